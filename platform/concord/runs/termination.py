"""SIGTERM, by which Slurm, Ray Jobs and container engines end a process, taken as Ctrl-C: work ends in order."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


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

    Whoever sends SIGTERM sends SIGKILL next, so another one need not be told from the first. In threads other than the
    main one, which get no signals, this changes nothing.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return

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

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, before)
