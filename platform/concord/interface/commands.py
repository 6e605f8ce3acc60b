"""The calls of the public interface that train: a run, a study, a comparison; and the search for runs.

The command line reads its words into the same :class:`~concord.interface.command_options.JobCommand` and calls the same
functions.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, UnfinishedError
from concord.execution.lifecycle import is_interrupted
from concord.execution.preflight import preflight
from concord.execution.run import run as run_job
from concord.interface.command_options import JobCommand, command_of
from concord.interface.frames import FrameFiles
from concord.interface.results import Comparison, Methods, Run, Runs, Study
from concord.interface.surroundings import left_as_found
from concord.logs import info
from concord.options import did_you_mean, kind_of, options_of, shortened
from concord.space import Entry, format_entry
from concord.studies.comparison_plan import plan_comparison
from concord.studies.criterion import metric_on
from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS
from concord.studies.page import check_page_file
from concord.tracking import Store
from concord.tracking.alive import shown_status
from concord.tracking.run_search import Condition, field_name, find_runs
from concord.training.callback import Callback
from concord.training.comparison import Comparison as Table
from concord.training.job import Job, JobFile
from concord.user import require_user

AnyJob = str | Path | Job[Any] | JobFile
_CONFIGURATIONS = "configurations"  # the table of configurations that a call gives
_SPLITS = {"train": "train", "held_out": "held-out", "validation": "validation", "ood": "o.o.d."}
_STATUSES = ("running", "interrupted", "finished", "failed", "killed")
# Words in the names of metrics of which smaller is better.
_SMALL_IS_GOOD = {"loss", "spread", "error", "mse", "rmse", "mae", "brier", "deviance", "kl"}


def train(job: AnyJob, *, callbacks: Callback | Sequence[Callback] | None = (), **options: Any) -> Run:
    """Train a job, or with ``name`` and ``resume=True`` continue a run.

    Args:
        job: a name from ``concord jobs``, the path of a Python file with ``job = Job(…)``, or a :class:`Job`.
        callbacks: called as the run trains, see :class:`~concord.training.callback.Callback`.
        options: as on the command line, with ``_`` for ``-``: ``lr=0.01, test=["west"]``. ``concord train JOB
            --help-all`` explains them. A pandas frame may stand where a file is expected, as for ``data``; it is kept
            in the output folder.

    Raises:
        InputError: an option or the job is wrong; nothing was written.
        RunFailedError: the training failed; it can be resumed.
        StoppedError: it was interrupted.
    """
    with left_as_found(), FrameFiles() as frames:
        given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        if wrong := [each for each in given if not isinstance(each, Callback)]:
            raise InputError(f"callbacks: {wrong[0]!r:.80} is no Callback; give objects of a class derived from it")
        return trained(command_of("train", JobFile.of(job), options, frames), given)


def trained(command: JobCommand, callbacks: Sequence[Callback] = ()) -> Run:
    """The run of a command."""
    recorded = run_job(command.job, command.options, info, command.given, callbacks)
    return Run(recorded, command.job, command.options.run.tracking_uri)


def tune(job: AnyJob, *, vary: Mapping[str, Entry] | Sequence[str] = (), **options: Any) -> Study:
    """Search for the best options of a job: a study. The same ``name`` continues it.

    Args:
        job: as in :func:`train`.
        vary: what is varied, beside or in place of the job's own space: ``{"lr": LogUniform(1e-4, 1.0), "l2":
            Choice(0.0, 1e-4)}``, or texts as after ``--vary``.
        options: of the study, such as ``trials``, and of the job, which are then the same in every trial.

    Raises:
        InputError: as in :func:`train`.
        RunFailedError: as in :func:`train`.
    """
    with left_as_found(), FrameFiles() as frames:
        if isinstance(vary, Mapping):
            vary = [format_entry(name, entry) for name, entry in vary.items()]
        elif not isinstance(vary, Sequence):
            example = "{'lr': LogUniform(1e-4, 1.0)}, or texts such as ['lr=log:1e-4:1']"
            raise InputError(f"vary {shortened(repr(vary))}: must be a dictionary such as {example}")
        texts = {"vary": [vary] if isinstance(vary, str) else list(vary)} if vary else {}
        return tuned(command_of("tune", JobFile.of(job), {**options, **texts}, frames))


def tuned(command: JobCommand) -> Study:
    """The study of a command."""
    from concord.studies.plan import plan_study

    plan = plan_study(command.job, command.options, set(command.given), command.sources)
    from concord.studies.study import run_study  # imports Ray Tune, which takes seconds

    return Study(run_study(plan, info), command.job, command.options.config.run.tracking_uri)


def compare(
    job: AnyJob, table: str | Sequence[str] | Mapping[str, Mapping[str, Any]] | None = (), **options: Any
) -> Comparison:
    """Compare configurations of a job over seeds; runs that exist already are not trained again.

    Args:
        job: as in :func:`train`.
        table: the name of a table of the job, or several; by default all. Or configurations: the options of each row,
            by its name, which the call does not give then. Or ``"methods"``, which tunes each method, or
            ``"leave-one-out"``, which leaves out each training environment in turn.
        options: of the comparison, such as ``seeds``, and of the job, which are then the same in every run.

    Raises:
        InputError: as in :func:`train`.
        UnfinishedError: some runs failed; the others are kept.
    """
    with left_as_found(), FrameFiles() as frames:
        file = JobFile.of(job)
        if isinstance(table, Mapping):
            file, table = _with_table(file, table, options, frames), _CONFIGURATIONS
        tables = [table] if isinstance(table, str) else list(table or ())
        if wrong := [each for each in tables if not isinstance(each, str)]:
            example = '{"small": {"lr": 0.01}, "large": {"lr": 0.1}}'
            raise InputError(
                f"table {shortened(repr(wrong[0]))}: must be the name of a table; configurations: {example}"
            )
        result = compared(command_of("compare", file, options, frames, tables))
        require_finished(result)
        return result


def compared(command: JobCommand) -> Comparison:
    """The tables of a command, and their page where it asks for one."""
    html = command.options.comparison.html
    check_page_file(html)
    result = _compared(command)
    if html is not None:
        info(f"page {result.html(html)}")
    return result


def _compared(command: JobCommand) -> Comparison:
    if METHODS in command.tables:
        from concord.studies.methods import plan_methods, run_methods

        plan, given = plan_methods(command.job, command.options, command.given), command.given_values()
        return Methods(run_methods(plan, given, info), plan.job, command.job.command("compare", METHODS, options=given))
    if LEAVE_ONE_OUT in command.tables:
        from concord.studies.leave_one_out import plan_leave_one_out

        tables = plan_leave_one_out(command.job, command.options, command.given)
    else:
        tables = plan_comparison(command.job, command.tables, command.options, command.given)
    from concord.studies.comparison_run import run_comparison  # imports Ray Tune, which takes seconds
    from concord.studies.results import write_lines

    result = run_comparison(tables, info)
    if (results := command.options.comparison.results) is not None:
        for table in result.tables:
            if table.runs:  # else rows that were kept earlier would be lost
                info(f"kept in {write_lines(table.runs, results, command.job.name, table.name)}")
    return Comparison(result.tables, result.failed, result, result.folder.path)


def require_finished(result: Comparison) -> None:
    """Refuse a comparison of which some runs failed (UnfinishedError with the result as JSON)."""
    if not result.failed:
        return
    name, failure = next(iter(result.failed.items()))
    what, again = ("methods", "") if isinstance(result, Methods) else ("runs", "; the same command tries again")
    first = f"{name}: {failure.splitlines()[0]}"
    shown = {} if result.result is None else result.result.as_json()
    raise UnfinishedError(f"failed {what}: {len(result.failed)}, the first of them {first}{again}", shown)


def _with_table(
    job: JobFile, configurations: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], frames: FrameFiles
) -> JobFile:
    """The job with a table of these configurations; its columns are the measure that compares models, by split."""
    job.require_platform_loop("compare with configurations")
    table = Table(configurations)  # which checks them
    known = options_of(type(job.job.config))
    given = {name: value for name, value in options.items() if name in known}
    for row, configuration in configurations.items():
        for name in configuration.keys() & given.keys():
            raise InputError(f"{name} {given[name]}: the configuration {row} has it, too; give it in one of them")
    first = {**next(iter(configurations.values())), **given}
    checked = preflight(job, command_of("train", job, first, frames).options)
    criterion = checked.criterion[0].removeprefix("worst_")
    split = next((each for each in _SPLITS if criterion.startswith(f"{each}_")), "")
    measure = criterion.removeprefix(f"{split}_")
    metrics = {f"{shown} {measure}": metric_on(split, measure) for split, shown in _SPLITS.items()}
    if not checked.environments.validation:  # then a copy of the held-out examples' numbers
        del metrics[f"{_SPLITS['validation']} {measure}"]
    columns = {heading: metric for heading, metric in metrics.items() if metric in checked.reported}
    table = dataclasses.replace(table, columns=columns)
    return dataclasses.replace(job, job=dataclasses.replace(job.job, comparisons={_CONFIGURATIONS: table}))


def runs(
    *,
    job: str | None = None,
    where: str | Sequence[str] | None = (),
    status: str | None = None,
    name: str | None = None,
    study: str | None = None,
    mine: bool = False,
    metric: str | None = None,
    mode: str | None = None,
    show: str | Sequence[str] = (),
    top: int = 1000,
    output: str | Path = DEFAULT_OUTPUT,
    tracking_uri: str | None = None,
) -> Runs:
    """The tracked runs of all jobs, the newest first.

    Args:
        job: only runs of this job.
        where: conditions that all hold, such as ``"ood_auc > 0.7"`` or ``"objective = irm"``.
        status: running, interrupted, finished, failed or killed.
        name: only runs whose name contains this text.
        study: the trials of this study instead.
        mine: only runs of this user.
        metric: orders the runs, the best first; those without it are left out.
        mode: ``max`` or ``min`` for the metric; by default min for losses and errors.
        show: further options and metrics, of which at least one run must have each.
        top: the most runs.
        output: the folder of runs.
        tracking_uri: of MLflow's store, if it is not in that folder.

    Raises:
        InputError: a condition is wrong, or no run has the job, the study, or a condition's option or metric.
    """
    right = "give OPTION=VALUE, or METRIC>NUMBER or METRIC<NUMBER, in quotes"
    texts = [where] if isinstance(where, str) else list(where or ())
    for argument, value, kind in (
        *(("where", each, str) for each in texts), ("metric", metric or "", str), ("top", top, int)
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise InputError(f"{argument} {shortened(repr(value))}: must be {kind_of(kind)}")
    conditions = [Condition.of("--where", text, right) for text in texts]
    for option, given, known in (("status", status, _STATUSES), ("mode", mode, ("max", "min"))):
        if given is not None and given not in known:
            raise InputError(f"--{option} {given}: must be one of {', '.join(known)}{did_you_mean(str(given), known)}")
    if mode and not metric:
        raise InputError(f"--mode {mode}: needs a metric; give --metric")
    if top < 1:
        raise InputError(f"--top {top}: must be at least 1")
    order = field_name(metric) if metric else None
    store = Store.existing(Path(output), tracking_uri)
    found = find_runs(
        store,
        top,
        job=job,
        status=status,
        name=name,
        study=study,
        owner=require_user("--mine") if mine else None,
        where=conditions,
        metric=order,
        largest=mode == "max" or (mode is None and _large_is_good(str(order))),
        show=[field_name(each) for each in ([show] if isinstance(show, str) else show)],
        shown=lambda run: shown_status(store, run, lambda each: is_interrupted(Path(output), each.name, each.run_id)),
    )
    return Runs(found, Path(output), tracking_uri)


def _large_is_good(metric: str) -> bool:
    """The mode of a metric by its name, such as ``worst_ood_mse`` or ``mse/ood/west``: MLflow keeps no other."""
    return _SMALL_IS_GOOD.isdisjoint(metric.partition("/")[0].split("_"))
