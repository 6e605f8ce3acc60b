"""Output of commands: lines of progress, and tables."""

import io
import os
import select
import sys
from collections.abc import Sequence

from concord.errors import InputError, RunFailedError, printable
from concord.logs import info
from concord.table import Table


def prepare_streams() -> None:
    """Open the standard streams that the caller closed, and let them print any text.

    The file that is opened next would take the number of a closed stream. A stream whose encoding lacks a letter shows
    its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # has the lowest free number, which is the closed stream's
            setattr(sys, name, open(nowhere, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def output_closed() -> bool:
    """Whether the reader of standard output or error has ended, as ``head`` does."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def require_consent(lines: Sequence[str], given: bool) -> None:
    """Ask on the terminal whether to delete what these lines name, unless consent is given.

    Raises InputError where no terminal can be asked, and RunFailedError if the answer is not yes.
    """
    if given:
        return
    if not sys.stdin.isatty():
        raise InputError(f"--yes: is needed to delete where no terminal can be asked: {'; '.join(lines)}")
    for line in lines:
        info(line)
    info("delete this? yes or no")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RunFailedError("nothing was deleted")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output."""
    Table.plain(header, rows).print()


def show(parts: Sequence[str | Table]) -> None:
    """Print lines and tables."""
    for part in parts:
        if isinstance(part, Table):
            part.print()
        else:
            print(printable(part))
