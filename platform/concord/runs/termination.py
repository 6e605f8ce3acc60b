"""SIGTERM, which Slurm, Ray Jobs and container engines send: as Ctrl-C in this process, and the end of a Ray worker."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any


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

    A sender of SIGTERM sends SIGKILL next, so later ones have no meaning.
    """
    termination = Termination()

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if termination.requested:
            return
        termination.requested = True
        # Ray Train and studies have their own handlers of Ctrl-C, which end their workers. If Ctrl-C is ignored, as
        # in a shell's background jobs, there is no handler to call.
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    with signal_handler(signal.SIGTERM, end):
        yield termination


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
