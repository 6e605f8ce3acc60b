"""What one Ray Train worker does: its environments, the loop, metrics to the log, checkpoints through Ray Train."""

import contextlib
import logging
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from concord import logs
from concord.aggregation.rule_file import RuleFile
from concord.environments.summary import PURPOSES, DataSummary
from concord.errors import InputError, to_be_sent
from concord.gradients import NonFiniteGradientError
from concord.runs.failures import is_outage
from concord.runs.folder import missing_run
from concord.runs.live_metrics import RUN_METRICS, Published, RunSamples
from concord.storage import (
    Folder,
    FullDiskError,
    TakenOverError,
    apply_credentials,
    full_disk_in_one_line,
    require_space,
    storage_credentials,
)
from concord.tracking import MetricLog, redact
from concord.training.job import job_from_source
from concord.training.loop import ProcessContext, WorkerData, prepare, train
from concord.training.options import TrainConfig
from concord.training.process import tune_process
from concord.training.steps_so_far import StepsSoFar

# The journal of a run's metrics, in the run's folder.
METRICS = "metrics.jsonl"
# Ray Train's folder of checkpoints there, and its list of them.
CHECKPOINTS, SNAPSHOT = "checkpoints", "checkpoint_manager_snapshot.json"
# What a checkpoint notes: how long the journal was when it was made.
_JOURNAL_LENGTH = "concord_journal_length"
# What went wrong in a worker, there too, if it was a mistake and no outage.
ERROR = "error.txt"
# How long the first worker, at its end, goes on trying to send metrics that a store did not take.
_LAST_METRICS_SECONDS = 20.0
# The same where a disk is full, which may be the store's as well.
_FULL_DISK_METRICS_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker is told.

    Attributes:
        path, source: the job's file.
        rule: the user's own that is trained with, if it is.
        options: the configuration's values; its class is the job's, which the worker makes from the source.
        folder: of the run, where the first worker keeps metrics before they are sent.
        tracking_uri, run_id: where they are sent; None keeps them in the journal alone.
        left_out: a training environment that is not to be trained on.
        log_context: how it logs.
        access: to the storages of the output and the data, see :func:`concord.storage.credentials`.
    """

    path: str
    # Ray keeps how its configuration looks as text: what is long, or may hold a password, is not in it.
    source: str = field(repr=False)
    rule: RuleFile | None
    options: dict[str, Any] = field(repr=False)
    folder: Folder
    tracking_uri: str | None = field(repr=False)
    run_id: str | None
    left_out: str | None = None
    log_context: logs.Context = field(default_factory=logs.context)
    storage_credentials: dict[str, str] = field(default_factory=storage_credentials, repr=False)


def work(loop_config: dict[str, Any]) -> dict[str, Any]:
    """One worker. What is wrong with input or model comes back as a value: to start again would not mend it."""
    import ray.train
    import ray.train.collective
    import ray.train.torch

    assignment: WorkerSpec = loop_config["assignment"]
    apply_credentials(assignment.storage_credentials)
    context = ray.train.get_context()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    tune_process(threads=max(1, cores // context.get_local_world_size()))
    place = ProcessContext(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    here = ray.get_runtime_context()
    logs.inherit_context(
        assignment.log_context, rank=place.rank, worker_id=here.get_worker_id(), node_id=here.get_node_id()
    )
    _quiet_ray_train()
    checkpoint = ray.train.get_checkpoint()
    log, failed = _metric_log(assignment, checkpoint) if place.rank == 0 else (None, None)
    failed = ray.train.collective.broadcast_from_rank_zero(failed)
    if failed:
        return {"error": failed}
    last_metrics_seconds = _LAST_METRICS_SECONDS
    reporter = _RayReporter(place.rank, log, assignment.folder)
    data: list[DataSummary] = []
    try:
        file = job_from_source(assignment.path, assignment.source, assignment.rule)
        job, name = file.job, file.name
        folder = fetched_checkpoint(assignment.folder, checkpoint) if checkpoint else None
        config = job.config.with_options(**assignment.options)

        def load() -> WorkerData:
            prepared = prepare(job, config, place, assignment.left_out)
            if assignment.run_id is not None:  # otherwise one of a study's many trials
                data.extend(prepared.summaries())
            return prepared

        with _watched(assignment, name, config, place) as so_far:
            outcome = train(job, config, place, reporter, folder, load, so_far)
        data = _of_all(data, place)
    except InputError as error:  # raised in every worker
        return {"input_error": to_be_sent(error)}
    except NonFiniteGradientError as error:  # raised in every worker
        return {"error": str(error)}
    except FullDiskError as error:  # raised in every worker
        last_metrics_seconds = _FULL_DISK_METRICS_SECONDS
        return {"error": str(error)}
    except Exception as error:
        # Raised in this worker while others wait for it: Ray has to end them. A mistake in the job would only be
        # made again, so the group that is started next finds it written down.
        if not is_outage(error):
            with contextlib.suppress(OSError):  # a folder that is not on this node must not hide the mistake
                text = redact(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
                (assignment.folder.path / ERROR).write_text(text)
                assignment.folder.keep(ERROR)
        raise
    finally:
        unsent = log.close(last_metrics_seconds) if log else 0
    return {
        "history": [tuple(evaluation) for evaluation in outcome.history],
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "unsent": unsent,
        "data": data,
    }


def fetched_checkpoint(run_folder: Folder, checkpoint: Any) -> Path:
    """A checkpoint's files on this machine.

    Not by Ray's own way, which writes what is called ``../name`` in a storage outside the folder.

    Raises:
        InputError: it holds such a file.
    """
    path = Path(checkpoint.path)
    return run_folder.fetch_tree(f"{CHECKPOINTS}/{path.name}") if run_folder.remote else path


def _of_all(data: list[DataSummary], place: ProcessContext) -> list[DataSummary]:
    """What all processes have, in order, each part once."""
    gathered: list[list[DataSummary]] = [data]
    if place.world_size > 1:
        gathered = [[] for _ in range(place.world_size)]
        torch.distributed.all_gather_object(gathered, data)
    parts = list(dict.fromkeys(part for of_one in gathered for part in of_one))
    return sorted(parts, key=lambda part: PURPOSES.index(part.purpose))


@contextlib.contextmanager
def _watched(assignment: WorkerSpec, job: str, config: TrainConfig, place: ProcessContext) -> Iterator[StepsSoFar]:
    """Show what the worker does as it does it."""
    so_far = StepsSoFar()
    if assignment.run_id is None:  # one of a study's many trials
        yield so_far
        return
    labels = {"run": str(config.run.name), "concord_job": job, "method": config.method, "rank": str(place.rank)}
    with Published(RUN_METRICS, labels, RunSamples(so_far, first=place.rank == 0)):
        yield so_far


def _quiet_ray_train() -> None:
    """Ray Train logs every report of every worker, past its own log level; what the user logs still comes through."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "/ray/train/" not in record.pathname or record.levelno >= logging.CRITICAL)


def _metric_log(assignment: WorkerSpec, checkpoint: Any) -> tuple[MetricLog | None, str | None]:
    """The log of a run that goes on from a checkpoint, or begins; or why its workers need not begin (again)."""
    folder = assignment.folder
    try:
        folder.check_claim()
        if assignment.run_id is not None and (gone := missing_run(folder)):
            return None, gone
        if error := recorded_error(folder):
            return None, error
        with folder.in_one_line():
            start = checkpoint.get_metadata().get(_JOURNAL_LENGTH) if checkpoint else 0
        with full_disk_in_one_line(folder.path):
            log = MetricLog.going_on(folder.lines(METRICS), assignment.tracking_uri, assignment.run_id, start)
    except (TakenOverError, FullDiskError) as problem:
        return None, str(problem)
    return log, None


class _RayReporter:
    """Metrics to the log, checkpoints through Ray Train."""

    def __init__(self, rank: int, log: MetricLog | None, folder: Folder) -> None:
        self._rank = rank
        self._log = log
        self._folder = folder

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._log is not None:
            self._log.log(metrics, step)

    def checkpoint(self, write: Callable[[Path], None], metrics: dict[str, float]) -> None:
        import ray.train

        if self._rank != 0:
            self._end_together(None)
            ray.train.report({})
            self._end_together(None)
            return
        with tempfile.TemporaryDirectory() as folder:
            self._end_together(_what_fills_a_disk(lambda: self._prepare(Path(folder), write)))
            short = {name: value for name, value in metrics.items() if "/" not in name}
            self._end_together(_what_fills_a_disk(lambda: self._report(Path(folder), short)))

    def _end_together(self, problem: str | None) -> None:
        """Raise in every worker what the first one found: others would wait for it, and be started again in vain."""
        import ray.train.collective

        problem = ray.train.collective.broadcast_from_rank_zero(problem)
        if problem is not None:
            raise FullDiskError(problem)

    def _prepare(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Write a checkpoint into a folder of its own, with how long the journal is, which is kept before."""
        import ray.train

        place = self._folder.path
        with full_disk_in_one_line(place):
            length = self._log.keep() if self._log is not None else 0
        with full_disk_in_one_line(folder):
            write(folder)
            # Who goes on from here cuts the journal there, and logs what comes after it anew.
            ray.train.Checkpoint.from_directory(folder).update_metadata({_JOURNAL_LENGTH: length})
        if not self._folder.remote:
            require_space(place, sum(file.stat().st_size for file in folder.rglob("*")))

    def _report(self, folder: Path, metrics: dict[str, float]) -> None:
        """Have Ray Train keep the checkpoint; what is there of one that a full disk cut short is removed again."""
        import ray.train

        before = set() if self._folder.remote else set(self._folder.names(CHECKPOINTS))
        try:
            with full_disk_in_one_line(self._folder.path), self._folder.in_one_line():
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
        except FullDiskError:
            for partial in set(self._folder.names(CHECKPOINTS)) - before:
                self._folder.remove(f"{CHECKPOINTS}/{partial}")
            raise


def _what_fills_a_disk(do: Callable[[], None]) -> str | None:
    """Do something; gives the line that says which disk is full, if that is why it failed."""
    try:
        do()
    except FullDiskError as error:
        return str(error)
    return None


def recorded_error(folder: Folder) -> str | None:
    """What went wrong in a worker, if it was a mistake that another worker would make again."""
    folder.fetch(ERROR)
    path = folder.path / ERROR
    return path.read_text() if path.exists() else None
