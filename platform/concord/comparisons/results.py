"""What a comparison found: its tables beside a paper's, what they were made of, and its figures."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.analysis.figures import method_name, save
from concord.analysis.spread import with_spread
from concord.comparisons.plan import DATA, Plan, PlannedRun, identity
from concord.storage import json_line
from concord.studies import journal as journals
from concord.studies.journal import Journal, TrialResult, TrialSpec
from concord.training import Comparison, Evaluation, FinishedRun

TABLES, FIGURES = "tables", "figures"


class KeptRuns:
    """The runs of a journal, found by their options.

    Args:
        journal: of a comparison.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tasks: dict[str, list[TrialSpec]] = {}
        for task in journal.tasks.values():
            self._tasks.setdefault(identity(task.point), []).append(task)

    def begun(self, run: PlannedRun) -> TrialSpec | None:
        """The run as it began; where the version of the data is not known, the one of the latest data."""
        for task in reversed(self._tasks.get(run.identity, [])):
            if DATA not in run.point or task.point.get(DATA) == run.point[DATA]:
                return task
        return None

    def ended(self, run: PlannedRun) -> tuple[TrialSpec, TrialResult] | None:
        """The run with how it ended, if it did."""
        task = self.begun(run)
        ended = None if task is None else self._journal.ended.get(task.key)
        return None if task is None or ended is None else (task, ended)


@dataclass(frozen=True)
class KeptLine:
    """A run as it is kept for a document: what a row's cells are made of.

    Attributes:
        configuration: the name of the row.
        seed: of the run.
        values: by heading.
        seconds: that it took.
        origin: command, commit and machine.
    """

    configuration: str
    seed: int
    values: Mapping[str, float]
    seconds: float
    origin: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """A line of a file of results; what a run does not report is left out, since JSON has no word for it."""
        return {
            "configuration": self.configuration,
            "seed": self.seed,
            "values": {heading: value for heading, value in self.values.items() if not math.isnan(value)},
            "seconds": round(self.seconds, 1),
            **self.origin,
        }

    @staticmethod
    def read(line: Mapping[str, Any]) -> "KeptLine":
        """From such a line."""
        return KeptLine(
            line["configuration"],
            line["seed"],
            line["values"],
            line["seconds"],
            {name: line[name] for name in ("command", "commit", "machine") if name in line},
        )


@dataclass(frozen=True)
class Table:
    """A table: what it should show, and of which runs.

    Attributes:
        name: of it.
        comparison: what it shows.
        lines: the runs that are there.
    """

    name: str
    comparison: Comparison
    lines: Sequence[KeptLine]

    def rows(self) -> list[dict[str, Any]]:
        """The contract of ``concord compare --json``: mean, standard deviation and the paper's mean, by metric."""
        rows = []
        for name in self.comparison.configurations:
            metrics = {}
            for heading, column in self.comparison.columns.items():
                values = self._values(name, heading)
                paper, paper_std = self._paper(name, heading)
                metrics[column if isinstance(column, str) else heading] = {
                    "mean": statistics.fmean(values) if values else None,
                    "std": statistics.stdev(values) if len(values) > 1 else None,
                    "paper": paper,
                    "paper_std": paper_std,
                }
            rows.append({"table": self.name, "name": name, "seeds": self._seeds(name), "metrics": metrics})
        return rows

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as a reader sees them, the paper's below ours."""
        columns = list(self.comparison.columns)
        rows = []
        for name in self.comparison.configurations:
            shown = [self._shown(name, heading) for heading in columns]
            rows.append([method_name(name), str(self._seeds(name)), *shown])
            if name in self.comparison.paper:
                rows.append([f"{method_name(name)}, paper", "", *self._published(name)])
        for name in self.comparison.paper:
            if name not in self.comparison.configurations:
                rows.append([name, "", *self._published(name)])
        return [self.name, "seeds", *columns], rows

    def _seeds(self, configuration: str) -> int:
        return sum(line.configuration == configuration for line in self.lines)

    def _values(self, configuration: str, heading: str) -> list[float]:
        found = [line.values.get(heading, math.nan) for line in self.lines if line.configuration == configuration]
        return [value for value in found if not math.isnan(value)]

    def _shown(self, configuration: str, heading: str) -> str:
        values = [self._scale * value for value in self._values(configuration, heading)]
        return with_spread(values, self.comparison.digits) if values else "–"

    def _published(self, name: str) -> list[str]:
        found = [self.comparison.paper[name].get(heading, "") for heading in self.comparison.columns]
        return [each if isinstance(each, str) else f"{each:.{self.comparison.digits}f}" for each in found]

    def _paper(self, name: str, heading: str) -> tuple[float | None, float | None]:
        """The paper's mean and spread in the unit of the metric."""
        said = self.comparison.paper.get(name, {}).get(heading, "")
        parts = str(said).split("±")
        try:
            numbers = [float(part) / self._scale for part in parts]
        except ValueError:
            return None, None
        return numbers[0], numbers[1] if len(numbers) > 1 else None

    @property
    def _scale(self) -> float:
        return 100.0 if self.comparison.percent else 1.0


@dataclass(frozen=True)
class ComparisonResult:
    """Tables as far as there are runs for them.

    Attributes:
        plan: what was wanted.
        folder: where it is on this machine.
        tables: what they show.
        runs: the finished runs of each table, by configuration.
        finished: how many different runs those are.
        failed: the failures of the others, by the runs' names.
        missing: the runs that nobody has trained yet, by table.
        seconds: that this call took; 0 if it was only read.
    """

    plan: Plan
    folder: Path
    tables: Sequence[Table]
    runs: Mapping[str, Mapping[str, Sequence[FinishedRun]]]
    finished: int
    failed: Mapping[str, str]
    missing: Mapping[str, Sequence[PlannedRun]]
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The contract of ``concord compare --json``."""
        names = [table.name for table in self.tables]
        return {
            "job": self.plan.job.name,
            "table": names[0] if len(names) == 1 else None,
            "tables": names,
            "runs": self.finished,
            "failed": len(self.failed),
            "missing": sum(map(len, self.missing.values())),
            "seconds": round(self.seconds, 3),
            "rows": [row for table in self.tables for row in table.rows()],
            "artifacts": str(self.folder),
        }


def read_results(plan: Plan, journal: Journal, folder: Path) -> ComparisonResult:
    """What the journal has of the plan's runs."""
    kept = KeptRuns(journal)
    tables: list[Table] = []
    found: dict[str, Mapping[str, Sequence[FinishedRun]]] = {}
    failed: dict[str, str] = {}
    missing: dict[str, list[PlannedRun]] = {}
    distinct: set[str] = set()
    for name, comparison in plan.tables.items():
        lines: list[KeptLine] = []
        runs: dict[str, list[FinishedRun]] = {}
        for run in plan.runs[name]:
            pair = kept.ended(run)
            if pair is None:
                missing.setdefault(name, []).append(run)
                continue
            task, ended = pair
            if ended.failure is not None:
                failed[f"{name}, {run.configuration}, seed {run.seed}"] = ended.failure
                continue
            distinct.add(task.key)
            finished = FinishedRun(run.seed, task.point, [Evaluation(*each) for each in ended.history])
            runs.setdefault(run.configuration, []).append(finished)
            values = {heading: _value(column, finished) for heading, column in comparison.columns.items()}
            lines.append(KeptLine(run.configuration, run.seed, values, ended.seconds, task.origin))
        tables.append(Table(name, comparison, lines))
        found[name] = runs
    return ComparisonResult(plan, folder, tables, found, len(distinct), failed, missing)


def journal_of(plan: Plan) -> Journal:
    """The journal as it is now; an empty one where nothing was trained."""
    return journals.read(plan.kept.path)


def write_results(result: ComparisonResult, folder: Path, info: Callable[[str], None]) -> dict[str, str]:
    """Draw the figures and write the tables with what they are made of; gives the figures' paths by name."""
    drawn: dict[str, str] = {}
    write_runs(result, folder / TABLES)
    for table in result.tables:
        (folder / TABLES / f"{table.name}.md").write_text(markdown(*table.cells()), encoding="utf-8")
        runs = result.runs[table.name]
        if not table.comparison.figures:
            continue
        if lacking := [name for name in table.comparison.configurations if name not in runs]:
            info(f"{table.name}: no figures yet, since there is no run of {', '.join(lacking)}")
            continue
        for name, draw in table.comparison.figures.items():
            drawn[name] = str(save(draw(runs), folder / FIGURES / f"{name}.png"))
    return drawn


def write_runs(result: ComparisonResult, folder: Path) -> None:
    """Keep what the tables are made of, a JSON line a run."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in result.tables:
        lines = b"".join(json_line(line.as_json()) for line in table.lines)
        (folder / f"{result.plan.job.name}-{table.name}.jsonl").write_bytes(lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [["", *header[1:]], ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |")


def _value(column: Any, run: FinishedRun) -> float:
    """A cell's number; not a number where the run does not report it."""
    return float(run.metrics.get(column, math.nan) if isinstance(column, str) else column(run))


def kept_words(folder: Path) -> Mapping[str, list[str]]:
    """The options with which each table of the comparison in this folder was last asked for."""
    words: Mapping[str, list[str]] = {}
    if (folder / journals.STUDY).exists():
        words = journals.read_study(folder).get("tables", {})
    return words
