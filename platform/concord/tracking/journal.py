"""The metrics of a run on this machine's disk, one line a call, so that they outlive whatever should receive them.

The journal is the truth; MLflow has a copy. A line is written by one system call, so that a process killed at
any moment leaves whole lines and at most one torn last line, which is cut off when the journal is opened again.
Nothing is kept in memory but which steps were seen, as ranges.
"""

import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What one call logged. `timestamp` is in milliseconds since 1970; `end` is the first byte after the entry."""

    timestamp: int
    step: int
    metrics: dict[str, float]
    end: int


def entries(file: Path, start: int = 0) -> Iterator[Entry]:
    """Yield the whole entries of a journal from byte `start` on, one at a time. Raises OSError.

    A last line without its end is not an entry yet; lines that are none (a full disk cut them) are passed over.
    """
    with file.open("rb") as lines:
        end = lines.seek(start)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                timestamp, step, metrics = json.loads(line)  # Python's JSON reads and writes NaN and Infinity
                yield Entry(int(timestamp), int(step), dict(metrics), end)
            except (ValueError, TypeError):
                continue


class Steps:
    """A set of steps. Steps come mostly evenly spaced, and then cost no memory: they are kept as ranges."""

    def __init__(self) -> None:
        self._ranges: list[range] = []  # ascending and apart
        self._late: set[int] = set()  # came after a higher one

    def add(self, step: int) -> bool:
        """Add `step`; return whether it is new."""
        if not self._ranges:
            self._ranges.append(range(step, step + 1))
            return True
        last = self._ranges[-1]
        if step > last[-1]:
            if len(last) == 1:
                self._ranges[-1] = range(last.start, step + 1, step - last.start)
            elif step == last[-1] + last.step:
                self._ranges[-1] = range(last.start, step + 1, last.step)
            else:
                self._ranges.append(range(step, step + 1))
            return True
        before = bisect_right(self._ranges, step, key=lambda each: each.start) - 1
        if (before >= 0 and step in self._ranges[before]) or step in self._late:
            return False
        self._late.add(step)
        return True


class Journal:
    """An append-only file of metrics that takes each (name, step) once. For one thread at a time.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen: dict[str, Steps] = {}
        self._torn = False
        file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        end = 0
        for entry in entries(file):
            end = entry.end
            for key in entry.metrics:
                self._seen.setdefault(key, Steps()).add(entry.step)
        rest = os.pread(self._descriptor, os.fstat(self._descriptor).st_size - end, end)
        if not rest.endswith(b"\n"):
            os.ftruncate(self._descriptor, end + rest.rfind(b"\n") + 1)

    def append(self, metrics: Mapping[str, float], step: int) -> int:
        """Write those metrics whose (name, step) is not there yet; return how many. Raises OSError (disk full)."""
        new = {key: value for key, value in metrics.items() if self._seen.setdefault(key, Steps()).add(step)}
        if not new:
            return 0
        line = json.dumps([time.time_ns() // 1_000_000, step, new], separators=(",", ":")).encode() + b"\n"
        # After a write that a full disk cut short, a line break keeps its remains from spoiling this line.
        data = b"\n" + line if self._torn else line
        self._torn = True
        if os.write(self._descriptor, data) < len(data):
            raise OSError(f"could not write a whole line to {self.file}")
        self._torn = False
        return len(new)

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        os.close(self._descriptor)


class Sent:
    """How far a journal was sent, in a small file beside it; replaced in one step, so never half written.

    It belongs to one run: another run on the same journal is sent all of it.
    """

    def __init__(self, journal: Path, run_id: str) -> None:
        self.file = journal.with_name(journal.name + ".sent")
        self._run_id = run_id
        self.offset = 0
        try:
            kept = json.loads(self.file.read_text())
            if kept["run_id"] == run_id and kept["offset"] <= journal.stat().st_size:
                self.offset = int(kept["offset"])
        except (OSError, ValueError, TypeError, KeyError):
            pass  # nothing was sent, or nobody knows: the store takes an entry that it has only once

    def advance(self, offset: int) -> None:
        """Remember that the journal was sent up to byte `offset`."""
        self.offset = offset
        draft = self.file.with_name(self.file.name + ".new")
        with suppress(OSError):  # a full disk: at worst the store is sent again what it has
            draft.write_text(json.dumps({"run_id": self._run_id, "offset": offset}))
            draft.replace(self.file)
