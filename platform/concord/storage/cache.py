"""This machine's cache of storages: files are fetched on demand, and again after a change.

fsspec's ``filecache`` and ``simplecache`` write a download at its final place, so a killed process leaves an incomplete
file, and parallel readers see one.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.storage.address import display_path, is_remote, parts
from concord.storage.filesystem import endpoint, filesystem, in_one_line

_AT_ONCE = 16
_CHUNK = 8 << 20
# A file that changes within the second of its fetch would look unchanged, so it is fetched again.
_SETTLED_SECONDS = 2.0


def cached(path: Path, kind: str) -> Path:
    """The cache's path for an address: below CONCORD_CACHE, or in the system's cache folder.

    ``kind`` separates files to read from files to write. An address that leads out of its bucket is refused, since the
    path would lie outside of the cache.
    """
    scheme, rest = parts(path)
    if not is_below(rest):
        raise InputError(f"{display_path(path)}: must be one plain address, without ..")
    server = hashlib.sha256(f"{scheme} {endpoint() or ''}".encode()).hexdigest()[:12]
    return _root() / kind / f"{scheme}-{server}" / rest


def cache_folder(kind: str) -> Path:
    """The folder in the cache for what this machine computes: below CONCORD_CACHE, or the system's cache folder."""
    return _root() / kind


def local(path: Path) -> Path:
    """Fetch the file or folder at an address; return the local path. A path on the disk is returned unchanged.

    Several processes may call it at once. If the storage has nothing there, the returned path does not exist.
    """
    if not is_remote(path):
        return path
    target = cached(path, "data")
    with in_one_line(display_path(path), InputError):
        fetch(*filesystem(path), target)
    return target


def file_checksum(path: Path) -> str:
    """SHA-256 in hexadecimal digits; a small part of the file is in memory at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing(path: Path, recursive: bool = False) -> list[str] | None:
    """The names of the files in a folder, on the disk or at an address, in order; None if there is no such folder."""
    if is_remote(path):
        with in_one_line(display_path(path), InputError):
            files, root = filesystem(path)
            if files.get_file_info(root).type.name != "Directory":
                return None
            found = entries(files, root, recursive)
        return sorted(name for name, each in found.items() if each.is_file)
    if not path.is_dir():
        return None
    names = []
    for each in _below(path) if recursive else path.iterdir():
        if each.is_file():
            names.append(str(each.relative_to(path)))
        elif each.is_symlink() and not each.exists() and not each.name.startswith("."):  # for example an editor's lock
            raise InputError(f"{each}: is a link to {os.readlink(each)}, which does not exist")
    return sorted(names)


def _below(path: Path, around: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files in a folder and in its folders, also in linked ones; a link to a folder around it is an InputError.

    Hidden folders, and those that may not be read (``lost+found``), are left out.
    """
    real = path.resolve()
    if real in around:
        raise InputError(f"{path}: is a link to a folder that contains it")
    try:
        found = list(path.iterdir())
    except PermissionError:
        found = []
    for each in found:
        if not each.is_dir():
            yield each
        elif not each.name.startswith("."):
            yield from _below(each, (*around, real))


def fetch(files: Any, root: str, target: Path) -> None:
    """Make a local file or folder equal to one of a storage; unchanged files are not fetched again.

    Local files that the storage lacks are removed. If a name leads out of the folder, nothing is fetched (InputError).
    """
    about = files.get_file_info(root)
    if about.is_file:
        _fetch(files, about, target)
        return
    wanted = {target / name: each for name, each in entries(files, root, recursive=True).items() if each.is_file}
    for stale in [each for each in (target, *target.rglob("*")) if each.is_file() and each not in wanted]:
        stale.unlink(missing_ok=True)
    if wanted:
        with one_at_a_time(target), ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(lambda file: _fetch(files, wanted[file], file), wanted))


def entries(files: Any, root: str, recursive: bool = False) -> dict[str, Any]:
    """PyArrow's information on the content of a storage's folder by name (InputError if a name leads out of it)."""
    from pyarrow import fs

    listed = files.get_file_info(fs.FileSelector(root, recursive=recursive, allow_not_found=True))
    prefix = root.rstrip("/") + "/"
    found = {each.path.removeprefix(prefix): each for each in listed}
    if escaping := next((name for name in found if not is_below(name)), None):
        raise InputError(f"{files.type_name}://{root}: it holds {escaping}, which leads out of it")
    return found


def is_below(name: str) -> bool:
    """Whether a name stays inside its folder, as ``../name`` does not."""
    return not name.startswith("/") and ".." not in name.split("/")


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of this machine run the body while others wait; without locks on the disk nothing waits."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _changed(files: Any, about: Any) -> int:
    """When a file last changed, ns since 1970. If the storage does not say, a number of what else it says of the file:
    its ETag, for example.
    """
    if about.mtime_ns or not hasattr(files, "handler"):
        return about.mtime_ns or 0
    facts = repr(files.handler.fs.info(about.path))
    return int(hashlib.sha256(facts.encode()).hexdigest()[:12], 16)  # in the first days of 1970, when nothing changed


def _fetch(files: Any, about: Any, target: Path) -> None:
    changed = _changed(files, about)
    with contextlib.suppress(OSError):
        found = target.stat()
        if target.is_file() and (found.st_size, found.st_mtime_ns) == (about.size, changed):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=_drafts(), delete=False) as draft:
        try:
            # Raw: PyArrow would decompress files called .gz.
            with files.open_input_stream(about.path, compression=None) as content:
                shutil.copyfileobj(content, draft, _CHUNK)
            size = draft.tell()
            if about.size is not None and size != about.size:
                raise OSError(f"{about.path}: received {size} bytes, expected {about.size}; the file changed meanwhile")
        except BaseException:
            os.unlink(draft.name)
            raise
    young = changed and abs(time.time_ns() - changed) < _SETTLED_SECONDS * 1e9
    os.utime(draft.name, ns=(time.time_ns(), 1 if young else changed))
    os.replace(draft.name, target)


def _root() -> Path:
    import pooch

    return Path(os.environ.get("CONCORD_CACHE") or pooch.os_cache("concord")).absolute()


def _drafts() -> Path:
    """A folder for incomplete files, on the same disk and outside of fetched folders."""
    drafts = _root() / "drafts"
    drafts.mkdir(parents=True, exist_ok=True)
    return drafts
