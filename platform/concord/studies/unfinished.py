"""The checkpoints of a group's runs that have not ended, from which a continued group resumes them.

A run in one process writes them, seldom. Runs with several workers, and the parts of a run that leave environments out,
have none and begin anew.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from concord.errors import RunFailedError
from concord.record import RunHistory
from concord.runs.checkpoints import last_checkpoint, remove_older, unlisted_checkpoints, written_at
from concord.runs.run import Info
from concord.storage import Folder
from concord.studies.proposals import RunProposal

UNFINISHED = "unfinished"  # in the group's folder, with a folder for each run


def folder_name(run: RunProposal) -> str:
    """The name of the run's folder."""
    return run.key.replace(" ", "-")


@dataclass(frozen=True)
class KeepTheLast:
    """A sink that removes a run's older checkpoints, and drops all other events."""

    folder: Folder

    def __call__(self, name: str, /, **_: Any) -> None:
        """An event of the run."""
        if name == "checkpoint":
            remove_older(self.folder, unlisted_checkpoints(self.folder))


@dataclass(frozen=True)
class UnfinishedRuns:
    """The checkpoints, as the group's process uses them."""

    folder: Folder
    info: Info

    def checkpoint(self, run: RunProposal, earlier: RunHistory) -> tuple[str, float] | None:
        """The checkpoint from which to resume a run with this history, and the seconds of training before it.

        None if there is none, or if it is damaged or of other options, other data or another commit; such a one is
        removed. At an address the checkpoint may be newer than the kept events; it is not used then.
        """
        own, began = self.folder / folder_name(run), earlier.began or {}
        if RunProposal.read(began) == run:
            there = unlisted_checkpoints(own)
            if self.folder.remote:
                last = max((step for _, step in earlier.evaluations), default=-1)
                there = [name for name in there if int(name.removeprefix("checkpoint_")) <= last]
            with contextlib.suppress(RunFailedError):
                start = last_checkpoint(own, there, self.info)
                if start is not None:
                    self.info(f"{run.name or run.key} continues from {start}")
                    before = began.get("seconds_before", 0.0) + written_at(own, start) - began["at"] / 1000
                    return start, max(before, 0.0)
        self.remove(run)
        return None

    def remove(self, run: RunProposal) -> None:
        """Remove the checkpoints of a run, and the folder with the last ones."""
        self.folder.remove(folder_name(run))
        if not self.folder.names():
            self.folder.delete()
