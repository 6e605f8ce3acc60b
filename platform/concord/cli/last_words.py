"""A line for a command that ends without one: killed, crashed in native code, or ended by the ``os._exit`` of a job.

The process itself cannot write it. A small fork of it, made before anything heavy is imported, waits on a pipe, which
closes when the command's process ends, however it ends.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

_LINE = (
    b"concord: the command's process ended without a word: it was killed, crashed, or its job called os._exit; "
    b"what was recorded is kept, concord runs lists it\n"
)
_DONE = b"."


@contextlib.contextmanager
def last_words() -> Iterator[None]:
    """Should this process end in the body without leaving it, a line on standard error says so."""
    if not hasattr(os, "fork"):
        yield
        return
    reading, writing = os.pipe()  # neither is passed on to programs that are started
    if os.fork() == 0:
        os.close(writing)
        _wait(reading)
    os.close(reading)
    try:
        yield
    finally:
        os.write(writing, _DONE)
        os.close(writing)


def _wait(reading: int) -> None:
    """Wait for the end, in the fork."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a terminal or job
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # whoever reads the command's output waits for the command alone
        os.dup2(nothing, stream)
    if os.read(reading, 1) != _DONE:
        os.write(2, _LINE)
    os._exit(0)
