"""Whether a run that MLflow shows as running is at work: its process says so every few seconds, in a tag of the run.

A process that is killed, or whose machine is lost, cannot record its end. Whoever finds that it has said nothing for a
while records it: the run is KILLED since its last sign, and shown as interrupted. Clocks of machines may differ by half
of that time. A process that was only cut off from the store shows the run as running again with its next sign.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from concord.errors import RunFailedError
from concord.storage.lease import SILENT_SECONDS
from concord.tracking.store import Store, TrackedRun

ALIVE = "concord.alive"
"""The tag: milliseconds since 1970, after ``interrupted`` if somebody else has recorded the end."""
INTERRUPTED = "INTERRUPTED"
"""The shown status of such a run, which MLflow lacks."""
_MARK = "interrupted "


def sign() -> str:
    """The tag's value now."""
    return str(time.time_ns() // 1_000_000)


def shown_status(store: Store, run: TrackedRun, dead_here: Callable[[TrackedRun], bool]) -> TrackedRun:
    """The run, as interrupted if its process is gone, which is then recorded in the store.

    ``dead_here`` tells whether no process holds the run's folder, if the folder is on this machine. A run of a group is
    at work as long as its group is.
    """
    if run.status == "KILLED" and run.tags.get(ALIVE, "").startswith(_MARK):
        return replace(run, status=INTERRUPTED)
    if run.status != "RUNNING":
        return run
    last = _last_sign(run)
    if last is None and run.group is not None:
        with contextlib.suppress(RunFailedError):  # it was deleted
            last = _last_sign(store.run(run.group))
    silent = last is not None and time.time() - last / 1000 > SILENT_SECONDS
    if not (silent or dead_here(run)):
        return run
    ended = int(run.started.timestamp() * 1000) if last is None else last
    with contextlib.suppress(RunFailedError):  # who may only read sees it all the same
        store.end_silent_run(run, {ALIVE: f"{_MARK}{ended}"}, ended)
    return replace(run, status=INTERRUPTED)


def _last_sign(run: TrackedRun) -> int | None:
    value = run.tags.get(ALIVE, "").removeprefix(_MARK)
    return int(value) if value.isdecimal() else None
