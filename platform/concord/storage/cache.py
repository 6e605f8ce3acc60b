"""This machine's cache of what storages hold: fetched when it is asked for, and again when it has changed there.

fsspec's ``filecache`` and ``simplecache`` write a download where it is read: a killed process leaves half a file, and
another process that reads meanwhile finds half of it.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.storage.address import display_path, is_remote, parts
from concord.storage.credentials import endpoint
from concord.storage.filesystem import filesystem, reason

_AT_ONCE = 16
_CHUNK = 8 << 20
# A file that was replaced within the second in which it was fetched looks the same afterwards: it is not trusted.
_SETTLED_SECONDS = 2.0


def cached(path: Path, kind: str) -> Path:
    """Where this machine has what is at an address: below CONCORD_CACHE, or in the system's place for caches.

    Args:
        path: the address.
        kind: what for; what is read and what is written are kept apart.

    Raises:
        InputError: the address leads out of its bucket, so its place would be elsewhere on this machine's disk.
    """
    scheme, rest = parts(path)
    if not is_below(rest):
        raise InputError(f"{display_path(path)}: must be one plain address, without ..")
    server = hashlib.sha256(f"{scheme} {endpoint() or ''}".encode()).hexdigest()[:12]
    return _root() / kind / f"{scheme}-{server}" / rest


def local(path: Path) -> Path:
    """The file or folder at an address, on this machine's disk; a path on the disk is given back.

    Only what is not there yet, or has another size or time of change than in the storage, is fetched. Several processes
    may ask at once. What is not in the storage is not at the path that is returned either.

    Raises:
        InputError: the storage does not answer, or what came is cut short.
    """
    if not is_remote(path):
        return path
    target = cached(path, "data")
    try:
        found, root = filesystem(path)
        about = found.get_file_info(root)
        if about.is_file:
            _fetch_all(found, [(about, target)])
            return target
        below = _below(found, root, recursive=True)
        wanted = {target / name: each for name, each in below.items()}
        for stale in [each for each in target.rglob("*") if each.is_file() and each not in wanted]:
            stale.unlink(missing_ok=True)
        if target.is_file():
            target.unlink(missing_ok=True)
        _fetch_all(found, [(each, file) for file, each in wanted.items()])
    except InputError:
        raise
    except Exception as error:  # of the network, the credentials, this machine's disk: each has its own
        raise InputError(f"{display_path(path)}: cannot be fetched; {reason(error)}") from error
    return target


def fetch_folder(found: Any, root: str, target: Path) -> None:
    """Bring the files below a folder of a storage; those that are here already are not fetched again.

    Args:
        found: PyArrow's file system.
        root: the folder in it.
        target: the folder here.

    Raises:
        ValueError: one is called such that it would lie elsewhere on this machine's disk; nothing is fetched.
        OSError, InputError: the storage does not answer, or what came is cut short.
    """
    _fetch_all(found, [(each, target / name) for name, each in _below(found, root, recursive=True).items()])


def listing(path: Path, recursive: bool = False) -> list[str] | None:
    """The names of the files in a folder, on the disk or at an address, in order; None if there is no such folder.

    Raises:
        InputError: the storage does not answer.
    """
    if not is_remote(path):
        if not path.is_dir():
            return None
        files = (each for each in (path.rglob("*") if recursive else path.iterdir()) if each.is_file())
        return sorted(str(each.relative_to(path)) for each in files)
    try:
        found, root = filesystem(path)
        below = _below(found, root, recursive)
        there = bool(below) or found.get_file_info(root).type.name == "Directory"
    except Exception as error:  # as above
        raise InputError(f"{display_path(path)}: cannot be read; {reason(error)}") from error
    return sorted(below) if there else None


def replace(target: Path, content: bytes) -> None:
    """Write a file of the cache at once and as a whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=_drafts(), delete=False) as draft:
        draft.write(content)
    os.replace(draft.name, target)


def _below(found: Any, root: str, recursive: bool) -> dict[str, Any]:
    """The files below a folder of a storage, by their names relative to it.

    Raises:
        ValueError: one is called such that it would lie elsewhere on this machine's disk.
    """
    from pyarrow import fs

    listed = found.get_file_info(fs.FileSelector(root, recursive=recursive, allow_not_found=True))
    prefix = root.rstrip("/") + "/"
    below = {each.path.removeprefix(prefix): each for each in listed if each.is_file}
    for name in below:
        if not is_below(name):
            raise ValueError(f"it holds {name}, which is no name of a file below it")
    return below


def is_below(name: str) -> bool:
    """Whether a name stays inside its folder, as ``../name`` does not."""
    return not name.startswith("/") and ".." not in name.split("/")


def _fetch_all(found: Any, files: Iterable[tuple[Any, Path]]) -> None:
    missing = [(each, target) for each, target in files if not _is_there(each, target)]
    if len(missing) == 1:
        _fetch(found, *missing[0])
    elif missing:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(lambda pair: _fetch(found, *pair), missing))


def _is_there(about: Any, target: Path) -> bool:
    try:
        kept = target.stat()
    except OSError:
        return False
    return bool(target.is_file() and kept.st_size == about.size and kept.st_mtime_ns == (about.mtime_ns or 0))


def _fetch(found: Any, about: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=_drafts(), delete=False) as draft:
        try:
            # As it is: PyArrow would unpack what is called .gz.
            with found.open_input_stream(about.path, compression=None) as content:
                shutil.copyfileobj(content, draft, _CHUNK)
            size = draft.tell()
            if about.size is not None and size != about.size:
                raise InputError(f"{about.path}: {size} bytes came, expected {about.size}; it changed in the meantime")
        except BaseException:
            os.unlink(draft.name)
            raise
    changed = about.mtime_ns or 0
    young = changed and abs(time.time_ns() - changed) < _SETTLED_SECONDS * 1e9
    os.utime(draft.name, ns=(time.time_ns(), 1 if young else changed))
    os.replace(draft.name, target)


def _root() -> Path:
    import pooch

    return Path(os.environ.get("CONCORD_CACHE") or pooch.os_cache("concord")).absolute()


def _drafts() -> Path:
    """A folder for what is being written, on the same disk, where no listing of a fetched folder finds it."""
    drafts = _root() / "drafts"
    drafts.mkdir(parents=True, exist_ok=True)
    return drafts
