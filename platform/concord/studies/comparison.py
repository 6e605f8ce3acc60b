"""Trains what tables need and is not there yet, and makes the tables. What ``concord compare`` does."""

import dataclasses
import itertools
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord import logs
from concord.analysis.figures import save
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import RunFailedError, StoppedError
from concord.job_files import built_in_jobs
from concord.machine import machine
from concord.record import read_history
from concord.redaction import redact
from concord.runs.tags import run_tags
from concord.storage import display_path, resolve
from concord.studies.comparison_plan import ComparisonPlan, KeptRuns, PlannedRun
from concord.studies.progress import GroupProgress
from concord.studies.proposals import EndedRun, GroupRuns, Listed
from concord.studies.selection import Judge
from concord.studies.tables import KeptLine, Table, markdown, results_file, write_lines
from concord.training import FinishedRun

TABLES, FIGURES = "tables", "figures"


@dataclass(frozen=True)
class ComparisonResult:
    """Tables as far as there are runs for them.

    Attributes:
        plan: what was wanted.
        tables: what they show.
        runs: the finished runs of each table, by configuration.
        finished: how many different runs those are.
        failed: the failures of the others, by the runs' names.
        missing: the runs that nobody has trained yet, by table.
        figures: by name, where those that were drawn are.
        seconds: that this call took; 0 if it was only read.
    """

    plan: ComparisonPlan
    tables: Sequence[Table]
    runs: Mapping[str, Mapping[str, Sequence[FinishedRun]]]
    finished: int
    failed: Mapping[str, str]
    missing: Mapping[str, Sequence[PlannedRun]]
    figures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def folder(self) -> Path:
        """Where it is on this machine."""
        return self.plan.folder

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
            "figures": dict(self.figures),
        }


def run_comparison(plan: ComparisonPlan, words: Sequence[str], info: Callable[[str], None]) -> ComparisonResult:
    """Train what is missing, and keep runs, tables and figures.

    Args:
        plan: what is wanted.
        words: the command's options, for the record.
        info: takes a line of progress.

    Raises:
        InputError: something cannot be used; nothing of a new comparison is left.
        RunFailedError: it was stopped, or every run failed; what was finished is kept.
    """
    from concord.studies.pool import open_group  # imports Ray Tune, which takes seconds

    started = time.perf_counter()
    logs.bind_context(study=plan.name, job=plan.job.name)
    try:
        with open_group(plan, plan.description(), info) as pool:
            group = pool.group
            group.describe(tables={**group.record["tables"], **{table: list(words) for table in plan.tables}})
            _train(plan, pool, command(plan, words), info)
            result = write_results(read_results(plan, pool.runs), info)
            for part in (TABLES, FIGURES):
                for file in sorted((plan.folder / part).glob("*")):
                    group.keep_artifact(f"{part}/{file.name}")
            counts = {"finished": float(result.finished), "failed": float(len(result.failed))}
            group.events.append("metrics", step=0, metrics=counts)
    except StoppedError:
        again = command(plan, [*words, *where(plan)])
        raise StoppedError(f"stopped; what was finished is kept; continue with {again}") from None
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def command(plan: ComparisonPlan, words: Sequence[str]) -> str:
    """The command that makes the tables, or goes on with them."""
    job = plan.job.name if plan.job.name in built_in_jobs() else plan.job.path
    return shlex.join(["concord", "compare", job, *plan.tables, *map(redact, words)])


def where(plan: ComparisonPlan) -> list[str]:
    """The options that say where a comparison is kept, unless it is at its usual place."""
    output, usual = plan.base.run.output, resolve(DEFAULT_OUTPUT)
    named = ["--name", plan.name] if plan.name != plan.job.name else []
    return named + (["--output", display_path(output)] if output not in (usual, DEFAULT_OUTPUT) else [])


def _train(plan: ComparisonPlan, pool: Any, origin: str, info: Callable[[str], None]) -> None:
    kept, by_identity = KeptRuns(pool.runs), dict[str, PlannedRun]()
    for run in itertools.chain.from_iterable(plan.runs.values()):
        by_identity.setdefault(run.identity, run)  # of a run that several tables have, the first one gives it its name
    wanted = list(by_identity.values())
    progress = GroupProgress("runs", len(wanted), info)
    tags = run_tags(plan.job.name, plan.job.path)
    commit = tags.get("concord.commit", f"version {tags['concord.version']}")
    from_here = {"command": origin, "machine": machine(), "commit": commit}
    proposals = []
    number = len(pool.runs.begun("run"))
    for run in wanted:
        ended, begun = kept.ended(run), kept.begun(run)
        if ended is not None and ended.failure is None:
            progress.earlier(ended)
            continue
        proposals.append(plan.proposal(run, number if begun is None else begun.trial, from_here))
        number += begun is None
    there = len(wanted) - len(proposals)
    info(
        f"comparison {plan.name}: {', '.join(plan.tables)}; {len(wanted)} runs"
        + (f", of which {there} are there" if there else "")
        + f", {pool.resources.concurrent} at a time"
    )
    if not proposals:
        return
    column = next((each for table in plan.tables.values() for each in table.columns.values()), None)

    class Told(Listed):
        """Tells of each run what the first column is of."""

        def ended(self, run: EndedRun) -> None:
            if isinstance(column, str) and column in run.metrics:
                info(f"{run.run.name}: {column} {run.metrics[column]:.4g}, {run.seconds:.0f} s")

    labels = {"study": plan.name, "concord_job": plan.job.name, "method": "comparison"}
    pool.run(Told(proposals), progress, Judge(detail=plan.detail), labels=labels)
    info(progress.line())
    kept = KeptRuns(pool.runs)
    failures = [ended.failure for run in wanted if (ended := kept.ended(run))]
    if failures and all(failures):
        raise RunFailedError(f"every run failed ({len(failures)}): {failures[0]}")


def read_results(plan: ComparisonPlan, runs: GroupRuns | None = None) -> ComparisonResult:
    """What there is of the plan's runs; as its folder has them where no runs are given."""
    kept = KeptRuns(GroupRuns(read_history(plan.kept)) if runs is None else runs)
    tables: list[Table] = []
    found: dict[str, Mapping[str, Sequence[FinishedRun]]] = {}
    failed: dict[str, str] = {}
    missing: dict[str, list[PlannedRun]] = {}
    distinct: set[str] = set()
    for name, comparison in plan.tables.items():
        lines: list[KeptLine] = []
        rows: dict[str, list[FinishedRun]] = {}
        for run in plan.runs[name]:
            ended = kept.ended(run)
            if ended is None:
                missing.setdefault(name, []).append(run)
            elif ended.failure is not None:
                failed[run.name] = ended.failure
            else:
                distinct.add(ended.run.key)
                finished = FinishedRun(run.seed, ended.run.point, ended.history)
                rows.setdefault(run.configuration, []).append(finished)
                values = {heading: _value(column, finished) for heading, column in comparison.columns.items()}
                lines.append(KeptLine(run.configuration, run.seed, values, ended.seconds, ended.run.origin))
        tables.append(Table(name, comparison, lines))
        found[name] = rows
    return ComparisonResult(plan, tables, found, len(distinct), failed, missing)


def write_results(result: ComparisonResult, info: Callable[[str], None]) -> ComparisonResult:
    """Draw the figures and write the tables with what they are made of; gives the result with its figures."""
    folder, figures = result.folder, dict[str, str]()
    write_runs(result, folder / TABLES)
    for table in result.tables:
        (folder / TABLES / f"{table.name}.md").write_text(markdown(table.cells()), encoding="utf-8")
        runs, draws = result.runs[table.name], table.comparison.figures
        if draws and (lacking := [name for name in table.comparison.configurations if name not in runs]):
            info(f"{table.name}: no figures yet, since there is no run of {', '.join(lacking)}")
            continue
        figures |= {name: str(save(draw(runs), folder / FIGURES / f"{name}.png")) for name, draw in draws.items()}
    return dataclasses.replace(result, figures=figures)


def write_runs(result: ComparisonResult, folder: Path) -> None:
    """Keep what the tables are made of, a JSON line a run."""
    for table in result.tables:
        write_lines(table.lines, results_file(folder, result.plan.job.name, table.name))


def _value(column: Any, run: FinishedRun) -> float:
    """A cell's number; not a number where the run does not report it."""
    return float(run.metrics.get(column, math.nan) if isinstance(column, str) else column(run))
