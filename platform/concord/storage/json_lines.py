"""Files of JSON values, one a line, that only grow.

A line is written by one system call. What a kill or a full disk leaves of one is taken away again, at once or when the
file is opened the next time, so that the line after it is never spoiled. For one writer at a time.
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
    """A file of JSON values, one a line, open for appending; a torn last line is cut off. A context manager.

    Args:
        file: the file; it and its folder are made if they are missing.

    Attributes:
        descriptor: of the open file.
        end: how long it is, in bytes.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.end = _end_of_last_line(self.descriptor)
        os.ftruncate(self.descriptor, self.end)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, value: object) -> None:
        """Write a line.

        Raises:
            OSError: it cannot be written (a full disk); the file is as it was, and is named.
        """
        line = json_line(value)
        try:
            if os.write(self.descriptor, line) < len(line):  # a full disk takes what it can
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.end)
            raise OSError(error.errno, error.strerror, str(self.file)) from error
        self.end += len(line)

    def sync(self) -> None:
        """See that what was written is on the disk, and outlives a machine that loses its power."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Nothing can be appended afterwards."""
        os.close(self.descriptor)


def json_line(value: object) -> bytes:
    """A value as a line of such a file; NaN and infinities are written as Python's JSON does."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def append_line(file: Path, value: object) -> None:
    """Add one line to a file that is rarely written; see :class:`JsonLines`."""
    with JsonLines(file) as lines:
        lines.append(value)


def read_lines(file: Path, start: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield the values from byte ``start`` on, each with the first byte after its line.

    A last line without its end is not there yet; lines that are no JSON are passed over.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as lines:
        end = lines.seek(start)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                value = json.loads(line)
            except ValueError:
                continue
            yield value, end


def _end_of_last_line(descriptor: int) -> int:
    """The first byte after the last line that is whole."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        if (found := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
