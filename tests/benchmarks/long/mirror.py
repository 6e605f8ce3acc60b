"""The cost of a record of 50,000 events: sending it to MLflow on SQLite, and reading it when its run resumes."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from concord.benchmark import Row
from concord.record import OpenRun, folder_of, write_record
from concord.tracking import Mirror, Store
from concord.tracking.mirror import track

_EVENTS = 50_000
_METRICS = {"step/loss": 0.5, "step/worst_loss": 0.7, "step/kept_fraction": 0.1, "step/lr": 1e-3}


def rows() -> Iterator[Row]:
    """Sending events to an empty store against appending them; reading them again against sending the rest."""
    with tempfile.TemporaryDirectory() as name:
        store = Store.open(Path(name))
        folder = folder_of(Path(name), "mirror")
        tracking = {"experiment": "benchmark", "parameters": {}, "tags": {}}
        record = write_record(
            folder, "run", {"job": "benchmark", "config": {}, "store": "", "key": {}, "tracking": tracking}
        )
        run = OpenRun(folder, record)
        track(store, run)
        began = time.perf_counter()
        for step in range(_EVENTS):
            run.append("metrics", step=step, metrics=_METRICS)
        run.close()
        appended = time.perf_counter() - began
        sent = _seconds(store, run)
        yield Row(
            f"{_EVENTS} events sent to MLflow", sent, "appended to the record", appended, sent / appended, "≤ 60 s"
        )
        began = time.perf_counter()
        OpenRun(folder, run.record).close()
        read = time.perf_counter() - began
        again = _seconds(store, run)
        yield Row("their record read, as a resume does", read, "nothing left to send", again, read / again, "≤ 2 s")


def _seconds(store: Store, run: OpenRun) -> float:
    began = time.perf_counter()
    mirror = Mirror(store)
    mirror.add(run)
    unsent = mirror.close(600.0)
    if unsent:
        raise RuntimeError(f"{unsent} events were not sent")
    return time.perf_counter() - began
