"""A process that trains a run, alone or as one of several workers, and yields each evaluation.

The other events of the run's record (metrics of steps, checkpoints, artifacts) go to a *sink*, in order.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from concord import logs
from concord.environments.summary import PURPOSES, DataSummary
from concord.errors import RunFailedError, TrainingFailedError, first_line
from concord.gradients import NonFiniteGradientError
from concord.runs.checkpoints import CHECKPOINTS
from concord.runs.failures import is_outage
from concord.source_file import own_traceback, reason
from concord.storage import Folder, FullDiskError, full_disk_in_one_line, storage_credentials
from concord.training.checkpoint import CHECKSUMS, write_checksums
from concord.training.context import ProcessContext, StepsSoFar
from concord.training.evaluation import Evaluation
from concord.training.job import Job, JobFile, job_from_source
from concord.training.loop import training
from concord.training.options import RunConfig, TrainConfig
from concord.training.rule_file import RuleFile
from concord.training.worker_data import WorkerData, prepare

_logger = logging.getLogger("concord.runs")


class Sink(Protocol):
    """Takes the events of a run other than its evaluations."""

    def __call__(self, name: str, /, **fields: Any) -> None:
        """An event, see :mod:`concord.record`; ``data`` has the :class:`DataSummary` of the training data."""


@dataclass(frozen=True)
class RunSpec:
    """The specification of a run, for any process that trains it.

    Attributes:
        path, source: the job's file.
        rule: the user's own aggregator, if there is one.
        options: the configuration's values; a worker makes its class from the job's source.
        folder: for checkpoints and files; None keeps none.
        on_ray_train: whether Ray Train's workers train; otherwise the executing process does.
        scratch: the folder for Ray Train's own files, which every node reaches; by default inside ``folder``.
        checkpoint_seconds: the least time between two checkpoints of a run that keeps nothing else, in one process;
            None: the run keeps its files, and the checkpoints that its options ask for.
    """

    path: str
    # Ray keeps its configuration as text, so this leaves out long values and possible passwords.
    source: str = field(repr=False)
    rule: RuleFile | None
    options: dict[str, Any] = field(repr=False)
    folder: Folder | None = None
    on_ray_train: bool = False
    scratch: Folder | None = None
    checkpoint_seconds: float | None = None
    log_context: logs.Context = field(default_factory=logs.context)
    storage_credentials: dict[str, str] = field(default_factory=storage_credentials, repr=False)

    @property
    def files(self) -> Folder | None:
        """The folder for all that the run keeps; None if it keeps nothing but checkpoints."""
        return self.folder if self.checkpoint_seconds is None else None

    def job(self) -> JobFile:
        """The job, made from its source."""
        return job_from_source(self.path, self.source, self.rule)


def ignore(name: str, /, **fields: Any) -> None:
    """A sink that drops all events."""


def failure(error: BaseException, path: str) -> TrainingFailedError:
    """The failure of a training in one line; if the job in this file raised it, with its traceback."""
    if isinstance(error, TrainingFailedError):
        return error
    if isinstance(error, NonFiniteGradientError | RunFailedError):
        return TrainingFailedError(first_line(error))
    if isinstance(error, Exception) and is_outage(error):
        return TrainingFailedError(reason(error, path))
    return TrainingFailedError(reason(error, path), own_traceback(error, path))


def evaluations_here(
    spec: RunSpec,
    job: Job[Any],
    config: RunConfig,
    process: ProcessContext,
    sink: Sink,
    start: str | None,
    load: Callable[[], WorkerData] | None = None,
    so_far: StepsSoFar | None = None,
) -> Iterator[Evaluation]:
    """Train in this process, which may be one of several in the default process group."""
    recorder = Recorder(spec, process, sink, start)
    if job.loop is not None:
        yield from job.loop.run(config, recorder)
        return
    assert isinstance(config, TrainConfig)

    def load_data() -> WorkerData:
        prepared = prepare(job, config, process)
        if recorder.data is not None:
            recorder.data = prepared.summaries()
        return prepared

    for evaluation in training(job, config, process, recorder, recorder.start, load or load_data, so_far):
        recorder.report_data()
        yield evaluation
    recorder.report_data()  # of a resumed run that had trained to its end


class Recorder:
    """Records a loop's metrics, checkpoints and files, see :class:`concord.training.context.RunContext`.

    What it keeps depends on the specification. The sink is called in the first process only. ``start`` names the
    checkpoint to resume from.
    """

    def __init__(self, spec: RunSpec, process: ProcessContext, sink: Sink, start: str | None) -> None:
        self._folder = folder = spec.folder
        self._seconds, self._files = spec.checkpoint_seconds, spec.files
        self.process = process
        self._sink = sink
        self.data: list[DataSummary] | None = [] if self._files is not None else None
        self.start = None if start is None or folder is None else folder.fetch(f"{CHECKPOINTS}/{start}")
        self._written = time.monotonic()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record metrics; in the first process only."""
        self._sink("metrics", step=step, metrics=metrics)

    def keep(self, path: str, write: Callable[[Path], None]) -> None:
        """Keep a file in the run's folder, by its path there, and show it in MLflow; ``write`` makes it."""
        if self._files is not None and self.process.rank == 0:
            file = self._files.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file)
            self._files.keep(path)
            self._sink("artifact", path=path)

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        """Keep a checkpoint; called in every process; the first one calls ``write``.

        A full disk is an error in every process, since the others would wait for the first one.
        """
        if self._folder is None:
            return
        if self._seconds is not None:
            if time.monotonic() < self._written + self._seconds:
                return
            try:
                self._write_checkpoint(self._folder, write, step)
            except Exception as error:  # the run does not need it
                _logger.warning("a checkpoint is missing: %s", first_line(error))
            self._written = time.monotonic()
            return
        problem = None
        if self.process.rank == 0:
            try:
                self._write_checkpoint(self._folder, write, step)
            except FullDiskError as error:
                problem = str(error)
        problem = self.process.broadcast_from_rank0(problem)
        if problem is not None:
            raise FullDiskError(problem)

    def _write_checkpoint(self, folder: Folder, write: Callable[[Path], None], step: int) -> None:
        name = f"checkpoint_{step:012d}"
        path = folder.path / CHECKPOINTS / name
        new = path.with_name(f"{name}.new")
        shutil.rmtree(new, ignore_errors=True)
        with full_disk_in_one_line(folder.path):
            try:
                new.mkdir(parents=True)
                write(new)
                if not (new / CHECKSUMS).exists():  # a loop of the job's own writes none
                    write_checksums(new)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
            shutil.rmtree(path, ignore_errors=True)
            new.replace(path)
            folder.keep(f"{CHECKPOINTS}/{name}")
        self._sink("checkpoint", name=name, step=step)

    def report_data(self) -> None:
        """Report the training data once; called in every process."""
        if self.data is None:
            return
        gathered, self.data = self.process.all_gather(self.data), None
        if self.process.rank == 0:
            parts = dict.fromkeys(part for of_one in gathered for part in of_one)
            self._sink("data", parts=sorted(parts, key=lambda part: PURPOSES.index(part.purpose)))
