"""The cost of a record of 50,000 events: sending it to MLflow on SQLite, and reading it when its run resumes."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from concord.benchmark import Row
from concord.record import Events
from concord.storage import Folder
from concord.tracking import Mirror, Store

_EVENTS = 50_000
_METRICS = {"step/loss": 0.5, "step/worst_loss": 0.7, "step/kept_fraction": 0.1, "step/lr": 1e-3}


def rows() -> Iterator[Row]:
    """Sending events to an empty store against appending them; reading them again against sending the rest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name) / "run")
        folder.make()
        store = Store.open(Path(name))
        run_id = store.start_run("benchmark", "mirror", {}, {})
        began = time.perf_counter()
        events = Events(folder)
        for step in range(_EVENTS):
            events.append("metrics", step=step, metrics=_METRICS)
        events.close()
        appended = time.perf_counter() - began
        sent = _seconds(store, run_id, folder)
        yield Row(
            f"{_EVENTS} events sent to MLflow", sent, "appended to the record", appended, sent / appended, "≤ 60 s"
        )
        began = time.perf_counter()
        Events(folder).close()
        read = time.perf_counter() - began
        again = _seconds(store, run_id, folder)
        yield Row("their record read, as a resume does", read, "nothing left to send", again, read / again, "≤ 2 s")


def _seconds(store: Store, run_id: str, folder: Folder) -> float:
    began = time.perf_counter()
    unsent = Mirror(store, run_id, folder).close(600.0)
    if unsent:
        raise RuntimeError(f"{unsent} events were not sent")
    return time.perf_counter() - began
