"""The record of a run, or of a group of runs: its description (``record.json``) and its events (``events.jsonl``).

The record is the truth; MLflow is a mirror of it, and Ray's own state follows from it. An event is a JSON object::

    {"event": "began", "at": 1764000000000, "run": "trial 3", …}
    {"event": "metrics", "at": …, "step": 40, "metrics": {"step/loss": 0.7}}
    {"event": "evaluated", "at": …, "epoch": 2, "step": 40, "metrics": {"ood_accuracy": 0.9, …}}
    {"event": "checkpoint", "at": …, "step": 40, "name": "checkpoint_000000000040"}
    {"event": "artifact", "at": …, "path": "figures/curves.png"}
    {"event": "ended", "at": …, "status": "FINISHED", …}

``at`` is in milliseconds since 1970. ``run`` names a run of a group; a single run's folder has none.
Lines are only appended. A resumed run appends the steps that it repeats, and of two events of one step the later
one counts. An evaluation also replaces those of later steps that stand before it: a resumed run may end earlier.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from concord.errors import InputError, RunFailedError
from concord.storage import (
    Folder,
    FullDiskError,
    JsonLines,
    StorageError,
    display_path,
    full_disk,
    full_disk_in_one_line,
)

_logger = logging.getLogger("concord.record")

RECORD, EVENTS = "record.json", "events.jsonl"
VERSION = 1
Kind = Literal["run", "study", "comparison"]

_OF_EARLIER_VERSIONS = ("run.json", "study.json")


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: the kind of event.
        at: milliseconds since 1970.
        run: the run of a group; empty for the folder's own run or group.
        fields: the other fields, which depend on the kind.
        end: the position in the file after the event.
    """

    name: str
    at: int
    run: str
    fields: Mapping[str, Any]
    end: int


@dataclass
class RunHistory:
    """The history of one run.

    Attributes:
        began: the fields of the latest beginning; None before the first.
        evaluations: metrics by (epoch, step), in this order.
        checkpoints: the names of its checkpoints, the oldest first.
        ended: the fields of its latest end, with ``at``; None if the run has not ended since it began.
    """

    began: Mapping[str, Any] | None = None
    evaluations: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    ended: Mapping[str, Any] | None = None

    def take(self, event: Event) -> None:
        """Add an event of this run."""
        match event.name:
            case "began":
                self.began, self.ended = {**event.fields, "at": event.at}, None
                if not event.fields.get("resumed"):
                    self.evaluations.clear()
            case "evaluated":
                moment = (event.fields["epoch"], event.fields["step"])
                while self.evaluations and next(reversed(self.evaluations)) >= moment:
                    self.evaluations.popitem()  # of an attempt that was given up; this one may end earlier
                self.evaluations[moment] = dict(event.fields["metrics"])
            case "checkpoint":
                name = event.fields["name"]
                self.checkpoints = [*(each for each in self.checkpoints if each != name), name]
            case "ended":
                self.ended = {**event.fields, "at": event.at}


class Events:
    """The events of a folder that this process has locked, open for appending; threads may share it.

    Attributes:
        history: of each run of a group by its key, and of the folder's own run or group as ``""``.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        folder.fetch(EVENTS)
        self.file = folder.path / EVENTS
        self.history = read_history(folder)
        self._lines = JsonLines(self.file)  # which removes an incomplete last line
        self._lock = threading.Lock()
        self._losing = False

    @property
    def own(self) -> RunHistory:
        """The history of the folder's own run or group."""
        return self.history.setdefault("", RunHistory())

    def append(self, event: str, /, run: str = "", **fields: Any) -> None:
        """Add an event. On a full disk metrics are lost with a warning, so training reaches its next checkpoint."""
        at = time.time_ns() // 1_000_000
        line = {"event": event, "at": at, **({"run": run} if run else {}), **fields}
        with self._lock:
            self._require_kept()
            try:
                self._lines.append(line)
            except OSError as error:
                problem = full_disk(error, self.file) or f"{self.file}: cannot be written ({error.strerror})"
                if event != "metrics":
                    raise FullDiskError(problem) from error
                if not self._losing:
                    _logger.warning("metrics are being lost: %s", problem)
                self._losing = True
                return
            if event != "metrics":
                self.history.setdefault(run, RunHistory()).take(Event(event, at, run, fields, self._lines.end))

    def sync(self) -> None:
        """Flush to disk; at an address, upload."""
        with self._lock:
            self._require_kept()
            with full_disk_in_one_line(self.file):
                self._lines.sync()
            self._folder.keep(EVENTS)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _require_kept(self) -> None:
        if os.fstat(self._lines.descriptor).st_nlink == 0:
            raise RunFailedError(f"{self._folder.display_path}: was removed while the run was at work")


def read_events(file: Path, start: int = 0) -> Iterator[Event]:
    """Yield the events from byte ``start`` on; a last line without its end is left out."""
    with file.open("rb") as lines:
        end = lines.seek(start)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                fields = json.loads(line)  # Python's JSON reads and writes NaN and Infinity
                yield Event(fields.pop("event"), int(fields.pop("at")), fields.pop("run", ""), fields, end)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                place = f"line {number}" if start == 0 else f"the line that ends at byte {end}"
                raise _no_event(file, place) from error


def _no_event(file: Path, place: str) -> InputError:
    return InputError(f"{file}: {place} is not an event; restore the file, or give another --name")


def read_history(folder: Folder) -> dict[str, RunHistory]:
    """The history of every run in a folder's events, as this machine has them."""
    file = folder.path / EVENTS
    found: dict[str, RunHistory] = {}
    if file.exists():
        for event in read_events(file):
            if event.name != "metrics":
                try:
                    found.setdefault(event.run, RunHistory()).take(event)
                except (KeyError, TypeError, ValueError) as error:
                    raise _no_event(file, f"the line that ends at byte {event.end}") from error
    return found


def read_record(folder: Folder, kind: Kind = "run") -> dict[str, Any] | None:
    """Read the record in a folder; None if there is none."""
    name = folder.place.name
    try:
        folder.fetch(RECORD)
        names = folder.names()
    except StorageError as error:
        raise InputError(f"--output {error}") from error
    if RECORD not in names:
        if earlier := next((each for each in _OF_EARLIER_VERSIONS if each in names), None):
            raise InputError(
                f"--name {name}: {folder.display_path}/{earlier} is of an earlier version of Concord; give another name"
            )
        return None
    path = folder.path / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(record, dict) and record.keys() >= {"version", "kind", "job", "config"}):
            raise ValueError("not a record")
    except (OSError, ValueError) as error:
        raise InputError(f"--name {name}: {path} cannot be read ({error})") from error
    if record["version"] != VERSION:
        raise InputError(
            f"--name {name}: {path} has version {record['version']}, this Concord reads {VERSION}; give another name"
        )
    if record["kind"] != kind:
        raise InputError(f"--name {name}: {folder.display_path} is a {record['kind']}, not a {kind}; give another name")
    return record


def require_record(folder: Folder, kind: Kind = "run") -> dict[str, Any]:
    """Read the record in a folder, which must exist."""
    record = read_record(folder, kind)
    if record is None:
        output = display_path(folder.place.parent.parent)
        raise InputError(f"--name {folder.place.name}: there is no such {kind} in {output}")
    return record


def write_record(folder: Folder, kind: Kind, record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a folder's record atomically, and return it."""
    written = {**record, "version": VERSION, "kind": kind}
    folder.write(RECORD, json.dumps(written, indent=1))
    return written
