"""A whole run (``concord train``): check, train, record, draw figures, register the model."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from concord.environments.summary import DataSummary
from concord.errors import InputError, RunFailedError, TrainingFailedError
from concord.options import flag_of, option_values
from concord.record import Events
from concord.runs.champion import required, scored_on, shortfall
from concord.runs.checkpoints import CHECKPOINTS, last_checkpoint, remove_older, remove_unlisted
from concord.runs.dashboard import described
from concord.runs.execute import execute, needs_ray_train
from concord.runs.lifecycle import Lineage, Opened, Reserved, open_run, reserved_run, run_description
from concord.runs.opening import comparison, mask_lines, mask_parameters, method_line, opening_lines, purposes
from concord.runs.preflight import Checked, preflight
from concord.runs.progress import RunProgress
from concord.runs.resources import require_resources
from concord.runs.resume import require_same_data
from concord.runs.session import check_cluster, ray_session
from concord.runs.tags import run_tags
from concord.runs.tracked_data import tracked_data
from concord.runs.worker import RunSpec
from concord.source_file import reason
from concord.storage import Folder, full_disk_in_one_line, require_reachable, require_space, resolve
from concord.tracking import ExportError, Mirror, Registered, log_model, register
from concord.training.checkpoint import MODEL, read_weights
from concord.training.empty_masks import empty_masks
from concord.training.job import JobFile
from concord.training.large_losses import large_losses
from concord.training.loop import build_model
from concord.training.options import RunConfig, TrainConfig
from concord.training.outcome import Evaluation, Outcome
from concord.training.process import tune_process
from concord.training.shortcuts import shortcuts
from concord.training.underfitting import underfitting

# How long a resumed finished run retries to send events to MLflow.
_UNSENT_SECONDS = 30.0
# MLflow's folder for the weights of a model that is not exported, and the line about it.
_WEIGHTS = "weights"
_NOT_CALLED = "the job's risk does not call it as a function of tensors"
FIGURES, _METRICS = "figures", "metrics.json"
# An exponential average of fewer steps, in multiples of 1 / (1 - decay), has over 5 % of the first step's weights.
_REACHES = 3
Info = Callable[[str], None]


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        seconds: from the first check to the registered model.
        model: the registered version as ``models:/name/version``, or ``models:/m-…`` without --register;
            None if it could not be kept, or its batches have another form than MLflow's models take.
        registered: the registered version and whether it is the champion; None if nothing was registered.
        kept: the folder with figures, configuration and checkpoints.
        metrics: by the short names (without those of single environments and layers).
    """

    job: str
    name: str
    run_id: str
    seconds: float
    model: str | None
    registered: Registered | None
    kept: Folder
    metrics: dict[str, float]
    tracking_uri: str

    @property
    def folder(self) -> Path:
        """The folder on this machine."""
        return self.kept.path

    def as_json(self) -> dict[str, Any]:
        """The contract of ``concord train --json``."""
        return {
            "job": self.job,
            "name": self.name,
            "run_id": self.run_id,
            "seconds": round(self.seconds, 3),
            "model": self.model,
            "champion": self.registered.champion if self.registered else False,
            "registration": self.registered.reason if self.registered else None,
            "artifacts": self.kept.display_path,
            "metrics": self.metrics,
        }


def run(
    job: JobFile, config: RunConfig, info: Info, lineage: Lineage | None = None, given: Collection[str] = ()
) -> RunResult:
    """Train a job, or resume it, and keep everything. After a failure ``--resume`` continues from the last checkpoint.

    Invalid input leaves nothing of the run. ``lineage`` is the origin of a configuration that a study chose; ``given``
    has the names of the options that the user gave, of which those without an effect are named.
    """
    started = time.perf_counter()
    config.check()
    # Ray Train's workers have another working directory, so paths must be absolute.
    config = config.resolve().with_options(**resolved_paths(config))
    check_cluster(config)
    checked = preflight(job, config)
    with (
        reserved_run(job.name, config, config.method, placement=config.placement, defaults=job.job.config) as reserved,
        RunProgress(info) as progress,
        contextlib.ExitStack() as session,
    ):
        environments = checked.environments
        if reserved.record is not None:
            if finished := _already_finished(reserved, info):
                return finished
            require_same_data(reserved.name, environments.version, reserved.record.get("data"))
        config = reserved.config
        require_space(reserved.folder.path)
        dashboard = None
        if needs_ray_train(config) or (job.job.loop is not None and job.job.loop.uses_ray):
            progress.waiting("starting Ray")
            dashboard = session.enter_context(ray_session(config))
            require_resources(config, info)
        tags = run_tags(job.name, job.path, len(environments.train) or None, environments.version)
        derived: dict[str, object] = {} if checked.objective is None else {"objective": checked.objective}
        if isinstance(config, TrainConfig):
            derived |= mask_parameters(config, len(environments.train))
        artifacts = {"environments.json": environments.by_purpose()} if environments.train else {}
        description = run_description(config, job.name, tags, lineage, derived, artifacts, environments.version)
        with full_disk_in_one_line(reserved.folder.path), open_run(reserved, description, info) as begun:
            for line in _opening(job, config, begun, checked, given):
                info(line)
            if idle := sorted(map(flag_of, config.unused() & {*given})):
                info(f"warning: {', '.join(idle)}: of no effect in this run; another objective, rule or option uses it")
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            progress.training(job.epochs(config), "starting workers" if needs_ray_train(config) else "loading data")
            outcome, data = _trained(job, config, begun, progress, info)
            session.close()  # Ray's processes are not needed for the rest
            progress.waiting("drawing figures, registering the model")
            report, tracked = _finished(job, config, begun, outcome, data, checked, info, lineage)
            for advice in _advice(job, config, outcome, checked):
                info(advice)
            report = dataclasses.replace(report, seconds=time.perf_counter() - started)
            if tracked:  # otherwise --resume must keep it
                begun.report = {"report": report.as_json()}
    return report


def _opening(job: JobFile, config: RunConfig, begun: Opened, checked: Checked, given: Collection[str]) -> list[str]:
    """The first lines of a run."""
    registers = config.run.register and checked.example is not None
    criterion = checked.criterion if registers else None
    if not isinstance(config, TrainConfig):
        opening = job.job.loop.opening if job.job.loop is not None else None
        what, *more = opening(config) if opening is not None else [config.method or job.name]
        return opening_lines(begun, what, more, criterion)
    environments = checked.environments
    mask = mask_lines(config, len(environments.train), comparison(job, config, given))
    lines = [f"data: {purposes(environments, config.data.held_out)}", *mask]
    what = method_line(config, needs_ray_train(config), checked.objective)
    return opening_lines(begun, what, lines, criterion, required(job.job, config))


def _trained(
    job: JobFile, config: RunConfig, begun: Opened, progress: RunProgress, info: Info
) -> tuple[Outcome, list[DataSummary]]:
    """Train from the last checkpoint on, and record everything; return outcome and data."""
    kept, events = begun.kept, begun.events
    start = last_checkpoint(kept, events.own.checkpoints, info)
    remove_unlisted(kept, events.own.checkpoints)
    data: list[DataSummary] = []

    def take(name: str, /, **fields: Any) -> None:
        if name == "data":
            data.extend(fields["parts"])
            return
        events.append(name, **fields)
        if name == "metrics":
            progress.show(fields["metrics"])
        elif name == "checkpoint":
            events.sync()
            remove_older(kept, events.own.checkpoints)

    on_ray_train = needs_ray_train(config)
    if not on_ray_train:
        tune_process()
    spec = RunSpec(job.path, job.source, job.rule, option_values(config), kept, on_ray_train=on_ray_train)
    with contextlib.closing(execute(spec, job, config, take, start)) as evaluations:
        try:
            for evaluation in evaluations:
                events.append("evaluated", **evaluation._asdict())
                progress.show({**evaluation.metrics, "epoch": float(evaluation.epoch)})
        except TrainingFailedError as error:
            if error.traceback:
                info(error.traceback)
            raise
    history = tuple(Evaluation(*moment, metrics) for moment, metrics in events.own.evaluations.items())
    if not history:
        raise TrainingFailedError(f"the loop of job {job.name} gave no evaluation")
    return Outcome(history), data


def _advice(job: JobFile, config: RunConfig, outcome: Outcome, checked: Checked) -> Iterator[str]:
    """Advice from the evaluations of a run."""
    if not isinstance(config, TrainConfig):
        return
    end = outcome.metrics
    if end.get("spread_reached") == 0:
        yield (
            f"--stop-spread {config.schedule.stop_spread}: never reached; the model of epoch "
            f"{end['kept_epoch']:.0f} is kept, with the least spread, {end['held_out_spread']:.4g}"
        )
    if (average := config.schedule.averaging) is not None and average[0] == "ema":
        steps, reach = outcome.history[-1].step, 1 / (1 - average[1])
        if steps < _REACHES * reach:
            yield (
                f"warning: --average {config.schedule.average}: averages about {reach:.0f} steps, and the run has "
                f"{steps}: it still holds first weights; give a smaller decay, or more epochs"
            )
    if config.schedule.keep == "best":
        yield f"--keep best: the model of epoch {end['kept_epoch']:.0f} is kept"
    for line in (
        large_losses(outcome.history),
        empty_masks(outcome.history, config, len(checked.environments.train)),
        underfitting(outcome.history, config),
        shortcuts(outcome.history, job.job, config, checked.environments, checked.measures),
    ):
        if line:
            yield line


def resolved_paths(config: RunConfig) -> dict[str, Any]:
    """The options that are paths, made absolute (InputError if their storage cannot be reached)."""
    paths = {key: resolve(value) for key, value in option_values(config).items() if isinstance(value, Path)}
    for option in ("output", "data_dir"):
        if option in paths:
            require_reachable(option.replace("_", "-"), paths[option])
    return paths


def _already_finished(reserved: Reserved, info: Info) -> RunResult | None:
    """The result of a finished run, after sending remaining events to MLflow; None if the run is not finished."""
    kept, store = reserved.folder, reserved.store
    events = Events(kept)
    report: Mapping[str, Any] | None = (events.own.ended or {}).get("report")
    events.close()
    if report is None:
        return None
    unsent = Mirror(store, report["run_id"], kept).close(_UNSENT_SECONDS)
    info(f"run {reserved.name} is finished" + (f"; {unsent} events are still not sent" if unsent else ""))
    return RunResult(
        job=reserved.job,
        name=reserved.name,
        run_id=report["run_id"],
        seconds=report["seconds"],
        model=report["model"],
        registered=_registered(report),
        kept=kept,
        metrics=report["metrics"],
        tracking_uri=store.uri,
    )


def _registered(report: Mapping[str, Any]) -> Registered | None:
    """The registration of a finished run's model, from its report."""
    name, _, version = (report["model"] or "").removeprefix("models:/").rpartition("/")
    if not name:  # no model was kept or registered
        return None
    reason = report.get("registration") or "registered when the run finished"
    return Registered(name, int(version), report.get("champion", False), reason)


def _finished(
    job: JobFile,
    config: RunConfig,
    begun: Opened,
    outcome: Outcome,
    data: list[DataSummary],
    checked: Checked,
    info: Info,
    lineage: Lineage | None,
) -> tuple[RunResult, bool]:
    """Draw the figures, and keep data and model in MLflow. Also returns whether MLflow took them."""
    store, run_id, kept = begun.store, begun.run_id, begun.kept
    metrics = {key: value for key, value in outcome.metrics.items() if "/" not in key}
    (kept.path / _METRICS).write_text(json.dumps(outcome.metrics, indent=1))
    kept.keep(_METRICS)
    model = _last_model(job, config, begun)
    for path in _draw(job, config, outcome, model, kept.path, info):
        begun.keep_artifact(f"{FIGURES}/{path.name}")
    registered: Registered | None = None
    uri: str | None = None
    tracked = False
    environments = checked.environments
    with _reported_if_failing(info):
        if data:
            store.log_data(run_id, tracked_data(data))
        reason = _NOT_CALLED
        if model is not None and checked.example is not None:
            try:
                uri = log_model(store, run_id, model, checked.example, environments.raw, environments.classes)
            except ExportError as error:
                reason = str(error)
        if model is not None and uri is None:
            store.log_files(run_id, kept.path / CHECKPOINTS / begun.events.own.checkpoints[-1] / MODEL, _WEIGHTS)
            line = f"the model is not registered: {reason}; its weights are the run's artifact {_WEIGHTS}/{MODEL}"
            store.note(run_id, line)
            info(line)
        if config.run.register and uri is not None:
            name = job.model_name(config)
            criterion, mode = checked.criterion
            if criterion not in metrics:
                raise RunFailedError(f"the run does not report {criterion}, by which versions are compared")
            unfit = shortfall(job.job, config, metrics)
            tags = lineage.tags if lineage else {}
            scored = scored_on(criterion, environments)
            registered = register(store, uri, run_id, name, metrics, criterion, mode, tags, unfit, scored)
            uri = f"models:/{registered.name}/{registered.version}"
        tracked = True
    result = RunResult(
        job=job.name,
        name=begun.name,
        run_id=run_id,
        seconds=0.0,
        model=uri if registered or not config.run.register else None,
        registered=registered,
        kept=kept,
        metrics=metrics,
        tracking_uri=store.uri,
    )
    return result, tracked


def _last_model(job: JobFile, config: RunConfig, begun: Opened) -> torch.nn.Module | None:
    """The model with the weights of the last checkpoint, in evaluation mode; None where the job has none."""
    checkpoints = begun.events.own.checkpoints
    if not job.job.has_model or not checkpoints:
        return None
    model = build_model(job.job, config)
    read_weights(begun.kept.fetch(f"{CHECKPOINTS}/{checkpoints[-1]}"), model)
    return model.eval()


@contextlib.contextmanager
def _reported_if_failing(info: Info) -> Iterator[None]:
    """Report a failing store or export as a line: the training is finished."""
    try:
        yield
    except (RunFailedError, InputError) as error:
        info(f"the model could not be kept in MLflow: {error}; --resume tries again")


def _draw(
    job: JobFile, config: RunConfig, outcome: Outcome, model: torch.nn.Module | None, folder: Path, info: Info
) -> list[Path]:
    """Draw the figures of every run of the platform's loop, and the job's own."""
    if job.job.loop is not None and job.job.figures is None:
        return []
    from concord.analysis.figures import save
    from concord.analysis.training_curves import training_curves
    from concord.analysis.trajectory_figures import moving_picture

    measure = "accuracy" if "train_accuracy" in outcome.metrics else "loss"
    drawn = {"curves": training_curves(outcome.history, measure)} if job.job.loop is None else {}
    if job.job.figures is not None and model is not None:
        try:
            drawn |= job.job.figures(job.job, config, outcome, model)
        except Exception as error:  # the user's code; the training is kept
            info(f"the job's figures could not be drawn ({reason(error, job.path)})")
    return [
        moving_picture(figure, folder / FIGURES / f"{name}.gif")
        if isinstance(figure, torch.Tensor)
        else save(figure, folder / FIGURES / f"{name}.png")
        for name, figure in drawn.items()
    ]
