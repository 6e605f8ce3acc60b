"""A whole run (``concord train``): check, train, record, draw figures, register the model."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from concord.environments.summary import DataSummary
from concord.errors import InputError, RunFailedError, TrainingFailedError
from concord.options import flag_of, option_values
from concord.record import OpenRun, Run
from concord.runs.champion import scored_on, shortfall
from concord.runs.dashboard import described
from concord.runs.execute import (
    CHECKPOINTS,
    RunTask,
    execute,
    kept_checkpoint,
    last_checkpoint,
    needs_ray_train,
    remove_checkpoints,
    remove_older,
)
from concord.runs.lifecycle import Info, Reserved, open_run, reserved_run
from concord.runs.preflight import Checked, preflight
from concord.runs.progress import RunProgress
from concord.runs.resources import require_resources
from concord.runs.run_summary import mask_parameters, run_summary
from concord.runs.session import check_cluster, ray_session
from concord.runs.spec import JOB, RunSpec, resolved_paths, run_tags
from concord.runs.tracked_data import tracked_data
from concord.source_file import reason
from concord.storage import full_disk_in_one_line, require_space
from concord.tracking import ExportError, Mirror, Store, log_model, register
from concord.training.advice import advice
from concord.training.checkpoint import MODEL, read_weights
from concord.training.job import JobFile
from concord.training.loop import build_model
from concord.training.options import ResolvedConfig, ResolvedTrainConfig, RunConfig
from concord.training.process import tune_process

# How long a resumed finished run retries to send events to MLflow.
_UNSENT_SECONDS = 30.0
# MLflow's folder for the weights of a model that is not exported, and the line about it.
_WEIGHTS = "weights"
_NOT_CALLED = "the job's risk does not call it as a function of tensors"
FIGURES, _METRICS = "figures", "metrics.json"


def run(job: JobFile, config: RunConfig, info: Info, given: Collection[str] = ()) -> Run:
    """Train a job, or resume it, and keep everything. After a failure ``--resume`` continues from the last checkpoint.

    Invalid input leaves nothing of the run. ``given`` has the names of the options that the user gave, of which those
    without an effect are named. The result's ``report`` is the contract of ``concord train --json``.
    """
    started = time.perf_counter()
    config.check()
    # Ray Train's workers have another working directory, so paths must be absolute.
    config = config.with_options(**resolved_paths(config))
    check_cluster(config)
    checked = preflight(job, config)
    spec = _spec(job, checked)
    with (
        reserved_run(spec) as reserved,
        RunProgress(info) as progress,
        contextlib.ExitStack() as session,
    ):
        if reserved.run is not None and reserved.run.report is not None:
            return _already_finished(reserved, info)
        config = spec.config.with_options(name=reserved.name)
        require_space(reserved.folder.path)
        dashboard = None
        if needs_ray_train(config) or (job.job.loop is not None and job.job.loop.uses_ray):
            progress.waiting("starting Ray")
            dashboard = session.enter_context(ray_session(config))
            require_resources(config, info)
        with (
            full_disk_in_one_line(reserved.folder.path),
            open_run(reserved, spec.record(reserved.store), info) as begun,
        ):
            for line in run_summary(job, config, begun, checked, given):
                info(line)
            if idle := sorted(map(flag_of, config.unused() & {*given})):
                info(f"warning: {', '.join(idle)}: of no effect in this run; another objective, rule or option uses it")
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            progress.training(job.epochs(config), "starting workers" if needs_ray_train(config) else "loading data")
            _train(job, config, begun.run, progress, info)
            session.close()  # Ray's processes are not needed for the rest
            progress.waiting("drawing figures, registering the model")
            report, tracked = finish(job, config, begun.run, begun.store, checked, info)
            # Without ``report`` --resume keeps it in MLflow later.
            found = {**report, "seconds": round(time.perf_counter() - started, 3)}
            begun.report = {"report" if tracked else "untracked": found}
    return begun.run


def _spec(job: JobFile, checked: Checked) -> RunSpec:
    """What a run is, from its checks."""
    environments = checked.environments
    spec = RunSpec.of(job, checked.config, environments.version)
    derived: dict[str, object] = {} if checked.objective is None else {"objective": checked.objective}
    if isinstance(spec.config, ResolvedTrainConfig):
        derived |= mask_parameters(spec.config, len(environments.train))
    return dataclasses.replace(
        spec,
        parameters={**spec.parameters, **derived},
        tags=run_tags(job.name, job.path, len(environments.train) or None, environments.version),
        artifacts={"environments.json": environments.by_purpose()} if environments.train else {},
    )


def _train(job: JobFile, config: ResolvedConfig, run: OpenRun, progress: RunProgress, info: Info) -> None:
    """Train from the last checkpoint on, and record everything."""
    start = None
    if run.record.get("group") and kept_checkpoint(run) is None:  # the group removed it, so the run begins again
        run.append("began", resumed=False)
    else:
        start = last_checkpoint(run.folder, run.checkpoints, info)
    remove_checkpoints(run.folder, run.checkpoints)

    def take(name: str, /, **fields: Any) -> None:
        run.append(name, **fields)
        if name == "metrics":
            progress.show(fields["metrics"])
        elif name == "checkpoint":
            run.sync()
            remove_older(run.folder, run.checkpoints)

    on_ray_train = needs_ray_train(config)
    if not on_ray_train:
        tune_process()
    task = RunTask(job.path, job.source, job.rule, option_values(config), run.folder, on_ray_train)
    with contextlib.closing(execute(task, job, config, take, start)) as evaluations:
        try:
            for evaluation in evaluations:
                progress.show({**evaluation.metrics, "epoch": float(evaluation.epoch)})
        except TrainingFailedError as error:
            if error.traceback:
                info(error.traceback)
            raise
    if not run.evaluations:
        raise TrainingFailedError(f"the loop of job {job.name} gave no evaluation")


def _already_finished(reserved: Reserved, info: Info) -> Run:
    """A finished run, after sending remaining events to MLflow."""
    assert reserved.run is not None
    run = OpenRun(reserved.folder, reserved.run.record)
    mirror = Mirror(reserved.store)
    mirror.add(run)
    unsent = mirror.close(_UNSENT_SECONDS)
    run.close()
    info(f"run {run.name} is finished" + (f"; {unsent} events are still not sent" if unsent else ""))
    return run


def finish(
    job: JobFile,
    config: ResolvedConfig,
    run: OpenRun,
    store: Store,
    checked: Checked,
    info: Info,
    lineage: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Draw the figures of a trained run, keep data and model in MLflow, and tell what may help.

    Returns the run's report, and whether MLflow took all. ``lineage`` becomes tags of the registered version.
    """
    run_id = str(run.run_id)
    metrics = {key: value for key, value in run.metrics.items() if "/" not in key}
    (run.folder.path / _METRICS).write_text(json.dumps(run.metrics, indent=1))
    run.folder.keep(_METRICS)
    model = _last_model(job, config, run)
    for path in _draw(job, config, run, model, info):
        run.keep_artifact(f"{FIGURES}/{path.name}")
    uri: str | None = None
    registered = None
    tracked = False
    environments = checked.environments
    with _reported_if_failing(info):
        if run.data:
            store.log_data(run_id, tracked_data([DataSummary.read(part) for part in run.data]))
        reason = _NOT_CALLED
        if model is not None and checked.example is not None:
            try:
                uri = log_model(store, run_id, model, checked.example, environments.raw, environments.classes)
            except ExportError as error:
                reason = str(error)
        if model is not None and uri is None:
            store.log_files(run_id, run.folder.path / CHECKPOINTS / run.checkpoints[-1] / MODEL, _WEIGHTS)
            line = f"the model is not registered: {reason}; its weights are the run's artifact {_WEIGHTS}/{MODEL}"
            store.note(run_id, line)
            info(line)
        if config.run.register and uri is not None:
            name = job.model_name(config)
            criterion, mode = checked.criterion
            if criterion not in metrics:
                raise RunFailedError(f"the run does not report {criterion}, by which versions are compared")
            unfit = shortfall(job.job, config, metrics)
            scored = scored_on(criterion, environments)
            store.set_tag(run_id, JOB, job.name)
            registered = register(store, uri, run_id, name, metrics, criterion, mode, lineage, unfit, scored)
            uri = f"models:/{registered.name}/{registered.version}"
        tracked = True
    for line in advice(job.job, config, run.history, environments, checked.measures):
        info(line)
    report = {
        "job": job.name,
        "name": run.name,
        "run_id": run_id,
        "seconds": 0.0,
        "model": uri if registered or not config.run.register else None,
        "champion": registered.champion if registered else False,
        "registration": registered.reason if registered else None,
        "artifacts": run.folder.display_path,
        "metrics": metrics,
    }
    return report, tracked


def _last_model(job: JobFile, config: ResolvedConfig, run: Run) -> torch.nn.Module | None:
    """The model with the weights of the last checkpoint, in evaluation mode; None where the job has none."""
    checkpoint = kept_checkpoint(run)
    if not job.job.has_model or checkpoint is None:
        return None
    model = build_model(job.job, config)
    read_weights(run.folder.fetch(f"{CHECKPOINTS}/{checkpoint}"), model)
    return model.eval()


@contextlib.contextmanager
def _reported_if_failing(info: Info) -> Iterator[None]:
    """Report a failing store or export as a line: the training is finished."""
    try:
        yield
    except (RunFailedError, InputError) as error:
        info(f"the model could not be kept in MLflow: {error}; --resume tries again")


def _draw(job: JobFile, config: ResolvedConfig, run: Run, model: torch.nn.Module | None, info: Info) -> list[Path]:
    """Draw the figures of every run of the platform's loop, and the job's own."""
    if job.job.loop is not None and job.job.figures is None:
        return []
    from concord.analysis.figures import save
    from concord.analysis.training_curves import training_curves
    from concord.analysis.trajectory_figures import moving_picture

    measure = "accuracy" if "train_accuracy" in run.metrics else "loss"
    drawn = {"curves": training_curves(run.history, measure)} if job.job.loop is None else {}
    if job.job.figures is not None and model is not None:
        try:
            drawn |= job.job.figures(job.job, config, run, model)
        except Exception as error:  # the user's code; the training is kept
            info(f"the job's figures could not be drawn ({reason(error, job.path)})")
    return [
        moving_picture(figure, run.folder.path / FIGURES / f"{name}.gif")
        if isinstance(figure, torch.Tensor)
        else save(figure, run.folder.path / FIGURES / f"{name}.png")
        for name, figure in drawn.items()
    ]
