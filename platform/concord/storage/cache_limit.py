"""How much the cache of this machine holds: what nobody has used for longest is removed, what is in use never.

Each process writes down what it uses, in a file of its own below ``in-use/``, on which it has a lock as long as it or a
child of it lives. Who makes room removes nothing that such a file names, and the files of those who are gone. Whatever
is removed is fetched again when it is asked for.
"""

import contextlib
import fcntl
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from concord.errors import InputError
from concord.storage.json_lines import JsonLines, read_lines

LIMIT = "CONCORD_CACHE_LIMIT"
_DEFAULT_GIB = 20.0
_IN_USE, _LOCK, _DRAFTS = "in-use", "lock", "drafts"
# What a process was writing that was killed: nothing is written so slowly that its file is not touched for so long.
_ABANDONED_SECONDS = 3600.0
# Each process looks again how much there is when it has fetched so much of the limit.
_PART = 1 / 20


@dataclass
class _Cache:
    """What this process knows of a cache.

    Attributes:
        uses: the locked file that names what it uses.
        named: what that names.
        room: bytes that it may fetch before it looks again how much there is.
    """

    uses: JsonLines
    named: set[Path] = field(default_factory=set)
    room: float = 0.0


_caches: dict[Path, _Cache] = {}
_one_at_a_time = threading.Lock()


def limit_in_bytes() -> float:
    """How much a cache may hold, from the environment.

    Raises:
        InputError: it is no number of GiB.
    """
    given = os.environ.get(LIMIT)
    try:
        gib = float(given) if given else _DEFAULT_GIB
    except ValueError:
        gib = math.nan
    if not gib >= 0:
        raise InputError(f"{LIMIT} {given}: must be a number of GiB, not negative")
    return gib * 2**30


def use(root: Path, path: Path) -> None:
    """Say that this process uses a file of the cache, or all that is below a folder, until it ends.

    To be called before it is looked whether the file is there. The first time, room is made, too.
    """
    with _one_at_a_time, contextlib.suppress(OSError):  # where nothing can be written, nothing can be fetched either
        cache, first = _caches.get(root), False
        if cache is None or not cache.uses.file.exists():  # somebody may have removed the whole cache
            cache, first = _Cache(_locked_file(root)), True
            _caches[root] = cache
        if path not in cache.named:
            with _lock(root, fcntl.LOCK_SH):
                cache.uses.append(str(path))
            cache.named.add(path)
        if first:
            _make_room(root, cache, 0)


def make_room(root: Path, size: int) -> None:
    """Remove what nobody has used for longest, so that as many bytes can be fetched; after :func:`use`."""
    with _one_at_a_time, contextlib.suppress(OSError):
        cache = _caches.get(root)
        if cache is None:
            return
        if size > cache.room:
            _make_room(root, cache, size)
        cache.room -= size


def _locked_file(root: Path) -> JsonLines:
    """A new file for what this process uses; it is inherited by its children, with the lock."""
    folder = root / _IN_USE
    name = f"{os.getpid()}-{time.time_ns()}"
    draft = JsonLines(folder / f"{name}.new")
    fcntl.flock(draft.descriptor, fcntl.LOCK_EX)
    draft.file = draft.file.rename(folder / name)  # whoever finds it finds it locked
    return draft


@contextlib.contextmanager
def _lock(root: Path, how: int) -> Iterator[None]:
    with (root / _LOCK).open("w") as file:
        fcntl.flock(file, how)
        yield


def _make_room(root: Path, cache: _Cache, size: int) -> None:
    limit = limit_in_bytes()
    with contextlib.suppress(BlockingIOError), _lock(root, fcntl.LOCK_EX | fcntl.LOCK_NB):  # another is at it
        _remove_abandoned(root)
        named = _named_by_the_living(root)
        wanted = named.union(*(path.parents for path in named))  # in which somebody may be about to put something
        files = sorted(_files(root))
        there = sum(length for _, length, _ in files)
        for _, length, file in files:
            if there + size <= limit:
                break
            if named.isdisjoint((file, *file.parents)):
                file.unlink(missing_ok=True)
                there -= length
                with contextlib.suppress(OSError):  # it holds others
                    for folder in itertools.takewhile(lambda each: each not in wanted, file.parents):
                        folder.rmdir()
        cache.room = size + limit * _PART


def _files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """The files of a cache: when each was last used (ns), its bytes, and its path."""
    for kind in ("data", "work"):
        for folder, _, names in os.walk(root / kind):
            for name in names:
                file = Path(folder, name)
                with contextlib.suppress(OSError):
                    about = file.lstat()
                    # Of what was fetched the time of change is the one in the storage.
                    used = about.st_atime_ns if kind == "data" else max(about.st_atime_ns, about.st_mtime_ns)
                    yield used, about.st_size, file


def _named_by_the_living(root: Path) -> set[Path]:
    """The files that living processes use; the lists of processes that have ended are removed."""
    named: set[Path] = set()
    for file in list((root / _IN_USE).iterdir()):
        with contextlib.suppress(OSError), file.open("rb") as uses:
            try:
                fcntl.flock(uses, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                named |= {Path(name) for name, _ in read_lines(file)}
            else:
                if file.suffix != ".new":  # of one that is about to be locked
                    file.unlink()
    return named


def _remove_abandoned(root: Path) -> None:
    before = time.time() - _ABANDONED_SECONDS
    for folder in (_DRAFTS, _IN_USE):
        for file in list((root / folder).glob("*" if folder == _DRAFTS else "*.new")):
            with contextlib.suppress(OSError):
                if file.stat().st_mtime < before:
                    file.unlink()
