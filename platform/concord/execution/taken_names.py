"""Whether the name of a new run is free: asked first, also where nothing slow is imported yet."""

import os
from collections.abc import Collection
from pathlib import Path

from concord.errors import InputError
from concord.record import RECORD, folder_of, read_record
from concord.storage import LOCK, Folder, display_path
from concord.submitted import SUBMISSION, SUBMISSION_TAG, is_submitted

BEFORE_RECORD = frozenset({LOCK, f"{RECORD}.new"})
"""Files that a run's folder may have before its record."""


def require_new(output: Path, name: str) -> None:
    """Refuse the name of an existing run that another submission has begun (InputError).

    A folder without a record is left from a killed process.
    """
    folder = folder_of(output, name)
    if is_of_this_submission(folder):
        return
    if read_record(folder) is not None:
        where = display_path(output)
        raise InputError(f"--name {name}: there is a run of this name in {where}; add --resume to continue it")
    require_no_other_files(folder, name, BEFORE_RECORD)


def is_of_this_submission(folder: Folder) -> bool:
    """Whether an earlier process of this submission has begun the run: the head node has died, and runs it again."""
    record = read_record(folder) if is_submitted() else None
    return record is not None and record["tracking"]["tags"].get(SUBMISSION_TAG) == os.environ[SUBMISSION]


def require_no_other_files(folder: Folder, name: str, allowed: Collection[str]) -> None:
    """Refuse a folder with other files than these, which is no run (InputError)."""
    if set(folder.names()) - set(allowed):
        raise InputError(f"--name {name}: {folder.display_path} exists and is not a run; give another name")
