"""What one worker does: its environments, the loop, metrics to the log, checkpoints to whoever keeps them."""

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from concord import logs
from concord.aggregation.rule_file import RuleFile
from concord.environments.summary import PURPOSES, DataSummary
from concord.errors import InputError, RunFailedError, to_be_sent
from concord.gradients import NonFiniteGradientError
from concord.runs.checkpoints import CHECKPOINTS, journal_length, note_journal_length
from concord.runs.failures import is_outage
from concord.runs.folder import missing_run
from concord.runs.live_metrics import RUN_METRICS, Published, RunSamples
from concord.storage import (
    Folder,
    FullDiskError,
    full_disk_in_one_line,
    require_space,
    storage_credentials,
)
from concord.tracking import MetricLog, redact
from concord.training.job import job_from_source
from concord.training.loop import ProcessContext, WorkerData, prepare, train
from concord.training.options import TrainConfig
from concord.training.outcome import Evaluation, Outcome
from concord.training.steps_so_far import StepsSoFar

# The journal of a run's metrics, in the run's folder.
METRICS = "metrics.jsonl"
# What went wrong in a worker, there too, if it was a mistake and no outage.
ERROR = "error.txt"
# How long the first worker, at its end, goes on trying to send metrics that a store did not take.
_LAST_METRICS_SECONDS = 20.0
# The same where a disk is full, which may be the store's as well.
_FULL_DISK_METRICS_SECONDS = 2.0

# What keeps a checkpoint; called in every worker, in the first one with its folder, with metrics to list beside it.
Keep = Callable[[Path | None, dict[str, float]], None]


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
        on_ray: whether the worker is Ray's, so that there is somebody to show live metrics to.
        log_context: how it logs.
        access: to the storages of the output and the data, see :func:`concord.storage.storage_credentials`.
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
    on_ray: bool = True
    log_context: logs.Context = field(default_factory=logs.context)
    storage_credentials: dict[str, str] = field(default_factory=storage_credentials, repr=False)


@dataclass(frozen=True)
class Trained:
    """What came back.

    Attributes:
        outcome: of the loop.
        checkpoint: folder of the last checkpoint.
        unsent: metrics that the store had not taken by the end; they are in the journal.
        data: what it was trained and evaluated on, part by part; nothing of what is not tracked.
    """

    outcome: Outcome
    checkpoint: Path
    unsent: int
    data: tuple[DataSummary, ...] = ()


def trained(said: Mapping[str, Any], last_checkpoint: Callable[[], Path | None]) -> Trained:
    """What the first worker's result, as :func:`work_as` gives it, stands for.

    Raises:
        InputError, RunFailedError: as the worker says.
    """
    if "input_error" in said:
        raise said["input_error"]
    if "error" in said:
        raise RunFailedError(said["error"])
    history = tuple(Evaluation(*evaluation) for evaluation in said["history"])
    outcome = Outcome(history, said["seconds"], said["steps"])
    checkpoint = last_checkpoint()
    assert checkpoint is not None  # the loop ends with one
    return Trained(outcome, checkpoint, said["unsent"], tuple(said.get("data", ())))


def work_as(
    assignment: WorkerSpec, place: ProcessContext, start: Path | None, keep: Keep, *, cut: bool = True
) -> dict[str, Any]:
    """Train as one of the workers, in the default process group if there are several.

    What is wrong with input or model comes back as a value: to start again would not mend it.

    Args:
        assignment: what all workers are told.
        place: which of them this is.
        start: the checkpoint to go on from.
        keep: keeps a checkpoint.
        cut: whether the journal is to be cut where the run goes on; otherwise it was.
    """
    log, failed = None, None
    if place.rank == 0:
        log, failed = open_log(assignment, journal_length(start) if cut else None)
    failed = _from_first(failed, place)
    if failed:
        return {"error": failed, "unsent": 0, "metrics_seconds": 0.0}
    result: dict[str, Any]
    metrics_seconds = _LAST_METRICS_SECONDS
    reporter = _Reporter(place, log, assignment.folder, keep)
    data: list[DataSummary] = []
    try:
        file = job_from_source(assignment.path, assignment.source, assignment.rule)
        job, name = file.job, file.name
        config = job.config.with_options(**assignment.options)

        def load() -> WorkerData:
            prepared = prepare(job, config, place, assignment.left_out)
            if assignment.run_id is not None:  # otherwise one of a study's many trials
                data.extend(prepared.summaries())
            return prepared

        with _watched(assignment, name, config, place) as so_far:
            outcome = train(job, config, place, reporter, start, load, so_far)
        data = _of_all(data, place)
        result = {
            "history": [tuple(evaluation) for evaluation in outcome.history],
            "seconds": outcome.seconds,
            "steps": outcome.steps,
            "data": data,
        }
    except InputError as error:  # raised in every worker
        result = {"input_error": to_be_sent(error)}
    except NonFiniteGradientError as error:  # raised in every worker
        result = {"error": str(error)}
    except FullDiskError as error:  # raised in every worker
        metrics_seconds = _FULL_DISK_METRICS_SECONDS
        result = {"error": str(error)}
    except Exception as error:
        # Raised in this worker while others wait for it: they have to be ended. A mistake in the job would only be
        # made again, so the group that is started next finds it written down.
        if not is_outage(error):
            with contextlib.suppress(OSError):  # a folder that is not on this node must not hide the mistake
                text = redact(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
                (assignment.folder.path / ERROR).write_text(text)
                assignment.folder.keep(ERROR)
        raise
    finally:
        unsent = log.close(metrics_seconds) if log else 0
    return result | {"unsent": unsent, "metrics_seconds": metrics_seconds}


def _of_all(data: list[DataSummary], place: ProcessContext) -> list[DataSummary]:
    """What all processes have, in order, each part once."""
    gathered: list[list[DataSummary]] = [data]
    if place.world_size > 1:
        gathered = [[] for _ in range(place.world_size)]
        dist.all_gather_object(gathered, data)
    parts = list(dict.fromkeys(part for of_one in gathered for part in of_one))
    return sorted(parts, key=lambda part: PURPOSES.index(part.purpose))


@contextlib.contextmanager
def _watched(assignment: WorkerSpec, job: str, config: TrainConfig, place: ProcessContext) -> Iterator[StepsSoFar]:
    """Show what the worker does as it does it."""
    so_far = StepsSoFar()
    if assignment.run_id is None or not assignment.on_ray:  # one of a study's many trials, or nobody to show it
        yield so_far
        return
    labels = {"run": str(config.run.name), "concord_job": job, "method": config.method, "rank": str(place.rank)}
    with Published(RUN_METRICS, labels, RunSamples(so_far, first=place.rank == 0)):
        yield so_far


def open_log(assignment: WorkerSpec, start: int | None) -> tuple[MetricLog | None, str | None]:
    """The log of a run, cut at a byte of its journal; or why its workers need not begin (again)."""
    folder = assignment.folder
    try:
        if assignment.run_id is not None and (gone := missing_run(folder)):
            return None, gone
        if error := recorded_error(folder):
            return None, error
        with full_disk_in_one_line(folder.path):
            log = MetricLog.going_on(folder.lines(METRICS), assignment.tracking_uri, assignment.run_id, start)
    except FullDiskError as problem:
        return None, str(problem)
    return log, None


def _from_first(problem: str | None, place: ProcessContext) -> str | None:
    """What the first worker found, in every worker."""
    said = [problem]
    if place.world_size > 1:
        dist.broadcast_object_list(said, 0)
    return said[0]


class _Reporter:
    """Metrics to the log, checkpoints to be kept."""

    def __init__(self, place: ProcessContext, log: MetricLog | None, folder: Folder, keep: Keep) -> None:
        self._place = place
        self._log = log
        self._folder = folder
        self._keep = keep

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._log is not None:
            self._log.log(metrics, step)

    def checkpoint(self, write: Callable[[Path], None], metrics: dict[str, float]) -> None:
        if self._place.rank != 0:
            self._end_together(None)
            self._keep(None, {})
            self._end_together(None)
            return
        with tempfile.TemporaryDirectory() as folder:
            self._end_together(_what_fills_a_disk(lambda: self._prepare(Path(folder), write)))
            short = {name: value for name, value in metrics.items() if "/" not in name}
            self._end_together(_what_fills_a_disk(lambda: self._report(Path(folder), short)))

    def _end_together(self, problem: str | None) -> None:
        """Raise in every worker what the first one found: others would wait for it, and be started again in vain."""
        problem = _from_first(problem, self._place)
        if problem is not None:
            raise FullDiskError(problem)

    def _prepare(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Write a checkpoint into a folder of its own, with how long the journal is, which is kept before."""
        place = self._folder.path
        with full_disk_in_one_line(place):
            length = self._log.keep() if self._log is not None else 0
        with full_disk_in_one_line(folder):
            write(folder)
            # Who goes on from here cuts the journal there, and logs what comes after it anew.
            note_journal_length(folder, length)
        if not self._folder.remote:
            require_space(place, sum(file.stat().st_size for file in folder.rglob("*")))

    def _report(self, folder: Path, metrics: dict[str, float]) -> None:
        """Have the checkpoint kept; what is there of one that a full disk cut short is removed again."""
        before = set() if self._folder.remote else set(self._folder.names(CHECKPOINTS))
        try:
            with full_disk_in_one_line(self._folder.path), self._folder.in_one_line():
                self._keep(folder, metrics)
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
