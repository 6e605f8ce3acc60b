"""Failures and signals that end a training, and which failures a restart of the workers repairs.

When a worker raises, its group ends, and a new group begins at the last checkpoint, ``--max-failures`` times. That
repairs an *outage*: another worker died, a node or the network is gone. It does not repair an error in a job or its
data, which new workers would repeat. So any other error is recorded, and ends the run.

Slurm, Ray Jobs and container engines send SIGTERM: it acts as Ctrl-C in this process, and ends a Ray worker.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from concord.errors import RunFailedError, TrainingFailedError, first_line
from concord.execution import local_ray
from concord.gradients import NonFiniteGradientError
from concord.source_file import own_traceback, reason

Outage = Callable[[Exception], bool]
"""Whether an error is an outage."""

_REPEAT_SECONDS = 0.05

_OUTAGES: dict[str, Outage] = {}


def outage(kind: Outage) -> Outage:
    """Register a kind of outage; a decorator, for this file or a job's."""
    _OUTAGES[kind.__qualname__] = kind
    return kind


def is_outage(error: Exception) -> bool:
    """Whether this error is an outage."""
    return any(kind(error) for kind in _OUTAGES.values())


@outage
def lost_connection(error: Exception) -> bool:
    """Another process, or another machine, does not answer."""
    return isinstance(error, (ConnectionError, TimeoutError))


@outage
def lost_ray_worker(error: Exception) -> bool:
    """Ray reports the death of a worker that this one waited for."""
    ray = sys.modules.get("ray")  # if not imported, it raised nothing
    return ray is not None and isinstance(error, ray.exceptions.RayError)


@outage
def failed_collective(error: Exception) -> bool:
    """A collective of gloo or NCCL failed, since another worker is gone."""
    if isinstance(error, torch.distributed.DistError):
        return True
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def failure(error: BaseException, path: str) -> TrainingFailedError:
    """The failure of a training in one line; if the job in this file raised it, with its traceback."""
    if isinstance(error, TrainingFailedError):
        return error
    if isinstance(error, NonFiniteGradientError | RunFailedError):
        return TrainingFailedError(first_line(error))
    if isinstance(error, Exception) and is_outage(error):
        return TrainingFailedError(reason(error, path))
    return TrainingFailedError(reason(error, path), own_traceback(error, path))


@contextlib.contextmanager
def signal_handler(number: signal.Signals, handler: Any = None) -> Iterator[None]:
    """Set a signal handler in the body (None keeps the current one), and restore the previous one.

    Handlers set in the body are removed. Other threads than the main one get no signals; there this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    if handler is not None:
        signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@dataclass
class Termination:
    """Whether this process received SIGTERM."""

    requested: bool = False


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[Termination]:
    """In the body the first SIGTERM acts as Ctrl-C; later ones are ignored.

    A sender of SIGTERM sends SIGKILL next, so later ones have no meaning. A KeyboardInterrupt that arrives where Python
    drops exceptions (the callback of a weak reference, ``__del__``) is raised again.
    """
    termination, main, previous_hook = Termination(), threading.main_thread(), sys.unraisablehook
    if threading.current_thread() is not main:
        yield termination
        return
    repetition: threading.Timer | None = None

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal repetition
        if termination.requested and repetition is None:
            return
        termination.requested, repetition = True, None
        # Ray Train and studies have their own handlers of Ctrl-C, which end their workers. If Ctrl-C is ignored, as
        # in a shell's background jobs, there is no handler to call.
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    def repeat(ignored: Any) -> None:
        nonlocal repetition
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            previous_hook(ignored)
            return
        # A signal that is sent here would arrive in the same callback.
        repetition = threading.Timer(_REPEAT_SECONDS, signal.pthread_kill, (main.ident, signal.SIGTERM))
        repetition.start()

    with signal_handler(signal.SIGTERM, end):
        sys.unraisablehook = repeat
        try:
            yield termination
        finally:
            sys.unraisablehook = previous_hook
            if repetition is not None:
                repetition.cancel()
                repetition.join()


def end_at_sigterm() -> None:
    """Let this Ray worker end at SIGTERM wherever the signal arrives.

    Ray's handler raises SystemExit. In the callback of a weak reference or in ``__del__`` Python would print it with a
    traceback and go on.
    """

    def end(ignored: Any) -> None:
        if isinstance(ignored.exc_value, SystemExit):
            os._exit(1)  # Ray's exit status
        sys.__unraisablehook__(ignored)

    sys.unraisablehook = end
    local_ray.receive_sigterm()
