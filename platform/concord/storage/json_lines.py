"""Append-only files of JSON values, one a line.

A line is written by one system call. An incomplete line, after a kill or on a full disk, is removed at once or when the
file is opened next, so that it never damages the next line. For one writer at a time.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from concord.storage.filesystem import DiskError, disk_errors_in_one_line

_BLOCK = 64 << 10


class JsonLines:
    """A file of JSON values, one a line, open for appending.

    The file and its folder are created if missing. An incomplete last line is removed.

    Attributes:
        end: its length in bytes.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with disk_errors_in_one_line(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self.end = _end_of_last_line(self.descriptor)
            os.ftruncate(self.descriptor, self.end)

    def append(self, *values: object) -> None:
        """Write lines, all or, if that fails, as on a full disk, none (DiskError); also in a process that is killed."""
        line = b"".join(map(json_line, values))
        try:
            with disk_errors_in_one_line(self.file):
                written = os.write(self.descriptor, line)
                while written < len(line):  # a disk that is nearly full takes a part, and refuses the rest
                    written += os.write(self.descriptor, line[written:])
        except DiskError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.end)
            raise
        self.end += len(line)

    def sync(self) -> None:
        """Flush to the disk, so that the data survive a power failure."""
        with disk_errors_in_one_line(self.file):
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


def read_lines(file: Path, kind: Any = Any) -> Iterator[Any]:
    """Yield the values. An incomplete last line is left out; lines that are not JSON of this type are skipped."""
    from concord.storage.typed_json import read_json  # imports pydantic, which takes a tenth of a second

    for line in file.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            yield read_json(line, kind)


def _end_of_last_line(descriptor: int) -> int:
    """The end position of the last complete line."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        if (found := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
