"""The training loop in processes of this machine, without Ray: a run that needs no cluster starts in seconds.

The processes are forked by one that has imported everything and done nothing else (Python's own fork server), so that
only the first run of a command waits for imports, and only once for all its workers. What they do, and what becomes of
a run whose workers die, is the same as with Ray Train; the run can go on there.
"""

import contextlib
import itertools
import os
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection, forkserver, get_context, parent_process
from pathlib import Path
from typing import Any

import torch.distributed as dist

from concord import logs
from concord.errors import RunFailedError
from concord.options import option_values
from concord.runs.checkpoints import journal_length, keep_checkpoint, last_checkpoint, remove_partial_checkpoints
from concord.runs.termination import signal_handler
from concord.runs.worker import ERROR, Trained, WorkerSpec, open_log, recorded_error, trained, work_as
from concord.storage import Folder, StorageError
from concord.training.job import JobFile
from concord.training.loop import ProcessContext
from concord.training.options import TrainConfig
from concord.training.process import own_cores, tune_process

# The second is what the first step of any optimizer of PyTorch's imports.
_PRELOADED = ["concord.runs.local_train", "torch._dynamo"]
# How long processes that are told to end may take, and metrics of processes that died.
_ENDING_SECONDS = 5.0


def trains_here(config: TrainConfig) -> bool:
    """Whether a run needs no Ray: it asks for no cluster, no GPU and no workers that come and go."""
    ray, parallel = sys.modules.get("ray"), config.parallel
    elsewhere = config.run.address or os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized())
    return not (elsewhere or parallel.use_gpu or parallel.min_workers is not None)


def prepare_workers() -> None:
    """Start importing what workers need, in a process of its own that they will be forked from; once for all runs."""
    forkserver.set_forkserver_preload(_PRELOADED)
    with signal_handler(signal.SIGINT, signal.SIG_IGN):  # Ctrl-C is this process's to act on
        forkserver.ensure_running()


def train_here(job: JobFile, config: TrainConfig, run_folder: Folder, tracking_uri: str, run_id: str) -> Trained:
    """Train in ``--workers`` processes; an existing checkpoint of the run is where it goes on.

    Raises:
        InputError: the data, or the checkpoint, do not fit; said by a worker.
        RunFailedError: training failed, also after ``max_failures`` replacements.
    """
    prepare_workers()
    run_folder.remove(ERROR)
    spec = WorkerSpec(
        job.path, job.source, job.rule, option_values(config), run_folder, tracking_uri, run_id, on_ray=False
    )
    for failures in itertools.count():
        try:
            remove_partial_checkpoints(run_folder)
            said = _attempt(spec, last_checkpoint(run_folder), config.parallel.workers)
            break
        except (_WorkerDiedError, StorageError) as error:
            why = run_folder.problem()
            mistake = None if why else recorded_error(run_folder)
            if mistake or failures == config.parallel.max_failures:
                raise RunFailedError(f"training failed: {why or mistake or error}") from error
    return trained(said, lambda: last_checkpoint(run_folder))


class _WorkerDiedError(Exception):
    """A worker ended before its work."""


def _attempt(spec: WorkerSpec, start: Path | None, workers: int) -> dict[str, Any]:
    """Train from a checkpoint on; gives what the first worker says.

    Metrics are sent from here, where MLflow is imported already; the workers write the journal alone. At an address
    the first worker does both, as nothing is sent that is not kept.

    Raises:
        _WorkerDiedError: one of them; the others are ended.
    """
    if spec.folder.remote:
        return _from_group(spec, start, workers)
    log, failed = open_log(spec, journal_length(start))
    if log is None:
        raise RunFailedError(str(failed))
    seconds = _ENDING_SECONDS
    try:
        said = _from_group(replace(spec, tracking_uri=None), start, workers)
        seconds = said["metrics_seconds"]
    finally:
        unsent = log.close(seconds)
    return said | {"unsent": said["unsent"] + unsent}


def _from_group(spec: WorkerSpec, start: Path | None, count: int) -> dict[str, Any]:
    """Start workers, wait until they are done, and see that they end; gives what the first one says."""
    with tempfile.TemporaryDirectory(prefix="concord-") as meeting, contextlib.ExitStack() as held:
        workers = []
        for rank in range(count):
            workers.append(_Worker(_Task(spec, start, rank, count, f"file://{meeting}/store")))
            held.callback(workers[-1].end)
        waiting = list(workers)
        while waiting:
            connection.wait([part for worker in waiting for part in (worker.process.sentinel, worker.results)])
            waiting = [worker for worker in waiting if not worker.done()]
        said: dict[str, Any] = workers[0].said
    return said


@dataclass(frozen=True)
class _Task:
    """What one worker is told.

    Attributes:
        spec, start: see :func:`~concord.runs.worker.work_as`.
        rank, count: which of how many it is.
        meeting: where they find each other, as PyTorch takes it.
        environment: the variables of this process: those of the fork server are of when it was started.
    """

    spec: WorkerSpec
    start: Path | None
    rank: int
    count: int
    meeting: str
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)


class _Worker:
    """A process that works on a task.

    Attributes:
        process: the process.
        results: where what it says comes from.
        said: what it said, once it is done.
    """

    def __init__(self, task: _Task) -> None:
        self._rank = task.rank
        context = get_context("forkserver")
        self.results, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(task, sender))
        with signal_handler(signal.SIGINT, signal.SIG_IGN), _nothing_to_import():
            self.process.start()
        sender.close()
        self.said: Any = None

    def done(self) -> bool:
        """Whether it has said its result; to be asked when there is something to receive, or it has ended.

        Raises:
            _WorkerDiedError: it ended without, or by an exception.
        """
        try:
            self.said = self.results.recv() if self.results.poll() else None
        except EOFError:
            self.process.join(_ENDING_SECONDS)
        if isinstance(self.said, str):
            raise _WorkerDiedError(self.said)
        if self.said is None and (code := self.process.exitcode) is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            short = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
            raise _WorkerDiedError(f"worker {self._rank} {how}{short}")
        return self.said is not None

    def end(self) -> None:
        """See that it is gone; one that is done is on its way."""
        if self.said is None:
            self.process.terminate()
        self.process.join(_ENDING_SECONDS)
        self.process.kill()
        self.process.join()
        self.results.close()


def _work(task: _Task, results: "connection.Connection[Any, Any]") -> None:
    """A worker, in its process. It says the result, or an exception in a line."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # standard output is for the command's results
    threading.Thread(target=_end_with_parent, name="concord-parent", daemon=True).start()
    os.environ.clear()
    os.environ.update(task.environment)
    tune_process(threads=max(1, own_cores() // task.count))
    logs.inherit_context(task.spec.log_context, rank=task.rank)
    try:
        if task.count > 1:
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
            if loopback is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            dist.init_process_group("gloo", init_method=task.meeting, rank=task.rank, world_size=task.count)
        place = ProcessContext(task.rank, task.count)
        said = work_as(task.spec, place, task.start, partial(_keep, task.spec.folder), cut=task.spec.folder.remote)
    except Exception as error:
        results.send(f"{type(error).__name__}: {error}".partition("\n")[0])
        return
    results.send(said)


def _keep(run_folder: Folder, written: Path | None, metrics: dict[str, float]) -> None:
    if written is not None:
        keep_checkpoint(run_folder, written, metrics)


def _end_with_parent() -> None:
    """End this process when the one that it works for has ended, however that was."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _nothing_to_import() -> Iterator[None]:
    """Processes that are started in the body do not import this one's main module: they need nothing of it.

    It may be a script that would begin from the start there.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
