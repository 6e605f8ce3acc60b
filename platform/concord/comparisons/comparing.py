"""Trains what tables need and is not there yet. What ``concord compare`` does."""

import dataclasses
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from concord import logs
from concord.comparisons.plan import Plan, PlannedRun, spec_of
from concord.comparisons.results import FIGURES, TABLES, ComparisonResult, KeptRuns, read_results, write_results
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import RunFailedError, StoppedError
from concord.job_files import built_in_jobs
from concord.machine import machine
from concord.redaction import redact
from concord.runs.folder import recorded_config
from concord.runs.live_metrics import Published
from concord.runs.run import Info
from concord.runs.tags import run_tags
from concord.storage import display_path, resolve
from concord.studies import journal as journals
from concord.studies.execution import overrides
from concord.studies.journal import TrialResult, TrialSpec
from concord.studies.progress import STUDY_METRICS, StudyProgress
from concord.studies.trial_group import Tracked, TrialGroup, Trials, opened, write_record


def experiment(job: str) -> str:
    """The MLflow experiment of a job's comparisons."""
    return f"{job}-comparisons"


def run_comparison(plan: Plan, words: Sequence[str], info: Info) -> ComparisonResult:
    """Train what is missing, and keep runs, tables and figures.

    Args:
        plan: what is wanted.
        words: the command's options, for the record.
        info: takes a line of progress.

    Raises:
        InputError: something cannot be used; nothing of a new comparison is left.
        RunFailedError: it was stopped, or every run failed; what was finished is kept.
    """
    started = time.perf_counter()
    logs.bind_context(study=plan.name, job=plan.job.name)
    try:
        with opened(_group(plan), lambda task: _tracked(plan, task), info) as trials:
            record = journals.read_study(trials.kept.path)
            tables = {**record["tables"], **{table: list(words) for table in plan.tables}}
            write_record(trials.kept, {**record, "tables": tables})
            _train(plan, trials, command(plan, words), info)
            result = read_results(plan, trials.journal, trials.kept.path)
            write_results(result, trials.kept.path, info)
            trials.kept.keep(TABLES)
            if (trials.kept.path / FIGURES).exists():
                trials.kept.keep(FIGURES)
            _track(result, trials, info)
    except StoppedError:
        raise StoppedError(
            f"stopped; what was finished is kept; continue with {command(plan, [*words, *where(plan)])}"
        ) from None
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def command(plan: Plan, words: Sequence[str]) -> str:
    """The command that makes the tables, or goes on with them."""
    job = plan.job.name if plan.job.name in built_in_jobs() else plan.job.path
    return shlex.join(["concord", "compare", job, *plan.tables, *map(redact, words)])


def where(plan: Plan) -> list[str]:
    """The options that say where a comparison is kept, unless it is at its usual place."""
    output, usual = plan.base.run.output, resolve(DEFAULT_OUTPUT)
    named = ["--name", plan.name] if plan.name != plan.job.name else []
    return named + (["--output", display_path(output)] if output not in (usual, DEFAULT_OUTPUT) else [])


def _group(plan: Plan) -> TrialGroup:
    return TrialGroup(
        what="comparison",
        name=plan.name,
        job=plan.job,
        base=plan.base,
        kept=plan.kept,
        sharing=plan.options.sharing,
        experiment=experiment(plan.job.name),
        parameters={},
        tags=run_tags(plan.job.name, plan.job.path),
        artifacts={},
        record={"tables": {}},
        updated=(),
    )


def _tracked(plan: Plan, task: TrialSpec) -> Tracked:
    """A run's parameters are the options that the table or the command line has chosen."""
    usual = recorded_config(plan.job.job.config)
    chosen = {name: value for name, value in task.point.items() if usual.get(name) != value or name == "seed"}
    return Tracked(task.name or task.key, chosen, {"concord.comparison": plan.name, "concord.kind": task.kind})


def _train(plan: Plan, trials: Trials, origin: str, info: Info) -> None:
    kept = KeptRuns(trials.journal)
    wanted: dict[str, tuple[str, PlannedRun]] = {}
    for table, runs in plan.runs.items():
        for run in runs:
            wanted.setdefault(run.identity, (table, run))
    progress = StudyProgress("runs", len(wanted), None, info)
    queue: list[tuple[str, PlannedRun]] = []
    for table, run in wanted.values():
        pair = kept.ended(run)
        if pair is not None and pair[1].failure is None:
            progress.earlier(*pair)
        else:
            queue.append((table, run))
    there = len(wanted) - len(queue)
    info(
        f"comparison {plan.name}: {', '.join(plan.tables)}; {len(wanted)} runs"
        + (f", of which {there} are there" if there else "")
        + f", {trials.where.concurrent} at a time"
    )
    if not queue:
        return
    configs: dict[str, PlannedRun] = {}
    from_here = {"command": origin, "machine": machine(), **_commit(plan)}
    column = next((each for table in plan.tables.values() for each in table.columns.values()), None)

    def propose() -> TrialSpec | None:
        if not queue:
            return None
        table, run = queue.pop(0)
        before = kept.begun(run)
        task = spec_of(run, len(trials.journal.tasks) if before is None else before.trial, table, from_here)
        configs[task.key] = run
        return task

    def learn(task: TrialSpec, ended: TrialResult) -> None:
        if ended.failure is None and isinstance(column, str) and column in ended.metrics:
            info(f"{task.name}: {column} {ended.metrics[column]:.4g}, {ended.seconds:.0f} s")

    labels = {"study": plan.name, "concord_job": plan.job.name, "method": "comparison"}
    with Published(STUDY_METRICS, labels, progress.samples):
        trials.run(
            propose,
            lambda task: overrides(plan.base, configs[task.key].config),
            progress,
            learn=learn,
            detail=plan.detail,
        )
    info(progress.line())
    ended = [kept_pair for _, run in wanted.values() if (kept_pair := KeptRuns(trials.journal).ended(run))]
    if ended and all(result.failure is not None for _, result in ended):
        raise RunFailedError(f"every run failed ({len(ended)}): {ended[0][1].failure}")


def _commit(plan: Plan) -> Mapping[str, str]:
    tags = run_tags(plan.job.name, plan.job.path)
    return {"commit": tags.get("concord.commit", f"version {tags['concord.version']}")}


def _track(result: ComparisonResult, trials: Trials, info: Info) -> None:
    """Keep tables and figures with the comparison's run."""
    metrics: dict[str, Any] = {"finished": float(result.finished), "failed": float(len(result.failed))}
    try:
        for part in (TABLES, FIGURES):
            if (folder := trials.kept.path / part).exists():
                trials.store.log_files(trials.run_id, folder, part)
        trials.store.log_metrics(trials.run_id, metrics)
    except RunFailedError as error:
        info(f"the tables could not be kept in MLflow: {error}")
