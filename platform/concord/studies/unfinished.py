"""The checkpoints of a group's runs that have not ended, from which they continue.

Each has the run's reports so far, so the reports of a run that continues are those of an undisturbed one. A run in one
process writes them, seldom. Runs with several workers, and repetitions with environments left out, begin anew.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from concord.errors import RunFailedError
from concord.runs.checkpoints import CHECKPOINTS, KEPT, last_checkpoint
from concord.storage import Folder, full_disk_in_one_line
from concord.studies.proposals import RunProposal

UNFINISHED = "unfinished"  # in the group's folder, with a folder for each run
_REPORTS = ".json"  # after the checkpoint's name


@dataclass
class RunCheckpoints:
    """The checkpoints of a run, in the process that trains it; a sink of its events.

    Attributes:
        start: the name of the checkpoint from which it continues; None if it begins.
        reports: its reports up to now, as JSON.
        seconds_before: of training up to that checkpoint.
    """

    folder: Folder
    start: str | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    seconds_before: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    @staticmethod
    def read(folder: Folder) -> "RunCheckpoints":
        """The run's checkpoints, with the last readable one as ``start``; the run begins anew if none can be read."""
        with contextlib.suppress(RunFailedError, OSError, ValueError):
            start = last_checkpoint(folder, _listed(folder), lambda _: None)
            if start is not None:
                kept = json.loads(folder.fetch(f"{CHECKPOINTS}/{start}{_REPORTS}").read_text())
                return RunCheckpoints(folder, start, kept["reports"], kept["seconds"])
        return RunCheckpoints(folder)

    def __call__(self, name: str, /, **fields: Any) -> None:
        """Keep the reports with a checkpoint that was written, and remove those before its predecessor."""
        if name != "checkpoint":
            return
        own, step = fields["name"], fields["step"]
        reports = [each for each in self.reports if each["step"] <= step]  # after an outage training steps back
        kept = {"reports": reports, "seconds": self.seconds_before + time.monotonic() - self._began}
        file = f"{CHECKPOINTS}/{own}{_REPORTS}"
        with full_disk_in_one_line(self.folder.path):
            self.folder.write(file, json.dumps(kept))
        listed = _listed(self.folder)
        last = [each for each in listed if each <= own][-KEPT:]
        for other in (each for each in listed if each not in last):
            for part in (f"{other}{_REPORTS}", other):
                self.folder.remove(f"{CHECKPOINTS}/{part}")


def _listed(folder: Folder) -> list[str]:
    """The names of the checkpoints with reports, which are written last; the oldest first."""
    return [name.removesuffix(_REPORTS) for name in folder.names(CHECKPOINTS) if name.endswith(_REPORTS)]


@dataclass(frozen=True)
class UnfinishedRuns:
    """The folders of all runs, in the group's process.

    Attributes:
        code: the code that trains them; a checkpoint of other code is not used.
    """

    folder: Folder
    code: str

    def name(self, run: RunProposal) -> str:
        """The name of the run's folder, which depends on all that its result depends on."""
        of_run = [run.point, run.resolved, run.seed, run.left_out, run.whole, run.origin.get("data")]
        text = json.dumps([*of_run, self.code], sort_keys=True, default=str)
        return f"{_key(run.key)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def remove(self, ended: Collection[str]) -> None:
        """Remove the checkpoints of the runs with these keys, of any code."""
        over = {_key(key) for key in ended}
        for name in self.folder.names():
            if name.rpartition("-")[0] in over:
                self.folder.remove(name)

    def close(self, ended: Collection[str]) -> None:
        """While no run trains: remove what these runs have left, and the folder if it is empty."""
        self.remove(ended)
        if not self.folder.names():
            self.folder.delete()


def _key(key: str) -> str:
    return key.replace(" ", "-")
