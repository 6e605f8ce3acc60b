"""The folder of a run or a study: on this machine's disk, or a local copy of a folder at an address.

Files are uploaded in the given order, each as a whole, so that a record appears after the files that it names.

Two processes must not use the same folder. A lock, which ends with its process, separates processes that see the same
disk; a lease (:mod:`concord.storage.lease`) separates machines that share only an address or a network disk.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.storage.address import display_path, is_remote
from concord.storage.cache import cached, entries, fetch, is_below
from concord.storage.filesystem import StorageError, disk_errors_in_one_line, filesystem, in_one_line
from concord.storage.holder import HeldError, Holder

LOCK = ".lock"
_LONGEST_HOLDER = 4096
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_locks: set[int] = set()  # that this process holds


def _close_inherited_locks() -> None:
    """A forked process that outlives its parent, such as a reader of data, must not keep the parent's locks."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_inherited_locks)


@dataclass(frozen=True)
class Folder:
    """A persistent folder. On a disk it is that folder, and fetching and keeping do nothing.

    It can be pickled and used on any node; each has its own copy at :attr:`path`.

    Every method raises StorageError, with one line, when the storage refuses or does not answer.

    Attributes:
        place: the folder, or its address.
    """

    place: Path

    @property
    def remote(self) -> bool:
        """Whether it is at an address."""
        return is_remote(self.place)

    @property
    def path(self) -> Path:
        """The folder on this machine."""
        return cached(self.place, "work") if self.remote else self.place

    @property
    def display_path(self) -> str:
        """Its address, or its path."""
        return display_path(self.place)

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.place / name)

    def exists(self) -> bool:
        """Whether the folder exists, at the address if it has one."""
        if not self.remote:
            return self.place.exists()
        with self._storage() as (files, root):
            return bool(files.get_file_info(root).type.name != "NotFound")

    def make(self) -> bool:
        """Make the local folder with its parents; return whether it was missing. If several processes make it at once,
        one gets True.
        """
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._not_writable(error) from error
        return True

    def write(self, name: str, content: str | bytes, *, durable: bool = True) -> None:
        """Replace a file, in a folder that may be missing: atomically, and keep it. It survives a power failure if
        ``durable``.
        """
        new = self.path / f"{name}.new"
        with disk_errors_in_one_line(new):
            new.parent.mkdir(parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            new.replace(self.path / name)
        self.keep(name)

    @contextlib.contextmanager
    def locked(self, what: str, user: str | None = None) -> Iterator[None]:
        """Lock it against other processes on this machine, or on others that share the disk.

        The folder must exist. The lock ends with the body, or with the process. ``what`` is run, study or comparison,
        and ``user`` who works here, for the error of the others.
        """
        path = self.path / LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._not_writable(error) from error
        _locks.add(lock)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = Holder.read(os.pread(lock, _LONGEST_HOLDER, 0))
                raise HeldError(self.place.name, what, holder) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise self._not_writable(error) from error
                # A network disk; its lease separates processes.
            # The previous holder may have removed the folder, and another process may have made it again.
            if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
                raise InputError(f"--name {self.place.name}: another process has just removed this {what}")
            with contextlib.suppress(OSError):  # a full disk; the lock holds all the same
                os.ftruncate(lock, 0)
                os.pwrite(lock, Holder.here(user).write(), 0)
            yield
        finally:
            if lock in _locks:  # not in a forked process
                _locks.remove(lock)
                os.close(lock)

    def _not_writable(self, error: OSError) -> InputError:
        if self.remote:
            return InputError(
                f"--output {self.display_path}: {self.path} cannot be written to ({error.strerror}); "
                "give another cache folder by CONCORD_CACHE"
            )
        return InputError(f"--output {self.place.parent.parent}: is not a writable folder ({error.strerror})")

    def fetch(self, name: str) -> Path:
        """Fetch a file, or a folder with its content; local files that the address lacks are removed.

        Returns the local path.
        """
        path = self._here(name)
        if self.remote:
            with self._storage(name) as (files, root):
                fetch(files, root, path)
        return path

    def keep(self, name: str) -> None:
        """Upload a file, or a folder with its content."""
        path = self.path / name
        if self.remote:
            for file in sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]:
                self._put(str(file.relative_to(self.path)), file.read_bytes())

    def names(self, below: str = "") -> list[str]:
        """The names of the files and folders in it, or in its folder ``below``."""
        if not self.remote:
            folder = self.place / below
            return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        with self._storage(below) as (files, root):
            return sorted(entries(files, root))

    def remove(self, name: str) -> None:
        """Remove a file or folder in it, locally and at the address, if it exists."""
        path = self._here(name)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if self.remote:
            with self._storage(name) as (files, root):
                kind = files.get_file_info(root).type.name
                if kind != "NotFound":
                    files.delete_dir(root) if kind == "Directory" else files.delete_file(root)

    def empty(self) -> None:
        """Remove the local files except the lock; the address is unchanged."""
        for each in self.path.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != LOCK:
                each.unlink(missing_ok=True)

    def delete(self) -> None:
        """Remove the folder; files that cannot be removed stay."""
        with contextlib.suppress(StorageError):
            self.remove("")

    def place_for_ray(self) -> dict[str, Any]:
        """The storage arguments for Ray Train and Ray Tune, valid on every node."""
        if not self.remote:
            return {"storage_path": str(self.place.resolve())}
        with self._storage() as (files, root):
            return {"storage_path": root, "storage_filesystem": files}

    def problem(self) -> str | None:
        """The storage's current problem in one line; None if it answers."""
        try:
            self.exists()
        except StorageError as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def _storage(self, below: str = "") -> Iterator[tuple[Any, str]]:
        with in_one_line(self.display_path, StorageError):
            files, root = filesystem(self.place)
            yield files, f"{root}/{below}" if below else root

    def _here(self, name: str) -> Path:
        """The local path of a file in it; the name may come from an untrusted file."""
        if not is_below(name):
            raise InputError(f"{self.display_path}: {name} leads out of it")
        return self.path / name

    def _put(self, name: str, content: bytes) -> None:
        with self._storage(name) as (files, path):
            if files.type_name not in ("s3", "gcs", "abfs"):  # these have objects only, no folders
                files.create_dir(path.rpartition("/")[0])
            with files.open_output_stream(path, compression=None) as target:
                target.write(content)
