"""The metrics of a run on this machine's disk, one line a call, so that they outlive whatever should receive them.

The journal is the truth; MLflow has a copy. It holds every value that was logged on the way to where the run is: of a
(name, step) that was logged twice the last value counts, here and in the store.

A checkpoint notes how long the journal was. Who goes on from it cuts off what was logged later (:func:`cut`): that is
of a branch that was left. What of it the store has already cannot be taken back, so a line in place of what was cut
says which timestamps are of that branch, and readers of the store leave them out. For this no timestamp comes twice in
the life of a journal, and each is later than the one before it.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from concord.storage import JsonLines, Lines, json_line, read_lines


@dataclass(frozen=True)
class Entry:
    """What one call logged.

    Attributes:
        timestamp: in milliseconds since 1970.
        step, metrics: what was logged.
        end: the first byte after the entry.
        left_since: None, but for an entry in place of what was cut off: points with timestamps from this one on, and
            before the entry's own, are of a branch that was left.
    """

    timestamp: int
    step: int
    metrics: dict[str, float]
    end: int
    left_since: int | None = None


def entries(file: Path, start: int = 0) -> Iterator[Entry]:
    """Yield the whole entries of a journal from byte `start` on, one at a time. Raises OSError.

    A last line without its end is not an entry yet; lines that are none (a full disk cut them) are passed over.
    """
    for line, end in read_lines(file, start):  # Python's JSON reads and writes NaN and Infinity
        try:
            timestamp, step, metrics, *left = line
            yield Entry(int(timestamp), int(step), dict(metrics), end, int(left[0]) if left else None)
        except (ValueError, TypeError):
            continue


class Journal:
    """An append-only file of metrics. For one thread at a time.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines = JsonLines(file)
        self._latest = max((entry.timestamp for entry in entries(file)), default=0)

    def append(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics, if there are any, at a step. Raises OSError (disk full); then nothing of them is written."""
        if not metrics:
            return
        timestamp = max(time.time_ns() // 1_000_000, self._latest + 1)
        self._lines.append([timestamp, step, dict(metrics)])
        self._latest = timestamp

    def synced(self) -> int:
        """See that all that was written outlives the machine; return how long the journal is, in bytes."""
        self._lines.sync()
        return self._lines.end

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        self._lines.close()


def cut(lines: Lines, start: int) -> None:
    """Cut off what a journal holds from byte `start` on, here and where it is kept, for a run that goes on from there.

    `start` is what the checkpoint notes; 0 where the run begins anew. What is cut is the branch that was left; a line
    in its place says so. A process killed here leaves the journal as it was or as it will be. Raises OSError.
    """
    if not lines.file.exists():
        return
    if not _begins_a_line(lines.file, start):
        return  # it is shorter, or another journal than the checkpoint's: all of it stays, and the last value counts
    since, latest = None, 0
    for entry in entries(lines.file, start):
        if since is None:
            since = entry.timestamp if entry.left_since is None else entry.left_since
        latest = max(latest, entry.timestamp)
    if since is None:
        return
    Sent.at_most(lines.file, start)
    lines.cut(start, json_line([max(time.time_ns() // 1_000_000, latest + 1), 0, {}, since]))


def _begins_a_line(file: Path, start: int) -> bool:
    with file.open("rb") as content:
        content.seek(max(0, start - 1))
        return start == 0 or content.read(1) == b"\n"


class Sent:
    """How far a journal was sent, in a small file beside it; replaced in one step, so never half written.

    It belongs to one run: another run on the same journal is sent all of it.
    """

    def __init__(self, journal: Path, run_id: str) -> None:
        self._journal = journal
        self._run_id = run_id
        self.offset = 0
        kept = _read_sent(journal)
        if kept is not None and kept[0] == run_id and kept[1] <= journal.stat().st_size:
            self.offset = kept[1]

    def advance(self, offset: int) -> None:
        """Remember that the journal was sent up to byte `offset`."""
        self.offset = offset
        with suppress(OSError):  # a full disk: at worst the store is sent again what it has
            _write_sent(self._journal, self._run_id, offset)

    @staticmethod
    def at_most(journal: Path, offset: int) -> None:
        """Forget what was sent of a journal from byte `offset` on. Raises OSError."""
        kept = _read_sent(journal)
        if kept is None or kept[1] <= offset:
            return
        try:
            _write_sent(journal, kept[0], offset)
        except OSError:
            _sent_file(journal).unlink(missing_ok=True)


def _sent_file(journal: Path) -> Path:
    return journal.with_name(journal.name + ".sent")


def _read_sent(journal: Path) -> tuple[str, int] | None:
    """The run and the byte up to which it was sent; None if not known. What is sent twice is stored once."""
    try:
        kept = json.loads(_sent_file(journal).read_text())
        return str(kept["run_id"]), int(kept["offset"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_sent(journal: Path, run_id: str, offset: int) -> None:
    draft = journal.with_name(journal.name + ".sent.new")
    draft.write_text(json.dumps({"run_id": run_id, "offset": offset}))
    draft.replace(_sent_file(journal))
