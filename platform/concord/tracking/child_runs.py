"""The trials of a study as child runs of one MLflow run, sent in the background.

A study does not wait for its store: what happened is queued, and a thread sends it about once a second. A trial that
began and ended since then goes in one piece, so that a thousand short trials cost three requests each, while a long
one can be watched. Which child belongs to which trial is kept in a file, so that a study that continues makes none
twice.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from concord.metric_name import metric_name
from concord.redaction import redact
from concord.storage import append_line, read_lines
from concord.tracking.client import import_mlflow, is_final, one_line, pages
from concord.tracking.store import Status, Store, clean_parameters

_logger = logging.getLogger("concord.tracking")

_EVERY_SECONDS = 1.0
_CLOSING_PAUSE_SECONDS = 0.2
_LARGEST_BATCH = 1000  # parameters, tags and metrics, MLflow's limit for one call
_LONGEST_TAG = 5000
_PARENT, _KEY = "mlflow.parentRunId", "concord.task"


@dataclass
class _Child:
    name: str
    parameters: dict[str, str]
    tags: dict[str, str]
    began: float
    points: list[tuple[str, float, int, int]] = field(default_factory=list)
    end: tuple[Status, float] | None = None
    known: bool = False  # to the store, its parameters too


class ChildRuns:
    """The child runs of the run ``parent``.

    Args:
        store: where they go.
        parent: the parent's run id.
        record: file that says which child is which, in the study's own folder.
        known: whether the parent may have children from before.
        kept: called after each line of the file, to keep it where it outlives this machine.
    """

    def __init__(
        self, store: Store, parent: str, record: Path, known: bool, kept: Callable[[], None] | None = None
    ) -> None:
        self._store = store
        self._parent = parent
        self._record = record
        self._keep = kept
        self._known = known
        self._ids: dict[str, str] = {}
        self._done: set[str] = set()
        self._waiting: dict[str, _Child] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._deadline = 0.0
        self._refused: set[str] = set()
        self._experiment: str | None = None
        for (key, run_id, done), _ in read_lines(record) if record.exists() else ():
            self._ids[key] = run_id
            (self._done.add if done else self._done.discard)(key)
        self._sender = threading.Thread(target=self._send_for_ever, name="concord-children", daemon=True)
        self._sender.start()

    def begin(
        self, key: str, name: str, parameters: Mapping[str, object], tags: Mapping[str, str], began: float
    ) -> None:
        """A trial began, at ``began`` seconds since 1970; one that is in the store as a whole is left as it is.

        After :meth:`forget` it has a new child.
        """
        if key in self._done:
            return
        with self._lock:
            child = _Child(name, clean_parameters(parameters), {**tags, _KEY: key, _PARENT: self._parent}, began)
            self._waiting.setdefault(key, child)

    def forget(self, key: str) -> None:
        """A trial that ended, and failed, begins again: what is in the store of it stays, and counts no more."""
        with self._lock:
            self._done.discard(key)
            self._ids.pop(key, None)
            self._waiting.pop(key, None)

    def log(self, key: str, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of a trial that began."""
        now = time.time_ns() // 1_000_000
        with self._lock:
            if (child := self._waiting.get(key)) is not None:
                child.points += [(metric_name(name), float(value), now, step) for name, value in metrics.items()]

    def end(self, key: str, status: Status, ended: float, tags: Mapping[str, str] | None = None) -> None:
        """A trial ended, at ``ended`` seconds since 1970."""
        with self._lock:
            if (child := self._waiting.get(key)) is not None:
                child.tags.update(tags or {})
                child.end = (status, ended)

    def close(self, timeout: float) -> int:
        """Send what is left for at most ``timeout`` seconds; trials that have not ended are marked as killed.

        Gives how many trials that ended are not in the store as a whole.
        """
        now = time.time()
        with self._lock:
            for child in self._waiting.values():
                child.end = child.end or ("KILLED", now)
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        self._sender.join(timeout)
        with self._lock:
            ends = [child.end for child in self._waiting.values() if child.end is not None]
        return len(self._refused) + sum(status != "KILLED" for status, _ in ends)

    def _send_for_ever(self) -> None:
        down = False
        while True:
            closing = self._closing.wait(_EVERY_SECONDS)
            try:
                self._send_all()
                down = False
            except Exception as error:  # no failure of tracking may end this thread silently
                if not down:
                    self._warn("does not take the trials", error)
                down = True
            if closing and (not down or time.monotonic() >= self._deadline):
                return
            if closing:
                time.sleep(_CLOSING_PAUSE_SECONDS)
            elif down:
                self._closing.wait(10 * _EVERY_SECONDS)

    def _warn(self, what: str, error: Exception) -> None:
        _logger.warning(
            "tracking at %s %s (%s); they are kept in the study and sent later",
            redact(self._store.uri),
            what,
            one_line(error),
        )

    def _send_all(self) -> None:
        if self._known:
            self._adopt()
        for key in list(self._waiting):
            try:
                self._send(key)
            except Exception as error:
                if not is_final(error):
                    raise
                # Asked again it would say the same, and the others wait: its run may have been deleted.
                if not self._refused:
                    self._warn("refuses some trials", error)
                self._refused.add(key)
                with self._lock:
                    del self._waiting[key]

    def _adopt(self) -> None:
        """Find the children that were made, but not yet written down, when the study was killed."""
        client = self._store.client
        experiment = client.get_run(self._parent).info.experiment_id
        running = f"tags.`{_PARENT}` = '{self._parent}' and attributes.status = 'RUNNING'"
        for run in pages(lambda token: client.search_runs([experiment], running, page_token=token)):
            if key := run.data.tags.get(_KEY):
                self._ids.setdefault(key, run.info.run_id)
        self._known = False

    def _send(self, key: str) -> None:
        import_mlflow()
        from mlflow.entities import Metric, Param, RunTag

        client = self._store.client
        with self._lock:
            child = self._waiting[key]
            points, child.points = child.points, []
            end, tags = child.end, {name: value[:_LONGEST_TAG] for name, value in child.tags.items()}
        try:
            if key not in self._ids:
                if self._experiment is None:
                    self._experiment = client.get_run(self._parent).info.experiment_id
                made = client.create_run(self._experiment, int(1000 * child.began), tags, child.name)
                self._ids[key] = made.info.run_id
                self._write(key, False)
            elif not child.known and end is None:  # of a process that was stopped
                client.update_run(self._ids[key], status="RUNNING")
            # Again if this process has not sent them: the one that made the run may have been killed before.
            parameters = [] if child.known else [Param(name, value) for name, value in child.parameters.items()]
            added = [] if end is None else [RunTag(name, value) for name, value in tags.items()]
            metrics = [Metric(*point) for point in points]
            first = _LARGEST_BATCH - len(parameters) - len(added)
            if metrics or parameters or added:
                client.log_batch(self._ids[key], metrics[:first], parameters, added, synchronous=True)
            for start in range(first, len(metrics), _LARGEST_BATCH):
                client.log_batch(self._ids[key], metrics[start : start + _LARGEST_BATCH], synchronous=True)
            child.known = True
            if end is not None:
                client.set_terminated(self._ids[key], end[0], int(1000 * end[1]))
        except Exception:
            with self._lock:
                child.points = points + child.points
            raise
        if end is not None:
            if end[0] != "KILLED":  # which goes on when the study does
                self._write(key, True)
                self._done.add(key)
            with self._lock:
                del self._waiting[key]

    def _write(self, key: str, done: bool) -> None:
        append_line(self._record, [key, self._ids[key], done])
        if self._keep is not None:
            self._keep()
