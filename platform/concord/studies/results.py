"""The result of a group of runs: its files, its tables of lines; for a study also the choice of each selection."""

import abc
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from typing_extensions import TypedDict

from concord.analysis.consistency.measurement import as_cells, read_measurements
from concord.analysis.figures import save
from concord.analysis.method_names import method_name
from concord.analysis.spread import finite, median_and_range
from concord.analysis.study_figures import TrialPoint, study_figures
from concord.errors import InputError
from concord.execution.lifecycle import ActiveRun
from concord.record import RECORD, Run, folder_of, require_run
from concord.space import Space, format_point
from concord.storage import Folder, disk_errors_in_one_line, json_line
from concord.storage.typed_json import Count, read_json
from concord.studies.criterion import SPREAD, Criterion, TrialEvaluator, metric_on
from concord.studies.proposals import GroupRuns, Trial
from concord.studies.study_options import SELECTIONS
from concord.table import Column, Table
from concord.training import Comparison
from concord.training.declared_measures import Mode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES, TABLE, SUMMARY = "figures", "best.csv", "summary.json"


ANALYZED = "analyzed"  # instead of a table's name: the results of ``concord analyze``


@dataclass(frozen=True, kw_only=True)
class GroupResult(abc.ABC):
    """A group of runs, from its record.

    Attributes:
        drawn: the figures' files by name, once drawn.
        seconds: the time of this call; 0 if it only read.
    """

    folder: Folder
    drawn: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @abc.abstractmethod
    def figures(self, info: Callable[[str], None]) -> "Mapping[str, Figure]":
        """Its figures by name; ``info`` takes the reason for a missing one."""

    @abc.abstractmethod
    def files(self) -> Mapping[str, bytes]:
        """Its tables, by their paths in the folder."""

    @abc.abstractmethod
    def summary(self) -> Mapping[str, float]:
        """The metrics of the group's own run in MLflow."""

    @abc.abstractmethod
    def note(self) -> str:
        """The result in its description in MLflow, in Markdown."""


Result = TypeVar("Result", bound=GroupResult)


def write_results(result: Result, info: Callable[[str], None], group: ActiveRun | None = None) -> Result:
    """Draw a group's figures and write its tables into its folder; return the result with the figures' files.

    An open group keeps the files with its run.
    """
    figures, files = result.figures(info), result.files()
    drawn = {name: str(save(figure, result.folder.path / FIGURES / f"{name}.png")) for name, figure in figures.items()}
    for path, content in files.items():
        file = result.folder.path / path
        with disk_errors_in_one_line(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    if group is not None:
        for path in (*(f"{FIGURES}/{name}.png" for name in figures), *files):
            group.run.keep_artifact(path)
        group.run.append("metrics", step=0, metrics=dict(result.summary()))
        group.run.append("note", part="result", text=result.note())
    return dataclasses.replace(result, drawn=drawn)


@dataclass(frozen=True)
class Selected:
    """The choice of one selection.

    Attributes:
        selection: the selection; ``o.o.d. test (oracle)`` if it uses the test.
        among: the number of trials with its metric.
        metrics: of that trial; with ``left_out_…`` if environments were left out for it.
    """

    selection: str
    among: int
    trial: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StudyResult(GroupResult):
    """A study, from its record.

    Attributes:
        record: the study's fields, see :meth:`concord.studies.plan.StudyPlan.record`.
        finished: the finished trials, best first.
        ended: the finished trials in the order of their ends.
        left_out: metrics of environments left out afterwards, by trial.
        repeated: the best trial with other seeds.
    """

    record: Mapping[str, Any]
    finished: Sequence[Trial]
    failed: Sequence[Trial]
    ended: Sequence[Trial]
    left_out: Mapping[int, Mapping[str, float]]
    repeated: Sequence[Trial]
    criterion: Criterion = field(init=False)
    space: Space = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "criterion", Criterion(**self.record["criterion"]))
        object.__setattr__(self, "space", Space.from_json(self.record["space"]))

    @property
    def best(self) -> Trial:
        """The trial that the study's selection chooses."""
        return self.finished[0]

    @property
    def reruns(self) -> dict[int, dict[str, float]]:
        """The metrics of the best trial with other seeds, by seed."""
        return {each.seed: each.metrics for each in self.repeated if each.seed is not None}

    @property
    def measure(self) -> str:
        """The measure without its examples, such as ``accuracy``."""
        return str(self.record["measure"])

    @property
    def reported_measure(self) -> str:
        """The measure on all examples: of a spread of held-out losses, the accuracy or the loss."""
        if self.measure != SPREAD:
            return self.measure
        return "accuracy" if metric_on("held_out", "accuracy") in self.best.metrics else "loss"

    @property
    def reported_mode(self) -> Mode:
        """The mode of this measure."""
        return self.criterion.mode if self.measure != SPREAD or self.reported_measure == "loss" else "max"

    @property
    def method(self) -> str:
        """The method: the name of the job's study."""
        return str(self.record["method"])

    def metrics(self, trial: Trial) -> dict[str, float]:
        """All metrics of a trial, with those of environments left out afterwards."""
        return {**trial.metrics, **self.left_out.get(trial.number, {})}

    def by_selection(self) -> list[Selected]:
        """The choice of every selection, among the trials with its metric."""
        found = []
        trials = [_Scored(each.number, self.metrics(each)) for each in self.finished]
        for selection in SELECTIONS:
            if (selection == "own") != (self.criterion.selection == "own"):
                continue
            if selection == "validation" and not self.record["validation"]:
                continue  # the same as held-out examples
            criterion = self.criterion
            if selection != criterion.selection:
                criterion = Criterion.of(selection, self.reported_measure, self.reported_mode)
            if ranked := criterion.ranked(trials):
                found.append(Selected(criterion.label, len(ranked), ranked[0].number, ranked[0].metrics))
        return found

    def varied(self) -> list[str]:
        """The names of varied options and switches."""
        return list(dict.fromkeys(located.name for located in self.space.varied()))

    def best_table(self) -> Table:
        """The best trials in the form of Table 3 of the AND-mask paper: the metric, then the varied options.

        Varied options are shown resolved, with the options that follow from them, such as the aggregator of ``auto``.
        """
        options = [Column(name, partial(_option, name)) for name in [*self.varied(), *self._derived()]]
        criterion = Column(self.criterion.metric, oracle=self.criterion.oracle)
        best = self.finished[: int(self.record["options"]["top"])]
        return Table.of([criterion, *options, Column("trial", attrgetter("number"))], best)

    def _derived(self) -> list[str]:
        """The options that differ between trials although they were not varied."""
        names = dict.fromkeys(name for each in self.finished for name in each.resolved)
        values = {name: {each.resolved.get(name) for each in self.finished} for name in names}
        chosen = self.varied()
        return [name for name, found in values.items() if name not in chosen and len(found) > 1]

    def selections_table(self) -> Table:
        """The choices of every selection, side by side."""
        own, validation = self.criterion.selection == "own", ["validation"] if self.record["validation"] else []
        splits = [""] if own else ["held_out", *validation, "left_out", "ood"]
        measure = self.reported_measure
        first = {"selected by": "selection", "among": "among", "trial": "trial"}
        columns = [Column(heading, attrgetter(name)) for heading, name in first.items()]
        columns += [Column(f"{split} {measure}".strip(), metric_on(split, measure)) for split in splits]
        return Table.of(columns, self.by_selection())

    def reruns_table(self) -> Table:
        """The best trial over new seeds."""
        splits = ("",) if self.criterion.selection == "own" else ("train", "held_out", "ood")
        count, rows = len(self.reruns), []
        for split in splits:
            if values := self.over_seeds(split, self.reported_measure):
                label = f"{split} {self.reported_measure}".replace("_", " ").strip()
                name = label if len(values) == count else f"{label} ({len(values)} of {count})"
                median, least, largest, _ = median_and_range(values).values()
                rows.append([name, median, least, largest])
        return Table.plain([f"best, {count} new seeds", "median", "least", "largest"], rows)

    def over_seeds(self, split: str, measure: str) -> list[float]:
        """The best trial's measure on a split over new seeds, as far as reported and finite."""
        metric = metric_on(split, measure)
        return finite(metrics[metric] for metrics in self.reruns.values() if metric in metrics)

    @property
    def registration(self) -> str | None:
        """The registration of the best trial's model, in words; None if it was not registered."""
        if not self.record.get("model"):
            return None
        became = "the champion now" if self.record["champion"] else "not the champion"
        return f"{self.record['model']}: {became} ({self.record['registration']})"

    def figures(self, info: Callable[[str], None]) -> "Mapping[str, Figure]":
        """The figures of the search's course and of the options' effects."""
        criterion = self.criterion
        trials = [
            TrialPoint(each.number, each.point, each.metrics[criterion.metric])
            for each in self.ended
            if math.isfinite(each.metrics.get(criterion.metric, math.nan))
        ]
        return study_figures(trials, self.space, criterion.shown, criterion.mode, info)

    def files(self) -> Mapping[str, bytes]:
        """The table of the best trials, and the JSON result."""
        return {TABLE: self.best_table().csv().encode(), SUMMARY: json.dumps(self.as_json(), indent=1).encode()}

    def summary(self) -> Mapping[str, float]:
        """The metrics of the best trial, and the numbers of finished and failed trials."""
        best = {f"best_{name}": value for name, value in self.metrics(self.best).items()}
        return best | {"finished": float(len(self.finished)), "failed": float(len(self.failed))}

    @property
    def _best(self) -> str:
        """The best trial, and by what it is the best."""
        criterion, value = self.criterion, self.best.metrics.get(self.criterion.metric, math.nan)
        chosen_by = f"selected by {criterion.label}: {criterion.metric} {value:.4g}, {criterion.direction}"
        return f"trial {self.best.number}, {chosen_by}"

    def note(self) -> str:
        """The best trial, its options and its model, and what each selection chooses."""
        best = f"**Best of {len(self.finished)} trials**: {self._best}: {format_point(self.best.point)}"
        lines = [best, *([f"Model: {self.registration}"] if self.registration else [])]
        return "  \n".join(lines) + f"\n\n{self.selections_table().markdown()}"

    def output(self) -> list[str | Table]:
        """The best trials, the choice of each selection, the new seeds, and the best trial's registration."""
        header, rows = self.best_table().cells()
        renamed = Table.plain([name.replace("_", " ") for name in header], rows)
        parts: list[str | Table] = [renamed, self.selections_table()]
        if self.reruns:
            parts.append(self.reruns_table())
        parts += [
            f"study     {self.record['name']}: {len(self.finished)} trials finished, {len(self.failed)} failed",
            f"best      {self._best}",
        ]
        if self.record["oracle"]:
            parts.append(f"oracle    the o.o.d. test decided over {self.record['oracle']}")
        if self.registration:
            parts.append(f"model     {self.registration}")
        parts.append(f"figures   {(self.folder / FIGURES).display_path}")
        return [*parts, f"seconds   {self.seconds:.1f}"] if self.seconds else parts

    def as_json(self) -> dict[str, Any]:
        """The contract of ``concord tune --json``."""
        best = None
        if self.finished:
            trial = self.best
            best = {"trial": trial.number, "config": trial.point | trial.resolved, "metrics": self.metrics(trial)}
        return {
            "job": self.record["job"],
            "study": self.record["name"],
            "method": self.method,
            "finished": len(self.finished),
            "failed": len(self.failed),
            "seconds": round(self.seconds, 3),
            "selection": self.criterion.selection,
            "oracle": self.record["oracle"],
            "metric": self.criterion.metric,
            "mode": self.criterion.mode,
            "best": best,
            "selections": [dataclasses.asdict(each) for each in self.by_selection()],
            "reruns": [{"seed": seed, "metrics": dict(metrics)} for seed, metrics in self.reruns.items()],
            "run_id": self.record.get("run_id"),
            "model": self.record.get("model"),
            "champion": self.record.get("champion"),
            "artifacts": self.folder.display_path,
        }


@dataclass(frozen=True)
class _Scored:
    """A trial with all its metrics, those of environments left out afterwards among them."""

    number: int
    metrics: Mapping[str, float]


def _option(name: str, trial: Trial) -> Any:
    return trial.resolved.get(name, trial.point.get(name))


def read_study(folder: Folder) -> StudyResult:
    """The study in this folder."""
    group = require_run(folder, "study")
    criterion = Criterion(**group.record["criterion"])
    try:
        Space.from_json(group.record["space"])
    except InputError as error:
        raise InputError(f"{folder.path / RECORD}: {error}") from error
    return study_result(group, GroupRuns(group, TrialEvaluator(criterion, group.record["modes"])))


def read_studies(output: Path, job: str, names: str = "*") -> list[StudyResult]:
    """The studies of a job in this folder whose names match the pattern, oldest first."""
    folder = folder_of(output, "any", "study").place.parent
    found = [read_study(Folder(path.parent)) for path in folder.glob(f"{names}/{RECORD}")]
    return sorted((each for each in found if each.record["job"] == job), key=lambda each: each.record["started"])


def study_result(group: Run, runs: GroupRuns) -> StudyResult:
    """The result of a study, from its runs."""
    trials, seeds = runs.finished("trial"), runs.finished("seed")
    ranked = Criterion(**group.record["criterion"]).ranked(trials)
    best, known = ranked[0].number if ranked else None, {each.number for each in ranked}
    return StudyResult(
        folder=group.folder,
        record={**group.record, "name": group.name},
        finished=[*ranked, *(each for each in trials if each.number not in known)],
        failed=[each for each in runs.ended("trial") if each.failure is not None],
        ended=trials,
        left_out={each.number: each.metrics for each in runs.finished("left-out")},
        repeated=[each for each in sorted(seeds, key=lambda each: each.seed or 0) if each.number == best],
    )


class _Line(TypedDict):
    configuration: str
    seed: Count
    values: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class ResultLine:
    """A finished run in a file of results.

    Attributes:
        configuration: the name of the row.
        values: by heading; the file has the finite ones, since JSON lacks the others.
        origin: command, commit and machine, and the version of the data if known.
    """

    configuration: str
    seed: int
    values: Mapping[str, float]
    seconds: float
    origin: Mapping[str, str]
    failure: ClassVar[None] = None

    def as_json(self) -> dict[str, Any]:
        """The line in a file of results."""
        values = {heading: value for heading, value in self.values.items() if math.isfinite(value)}
        line = {"configuration": self.configuration, "seed": self.seed, "values": values}
        return {**line, "seconds": round(self.seconds, 1), **self.origin}

    @staticmethod
    def read_all(file: Path) -> "list[ResultLine]":
        """The lines of a file of results, in its order (InputError for a line that is none); none without the file."""
        own, found = _Line.__annotations__.keys(), []
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines() if file.is_file() else (), 1):
            try:
                line = read_json(text, _Line)
                origin = {name: value for name, value in line.items() if name not in own}
                found.append(ResultLine(**{name: line[name] for name in own}, origin=origin))
            except ValueError as error:
                raise InputError(f"{file}: line {number} is not a result ({error})") from error
        return found


def columns_of(comparison: Comparison) -> list[Column]:
    """The columns of a comparison, of its runs."""
    digits, percent = comparison.digits, comparison.percent
    return [Column(heading, value, digits, percent) for heading, value in comparison.columns.items()]


def table_of_lines(
    name: str,
    lines: Sequence[ResultLine],
    columns: Sequence[Column] | None = None,
    rows: Iterable[str] | None = None,
    failed: Mapping[str, Sequence[Any]] | None = None,
    **parts: Any,
) -> Table:
    """A table over these lines, by default with their rows and columns; ``failed`` has the failed runs of rows."""
    if columns is None:
        columns = [Column(heading) for heading in dict.fromkeys(each for line in lines for each in line.values)]
    runs: dict[str, list[Any]] = {row: [] for row in rows or [line.configuration for line in lines]}
    for line in lines:
        runs[line.configuration].append(line)
    every = {row: [*of_row, *(failed or {}).get(row, ())] for row, of_row in runs.items()}
    return Table.over(name, columns, every, label=method_name, value=_value, **parts)


def comparison_table(name: str, comparison: Comparison, lines: Sequence[ResultLine], **parts: Any) -> Table:
    """The table of a comparison over these lines."""
    parts |= {"title": comparison.title, "published": comparison.paper, "source": comparison.source}
    return table_of_lines(name, lines, columns_of(comparison), comparison.configurations, **parts)


def _value(column: Column, line: ResultLine) -> float | None:
    return line.values.get(column.title)


def results_file(job: str, table: str) -> str:
    """The name of the file of a table's lines."""
    return f"{job}-{table}.jsonl"


def as_lines(lines: Iterable[ResultLine]) -> bytes:
    """The lines of a table, as JSON."""
    return b"".join(json_line(line.as_json()) for line in lines)


def write_lines(lines: Iterable[ResultLine], results: Path, job: str, table: str) -> Path:
    """Write the lines of a table into this folder; return the file."""
    file = results_file(job, table)
    Folder(results).write(file, as_lines(lines))
    return results / file


def write_analyses(analyses: Sequence[Mapping[str, Any]], command: str, results: Path) -> Path:
    """Write the results of ``concord analyze`` for runs of one job; return the file."""
    lines = [
        ResultLine(
            each["method"],
            each["seed"],
            as_cells(read_measurements(each)),
            each["seconds"],
            {"command": command, **each["origin"]},
        )
        for each in analyses
    ]
    return write_lines(lines, results, analyses[0]["job"], ANALYZED)
