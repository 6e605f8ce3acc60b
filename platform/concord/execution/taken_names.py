"""Whether the name of a new run is free: asked first, also where nothing slow is imported yet."""

from collections.abc import Collection
from pathlib import Path

from concord.errors import InputError
from concord.record import RECORD, folder_of, read_record
from concord.storage import LOCK, Folder, display_path

BEFORE_RECORD = frozenset({LOCK, f"{RECORD}.new"})
"""Files that a run's folder may have before its record."""


def require_new(output: Path, name: str) -> None:
    """Refuse the name of an existing run (InputError). A folder without a record is left from a killed process."""
    folder = folder_of(output, name)
    if read_record(folder) is not None:
        where = display_path(output)
        raise InputError(f"--name {name}: there is a run of this name in {where}; add --resume to continue it")
    require_no_other_files(folder, name, BEFORE_RECORD)


def require_no_other_files(folder: Folder, name: str, allowed: Collection[str]) -> None:
    """Refuse a folder with other files than these, which is no run (InputError)."""
    if set(folder.names()) - set(allowed):
        raise InputError(f"--name {name}: {folder.display_path} exists and is not a run; give another name")
