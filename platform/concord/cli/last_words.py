"""Prints a line for a command that ends without one: killed, crashed in native code, or ended by a job's ``os._exit``.

The process itself cannot print it. A small fork, made before slow imports, waits on a pipe, which closes when the
command's process ends for any reason.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

_LINE = (
    b"concord: the command's process ended without an error message: it was killed, crashed, or its job called "
    b"os._exit; what was recorded is kept, concord runs lists it\n"
)
_DONE = b"."


@contextlib.contextmanager
def last_words() -> Iterator[None]:
    """Print a line to standard error if this process ends inside the body."""
    reading, writing = os.pipe()  # child programs inherit neither
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
    for stream in (0, 1):  # readers of the output must not wait for this fork
        os.dup2(nothing, stream)
    if os.read(reading, 1) != _DONE:
        os.write(2, _LINE)
    os._exit(0)
