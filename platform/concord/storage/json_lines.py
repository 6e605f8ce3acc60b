"""Append-only files of JSON values, one a line.

A line is written by one system call. An incomplete line, after a kill or on a full disk, is removed at once or when the
file is opened next, so that it never damages the next line. For one writer at a time.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 64 << 10


class JsonLines:
    """A file of JSON values, one a line, open for appending.

    The file and its folder are created if missing. An incomplete last line is removed.

    Attributes:
        end: its length in bytes.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.end = _end_of_last_line(self.descriptor)
        os.ftruncate(self.descriptor, self.end)

    def append(self, value: object) -> None:
        """Write a line. If that fails (a full disk), the file is unchanged, and the OSError names it."""
        line = json_line(value)
        try:
            if os.write(self.descriptor, line) < len(line):  # a full disk takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.end)
            raise OSError(error.errno, error.strerror, str(self.file)) from error
        self.end += len(line)

    def sync(self) -> None:
        """Flush to the disk, so that the data survive a power failure."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def json_line(value: object) -> bytes:
    """A value as a line; NaN and infinities as in Python's JSON."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def append_line(file: Path, value: object) -> None:
    """Add one line to a file that is rarely written; see :class:`JsonLines`."""
    with contextlib.closing(JsonLines(file)) as lines:
        lines.append(value)


def read_lines(file: Path) -> Iterator[Any]:
    """Yield the values. An incomplete last line is left out; lines that are not JSON are skipped."""
    for line in file.read_bytes().split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        yield value


def _end_of_last_line(descriptor: int) -> int:
    """The end position of the last complete line."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        if (found := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
