"""Executes a run, in this process or on Ray Train, and yields each evaluation.

One worker trains in the caller's process, which may be one of Ray Tune. Several workers, or an address, mean Ray Train.
All events of the run's record (metrics of steps, evaluations, checkpoints, artifacts) go to a *sink*, in order.
"""

import contextlib
import copy
import dataclasses
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from concord import logs
from concord.environments.summary import PURPOSES
from concord.errors import CheckpointError, InputError, RunFailedError, first_line
from concord.execution.failures import failure, is_outage
from concord.openmp import threads_of_user
from concord.record import Evaluation, Run
from concord.storage import DiskError, Folder, disk_errors_in_one_line, storage_credentials
from concord.tracking.system_metrics import sampled
from concord.training.callback import Callback, TrainingRun
from concord.training.checkpoint import CHECKSUMS, verify_checkpoint, write_checksums
from concord.training.context import ProcessContext, StepsSoFar
from concord.training.job import Job, JobFile, SentJob
from concord.training.loop import training
from concord.training.options import ResolvedConfig, ResolvedTrainConfig, RunConfig, TrainConfig, device_of, parallel_of
from concord.training.worker_data import WorkerData, prepare

_logger = logging.getLogger("concord.execution")

CHECKPOINTS = "checkpoints"  # in the run's folder
KEPT = 2  # the last ones, while a run trains
_PREFIX = "checkpoint_"


class Sink(Protocol):
    """Takes the events of a run."""

    def __call__(self, name: str, /, **fields: Any) -> None:
        """An event, see :mod:`concord.record`."""


@dataclass(frozen=True)
class RunTask:
    """A run, for any process that trains it.

    Attributes:
        sent: the job.
        options: the resolved options' values; a worker makes their class from the job's source.
        folder: the run's.
        on_ray_train: whether Ray Train's workers train; otherwise the executing process does.
        scratch: the folder for Ray Train's own files, which every node reaches; by default inside ``folder``.
        checkpoint_seconds: the least time between two checkpoints before the last one, for a group's runs; None: the
            checkpoints that the options ask for.
        callbacks: beside the job's.
        system_seconds: between two samples of each worker's machine; None for none.
        threads: the most threads of a process, where the command was started with a limit.
    """

    sent: SentJob
    # Ray keeps its configuration as text, so this leaves out long values and possible passwords.
    options: dict[str, Any] = field(repr=False)
    folder: Folder
    on_ray_train: bool = False
    scratch: Folder | None = None
    checkpoint_seconds: float | None = None
    callbacks: tuple[Callback, ...] = ()
    system_seconds: float | None = None
    threads: int | None = field(default_factory=threads_of_user)
    log_context: logs.Context = field(default_factory=logs.context)
    storage_credentials: dict[str, str] = field(default_factory=storage_credentials, repr=False)

    @property
    def path(self) -> str:
        """The job's file."""
        return self.sent.path

    def config(self, job: JobFile) -> ResolvedConfig:
        """The resolved options."""
        config: ResolvedConfig = job.job.config.with_options(**self.options)
        return config


def needs_ray_train(config: RunConfig) -> bool:
    """Whether a run with these options trains on Ray Train, not in the command's process."""
    if not isinstance(config, TrainConfig):
        return False  # a loop of the job's own starts its own processes
    parallel = config.parallel
    return bool(
        parallel.workers > 1 or parallel.min_workers is not None or config.run.address or os.environ.get("RAY_ADDRESS")
    )


def only_process(config: RunConfig) -> ProcessContext:
    """The context of a single training process."""
    return ProcessContext(device=torch.device(device_of(config)))


def execute(
    task: RunTask,
    job: JobFile,
    sink: Sink,
    start: str | None,
    load: Callable[[], WorkerData] | None = None,
) -> Generator[Evaluation, None, None]:
    """Train a run, and yield each evaluation after the sink has it. Closing the iterator ends the training.

    After an outage, training continues from the last checkpoint, or starts again without one. ``start`` names the
    checkpoint to resume from; None starts a new run. ``load`` returns data that this process has already.
    """
    if callbacks := (*job.job.callbacks, *task.callbacks):
        yield from _with_callbacks(callbacks, task, job, sink, start, load)
    else:
        yield from _executed(task, job, sink, start, load)


def _with_callbacks(
    callbacks: Sequence[Callback],
    task: RunTask,
    job: JobFile,
    sink: Sink,
    start: str | None,
    load: Callable[[], WorkerData] | None,
) -> Generator[Evaluation, None, None]:
    """Execute a run, and call the callbacks as its events come."""
    run = TrainingRun(task.folder.place.name, task.folder.path, task.options, resumed=start is not None)

    def call(method: str, *arguments: Any) -> None:
        try:
            for each in callbacks:
                getattr(each, method)(*arguments)
        except (InputError, RunFailedError):
            raise
        except Exception as error:
            raise failure(error, task.path) from error

    def record(name: str, /, **fields: Any) -> None:
        sink(name, **fields)
        if name == "metrics":
            call("on_metrics", fields["step"], fields["metrics"])
        elif name == "evaluated":
            call("on_evaluation", Evaluation(**fields))
        elif name == "checkpoint":
            call("on_checkpoint", task.folder.path / CHECKPOINTS / fields["name"], fields["step"])

    if task.on_ray_train:
        task = _for_workers(task)
    call("on_train_begin", run)
    try:
        yield from _executed(task, job, record, start, load)
    finally:
        call("on_train_end", run)


def _for_workers(task: RunTask) -> RunTask:
    """The task with copies of the callbacks, without what they open or count in this process."""
    value = task.sent.value
    if value is not None:
        value = dataclasses.replace(value, callbacks=[copy.copy(each) for each in value.callbacks])
    sent = dataclasses.replace(task.sent, value=value)
    return dataclasses.replace(task, sent=sent, callbacks=tuple(copy.copy(each) for each in task.callbacks))


def _executed(
    task: RunTask, job: JobFile, sink: Sink, start: str | None, load: Callable[[], WorkerData] | None
) -> Generator[Evaluation, None, None]:
    config = task.config(job)
    if task.on_ray_train:
        from concord.execution.ray_train import evaluations_on_ray

        yield from evaluations_on_ray(task, config, sink, start)
        return
    with system_metrics(task, 0, lambda metrics, step: sink("system", step=step, metrics=metrics)):
        yield from _evaluations_in_this_process(task, job, config, sink, start, load)


def system_metrics(
    task: RunTask, worker: int, send: Callable[[dict[str, float], int], None]
) -> contextlib.AbstractContextManager[None]:
    """Sample this machine while the body runs, if the task asks for it."""
    if task.system_seconds is None:
        return contextlib.nullcontext()
    return sampled(task.system_seconds, worker, send)


def _evaluations_in_this_process(
    task: RunTask,
    job: JobFile,
    config: ResolvedConfig,
    sink: Sink,
    start: str | None,
    load: Callable[[], WorkerData] | None,
) -> Generator[Evaluation, None, None]:
    process, max_failures = only_process(config), parallel_of(config).max_failures

    def keep_place(name: str, /, **fields: Any) -> None:
        nonlocal start
        sink(name, **fields)
        start = fields["name"] if name == "checkpoint" else start

    for failures in itertools.count():
        try:
            yield from evaluations_here(task, job.job, config, process, keep_place, start, load)
            return
        except (Exception, SystemExit) as error:
            mended = isinstance(error, Exception) and is_outage(error)
            if mended and failures < max_failures:  # resume from the last checkpoint, as new workers would
                continue
            if isinstance(error, InputError | RunFailedError) and not mended:
                raise
            raise failure(error, task.path) from error


def evaluations_here(
    task: RunTask,
    job: Job[Any],
    config: ResolvedConfig,
    process: ProcessContext,
    sink: Sink,
    start: str | None,
    load: Callable[[], WorkerData] | None = None,
    so_far: StepsSoFar | None = None,
) -> Iterator[Evaluation]:
    """Train in this process, which may be one of several in the default process group."""
    recorder = Recorder(task, process, sink, start)
    callbacks = (*job.callbacks, *task.callbacks)
    if job.loop is not None:
        last, evaluations = job.loop.epochs(config), job.loop.run(config, recorder)
    else:
        assert isinstance(config, ResolvedTrainConfig)
        last, given = config.schedule.epochs, config

        def load_data() -> WorkerData:
            prepared = prepare(job, given, process) if load is None else load()
            recorder.data = [dataclasses.asdict(each) for each in prepared.summaries]
            return prepared

        evaluations = training(job, given, process, recorder, recorder.start, load_data, so_far, callbacks)
    for evaluation in evaluations:
        recorder.report_data()
        if process.rank == 0:
            sink("evaluated", **evaluation._asdict())
        recorder.at_end = evaluation.ended_early or evaluation.epoch >= last
        yield evaluation
    recorder.report_data()  # of a resumed run that had trained to its end


class Recorder:
    """Records a loop's metrics, checkpoints and files, see :class:`concord.training.context.RunContext`.

    The sink is called in the first process only. ``start`` names the checkpoint to resume from.

    Attributes:
        at_end: whether the next checkpoint is the last.
    """

    def __init__(self, task: RunTask, process: ProcessContext, sink: Sink, start: str | None) -> None:
        self._folder, self._seconds = task.folder, task.checkpoint_seconds
        self.process = process
        self._sink = sink
        self.data: list[dict[str, Any]] | None = None
        self.start = None if start is None else self._folder.fetch(f"{CHECKPOINTS}/{start}")
        self._written = time.monotonic()
        self.at_end = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record metrics; in the first process only."""
        self._sink("metrics", step=step, metrics=metrics)

    def keep(self, path: str, write: Callable[[Path], None]) -> None:
        """Keep a file in the run's folder, by its path there, and show it in MLflow; ``write`` makes it."""
        if self.process.rank == 0:
            file = self._folder.path / path
            with disk_errors_in_one_line(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write(file)
            self._folder.keep(path)
            self._sink("artifact", path=path)

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        """Keep a checkpoint; called in every process; the first one calls ``write``.

        A disk's error is raised in every process, since the others would wait for the first one. A group's run goes on
        without a checkpoint.
        """
        if self._seconds is not None:
            early = time.monotonic() < self._written + self._seconds and not self.at_end
            if self.process.rank > 0 or early:
                return
            try:
                self._write_checkpoint(write, step)
            except Exception as error:
                _logger.warning("a checkpoint is missing: %s", first_line(error))
            self._written = time.monotonic()
            return
        problem = None
        if self.process.rank == 0:
            try:
                self._write_checkpoint(write, step)
            except DiskError as error:
                problem = str(error)
        problem = self.process.broadcast_from_rank0(problem)
        if problem is not None:
            raise DiskError(problem)

    def _write_checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        folder, name = self._folder, f"{_PREFIX}{step:012d}"
        path = folder.path / CHECKPOINTS / name
        new = path.with_name(f"{name}.new")
        shutil.rmtree(new, ignore_errors=True)
        with disk_errors_in_one_line(new):
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
            parts = {(part["purpose"], part["name"]): part for own in gathered for part in own}
            self._sink("data", parts=sorted(parts.values(), key=lambda part: PURPOSES.index(part["purpose"])))


def checkpoint_step(name: str) -> int:
    """The step of a checkpoint, from its name."""
    return int(name.removeprefix(_PREFIX))


def last_checkpoint(run: Run, info: Callable[[str], None]) -> str | None:
    """The name of a run's last readable checkpoint; None if it has none."""
    problem: str | None = None
    for name in reversed(run.checkpoints[-KEPT:]):
        if problem is not None:
            info(f"{problem}; the previous checkpoint is used")
        try:
            verify_checkpoint(run.folder.fetch(f"{CHECKPOINTS}/{name}"))
            return name
        except CheckpointError as error:
            problem = str(error)
    if problem is not None:
        raise RunFailedError(f"{problem}; no checkpoint of the run can be read")
    return None


def kept_checkpoint(run: Run) -> str | None:
    """The name of the last checkpoint of a run that ended, if it still exists."""
    last = run.checkpoints[-1] if run.checkpoints else None
    return last if last in run.folder.names(CHECKPOINTS) else None


def remove_checkpoints(run: Run, keep: int = KEPT) -> None:
    """Remove a run's checkpoints but for the last ones, while none is being written."""
    listed = run.checkpoints[len(run.checkpoints) - keep :]
    for name in run.folder.names(CHECKPOINTS):
        if name.startswith(_PREFIX) and name not in listed:
            run.folder.remove(f"{CHECKPOINTS}/{name}")


def remove_older(run: Run) -> None:
    """Remove a run's checkpoint before the last ones, while another process may be writing one."""
    for name in run.checkpoints[-KEPT - 1 : -KEPT]:
        run.folder.remove(f"{CHECKPOINTS}/{name}")
