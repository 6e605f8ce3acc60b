"""The checkpoints of a run: those that its record lists. Others in the folder are incomplete."""

from collections.abc import Callable, Sequence

from concord.errors import CheckpointError, RunFailedError
from concord.storage import Folder
from concord.training.checkpoint import verify_checkpoint

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


def remove_older(folder: Folder, listed: Sequence[str]) -> None:
    """Remove the checkpoints before the last ones."""
    for name in listed[-KEPT - 1 : -KEPT]:
        folder.remove(f"{CHECKPOINTS}/{name}")


def remove_unlisted(folder: Folder, listed: Sequence[str]) -> None:
    """Remove unlisted checkpoints, while none is being written."""
    for name in folder.names(CHECKPOINTS):
        if name.startswith("checkpoint_") and name not in listed[-KEPT:]:
            folder.remove(f"{CHECKPOINTS}/{name}")
