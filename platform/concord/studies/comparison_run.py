"""Trains the missing runs of tables, and makes the tables (``concord compare``)."""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas

from concord import logs
from concord.analysis.uncertainty import Verdict
from concord.errors import RunFailedError, StoppedError
from concord.execution.key import finished_run
from concord.execution.spec import RunSpec
from concord.options import option_values
from concord.record import Run, read_run
from concord.studies.comparison_page import REPORT, comparison_page
from concord.studies.comparison_plan import ComparisonPlan, recorded_command
from concord.studies.expected_time import require_time
from concord.studies.leave_one_out import (
    explained,
    fold_predictions,
    fold_values,
    known_of_environments,
    left_out_table,
    majority_shares,
    with_choices,
)
from concord.studies.proposals import GroupProgress, GroupRuns, ProposalList
from concord.studies.results import (
    FIGURES,
    GroupResult,
    ResultLine,
    as_lines,
    columns_of,
    comparison_table,
    results_file,
    write_results,
)
from concord.studies.verdicts import left_out_verdict
from concord.table import Table
from concord.training.left_out import PREDICTIONS
from concord.training.options import ResolvedTrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = "tables"


@dataclass(frozen=True, kw_only=True)
class ComparisonResult(GroupResult):
    """The tables, as far as their runs exist.

    Attributes:
        runs: the finished runs of each table, by configuration.
        finished: the number of different finished runs.
        failed: the failures of other runs, by run name.
        missing: the runs still to train, by table.
        predictions: for environments left out in turn, a row for each example, method and seed; None without any.
        verdict: of environments left out in turn: which method, and what to expect of it; None of other tables.
    """

    plan: ComparisonPlan
    tables: Sequence[Table]
    runs: Mapping[str, Mapping[str, Sequence[Run]]]
    finished: int
    failed: Mapping[str, str]
    missing: Mapping[str, Sequence[RunSpec]]
    predictions: pandas.DataFrame | None = None
    verdict: Verdict | None = None

    def figures(self, info: Callable[[str], None]) -> "Mapping[str, Figure]":
        """The figures of the tables that have a run of every configuration."""
        found: dict[str, Figure] = {}
        for table in self.tables:
            runs, comparison = self.runs[table.name], self.plan.tables[table.name]
            draws = comparison.figures
            if draws and (lacking := [name for name in comparison.configurations if name not in runs]):
                info(f"{table.name}: no figures yet, since there is no run of {', '.join(lacking)}")
                continue
            found |= {name: draw(runs) for name, draw in draws.items()}
        return found

    def files(self) -> Mapping[str, bytes]:
        """The tables, and their lines of results."""
        made_of = {
            f"{TABLES}/{results_file(self.plan.job.name, table.name)}": as_lines(table.runs) for table in self.tables
        }
        made_of |= {f"{TABLES}/{table.name}.md": table.markdown().encode() for table in self.tables}
        return made_of | ({} if self.predictions is None else {PREDICTIONS: self.predictions.to_parquet(index=False)})

    def summary(self) -> Mapping[str, float]:
        """The numbers of finished and failed runs."""
        return {"finished": float(self.finished), "failed": float(len(self.failed))}

    @property
    def train(self) -> str | None:
        """The command that trains the recommended method on all environments; None without it, or with runs missing."""
        if self.verdict is None or self.missing:
            return None
        table = next(name for name, comparison in self.plan.tables.items() if comparison.folds is not None)
        return self.plan.train_command(table, self.verdict.recommended)

    def answer(self) -> list[str]:
        """The verdict, and the command that follows from it."""
        lines = [] if self.verdict is None else [*self.verdict.lines]
        return [*lines, f"train it  {self.train}"] if self.train else lines

    def note(self) -> str:
        """The answer, the tables, and where the page is."""
        lines = [] if self.verdict is None else [*self.verdict.lines]
        lines += [f"train it: `{self.train}`"] if self.train else []
        parts = ["\n".join(f"- {line}" for line in lines), *(table.markdown() for table in self.tables)]
        page = [f"The artifact `{REPORT}` is a page with all of it."] if self.finished else []
        return "\n\n".join(filter(None, [*parts, *page]))

    def output(self) -> list[str | Table]:
        """The tables, the answer, and their files."""
        parts: list[str | Table] = [
            *self.tables,
            *self.answer(),
            f"runs      {self.finished} finished, {len(self.failed)} failed",
            f"tables    {(self.folder / TABLES).display_path}",
        ]
        if self.predictions is not None:
            parts.append(f"predicted {(self.folder / PREDICTIONS).display_path}")
        if self.drawn:
            parts.append(f"figures   {(self.folder / FIGURES).display_path}")
        return [*parts, f"seconds   {self.seconds:.1f}"]

    def as_json(self) -> dict[str, Any]:
        """The contract of ``concord compare --json``."""
        names = [table.name for table in self.tables]
        lines = [line for table in self.tables for line in table.runs]
        folds = any(comparison.folds is not None for comparison in self.plan.tables.values())
        return {
            "job": self.plan.job.name,
            "table": names[0] if len(names) == 1 else None,
            "tables": names,
            "runs": self.finished,
            "failed": len(self.failed),
            "missing": sum(map(len, self.missing.values())),
            "seconds": round(self.seconds, 3),
            "rows": [row for table in self.tables for row in table.as_json()],
            **({"environments": known_of_environments(lines)} if folds else {}),
            **({} if self.verdict is None else {"verdict": self.verdict.as_json(), "train": self.train}),
            "artifacts": self.folder.display_path,
            "figures": dict(self.drawn),
        }


def run_comparison(plan: ComparisonPlan, info: Callable[[str], None]) -> ComparisonResult:
    """Train the missing runs, and keep runs, tables and figures; after a stop or failures finished runs are kept."""
    from concord.studies.pool import open_group  # imports Ray Tune, which takes seconds

    started = time.perf_counter()
    logs.bind_context(study=plan.name, job=plan.job.name)
    try:
        with open_group(plan, plan.record, info, functools.partial(_require_time, plan, info)) as pool:
            record = pool.group.run.record
            pool.group.run.describe(
                asked={**record.get("asked", {}), **plan.asked},
                sources={**record.get("sources", {}), **plan.base.sources()},
            )
            _train(plan, pool, info)
            result = write_results(read_comparison(plan, pool.runs()), info, pool.group)
            if result.finished:
                comparison_page([result], info).write(plan.folder.path / REPORT)
                pool.group.run.keep_artifact(REPORT)
    except StoppedError:
        raise StoppedError(f"stopped; finished runs are kept; continue with {plan.continuation}") from None
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def _require_time(plan: ComparisonPlan, info: Callable[[str], None], concurrent: int) -> None:
    """Announce the time of a comparison that has a limit, and ask if it is above."""
    left = [spec for spec in plan.wanted.values() if finished_run(plan.base.run.output, spec.key) is None]
    by_steps = [spec for spec in left if plan.job.job.fit_of(spec.config) is None]
    first = next(iter(by_steps or left), None)
    if plan.hours is not None and first is not None and isinstance(first.config, ResolvedTrainConfig):
        trainings = f"{len(left)} trainings"
        first_look = "--seeds 1" if len({spec.place["seed"] for spec in left}) > 1 else ""
        require_time(plan.job, first.config, len(by_steps), trainings, concurrent, plan.hours, info, first_look)


def _train(plan: ComparisonPlan, pool: Any, info: Callable[[str], None]) -> None:
    wanted = plan.wanted
    answers, progress = pool.ask(wanted.values(), plan.keep), GroupProgress("runs", len(wanted), info)
    left = [spec for spec, run in answers if run is None]
    available = [run for _, run in answers if run is not None]
    for run in available:
        progress.earlier(run)
    compared = "; ".join(f"{name}: {', '.join(table.configurations)}" for name, table in plan.tables.items())
    pool.group.run.append("note", part="beginning", text=f"**Comparison of {plan.job.name}**, {compared}")
    info(
        f"comparison {plan.name}: {', '.join(plan.tables)}; {len(wanted)} runs"
        + (f", of which {len(available)} are there" if available else "")
        + f", {pool.resources.concurrent} at a time"
    )
    if not left:
        return
    column = next((each for table in plan.tables.values() for each in table.columns.values()), None)

    failures: dict[str, str | None] = {}

    def tell(spec: RunSpec, run: Run) -> None:
        failures[spec.key.value] = run.failure
        if isinstance(column, str) and column in run.metrics:
            info(f"{spec.place['label']}: {column} {run.metrics[column]:.4g}, {run.seconds:.0f} s")

    labels = {"study": plan.name, "concord_job": plan.job.name, "method": "comparison"}
    pool.run(ProposalList(left, tell, plan.keep), progress, labels=labels)
    info(progress.line())
    if failures and not available and all(failures.values()):
        first = next(failures[key] for key in wanted if key in failures)
        raise RunFailedError(f"every run failed ({len(failures)}): {first}")


def read_comparison(plan: ComparisonPlan, runs: GroupRuns | None = None) -> ComparisonResult:
    """The result of the plan's existing runs, by default read from its folder."""
    if runs is None:
        runs = GroupRuns(read_run(plan.folder, "comparison") or Run(plan.folder))
    tables: list[Table] = []
    found: dict[str, Mapping[str, Sequence[Run]]] = {}
    failed: dict[str, str] = {}
    missing: dict[str, list[RunSpec]] = {}
    distinct: set[str] = set()
    predicted: list[pandas.DataFrame] = []
    for name, comparison in plan.tables.items():
        lines: list[ResultLine] = []
        failures: dict[str, list[Run]] = {}
        lacking = Counter[str]()
        command = recorded_command(plan.job, name, plan.given, option_values(plan.base))
        rows: dict[str, list[Run]] = {}
        for spec in plan.runs[name]:
            run = runs.by_key(spec.key)
            row, seed = spec.place["row"], spec.place["seed"]
            if run is None or run.status not in ("FINISHED", "FAILED"):
                missing.setdefault(name, []).append(spec)
                lacking[row] += 1
            elif run.failure is not None:
                failed[spec.place["label"]] = run.failure
                failures.setdefault(row, []).append(run)
            else:
                distinct.add(run.name)
                rows.setdefault(row, []).append(run)
                cells: Mapping[str, Any] = {each.heading: each.of(run) for each in columns_of(comparison)}
                if comparison.folds is not None:
                    cells = fold_values(run, comparison.folds)
                    kept = fold_predictions(run, comparison.folds, row)
                    if kept is not None:
                        predicted.append(kept)
                        cells |= majority_shares(kept)
                values = {heading: float(value) for heading, value in cells.items() if value is not None}
                # The run may have been made for another table or measure; the command is this table's.
                origin = {**run.record.get("origin", {}), "command": command}
                lines.append(ResultLine(row, seed, values, run.seconds, origin))
        if comparison.folds is None:
            tables.append(comparison_table(name, comparison, lines, failed=failures, missing=lacking))
        else:
            lines = with_choices(lines, comparison.folds, len(comparison.configurations))
            tables.append(
                left_out_table(name, lines, title=explained(comparison.folds, lines), failed=failures, missing=lacking)
            )
        found[name] = rows
    predictions = pandas.concat(predicted, ignore_index=True) if predicted else None
    folds = {name: comparison.folds for name, comparison in plan.tables.items() if comparison.folds is not None}
    unfinished = {name: f"{len(each)} of {len(plan.runs[name])} runs are missing" for name, each in missing.items()}
    verdicts = [
        left_out_verdict(table.runs, folds[table.name], predictions, unfinished.get(table.name, ""))
        for table in tables
        if table.name in folds
    ]
    return ComparisonResult(
        folder=plan.folder,
        plan=plan,
        tables=tables,
        runs=found,
        finished=len(distinct),
        failed=failed,
        missing=missing,
        predictions=predictions,
        verdict=next(iter(verdicts), None),
    )
