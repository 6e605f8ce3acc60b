"""A full disk: recognized in errors of any library, and reported in one line that names the place."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from concord.errors import InputError, RunFailedError

# What has to stay free besides what is to be written: for the records of those who find the disk full.
_RESERVE = 1 << 20
_WORDS = (os.strerror(errno.ENOSPC).lower(), os.strerror(errno.EDQUOT).lower(), "database or disk is full")


class FullDiskError(RunFailedError):
    """No space is left where something has to be written; to try again would not help."""


@contextlib.contextmanager
def full_disk_in_one_line(place: Path) -> Iterator[None]:
    """What fails in the body because a disk is full becomes a :class:`FullDiskError`.

    Args:
        place: where the body writes, to be named where the error does not name a file.
    """
    try:
        yield
    except (InputError, RunFailedError):
        raise  # in a line already
    except Exception as error:  # each library has its own
        if (line := full_disk(error, place)) is None:
            raise
        raise FullDiskError(line) from error


def full_disk(error: BaseException, place: Path) -> str | None:
    """The line that says which disk is full, if that is why something failed."""
    found: BaseException | None = error
    while found is not None:
        full = isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(word in str(found).lower() for word in _WORDS):
            name = getattr(found, "filename", None)
            return _line(Path(name) if isinstance(name, str) else place)
        found = found.__cause__ or found.__context__
    return None


def require_space(place: Path, size: int) -> None:
    """Refuse to begin what would fill a disk.

    Args:
        place: a folder on it.
        size: of what is to be written, in bytes.

    Raises:
        FullDiskError: there is not so much space, and some to spare.
    """
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(place).free
        if free < size + _RESERVE:
            needed = f"{size / 2**20:.1f} MiB are to be written and {_RESERVE / 2**20:.0f} MiB has to stay free"
            raise FullDiskError(f"{_line(place)}; {free / 2**20:.1f} MiB are free, {needed}")


def _line(place: Path) -> str:
    return f"{place}: no space left on the disk"
