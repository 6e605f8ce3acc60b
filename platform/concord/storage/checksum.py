"""Checksums of files."""

import hashlib
from pathlib import Path


def file_checksum(path: Path) -> str:
    """SHA-256 in hexadecimal digits; a small part of the file is in memory at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
