"""A run's checkpoints, listed in Ray Train's own form: a run goes on with Ray Train that began without, and vice versa.

The list is the truth. What is in the folder and not in the list was being written when a process was killed.
"""

import json
import shutil
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from concord.errors import RunFailedError
from concord.storage import Folder, StorageError

# Ray Train's folder of checkpoints in a run's folder, and its list of them there.
CHECKPOINTS, SNAPSHOT = "checkpoints", "checkpoint_manager_snapshot.json"
# How many are kept, the last ones.
KEPT = 2
# Where a checkpoint of Ray Train has its metadata, and what Concord notes there: how long the journal was then.
_METADATA, _JOURNAL_LENGTH = ".metadata.json", "concord_journal_length"
_UNUSED = (
    "pending_training_results",
    "pending_validation_specs",
    "validated_checkpoint_dir_names",
    "timed_out_validation_checkpoint_dir_names",
    "failed_validation_checkpoint_dir_names",
)


def note_journal_length(checkpoint: Path, length: int) -> None:
    """Note in a checkpoint how long the journal was when it was made."""
    (checkpoint / _METADATA).write_text(json.dumps({_JOURNAL_LENGTH: length}))


def journal_length(checkpoint: Path | None) -> int | None:
    """What :func:`note_journal_length` noted; None if nothing is, and 0 where there is no checkpoint."""
    if checkpoint is None:
        return 0
    try:
        length: int | None = json.loads((checkpoint / _METADATA).read_text()).get(_JOURNAL_LENGTH)
    except FileNotFoundError:
        return None
    return length


def last_checkpoint(run_folder: Folder) -> Path | None:
    """The last checkpoint that is listed, its files on this machine.

    Raises:
        InputError: it holds a file that would lie elsewhere.
        RunFailedError: the list cannot be read.
    """
    try:
        listed = _listed(run_folder)["checkpoint_results"]
    except (ValueError, LookupError) as error:
        at = f"{run_folder.display_path}/{CHECKPOINTS}/{SNAPSHOT}"
        raise RunFailedError(f"{at}: cannot be read ({error})") from error
    return run_folder.fetch_tree(f"{CHECKPOINTS}/{listed[-1]['checkpoint_dir_name']}") if listed else None


def keep_checkpoint(run_folder: Folder, written: Path, metrics: Mapping[str, float]) -> None:
    """Keep a checkpoint, list it, and remove the oldest ones, as Ray Train does.

    Args:
        run_folder: of the run.
        written: a folder with its files.
        metrics: what Ray Train lists beside its name.

    Raises:
        OSError: the disk is full.
    """
    snapshot = _listed(run_folder)
    name = f"checkpoint_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
    shutil.copytree(written, run_folder.path / CHECKPOINTS / name)
    run_folder.keep(f"{CHECKPOINTS}/{name}")
    index = snapshot["current_report_index"]
    entry = {"version": 0, "checkpoint_dir_name": name, "metrics": dict(metrics)}
    listed, indices = [*snapshot["checkpoint_results"], entry], [*snapshot["checkpoint_report_indices"], index]
    snapshot |= {
        "checkpoint_results": listed[-KEPT:],
        "checkpoint_report_indices": indices[-KEPT:],
        "latest_checkpoint_result": entry,
        "current_report_index": index + 1,
    }
    new = run_folder.path / CHECKPOINTS / f"{SNAPSHOT}.new"
    new.write_text(json.dumps(snapshot))
    new.replace(new.with_suffix(""))
    run_folder.keep(f"{CHECKPOINTS}/{SNAPSHOT}")
    for old in listed[:-KEPT]:
        run_folder.remove(f"{CHECKPOINTS}/{old['checkpoint_dir_name']}")


def remove_partial_checkpoints(run_folder: Folder) -> None:
    """Remove what is not listed; for when no checkpoint is being written."""
    try:
        listed = {entry["checkpoint_dir_name"] for entry in _listed(run_folder)["checkpoint_results"]}
    except StorageError:
        raise
    except (OSError, ValueError, LookupError):
        return  # nobody knows
    for name in run_folder.names(CHECKPOINTS):
        if name.startswith("checkpoint_") and name != SNAPSHOT and name not in listed:
            run_folder.remove(f"{CHECKPOINTS}/{name}")


def _listed(run_folder: Folder) -> dict[str, Any]:
    """Ray Train's list, or an empty one (OSError, ValueError)."""
    run_folder.fetch(f"{CHECKPOINTS}/{SNAPSHOT}")
    try:
        listed: dict[str, Any] = json.loads((run_folder.path / CHECKPOINTS / SNAPSHOT).read_text())
    except FileNotFoundError:
        empty = {"ray_version": version("ray"), "checkpoint_results": [], "checkpoint_report_indices": []}
        listed = empty | {"current_report_index": 0} | {name: [] for name in _UNUSED}
    return listed
