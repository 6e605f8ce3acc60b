"""What signals do for a while; above all SIGTERM, which Slurm, Ray Jobs and container engines send, is as Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any


@contextlib.contextmanager
def signal_handler(number: signal.Signals, handler: Any = None) -> Iterator[None]:
    """In the body the signal does what this handler says (None: what it did before); afterwards, what it did before.

    Whatever else the body sets is undone. In threads other than the main one, which get no signals, nothing changes.
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
    """Whether this process was told to end.

    Attributes:
        requested: set by the first SIGTERM.
    """

    requested: bool = False


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[Termination]:
    """In the body the first SIGTERM does what Ctrl-C would do then, and later ones nothing.

    Whoever sends SIGTERM sends SIGKILL next, so another one need not be told from the first.
    """
    termination = Termination()

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if termination.requested:
            return
        termination.requested = True
        # Ray Train and studies have handlers of their own for Ctrl-C, which end their workers. Where Ctrl-C is ignored,
        # as by what a shell starts in the background, there is none to call.
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    with signal_handler(signal.SIGTERM, end):
        yield termination
