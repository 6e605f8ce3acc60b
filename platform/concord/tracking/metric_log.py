"""Metrics from a training loop to MLflow. A server that is down neither stops nor slows training.

`MetricLog.log` writes to a journal on local disk and returns; a thread reads the journal and sends it. In an
outage the journal grows and nothing else does. What was sent is remembered beside the journal, so a run that was
killed and started again sends the rest. An entry sent twice (the process died between sending and remembering)
is stored once: it carries the journal's timestamp, and MLflow keeps one of what is equal in name, step, time and
value. What the store has of a branch that was left is marked there by a tag of the run (:data:`LEFT`), which `Store`
reads. MLflow's own asynchronous logging has its queue in memory alone, and loses it with the process.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from concord.metric_name import metric_name
from concord.redaction import redact
from concord.storage import Lines
from concord.tracking.client import connect, import_mlflow, is_final, one_line, post
from concord.tracking.journal import Journal, Sent, cut, entries
from concord.tracking.store import LEFT

_logger = logging.getLogger("concord.tracking")

_LARGEST_BATCH, _LARGEST_TAGS = 1000, 100  # metrics and tags, MLflow's limits for one call
_EVERY_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_CLOSING_PAUSE_SECONDS = 0.5
_HTTP_SECONDS = (3.0, 30.0)  # to connect; to answer, for which a server that has just started may need 15


@dataclass
class _Batch:
    """What is sent in one call: points (name, value, timestamp in ms, step), tags, and where it ends in the journal."""

    points: list[tuple[str, float, int, int]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    end: int = 0


class MetricLog:
    """The metrics of one run on their way to the store at `uri`, by way of the file `journal`.

    `journal` should be in the run's own folder and survive a restart: the same journal opened again continues
    where the last one stopped. `uri` is complete (`Store.uri`); without it and a run the journal is all there is.
    `kept` keeps the journal up to a byte where it outlives this machine; nothing is sent that is not kept, so that
    whoever goes on with the journal elsewhere logs nothing a second time.
    Usable as a context manager, which closes it and waits up to 10 s. Raises OSError if the journal cannot be opened.
    """

    def __init__(
        self, journal: Path, uri: str | None, run_id: str | None, kept: Callable[[int], None] | None = None
    ) -> None:
        self._uri = uri or ""
        self._run_id = run_id or ""
        self._journal = Journal(journal)
        self._sent = Sent(journal, self._run_id)
        self._keep_to = kept
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._lost = 0  # could not be written to the journal
        self._wake = threading.Event()
        self._deadline: float | None = None  # set by close, on the monotonic clock
        self._client: Any = None
        self._sender = threading.Thread(target=self._send_for_ever, name="concord-tracking", daemon=True)
        if self._uri or kept is not None:
            self._sender.start()

    @classmethod
    def going_on(cls, lines: Lines, uri: str | None, run_id: str | None, start: int | None) -> Self:
        """Open the log of a run whose journal is kept in `lines`, and cut it where the run goes on.

        `start` is the length of the journal that the run's checkpoint notes, 0 where the run begins anew. With None,
        of a checkpoint that notes none, nothing is cut, and of what is logged again the last value counts.
        Raises RunFailedError if a piece of the journal is missing, and OSError (disk full).
        """
        lines.fetch()
        if start is not None:
            cut(lines, start)
        return cls(lines.file, uri, run_id, lines.keeper)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(10.0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep `metrics` at `step`, and return at once; of a (name, step) logged twice the last value counts.

        NaN and infinities are values like others. Raises TypeError for a value that is no number, and ValueError
        after `close`.
        """
        values = {self._name(name): float(value) for name, value in metrics.items()}
        with self._lock:
            if self._deadline is not None:
                raise ValueError("this MetricLog is closed")
            try:
                self._journal.append(values, int(step))
            except OSError as error:  # training goes on with a full disk, too
                if not self._lost:
                    _logger.warning("metrics are being lost: %s (%s)", self._journal.file, error)
                self._lost += len(values)

    def keep(self) -> int:
        """Keep all that was logged, now, and return how long the journal is, in bytes.

        A checkpoint notes the length: whoever goes on from it cuts the journal there. Raises OSError, and what `kept`
        does.
        """
        with self._lock:
            length = self._journal.synced()
        if self._keep_to is not None:
            self._keep_to(length)
        return length

    def close(self, timeout: float) -> int:
        """Send what is left for at most `timeout` seconds; return the number of metrics that were not sent.

        They stay in the journal, and go out when a MetricLog is opened on it again.
        """
        with self._lock:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout
                self._journal.close()
        if self._sender.is_alive():
            self._wake.set()
            self._sender.join(timeout)
        if not self._uri:
            return self._lost
        return self._lost + sum(len(entry.metrics) or 1 for entry in entries(self._journal.file, self._sent.offset))

    def _name(self, name: str) -> str:
        if (known := self._names.get(name)) is None:
            known = self._names[name] = metric_name(name)
        return known

    def _send_for_ever(self) -> None:
        pause, down = _EVERY_SECONDS, False
        while True:
            if self._deadline is None:
                self._wake.wait(pause)
            elif down:
                time.sleep(_CLOSING_PAUSE_SECONDS)
            closing = self._deadline is not None  # read before sending: then all that was logged is in the journal
            try:
                for batch in _batches(self._journal.file, self._sent.offset):
                    if self._keep_to is not None:
                        self._keep_to(batch.end)
                        if self._deadline is not None and time.monotonic() >= self._deadline:
                            return  # close has returned, and who opened the journal since may send this
                    self._send(batch)
                    self._sent.advance(batch.end)
                    if down:
                        _logger.warning("tracking at %s answers again; the metrics kept are being sent", self._shown)
                    pause, down = _EVERY_SECONDS, False
            except Exception as error:  # no failure of tracking may end this thread silently
                if is_final(error):
                    _logger.warning(
                        "tracking at %s refuses the metrics of run %s (%s); they are kept in %s",
                        self._shown,
                        self._run_id,
                        one_line(error),
                        self._journal.file,
                    )
                    return
                if not down:
                    _logger.warning(
                        "tracking at %s is not answering (%s); metrics are kept in %s and will be sent later",
                        self._shown,
                        one_line(error),
                        self._journal.file,
                    )
                pause, down = min(2 * pause, _LONGEST_PAUSE_SECONDS), True
            if self._deadline is not None and (time.monotonic() >= self._deadline or (closing and not down)):
                return

    @property
    def _shown(self) -> str:
        return redact(self._uri)

    def _send(self, batch: _Batch) -> None:
        if not self._uri:
            return
        if self._uri.startswith(("http://", "https://")):
            points = [
                # JSON has no NaN and no infinity; protobuf, which reads this, takes them as text.
                {
                    "key": key,
                    "value": value if math.isfinite(value) else json.dumps(value),
                    "timestamp": timestamp,
                    "step": step,
                }
                for key, value, timestamp, step in batch.points
            ]
            tags = [{"key": key, "value": value} for key, value in batch.tags.items()]
            body: dict[str, object] = {"run_id": self._run_id, "metrics": points, "tags": tags}
            post(self._uri, "/api/2.0/mlflow/runs/log-batch", body, _HTTP_SECONDS)
            return
        import_mlflow()
        from mlflow.entities import Metric, RunTag

        if self._client is None:
            self._client = connect(self._uri)
        tags = [RunTag(key, value) for key, value in batch.tags.items()]
        points = [Metric(*point) for point in batch.points]
        self._client.log_batch(self._run_id, metrics=points, tags=tags, synchronous=True)


def _batches(journal: Path, start: int) -> Iterator[_Batch]:
    """Yield what the journal holds from byte `start` in pieces for one call each."""
    batch = _Batch(end=start)
    for entry in entries(journal, start):
        tags = {} if entry.left_since is None else {f"{LEFT}{entry.left_since}": str(entry.timestamp)}
        if len(batch.points) + len(entry.metrics) > _LARGEST_BATCH or len(batch.tags) + len(tags) > _LARGEST_TAGS:
            yield batch
            batch = _Batch(end=batch.end)
        points = [(key, value, entry.timestamp, entry.step) for key, value in entry.metrics.items()]
        while len(points) > _LARGEST_BATCH:  # only the last piece of an entry moves the end past it
            yield _Batch(points[:_LARGEST_BATCH], end=batch.end)
            points = points[_LARGEST_BATCH:]
        batch.points += points
        batch.tags |= tags
        batch.end = entry.end
    if batch.points or batch.tags:
        yield batch
