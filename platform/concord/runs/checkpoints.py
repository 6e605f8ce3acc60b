"""The checkpoints of a run: those that its record lists. Others in the folder are incomplete."""

import json
import re
from collections.abc import Callable, Sequence

from concord.errors import CheckpointError, RunFailedError
from concord.storage import Folder
from concord.training.checkpoint import PROGRESS, verify_checkpoint

CHECKPOINTS = "checkpoints"  # in the run's folder
KEPT = 2  # the last ones


def last_checkpoint(folder: Folder, listed: Sequence[str], info: Callable[[str], None]) -> str | None:
    """The name of the last readable checkpoint of those listed, oldest first; None if the run has none."""
    problem: str | None = None
    for name in reversed(listed[-KEPT:]):
        if problem is not None:
            info(f"{problem}; the previous checkpoint is used")
        try:
            verify_checkpoint(folder.fetch(f"{CHECKPOINTS}/{name}"))
            return name
        except CheckpointError as error:
            problem = str(error)
    if problem is not None:
        raise RunFailedError(f"{problem}; no checkpoint of the run can be read")
    return None


def unlisted_checkpoints(folder: Folder) -> list[str]:
    """The names of the whole checkpoints in a folder without a record, oldest first."""
    return [each for each in folder.names(CHECKPOINTS) if re.fullmatch(r"checkpoint_\d+", each)]


def written_at(folder: Folder, name: str) -> float:
    """When a verified checkpoint was written, in seconds since 1970; 0 if a loop of the job's own does not say."""
    progress = folder.path / CHECKPOINTS / name / PROGRESS
    return float(json.loads(progress.read_text()).get("written", 0.0)) if progress.exists() else 0.0


def remove_older(folder: Folder, listed: Sequence[str]) -> None:
    """Remove the checkpoints before the last ones."""
    for name in listed[-KEPT - 1 : -KEPT]:
        folder.remove(f"{CHECKPOINTS}/{name}")


def remove_unlisted(folder: Folder, listed: Sequence[str]) -> None:
    """Remove unlisted checkpoints, while none is being written."""
    for name in folder.names(CHECKPOINTS):
        if name.startswith("checkpoint_") and name not in listed[-KEPT:]:
            folder.remove(f"{CHECKPOINTS}/{name}")
