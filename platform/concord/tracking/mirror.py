"""Sends the events of records to MLflow: metrics, artifacts, and how runs began and ended.

One thread reads the event files of all open records and sends new events about once a second. A store that is down
neither stops nor slows the work. The MLflow run of a group's run is made when its first events are sent. A cursor
beside each file holds the sent position: a resumed process goes on from there. A process killed after sending and
before it moves the cursor leaves a piece that is sent again; MLflow stores it once, since the points are equal in name,
step, time and value.
"""

import contextlib
import functools
import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concord.backoff import pauses
from concord.errors import RunFailedError
from concord.metric_name import metric_name
from concord.record import EVENTS, Event, OpenRun, Run, read_events, write_record
from concord.redaction import redact
from concord.storage import StorageError, append_line, read_lines
from concord.storage.lease import EVERY_SECONDS
from concord.storage.typed_json import Count
from concord.tracking.alive import ALIVE, sign
from concord.tracking.client import import_mlflow, is_final, one_line, post
from concord.tracking.store import NOTE, PARENT, Store, clean_parameters

CURSOR = "events.sent"

_logger = logging.getLogger("concord.tracking")

_EVERY_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_CLOSING_PAUSE_SECONDS = 0.2
_LARGEST_BATCH = 1000  # parameters, tags and metrics, MLflow's limit for one call
_LARGEST_PIECE = 4000  # metrics sent before the cursor moves
_LONGEST_TAG = 5000
_HTTP_SECONDS = (3.0, 30.0)  # to connect; to answer: a new server may need 15


def track(store: Store, run: OpenRun, group_id: str | None = None, unsure: bool = False) -> str:
    """Create the MLflow run of a record, and record its id; nothing is left if that fails.

    The entry ``tracking`` of a record has the experiment, the run's parameters, tags and JSON artifacts, and its key.
    With ``unsure`` it may have been created by an earlier request, also of a process that was killed.
    """
    if "key" not in run.record["tracking"]:  # of an earlier version
        run.describe(tracking={**run.record["tracking"], "key": tracking_key()})
    about: dict[str, Any] = run.record["tracking"]
    tags = {**about["tags"], "concord.run": run.name, **({PARENT: group_id} if group_id else {})}
    began = None if run.began is None else int(run.began["at"])
    # Of a group's run the parameters are sent with the first metrics: a call less for each of thousands.
    parameters = about["parameters"] if group_id is None else {}
    run_id = store.start_run(about["experiment"], run.name, parameters, tags, began, about["key"], unsure)
    try:
        if group_id is None:
            for name, value in {"config.json": run.record["config"], **about.get("artifacts", {})}.items():
                store.log_text(run_id, json.dumps(value, indent=2, default=str), name)
            for name, source in run.record.get("sources", {}).items():
                store.log_text(run_id, source, name)
        run.describe(run_id=run_id)
    except BaseException:
        with contextlib.suppress(RunFailedError):
            store.delete_run(run_id)
        raise
    return run_id


def forget(run: Run) -> None:
    """Forget the MLflow run of a record, so that a new one takes all events."""
    described = {name: value for name, value in run.record.items() if name != "run_id"}
    described["tracking"] = {**described["tracking"], "key": tracking_key()}
    run.record = write_record(run.folder, described["kind"], described)
    run.folder.write(CURSOR, "0\n", durable=False)


def tracking_key() -> str:
    """A key by which MLflow's run of a record is found."""
    return uuid.uuid4().hex


def recover(store: Store, run: Run) -> str | None:
    """Restore the MLflow run of a record if it was deleted, or forget it if the store has lost it; say so in a line."""
    found = "present" if run.run_id is None else store.recover_run(run.run_id)
    if found == "present":
        return None
    line = f"tracking at {redact(store.uri)} has {'lost' if found == 'lost' else 'deleted'} run {run.run_id}"
    if found == "restored":
        return f"{line}; it is restored"
    forget(run)
    return f"{line}; a new run takes the whole record"


def is_sent(run: Run) -> bool:
    """Whether the store has all events of a record, by the files of this machine."""
    events, cursor = run.folder.path / EVENTS, run.folder.path / CURSOR
    return run.run_id is not None and cursor.exists() and [*read_lines(cursor, Count)][-1:] == [events.stat().st_size]


@dataclass
class _Piece:
    """The data to send at once, from consecutive events."""

    end: int
    began: Event | None = None
    points: list[tuple[str, float, int, int]] = field(default_factory=list)  # name, value, ms, step
    artifacts: list[str] = field(default_factory=list)
    noted: bool = False
    ended: Event | None = None


class _Mirrored:
    """A record that is being sent.

    Attributes:
        closed: whether its last event was written.
        alive_at: when the store last heard that it is at work; None before its beginning, after its end, and of a
            group's run.
        earlier: whether its MLflow run may have been deleted or lost since an earlier process made it.
        unsure: whether a request to create its MLflow run may have been carried out.
    """

    def __init__(self, run: OpenRun, group: OpenRun | None) -> None:
        self.run, self.group = run, group
        self.file, self.cursor = run.folder.path / EVENTS, run.folder.path / CURSOR
        self.sent, self.closed, self.refused = 0, False, False
        self.alive_at: float | None = None
        begun = self.file.stat().st_size > 0
        self.earlier, self.unsure = begun and run.run_id is not None, begun and run.run_id is None
        run.folder.fetch(CURSOR)
        for entry in read_lines(self.cursor, Count) if self.cursor.exists() else ():
            self.sent = entry
        if not _begins_line(self.file, self.sent):  # the file has lost its end, or its address has an earlier one
            self.sent = 0

    @property
    def unsent(self) -> int:
        """The number of events that the store has not taken."""
        if not self.file.exists() or self.sent >= self.file.stat().st_size:
            return 0
        with self.file.open("rb") as lines:  # perhaps of another program, if the folder was removed
            lines.seek(self.sent)
            return sum(line.endswith(b"\n") for line in lines)

    def pieces(self, name: Any) -> Iterator[_Piece]:
        """The unsent events; of a group's run only the metrics that are not of single environments and layers."""
        if not self.file.exists() or self.sent >= self.file.stat().st_size:
            return
        piece: _Piece | None = None
        size = 0
        for event in read_events(self.file, self.sent):
            if piece is not None and size >= _LARGEST_PIECE:
                yield piece
                piece, size = None, 0
            piece = piece or _Piece(event.end)
            piece.end = event.end
            size += 1
            match event.name:
                case "began":
                    piece.began, piece.ended = event, None
                case "metrics" | "system" | "evaluated":
                    metrics, step = event.fields["metrics"], event.fields["step"]
                    if self.group is not None:
                        metrics = {key: value for key, value in metrics.items() if "/" not in key}
                    piece.points += [(name(key), float(value), event.at, step) for key, value in metrics.items()]
                    size += len(metrics)
                case "artifact":
                    piece.artifacts.append(event.fields["path"])
                case "note":
                    piece.noted = True
                case "ended":
                    piece.ended = event
        if piece is not None:
            yield piece


class Mirror:
    """The mirror of the records that this process has locked; active until it is closed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, _Mirrored] = {}
        self._lock = threading.Lock()
        self._name = functools.cache(metric_name)
        self._wake = threading.Event()
        self._deadline: float | None = None
        self._warned = False
        self._sender = threading.Thread(target=self._send_until_closed, name="concord-mirror", daemon=True)
        self._sender.start()

    def add(self, run: OpenRun, group: OpenRun | None = None) -> None:
        """Send a record's events from now on; ``group`` is the open group that it belongs to."""
        with self._lock:
            self._records[str(run.folder.place)] = _Mirrored(run, group)

    def finish(self, run: Run) -> None:
        """The record of a group's run has all its events."""
        with self._lock:
            if (mirrored := self._records.get(str(run.folder.place))) is not None:
                mirrored.closed = True

    def wait_for(self, run: Run, seconds: float) -> None:
        """Wait until a run that is being sent has its MLflow run (RunFailedError if it has not in time)."""
        until, place = time.monotonic() + seconds, str(run.folder.place)
        self._wake.set()
        while (sent := self._records.get(place)) is not None and (sent.run.run_id is None or sent.earlier):
            if time.monotonic() > until:
                raise RunFailedError(f"tracking at {self._shown} did not take run {run.name} in time")
            time.sleep(0.02)

    def close(self, seconds: float) -> int:
        """Send the remaining events within this number of seconds; return the number of unsent events."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds
            self._wake.set()
            self._sender.join(seconds)
        with self._lock:
            for mirrored in self._records.values():
                if mirrored.cursor.exists():
                    with contextlib.suppress(StorageError):
                        mirrored.run.folder.keep(CURSOR)
            return sum(mirrored.unsent for mirrored in self._records.values())

    def discard(self) -> None:
        """Stop sending: the records will be deleted."""
        with self._lock:
            self._records.clear()
        self.close(_EVERY_SECONDS)

    def _send_until_closed(self) -> None:
        pause, down, retries = _EVERY_SECONDS, False, pauses(2 * _EVERY_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            if self._deadline is None:
                self._wake.wait(pause)
                if self._deadline is None:
                    self._wake.clear()
            elif down:
                time.sleep(_CLOSING_PAUSE_SECONDS)
            closing = self._deadline is not None  # read before sending: then the files hold all events
            with self._lock:
                records = list(self._records.values())
            try:
                for mirrored in records:
                    sent = self._send_all(mirrored)
                    if sent and down:
                        _logger.warning("tracking at %s answers again; the kept events are being sent", self._shown)
                        down = False
                if down:
                    retries = pauses(2 * _EVERY_SECONDS, _LONGEST_PAUSE_SECONDS)
                pause, down = _EVERY_SECONDS, False
            except Exception as error:  # no failure of tracking may end this thread silently
                if is_final(error):
                    self._warn("refuses events", error, mirrored.file)
                    return
                if not down:
                    self._warn("is not answering", error, mirrored.file)
                pause, down = next(retries), True
            if self._deadline is not None and (time.monotonic() >= self._deadline or (closing and not down)):
                return

    def _send_all(self, mirrored: _Mirrored) -> bool:
        """Send a record's new events, and that it is at work; returns whether there were some."""
        closed, found = mirrored.closed, False  # read before: then the file holds all events
        try:
            for piece in mirrored.pieces(self._name):
                if not mirrored.refused:
                    self._send(mirrored, piece)
                mirrored.sent, found = piece.end, True
                if mirrored.cursor.parent.exists():
                    append_line(mirrored.cursor, piece.end)
            if mirrored.earlier and self._recover(mirrored):  # also if there was nothing to send
                return self._send_all(mirrored)
            self._send_sign(mirrored)
        except Exception as error:
            if not is_final(error):
                raise
            if not self._recover(mirrored):
                if mirrored.group is None:
                    raise
                if not self._warned:
                    self._warn("refuses some runs", error, mirrored.file)
                self._warned = mirrored.refused = True  # do not block the others by retries
            return self._send_all(mirrored)
        if closed:
            with contextlib.suppress(StorageError):
                mirrored.run.folder.keep(CURSOR)
            with self._lock:
                self._records.pop(str(mirrored.run.folder.place), None)
        return found

    @property
    def _shown(self) -> str:
        return redact(self._store.uri)

    def _warn(self, what: str, error: Exception, file: Path) -> None:
        _logger.warning("tracking at %s %s (%s); events are kept in %s", self._shown, what, one_line(error), file)

    def _send(self, mirrored: _Mirrored, piece: _Piece) -> None:
        run, client = mirrored.run, self._store.client
        run_id = self._run_id(mirrored)
        ended = piece.ended.fields if piece.ended is not None else {}
        tags = {f"concord.{name}": str(ended[name]) for name in ("stopped", "failure") if ended.get(name)}
        # The record has all notes, so a repeated piece sets the same description.
        tags |= {NOTE: run.description} if piece.noted else {}
        alive = mirrored.group is None and piece.began is not None and piece.ended is None
        # Also with its end: it is its own, whatever somebody has recorded who took the run for dead.
        tags |= {ALIVE: sign()} if alive or piece.ended is not None else {}
        tags = {name: redact(value)[:_LONGEST_TAG] for name, value in tags.items()}
        first = mirrored.group is not None and piece.began is not None
        parameters = clean_parameters(run.record["tracking"]["parameters"]) if first else {}
        self._log(run_id, piece.points, parameters, tags)
        for path in piece.artifacts:
            if (file := run.folder.path / path).exists():
                self._store.log_files(run_id, file, path.rpartition("/")[0] or None)
        if piece.ended is not None:
            client.set_terminated(run_id, piece.ended.fields["status"], piece.ended.at)
            mirrored.alive_at = None
        elif piece.began is not None:  # it may have ended in an earlier attempt
            client.update_run(run_id, status="RUNNING")
            mirrored.alive_at = time.monotonic() if alive else None

    def _send_sign(self, mirrored: _Mirrored) -> None:
        """Say that a run is at work; somebody may have taken it for dead while the store could not be reached."""
        if mirrored.alive_at is None or time.monotonic() - mirrored.alive_at < EVERY_SECONDS:
            return
        run_id = str(mirrored.run.run_id)
        self._log(run_id, [], {}, {ALIVE: sign()})
        if self._store.uri.startswith(("http://", "https://")):
            post(self._store.uri, "/api/2.0/mlflow/runs/update", {"run_id": run_id, "status": "RUNNING"}, _HTTP_SECONDS)
        else:
            self._store.client.update_run(run_id, status="RUNNING")
        mirrored.alive_at = time.monotonic()

    def recover(self, run: Run) -> bool:
        """Restore, or forget, a record's MLflow run that was deleted or lost; return whether it was."""
        line = recover(self._store, run)
        if line is not None:
            _logger.warning(line)
        return line is not None

    def _recover(self, mirrored: _Mirrored) -> bool:
        found = self.recover(mirrored.run)
        if mirrored.run.run_id is None:
            mirrored.sent = 0
        mirrored.earlier = False
        return found

    def _run_id(self, mirrored: _Mirrored) -> str:
        """The id of a record's MLflow run, which is made, or found, if none is recorded."""
        run, group = mirrored.run, mirrored.group
        if run.run_id is None:
            unsure, mirrored.unsure = mirrored.unsure, True  # if the answer is lost
            track(self._store, run, group.run_id if group is not None else None, unsure)
        return str(run.run_id)

    def _log(
        self,
        run_id: str,
        points: list[tuple[str, float, int, int]],
        parameters: dict[str, str],
        tags: dict[str, str],
    ) -> None:
        """Send these in calls of at most MLflow's limit, parameters and tags with the first."""
        import_mlflow()
        from mlflow.entities import Metric, Param, RunTag

        while points or parameters or tags:
            size = _LARGEST_BATCH - len(parameters) - len(tags)
            if self._store.uri.startswith(("http://", "https://")):  # once, without the client's minutes of retries
                body: dict[str, object] = {
                    "run_id": run_id,
                    # JSON has no NaN and no infinity; protobuf, which reads this, takes them as text.
                    "metrics": [
                        {
                            "key": key,
                            "value": each if math.isfinite(each) else json.dumps(each),
                            "timestamp": at,
                            "step": step,
                        }
                        for key, each, at, step in points[:size]
                    ],
                    "params": [{"key": key, "value": value} for key, value in parameters.items()],
                    "tags": [{"key": key, "value": value} for key, value in tags.items()],
                }
                post(self._store.uri, "/api/2.0/mlflow/runs/log-batch", body, _HTTP_SECONDS)
            else:
                self._store.client.log_batch(
                    run_id,
                    [Metric(*point) for point in points[:size]],
                    [Param(key, value) for key, value in parameters.items()],
                    [RunTag(key, value) for key, value in tags.items()],
                    synchronous=True,
                )
            points, parameters, tags = points[size:], {}, {}


def _begins_line(file: Path, at: int) -> bool:
    """Whether a line begins at this byte, or the next line will."""
    if at == 0:
        return True
    if not file.exists():
        return False
    with file.open("rb") as lines:
        lines.seek(at - 1)
        return lines.read(1) == b"\n"
