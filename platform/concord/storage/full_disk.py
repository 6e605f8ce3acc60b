"""Recognizes a full disk in errors of any library, and reports it in one line with the path."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from concord.errors import InputError, RunFailedError

# Space that must stay free, so that runs can still record that the disk is full.
_RESERVE = 1 << 20
_WORDS = (os.strerror(errno.ENOSPC).lower(), os.strerror(errno.EDQUOT).lower(), "database or disk is full")


class FullDiskError(RunFailedError):
    """No space is left on a disk; a retry would not help."""


@contextlib.contextmanager
def full_disk_in_one_line(place: Path) -> Iterator[None]:
    """Turn a full disk's error in the body into a :class:`FullDiskError` that names the error's file, or the place."""
    try:
        yield
    except (InputError, RunFailedError):
        raise  # already one line
    except Exception as error:  # each library has its own errors
        if (line := full_disk(error, place)) is None:
            raise
        raise FullDiskError(line) from error


def full_disk(error: BaseException, place: Path) -> str | None:
    """The line about a full disk, if that caused the error."""
    found: BaseException | None = error
    while found is not None:
        full = isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(word in str(found).lower() for word in _WORDS):
            name = getattr(found, "filename", None)
            return _line(Path(name) if isinstance(name, str) else place)
        found = found.__cause__ or found.__context__
    return None


def require_space(place: Path) -> None:
    """Refuse to write into a folder on a full disk (FullDiskError)."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(place).free
        if free < _RESERVE:
            least = f"at least {_RESERVE / 2**20:.0f} MiB must be free"
            raise FullDiskError(f"{_line(place)}; {free / 2**20:.1f} MiB are free, {least}")


def _line(place: Path) -> str:
    return f"{place}: no space left on the disk"
