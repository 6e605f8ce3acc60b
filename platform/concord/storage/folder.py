"""The folder of a run or a study: on this machine's disk, or worked on here and kept at an address.

Files are sent in the order in which they are named, each as a whole, so that a record is there after what it names.

Two processes must not work on the same folder. A lock keeps those apart that see the same disk, and ends with its
process. A second machine that shares only an address is not noticed.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.storage.address import display_path, is_remote
from concord.storage.cache import cached, entries, fetch, is_below
from concord.storage.filesystem import StorageError, filesystem, in_one_line

LOCK = ".lock"
_logger = logging.getLogger("concord.storage")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@dataclass(frozen=True)
class Folder:
    """A folder that lasts. On a disk all of it is that folder, and what fetches and keeps does nothing.

    May be pickled, and used on any node: each has its own copy at :attr:`path`.

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
        """Where its files are on this machine."""
        return cached(self.place, "work") if self.remote else self.place

    @property
    def display_path(self) -> str:
        """Its address, or its path."""
        return display_path(self.place)

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.place / name)

    def exists(self) -> bool:
        """Whether there is anything of it where it is kept."""
        if not self.remote:
            return self.place.exists()
        with self._storage() as (files, root):
            return bool(files.get_file_info(root).type.name != "NotFound")

    def make(self) -> bool:
        """Make it on this machine, with the folders above it; gives whether it was missing. Of several processes that
        make one folder at once, one is told so.

        Raises:
            InputError: it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._not_writable(error) from error
        return True

    @contextlib.contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Keep every other process away that would lock it on this machine, or on another that shares the disk.

        The folder is there. The lock ends with the body, and with the process however it ends.

        Args:
            what: it is the folder of, for the refusal.

        Raises:
            InputError: another process has it, or it cannot be written to.
        """
        path = self.path / LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"--name {self.place.name}: another process is at work on this {what}") from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise self._not_writable(error) from error
                _logger.warning("%s: its file system has no locks; let no second process work on it", self.path)
            # Who had it may have removed the folder, and another may have made it again.
            if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
                raise InputError(f"--name {self.place.name}: another process has just removed this {what}")
            yield
        finally:
            os.close(lock)

    def _not_writable(self, error: OSError) -> InputError:
        if self.remote:
            return InputError(
                f"--output {self.display_path}: {self.path} cannot be written to ({error.strerror}); "
                "CONCORD_CACHE names another folder for what is under way"
            )
        return InputError(f"--output {self.place.parent.parent}: not a folder to write to ({error.strerror})")

    def fetch(self, *names: str) -> None:
        """Bring these files, and all files of these folders; what is not kept is removed here."""
        for name in names if self.remote else ():
            path = self._here(name)
            with self._storage(name) as (files, root):
                fetch(files, root, path)

    def fetch_tree(self, name: str) -> Path:
        """Bring its folder ``name`` with all that is below; gives where it is on this machine."""
        self.fetch(name)
        return self._here(name)

    def keep(self, *names: str) -> None:
        """Send these files, and all files of these folders, in this order."""
        for name in names if self.remote else ():
            path = self.path / name
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
        """Remove a file or a folder of it, here and where it is kept, if it is there."""
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
        """Remove what this machine has of it; its lock, and what is kept elsewhere, stay."""
        for each in self.path.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != LOCK:
                each.unlink(missing_ok=True)

    def delete(self) -> None:
        """Remove all of it; what cannot be removed stays."""
        with contextlib.suppress(StorageError):
            self.remove("")

    def place_for_ray(self) -> dict[str, Any]:
        """As Ray Train and Ray Tune take it: they write there from whatever node it is."""
        if not self.remote:
            return {"storage_path": str(self.place.resolve())}
        with self._storage() as (files, root):
            return {"storage_path": root, "storage_filesystem": files}

    def problem(self) -> str | None:
        """What is wrong with the storage now, in a line; None if it answers."""
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
        """Where a file of it is on this machine; its name may come from a file that anybody wrote."""
        if not is_below(name):
            raise InputError(f"{self.display_path}: {name} is no name of a file below it")
        return self.path / name

    def _put(self, name: str, content: bytes) -> None:
        with self._storage(name) as (files, path):
            if files.type_name not in ("s3", "gcs", "abfs"):  # which know objects only, and no folders
                files.create_dir(path.rpartition("/")[0])
            with files.open_output_stream(path, compression=None) as target:
                target.write(content)
