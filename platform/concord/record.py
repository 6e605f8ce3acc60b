"""The record of a run, or of a group of runs: its description (``record.json``) and its events (``events.jsonl``).

The record is the truth; MLflow is a mirror of it, and Ray's own state follows from it. An event is a JSON object::

    {"event": "began", "at": 1764000000000, "resumed": false}
    {"event": "data", "at": …, "parts": [{"name": "north", "purpose": "train", …}]}
    {"event": "metrics", "at": …, "step": 40, "metrics": {"step/loss": 0.7}}
    {"event": "system", "at": …, "step": 0, "metrics": {"system/worker-0/cpu_utilization_percentage": 71.2}}
    {"event": "evaluated", "at": …, "epoch": 2, "step": 40, "metrics": {"ood_accuracy": 0.9, …}}
    {"event": "checkpoint", "at": …, "step": 40, "name": "checkpoint_000000000040"}
    {"event": "artifact", "at": …, "path": "figures/curves.png"}
    {"event": "note", "at": …, "part": "result", "text": "…"}
    {"event": "ended", "at": …, "status": "FINISHED", …}

``at`` is in milliseconds since 1970. A group has an event ``asked`` for each run that it asks for, with the run's name,
its key and its place in the group; the run has a folder and events of its own.
Lines are only appended. A resumed run appends the steps that it repeats, and of two events of one step the later
one counts. An evaluation also replaces those of later steps that stand before it: a resumed run may end earlier.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from concord.errors import InputError, RunFailedError, UnansweredError, UnreachableError
from concord.record_types import EVENT_TYPES, RECORD_TYPES, AnyRecord
from concord.space import frozen
from concord.storage import (
    DiskError,
    Folder,
    JsonLines,
    StorageError,
    display_path,
)
from concord.storage.typed_json import parse_json, read_json, require_type, type_check

_logger = logging.getLogger("concord.record")

RECORD, EVENTS = "record.json", "events.jsonl"
VERSION = 2
Kind = Literal["run", "study", "comparison"]
FOLDERS: Mapping[Kind, str] = {"run": "runs", "study": "studies", "comparison": "comparisons"}  # in the output folder

_OF_EARLIER_VERSIONS = ("run.json", "study.json")


class Evaluation(NamedTuple):
    """All metrics at one moment of a run.

    Attributes:
        epoch: epochs done.
        step: steps done.
        metrics: by name, as tracked.
    """

    epoch: int
    step: int
    metrics: dict[str, float]

    @property
    def ended_early(self) -> bool:
        """Whether the run ends here, before its last epoch: environments are equally hard, or patience is over."""
        return any(self.metrics.get(name, 0.0) for name in ("spread_reached", "out_of_patience"))


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: the kind of event.
        at: milliseconds since 1970.
        fields: the other fields, which depend on the kind.
        end: the position in the file after the event.
    """

    name: str
    at: int
    fields: Mapping[str, Any]
    end: int


@dataclass
class Run:
    """A run or a group of runs: its record, and what its events say.

    Attributes:
        folder: its folder, whose name is the run's.
        record: the content of ``record.json``.
        began: the fields of the latest beginning; None before the first.
        evaluations: metrics by (epoch, step), in this order.
        checkpoints: the names of its checkpoints, the oldest first.
        data: the parts of the data on which it trained, as JSON.
        notes: the parts of its description in MLflow, in Markdown, by name.
        evaluated_at: the time of the last evaluation, in milliseconds since 1970.
        asked: of a group, the fields of each request for a run; several may name the same run.
        ended: the fields of its latest end, with ``at``; None if the run has not ended since it began.
        seconds_before: of training before the checkpoint from which it was resumed.
    """

    folder: Folder
    record: dict[str, Any] = field(default_factory=dict)
    began: Mapping[str, Any] | None = None
    evaluations: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    evaluated_at: int = 0
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    ended: Mapping[str, Any] | None = None
    seconds_before: float = 0.0
    _trained_seconds: float = 0.0  # at the last checkpoint

    @staticmethod
    def of(history: Iterable[Evaluation], seed: int = 0, options: Mapping[str, Any] = MappingProxyType({})) -> "Run":
        """A run that is only in memory, with these evaluations."""
        evaluations = {(each.epoch, each.step): each.metrics for each in history}
        return Run(Folder(Path()), {"config": {**options, "seed": seed}}, evaluations=evaluations)

    def take(self, event: Event) -> None:
        """Add an event."""
        match event.name:
            case "began":
                resumed = event.fields.get("resumed")
                if not resumed:
                    self.evaluations.clear()
                    self.data.clear()
                    self.notes.clear()
                    self._trained_seconds = 0.0
                self.notes.pop("stopped", None)
                self.seconds_before = self._trained_seconds
                self.began, self.ended = {**event.fields, "at": event.at}, None
            case "data":
                self.data = list(event.fields["parts"])
            case "evaluated":
                moment = (event.fields["epoch"], event.fields["step"])
                while self.evaluations and next(reversed(self.evaluations)) >= moment:
                    self.evaluations.popitem()  # of an attempt that was given up; this one may end earlier
                self.evaluations[moment] = dict(event.fields["metrics"])
                self.evaluated_at = event.at
            case "note":
                self.notes[event.fields["part"]] = event.fields["text"]
            case "checkpoint":
                name = event.fields["name"]
                self.checkpoints = [*(each for each in self.checkpoints if each != name), name]
                if self.began is not None:
                    self._trained_seconds = self.seconds_before + (event.at - self.began["at"]) / 1000
            case "asked":
                self.asked.append(event.fields)
            case "ended":  # again, with a report, when the model is registered later
                self.ended = {**event.fields, "at": event.at if self.ended is None else self.ended["at"]}

    @property
    def name(self) -> str:
        """The name, unique in the output folder among those of its kind."""
        return self.folder.place.name

    @property
    def output(self) -> Path:
        """The output folder in which it is, beside other runs and groups."""
        return self.folder.place.parent.parent

    @property
    def run_id(self) -> str | None:
        """The id of its MLflow run; None before MLflow has it."""
        return self.record.get("run_id")

    @property
    def key(self) -> str:
        """The key of the run: equal for runs with the same result."""
        return str(self.record.get("key", {}).get("key", ""))

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The options, resolved, by name, without those that are never kept."""
        return {name: frozen(value) for name, value in self.record.get("config", {}).items()}

    @property
    def seed(self) -> int:
        """The seed of its training."""
        return int(self.options["seed"])

    @property
    def history(self) -> list[Evaluation]:
        """Every evaluation; the last one is the end of the run."""
        return [Evaluation(*moment, metrics) for moment, metrics in self.evaluations.items()]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics at the end; empty without an evaluation, or if it failed."""
        return next(reversed(self.evaluations.values())) if self.evaluations and self.failure is None else {}

    @property
    def steps(self) -> int:
        """Steps done at the last evaluation."""
        return next(reversed(self.evaluations))[1]

    @property
    def status(self) -> str | None:
        """How it ended: FINISHED, FAILED or KILLED; None if it has not ended."""
        return None if self.ended is None else str(self.ended["status"])

    @property
    def failure(self) -> str | None:
        """Why it failed, in words; None if it did not."""
        return None if self.ended is None else self.ended.get("failure")

    @property
    def stopped(self) -> str | None:
        """Why it ended early; None if it did not."""
        return None if self.ended is None else self.ended.get("stopped")

    @property
    def report(self) -> Mapping[str, Any] | None:
        """The result of a run that was finished with its figures and its model; None of any other."""
        return None if self.ended is None else self.ended.get("report")

    @property
    def description(self) -> str:
        """What MLflow's page of the run says, in Markdown: that it was stopped, the result, how it was obtained."""
        return "\n\n".join(self.notes[part] for part in ("stopped", "result", "beginning") if part in self.notes)

    @property
    def ended_at(self) -> float:
        """When it ended, in seconds since 1970; infinity if it has not."""
        return float("inf") if self.ended is None else float(self.ended["at"]) / 1000

    @property
    def seconds(self) -> float:
        """The time of training, from its beginning to its end, without what a resumed run repeats."""
        if self.began is None or self.ended is None:
            return 0.0
        return self.seconds_before + float(self.ended["at"] - self.began["at"]) / 1000


class OpenRun(Run):
    """A run or group whose folder this process has locked, with its events open for appending; threads may share it."""

    def __init__(self, folder: Folder, record: dict[str, Any]) -> None:
        super().__init__(folder, record)
        folder.fetch(EVENTS)
        self.file = folder.path / EVENTS
        _replay(self)
        self._lines = JsonLines(self.file)  # which removes an incomplete last line
        self._lock = threading.RLock()
        self._losing = False

    def append(self, event: str, /, at: int | None = None, **fields: Any) -> None:
        """Add an event, of now or of another time. On a full disk metrics are lost with a warning, so training reaches
        its next checkpoint."""
        at = time.time_ns() // 1_000_000 if at is None else at
        with self._lock:
            self._require_kept()
            try:
                self._lines.append({"event": event, "at": at, **fields})
            except DiskError as error:
                if event not in ("metrics", "system"):
                    raise
                if not self._losing:
                    _logger.warning("metrics are being lost: %s", error)
                self._losing = True
                return
            if event not in ("metrics", "system"):
                self.take(Event(event, at, fields, self._lines.end))

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Add an event ``asked`` for each request for a run of a group, all or none: the runs of a trial belong
        together."""
        at = time.time_ns() // 1_000_000
        with self._lock:
            self._require_kept()
            self._lines.append(*({"event": "asked", "at": at, **request} for request in requests))
            for request in requests:
                self.take(Event("asked", at, dict(request), self._lines.end))

    def sync(self) -> None:
        """Flush to disk; at an address, upload."""
        with self._lock:
            self._require_kept()
            self._lines.sync()
            self.folder.keep(EVENTS)

    def describe(self, **more: Any) -> None:
        """Add fields to the record."""
        with self._lock:
            self.record = write_record(self.folder, self.record["kind"], {**self.record, **more})

    def keep_artifact(self, path: str) -> None:
        """Keep a file of the folder, by its path in it, and show it in MLflow."""
        self.folder.keep(path)
        self.append("artifact", path=path)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _require_kept(self) -> None:
        if os.fstat(self._lines.descriptor).st_nlink == 0:
            raise RunFailedError(f"{self.folder.display_path}: was removed while the run was at work")


def read_events(file: Path, start: int = 0) -> Iterator[Event]:
    """Yield the events from byte ``start`` on; a last line without its end is left out."""
    checks = {name: type_check(kind) for name, kind in EVENT_TYPES.items()}
    with file.open("rb") as lines:
        end = lines.seek(start)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                fields = parse_json(line)
                name = fields.get("event") if isinstance(fields, dict) else None
                check = checks.get(name) if isinstance(name, str) else None
                if check is None:
                    raise ValueError(f"event: must be one of {', '.join(EVENT_TYPES)}")
                check(fields)
            except ValueError as error:
                place = f"line {number}" if start == 0 else f"the line that ends at byte {end}"
                raise InputError(
                    f"{file}: {place} is not an event ({error}); restore the file, or give another --name"
                ) from error
            yield Event(fields.pop("event"), fields.pop("at"), fields, end)


def _replay(run: Run) -> None:
    """Take the events of a run's file, as this machine has it."""
    file = run.folder.path / EVENTS
    for event in read_events(file) if file.exists() else ():
        if event.name not in ("metrics", "system"):
            run.take(event)


def folder_of(output: Path, name: str, kind: Kind = "run") -> Folder:
    """The folder of a run or group of this name."""
    return Folder(output) / FOLDERS[kind] / name


def read_run(folder: Folder, kind: Kind = "run") -> Run | None:
    """The run or group in a folder; None if there is none."""
    record = read_record(folder, kind)
    if record is None:
        return None
    folder.fetch(EVENTS)
    run = Run(folder, record)
    _replay(run)
    return run


def require_run(folder: Folder, kind: Kind = "run") -> Run:
    """The run or group in a folder, which must exist."""
    run = read_run(folder, kind)
    if run is None:
        output = display_path(folder.place.parent.parent)
        raise InputError(f"--name {folder.place.name}: there is no such {kind} in {output}")
    return run


def read_record(folder: Folder, kind: Kind = "run") -> dict[str, Any] | None:
    """Read the record in a folder; None if there is none."""
    name = folder.place.name
    try:
        folder.fetch(RECORD)
        names = folder.names()
    except StorageError as error:
        refusal = UnreachableError if isinstance(error, UnansweredError) else InputError
        raise refusal(f"--output {error}") from error
    if RECORD not in names:
        if earlier := next((each for each in _OF_EARLIER_VERSIONS if each in names), None):
            raise InputError(
                f"--name {name}: {folder.display_path}/{earlier} is of an earlier version of Concord; give another name"
            )
        return None
    path = folder.path / RECORD
    try:
        record: dict[str, Any] = read_json(path.read_text(encoding="utf-8"), AnyRecord)
        if record["version"] == VERSION and record["kind"] == kind:
            require_type(record, RECORD_TYPES[kind])
    except (OSError, ValueError) as error:
        raise InputError(f"--name {name}: {path} cannot be read ({error})") from error
    if record["version"] != VERSION:
        raise InputError(
            f"--name {name}: {path} has version {record['version']}, this Concord reads {VERSION}; give another name"
        )
    if record["kind"] != kind:
        raise InputError(f"--name {name}: {folder.display_path} is a {record['kind']}, not a {kind}; give another name")
    return record


def write_record(folder: Folder, kind: Kind, record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a folder's record atomically, and return it.

    The record of a group's run, of which there may be thousands, may be lost in a power failure: the group asks again.
    """
    written = {**record, "version": VERSION, "kind": kind}
    folder.write(RECORD, json.dumps(written, indent=1, default=str), durable="group" not in record)
    return written
