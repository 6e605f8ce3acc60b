"""The files that a folder of data consists of beside the data, and how they are written and refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.storage.address import display_path
from concord.storage.cache import listing, local

MANIFEST = "manifest.json"
PLAN = "plan.json"


def unfit(folder: Path, why: str) -> InputError:
    """The refusal of a folder of data."""
    return InputError(f"--data-dir {display_path(folder)}: {why}")


def checksum(content: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_checksum(path: Path) -> str:
    """The same of a file, of which a small part is in memory at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """At once and as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def manifest_of(folder: Path, what: str, command: str) -> tuple[dict[str, Any], set[str]]:
    """The manifest of a folder of data, and the names of its files.

    Args:
        folder: or its address.
        what: the data are.
        command: makes them.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    names = set(listing(folder, recursive=True) or ())
    if MANIFEST not in names:
        unfinished = ", only the beginning of some" if PLAN in names else ""
        raise unfit(folder, f"no {what}{unfinished}; {command} makes them")
    return read_json(local(folder / MANIFEST)), names


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file of the folder.

    Raises:
        InputError: it cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
    except (OSError, ValueError) as error:
        raise unfit(path.parent, f"{path.name} cannot be read ({error})") from error
    return content
