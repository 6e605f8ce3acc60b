"""A whole run: checked, trained, tracked, drawn, its model registered. What ``concord train`` does."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from concord.errors import InputError, RunFailedError
from concord.options import option_values
from concord.runs.champion import criterion_of, required, shortfall
from concord.runs.cluster_address import check_cluster
from concord.runs.dashboard import described
from concord.runs.lifecycle import Lineage, ReservedRun, reserved_run, run_lifecycle
from concord.runs.local_train import prepare_workers, train_here, trains_here
from concord.runs.opening import mask_lines, mask_parameters, method_line, opening_lines, purposes
from concord.runs.preflight import Checked, preflight
from concord.runs.progress import RunProgress
from concord.runs.ray_train import train_on_ray
from concord.runs.resources import require_resources
from concord.runs.session import ray_session, require_shared_store
from concord.runs.tags import run_tags
from concord.runs.tracked_data import tracked_data
from concord.runs.worker import METRICS, Trained
from concord.source_file import reason
from concord.storage import Folder, full_disk_in_one_line, require_reachable, resolve
from concord.tracking import MetricLog, Registered, Store, log_model, register
from concord.training.checkpoint import MODEL, read_weights
from concord.training.job import JobFile
from concord.training.loop import build_model
from concord.training.options import RUNTIME_OPTIONS, RunConfig, TrainConfig
from concord.training.shortcuts import shortcuts
from concord.training.underfitting import underfitting

# How long a run that is finished tries to send what was left of its metrics.
_UNSENT_SECONDS = 30.0
# Where MLflow keeps the weights of a model that is not exported, and what the run says about it.
_WEIGHTS = "weights"
_NOT_A_MODEL = (
    "the model is not registered: MLflow's PyTorch models take one tensor, and this job's batches have another form; "
    f"its weights are the run's artifact {_WEIGHTS}/{MODEL}"
)
Info = Callable[[str], None]


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Attributes:
        job: the job's name.
        name: the run's name.
        run_id: in MLflow.
        seconds: from the first check to the registered model.
        model: the registered version as ``models:/name/version``, or ``models:/m-…`` of a model that was not to be
            registered; None if it could not be kept, or takes other batches than MLflow's models do.
        registered: what became of the champion; None if nothing was registered.
        kept: with the figures, the configuration and the checkpoints.
        figures: the figures' files.
        metrics: by the short names (without those of single environments and layers).
        tracking_uri: where MLflow keeps it.
    """

    job: str
    name: str
    run_id: str
    seconds: float
    model: str | None
    registered: Registered | None
    kept: Folder
    figures: tuple[Path, ...]
    metrics: dict[str, float]
    tracking_uri: str

    @property
    def folder(self) -> Path:
        """The same on this machine."""
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


def run(job: JobFile, config: TrainConfig, info: Info, lineage: Lineage | None = None) -> FinishedRun:
    """Train a job from nothing, or resume it, and keep everything.

    Args:
        job: the job with its file.
        config: the options, an instance of the job's own configuration class.
        info: takes a line of progress.
        lineage: where the configuration came from, if a study chose it.

    Raises:
        InputError: something given cannot be used; nothing of the run is left.
        RunFailedError: training failed; what was finished is kept, and ``--resume`` goes on from it.
    """
    started = time.perf_counter()
    config.check()
    # Ray Train's workers run in a folder of their own: what is relative here would be something else there.
    config = config.resolved().with_options(**resolved_paths(config))
    check_cluster(config)
    here = trains_here(config)
    checked = preflight(job, config)
    if here:
        prepare_workers()  # while the store is opened
    environments = checked.environments
    tags = run_tags(job.name, job.path, len(environments.train), environments.version)
    tags |= lineage.tags if lineage else {}
    # Which environments meet at a step depends on the processes, if a step takes some of them.
    placement = RUNTIME_OPTIONS - ({"workers"} if config.data.environments_per_step else set())
    experiment = lineage.experiment if lineage else None
    derived = mask_parameters(config, len(environments.train))
    with (
        reserved_run(job.name, config, config.method, placement=placement, defaults=job.job.config) as reserved,
        RunProgress(info) as progress,
        contextlib.ExitStack() as session,
    ):
        if reserved.report is not None:
            return already_finished(reserved, reserved.report, info)
        name, config = reserved.name, config.with_options(name=reserved.name)
        dashboard = None
        if not here:
            progress.waiting("starting Ray")
            dashboard = session.enter_context(ray_session(config))
            require_resources(config, info)
            require_shared_store(config)
        with full_disk_in_one_line(reserved.folder.path), run_lifecycle(reserved, tags, experiment, derived) as opened:
            store, run_id, kept = opened.store, opened.run_id, opened.kept
            registers = config.run.register and checked.example is not None
            criterion = criterion_of(job.job, checked.reported, checked.reported) if registers else None
            data = purposes(environments, config.data.held_out)
            mask = mask_lines(config, len(environments.train))
            for line in opening_lines(opened, method_line(config), data, criterion, required(job.job, config), mask):
                info(line)
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            if not opened.resumed:
                store.log_json(run_id, environments.by_purpose(), "environments.json")
            with progress.training(store, run_id, config.schedule.epochs):
                trained = (train_here if here else train_on_ray)(job, config, kept, store.uri, run_id)
            session.close()  # Ray's processes are not needed for the rest
            end = trained.outcome.metrics
            if end.get("spread_reached") == 0:
                info(
                    f"--stop-spread {config.schedule.stop_spread}: never reached; the model of epoch "
                    f"{end['kept_epoch']:.0f} is kept, with the least spread, {end['held_out_spread']:.4g}"
                )
            progress.waiting("drawing figures, registering the model")
            report = _finished(job, config, store, run_id, name, kept, trained, checked, info, lineage)
            # The store may have come back since the workers ended: what has taken the model takes the metrics, too.
            unsent = trained.unsent
            complete = report.model is not None or checked.example is None
            if unsent and complete:
                unsent = send_unsent(kept, store.uri, run_id)
            if unsent:
                info(
                    f"tracking did not answer: {unsent} metrics are kept in {kept.display_path}/{METRICS} "
                    f"and sent by --name {name} --resume"
                )
            with _said_if_failing(info, "status"):
                store.finish_run(run_id, "FINISHED")
            if advice := underfitting(trained.outcome.history, config):
                info(advice)
            if advice := shortcuts(trained.outcome.history, job.job, config, environments, checked.measures):
                info(advice)
            report = dataclasses.replace(report, seconds=time.perf_counter() - started)
            if complete:
                opened.record(report=report.as_json())
    return report


def resolved_paths(config: RunConfig) -> dict[str, Any]:
    """The options that are paths, as they are the same for all processes; storages that do not answer are refused.

    Raises:
        InputError: the storage of --output or --data-dir cannot be reached.
    """
    paths = {key: resolve(value) for key, value in option_values(config).items() if isinstance(value, Path)}
    for option in ("output", "data_dir"):
        if option in paths:
            require_reachable(option.replace("_", "-"), paths[option])
    return paths


def already_finished(run: ReservedRun, said: Mapping[str, Any], info: Info) -> FinishedRun:
    """The report of a run that is done, after sending what the store had not taken then."""
    kept = run.folder
    unsent = send_unsent(kept, run.store.uri, said["run_id"])
    info(f"run {run.name} is finished" + (f"; {unsent} metrics are still not sent" if unsent else ""))
    return FinishedRun(
        job=run.job,
        name=run.name,
        run_id=said["run_id"],
        seconds=said["seconds"],
        model=said["model"],
        registered=_registered(said),
        kept=kept,
        figures=tuple(sorted(each for each in (kept.path / "figures").glob("*") if each.suffix in (".png", ".gif"))),
        metrics=said["metrics"],
        tracking_uri=run.store.uri,
    )


def send_unsent(kept: Folder, tracking_uri: str, run_id: str) -> int:
    """Send the metrics that the store has not taken, now that none is logged any more; gives how many are left."""
    return MetricLog.going_on(kept.lines(METRICS), tracking_uri, run_id, None).close(_UNSENT_SECONDS)


def _registered(said: Mapping[str, Any]) -> Registered | None:
    """What became of a finished run's model, as the run said it then."""
    name, _, version = (said["model"] or "").removeprefix("models:/").rpartition("/")
    if not name:  # no model was kept, or it was not to be registered
        return None
    reason = said.get("registration") or "registered when the run finished"
    return Registered(name, int(version), said.get("champion", False), None, reason)


def _finished(
    job: JobFile,
    config: TrainConfig,
    store: Store,
    run_id: str,
    name: str,
    kept: Folder,
    trained: Trained,
    checked: Checked,
    info: Info,
    lineage: Lineage | None,
) -> FinishedRun:
    metrics = {key: value for key, value in trained.outcome.metrics.items() if "/" not in key}
    model = build_model(job.job, config)
    read_weights(trained.checkpoint, model)
    model.eval()
    (kept.path / "metrics.json").write_text(json.dumps(trained.outcome.metrics, indent=1))
    figures = _draw(job, config, trained, model, kept.path, info)
    kept.keep("metrics.json", "figures")
    registered: Registered | None = None
    uri: str | None = None
    with _said_if_failing(info, "model"):
        criterion, mode = criterion_of(job.job, metrics, checked.reported)
        unfit = shortfall(job.job, config, metrics)
        for figure in figures:
            store.log_files(run_id, figure, "figures")
        store.log_data(run_id, tracked_data(trained.data))
        if checked.example is None:
            store.log_files(run_id, trained.checkpoint / MODEL, _WEIGHTS)
            store.note(run_id, _NOT_A_MODEL)
            info(_NOT_A_MODEL)
        else:
            uri = log_model(store, run_id, model, checked.example)
        if config.run.register and uri is not None:
            tags = lineage.tags if lineage else {}
            registered = register(store, uri, run_id, job.name, metrics, criterion, mode, tags, unfit)
            uri = f"models:/{registered.name}/{registered.version}"
    return FinishedRun(
        job=job.name,
        name=name,
        run_id=run_id,
        seconds=0.0,
        model=uri if registered or not config.run.register else None,
        registered=registered,
        kept=kept,
        figures=figures,
        metrics=metrics,
        tracking_uri=store.uri,
    )


@contextlib.contextmanager
def _said_if_failing(info: Info, what: str) -> Iterator[None]:
    """A store that fails, or a model that cannot be exported, does not undo a finished training."""
    try:
        yield
    except (RunFailedError, InputError) as error:
        info(f"the {what} could not be kept in MLflow, --resume tries again: {error}")


def _draw(
    job: JobFile, config: TrainConfig, trained: Trained, model: torch.nn.Module, folder: Path, info: Info
) -> tuple[Path, ...]:
    from concord.analysis.figures import save
    from concord.analysis.training_curves import training_curves
    from concord.analysis.trajectory_figures import moving_picture

    measures = ["accuracy"] if "train_accuracy" in trained.outcome.metrics else ["loss"]
    drawn = {"curves": training_curves(trained.outcome.history, measures[0])}
    if job.job.figures is not None:
        try:
            drawn |= job.job.figures(job.job, config, trained.outcome, model)
        except Exception as error:  # the user's; the training it came after is not lost by it
            info(f"the job's figures could not be drawn ({reason(error, job.path)})")
    return tuple(
        moving_picture(figure, folder / "figures" / f"{name}.gif")
        if isinstance(figure, torch.Tensor)
        else save(figure, folder / "figures" / f"{name}.png")
        for name, figure in drawn.items()
    )
