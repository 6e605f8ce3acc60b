"""Sends a record's events to MLflow: metrics, children, parameters, tags, artifacts and how runs ended.

One thread reads the event file and sends new events about once a second. A store that is down neither stops nor slows
the work. A cursor beside the file holds the sent position, and the child of the MLflow run for each run of a group: a
resumed process goes on from there. A process killed after sending and before it moves the cursor leaves a piece that is
sent again; MLflow stores it once, since the points are equal in name, step, time and value.
"""

import contextlib
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from concord.metric_name import metric_name
from concord.record import EVENTS, Event, read_events
from concord.redaction import redact
from concord.storage import Folder, StorageError, append_line, read_lines
from concord.tracking.client import import_mlflow, is_final, one_line, pages, post
from concord.tracking.store import PARENT, Store, clean_parameters

CURSOR = "events.sent"

_logger = logging.getLogger("concord.tracking")

_EVERY_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_CLOSING_PAUSE_SECONDS = 0.2
_LARGEST_BATCH = 1000  # parameters, tags and metrics, MLflow's limit for one call
_LARGEST_PIECE = 4000  # metrics sent before the cursor moves
_LONGEST_TAG = 5000
_HTTP_SECONDS = (3.0, 30.0)  # to connect; to answer: a new server may need 15
_KEY = "concord.task"


def send_again(folder: Folder) -> None:
    """Make the next mirror of this folder's record send all of its events."""
    (folder.path / CURSOR).write_text("0\n")
    folder.keep(CURSOR)


@dataclass
class _Piece:
    """The data to send for one run, from consecutive events."""

    began: Event | None = None
    points: list[tuple[str, float, int, int]] = field(default_factory=list)  # name, value, ms, step
    artifacts: list[str] = field(default_factory=list)
    ended: Event | None = None


class Mirror:
    """The mirror of one record, whose folder this process has locked; active until it is closed."""

    def __init__(self, store: Store, run_id: str, folder: Folder) -> None:
        self._store = store
        self._run_id = run_id
        self._folder = folder
        self._file, self._cursor = folder.path / EVENTS, folder.path / CURSOR
        self._sent = 0
        self._children: dict[str, str] = {}
        folder.fetch(CURSOR)
        for entry in read_lines(self._cursor) if self._cursor.exists() else ():
            if isinstance(entry, list):
                self._children[entry[0]] = entry[1]
            else:
                self._sent = entry
        if not _begins_line(self._file, self._sent):  # the file has lost its end, or its address has an earlier one
            self._sent = 0
            with contextlib.suppress(OSError):
                send_again(folder)
        # A process may have been killed between creating a child and recording it.
        self._adopts = self._file.exists() and self._file.stat().st_size > 0
        self._experiment: str | None = None
        self._refused: set[str] = set()
        self._name = functools.cache(metric_name)
        self._wake = threading.Event()
        self._deadline: float | None = None
        self._sender = threading.Thread(target=self._send_until_closed, name="concord-mirror", daemon=True)
        self._sender.start()

    @property
    def unsent(self) -> int:
        """The number of events that the store has not taken."""
        if not self._file.exists() or self._sent >= self._file.stat().st_size:
            return 0
        with self._file.open("rb") as lines:
            lines.seek(self._sent)
            return sum(line.endswith(b"\n") for line in lines)

    def close(self, seconds: float) -> int:
        """Send the remaining events within this number of seconds; return the number of unsent events."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds
            self._wake.set()
            self._sender.join(seconds)
        if self._cursor.exists():
            with contextlib.suppress(StorageError):
                self._folder.keep(CURSOR)
        return self.unsent

    def discard(self) -> None:
        """Stop sending: the record will be deleted."""
        self._sent = 1 << 62
        self._deadline = time.monotonic()
        self._wake.set()
        self._sender.join(_EVERY_SECONDS)

    def _send_until_closed(self) -> None:
        pause, down = _EVERY_SECONDS, False
        while True:
            if self._deadline is None:
                self._wake.wait(pause)
            elif down:
                time.sleep(_CLOSING_PAUSE_SECONDS)
            closing = self._deadline is not None  # read before sending: then the file holds all events
            try:
                for pieces, end in self._pieces():
                    for run, piece in pieces.items():
                        self._send(run, piece)
                    self._sent = end
                    append_line(self._cursor, end)
                    if down:
                        _logger.warning("tracking at %s answers again; the kept events are being sent", self._shown)
                    pause, down = _EVERY_SECONDS, False
            except Exception as error:  # no failure of tracking may end this thread silently
                if is_final(error):
                    self._warn("refuses events", error)
                    return
                if not down:
                    self._warn("is not answering", error)
                pause, down = min(2 * pause, _LONGEST_PAUSE_SECONDS), True
            if self._deadline is not None and (time.monotonic() >= self._deadline or (closing and not down)):
                return

    @property
    def _shown(self) -> str:
        return redact(self._store.uri)

    def _warn(self, what: str, error: Exception) -> None:
        reason = one_line(error)
        _logger.warning("tracking at %s %s (%s); events are kept in %s", self._shown, what, reason, self._file)

    def _pieces(self) -> Iterator[tuple[dict[str, _Piece], int]]:
        """Yield the unsent events by run, in pieces, each with its end position."""
        if not self._file.exists() or self._sent >= self._file.stat().st_size:
            return
        pieces: dict[str, _Piece] = {}
        size, end = 0, self._sent
        for event in read_events(self._file, self._sent):
            piece = pieces.get(event.run)
            # Events before a new beginning belong to another child.
            if size >= _LARGEST_PIECE or (piece is not None and event.name == "began"):
                yield pieces, end
                pieces, size, piece = {}, 0, None
            piece = pieces.setdefault(event.run, piece or _Piece())
            match event.name:
                case "began":
                    piece.began = event
                case "metrics" | "evaluated":
                    metrics, step = event.fields["metrics"], event.fields["step"]
                    piece.points += [(self._name(key), float(value), event.at, step) for key, value in metrics.items()]
                    size += len(metrics)
                case "artifact":
                    piece.artifacts.append(event.fields["path"])
                case "ended":
                    piece.ended = event
            size += 1
            end = event.end
        if pieces:
            yield pieces, end

    def _send(self, run: str, piece: _Piece) -> None:
        if run in self._refused:
            return
        try:
            run_id = self._run_id if not run else self._child(run, piece.began)
            parameters, tags = _described(piece)
            self._log(run_id, piece.points, parameters if run else {}, tags)
            for path in piece.artifacts:
                if (file := self._folder.path / path).exists():
                    self._store.log_files(run_id, file, path.rpartition("/")[0] or None)
            if piece.ended is not None:
                self._store.client.set_terminated(run_id, piece.ended.fields["status"], piece.ended.at)
            elif piece.began is not None:  # the child may have ended in an earlier attempt
                self._store.client.update_run(run_id, status="RUNNING")
        except Exception as error:
            # A final answer, for example for a deleted child: do not block the others by retries.
            if not run or not is_final(error):
                raise
            if not self._refused:
                self._warn("refuses some runs", error)
            self._refused.add(run)

    def _child(self, run: str, began: Event | None) -> str:
        """The child of a run of the group; created if there is none, or if the run begins again after a failure."""
        if self._adopts:
            self._adopt()
        known = self._children.get(run)
        if known is not None and (began is None or not began.fields.get("anew")):
            return known
        assert began is not None  # the beginning is a run's first event
        if known is not None and self._store.client.get_run(known).info.status == "RUNNING":
            return known  # created for this beginning
        if self._experiment is None:
            self._experiment = self._store.client.get_run(self._run_id).info.experiment_id
        tags = {PARENT: self._run_id, _KEY: run}
        name = str(began.fields.get("name") or run)
        made = self._store.client.create_run(self._experiment, began.at, tags, name)
        self._children[run] = made.info.run_id
        append_line(self._cursor, [run, made.info.run_id])
        return str(made.info.run_id)

    def _adopt(self) -> None:
        """Find the children that a killed process created without recording them."""
        client = self._store.client
        experiment = client.get_run(self._run_id).info.experiment_id
        of_parent = f"tags.`{PARENT}` = '{self._run_id}'"
        for found in pages(lambda token: client.search_runs([experiment], of_parent, page_token=token)):
            if key := found.data.tags.get(_KEY):
                self._children.setdefault(key, found.info.run_id)
        self._adopts = False

    def _log(
        self,
        run_id: str,
        points: list[tuple[str, float, int, int]],
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
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


def _described(piece: _Piece) -> tuple[dict[str, str], dict[str, str]]:
    """The parameters and tags of a beginning and an end."""
    parameters: dict[str, str] = {}
    tags: dict[str, str] = {}
    if piece.began is not None:
        parameters = clean_parameters(piece.began.fields.get("parameters", {}))
        tags |= piece.began.fields.get("tags", {})
    if piece.ended is not None:
        found = {f"concord.{name}": piece.ended.fields.get(name) for name in ("stopped", "failure")}
        tags |= {name: value for name, value in found.items() if value}
    return parameters, {name: redact(str(value))[:_LONGEST_TAG] for name, value in tags.items()}
