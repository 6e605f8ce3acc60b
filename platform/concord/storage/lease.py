"""Leases: who works in a folder at an address or on a network disk, where a lock may not reach other machines.

A holder has a file of its own beside the folder, ``leases/KIND/NAME/…``, and writes it again every few seconds. Its
time, by the storage's clock, is the holder's last sign; after a while without one the lease has run out. Who wants the
folder writes a file first and then looks at the others, so that of two who come at once at least one sees the other.
That needs lists that show what has been written, which these storages have, and no conditional writes, which would need
a client and credentials beside PyArrow's, and which network disks lack.
"""

import contextlib
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from concord.storage.cache import entries
from concord.storage.filesystem import StorageError, filesystem, in_one_line
from concord.storage.folder import Folder
from concord.storage.holder import HeldError, Holder

EVERY_SECONDS = 10.0
"""Between two signs of a holder, and of a run in MLflow."""
SILENT_SECONDS = 45.0
"""After this time without a sign a lease has run out, and a run is not at work."""
# File systems of Linux that machines share; with some options, or without a service, their locks are local.
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "ocfs2", "gfs2")
_TRIES, _LONGEST_PAUSE_SECONDS = 4, 0.4
_logger = logging.getLogger("concord.storage")


@contextlib.contextmanager
def leased(folder: Folder, what: str, user: str | None) -> Iterator[None]:
    """Hold a folder's lease while the body runs; of a folder on a disk of this machine nothing, its lock is enough.

    ``what`` is run, study or comparison, and ``user`` who works here, for the error of the others.

    Raises:
        HeldError: another process, perhaps on another machine, works in it.
        StorageError: the storage does not answer.
    """
    if not folder.remote and not on_network_disk(folder.path):
        yield
        return
    lease = _Lease(folder, what, user)
    lease.take()
    over = threading.Event()
    signs = threading.Thread(target=lease.sign_until, args=(over,), name="concord-lease", daemon=True)
    signs.start()
    try:
        yield
    finally:
        over.set()
        signs.join()
        with contextlib.suppress(StorageError):
            lease.remove(lease.own)
            lease.remove_folders()


def on_network_disk(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a folder is on a disk that other machines may share; its locks may be of this machine alone."""
    kinds: dict[Path, str] = {}
    with contextlib.suppress(OSError, ValueError):  # not Linux
        for line in mounts.read_text(errors="replace").splitlines():
            _, place, kind, *_ = line.split(" ")
            kinds[Path(place.replace("\\040", " "))] = kind
    real = path.resolve()
    kind = next((kinds[each] for each in (real, *real.parents) if each in kinds), "")
    return kind.startswith("fuse.") or kind in _NETWORK


class _Lease:
    """A lease: the file ``TOKEN.holds``, and before it is taken ``TOKEN.asks``."""

    def __init__(self, folder: Folder, what: str, user: str | None) -> None:
        place = folder.place
        self._name, self._what = place.name, what
        self._folder = Folder(place.parent.parent / "leases" / place.parent.name / place.name)
        self._token = secrets.token_hex(8)
        self._about = Holder.here(user).write()

    @property
    def own(self) -> str:
        """The file of its holder."""
        return f"{self._token}.holds"

    def take(self) -> None:
        """Take it (HeldError if another has it, or if others ask at the same moment, of whom one may have got it)."""
        asks, live = f"{self._token}.asks", dict[str, float]()
        for _ in range(_TRIES):
            try:
                self._write(asks)
                live, silent = self._others(asks)
                if not live:
                    self._write(self.own)
                    # Meanwhile this process may have stood still, so that its question ran out for another.
                    found, _ = self._others(self.own)
                    live = {name: age for name, age in found.items() if name.endswith(".holds")}
                if not live:
                    for name in (asks, *silent):
                        self.remove(name)
                    return
            except StorageError:
                self._withdraw()
                raise
            self._withdraw()
            if holders := [name for name in live if name.endswith(".holds")]:
                break
            time.sleep(random.uniform(0.0, _LONGEST_PAUSE_SECONDS))  # both asked at once: one asks first again
        other = next(iter(holders or live))
        holder = self._read(other)
        sign = f", whose last sign is {max(live[other], 0):.0f} s old"
        raise HeldError(self._name, self._what, holder, sign)

    def _withdraw(self) -> None:
        """Remove this process's files, so that nobody waits for them."""
        for name in (f"{self._token}.asks", self.own):
            with contextlib.suppress(StorageError):
                self.remove(name)

    def sign_until(self, over: threading.Event) -> None:
        """Write it again every few seconds until it is over."""
        while not over.wait(EVERY_SECONDS):
            with contextlib.suppress(StorageError):  # an outage: training goes on, and the others do not see it either
                if not self.sign():
                    _logger.error("%s: its lease ran out and another process uses it; this one ends", self._name)
                    os._exit(1)

    def sign(self) -> bool:
        """Write it again; return whether the folder is still this process's.

        It is not if this process stood still for so long that another has taken the folder: the other removed the file,
        perhaps in the moment before it was written again. Who takes a folder writes its own file too before it looks,
        and gives up if it finds a sign of the holder: of two that meet here at least one sees the other.
        """
        if self.own not in self._times():
            return False
        self._write(self.own)
        live, _ = self._others(self.own)
        if any(name.endswith(".holds") for name in live):
            self._withdraw()
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file."""
        with self._storage() as (files, root), contextlib.suppress(FileNotFoundError):
            files.delete_file(f"{root}/{name}")

    def remove_folders(self) -> None:
        """Remove the folders of leases that are empty; an address has none."""
        if not self._folder.remote:
            with contextlib.suppress(OSError):
                for each in (self._folder.path, *self._folder.path.parents[:2]):
                    each.rmdir()

    @contextlib.contextmanager
    def _storage(self) -> Iterator[tuple[Any, str]]:
        from pyarrow import fs

        with in_one_line(self._folder.display_path, StorageError):
            place = self._folder.place
            yield filesystem(place) if self._folder.remote else (fs.LocalFileSystem(), str(place))

    def _times(self) -> dict[str, float | None]:
        """The files and their times, in seconds by the storage's clock; None if it has none."""
        with self._storage() as (files, root):
            times = {name: each.mtime_ns for name, each in entries(files, root).items()}
        return {name: None if at is None else at / 1e9 for name, at in times.items()}

    def _others(self, just_written: str) -> tuple[dict[str, float], list[str]]:
        """Of the others' files those with a sign and its age in seconds, and those that have run out."""
        times = self._times()
        if just_written not in times:  # another process took it for one that had run out, and removed it
            return {just_written: 0.0}, []
        now = times[just_written]
        if now is None:
            _logger.warning("%s: its storage has no times of files; start no second process on it", self._name)
            return {}, []
        ages = {name: now - at for name, at in times.items() if at is not None and not name.startswith(self._token)}
        live = {name: age for name, age in ages.items() if age <= SILENT_SECONDS}
        return live, [name for name in ages if name not in live]

    def _read(self, name: str) -> Holder:
        try:
            with self._storage() as (files, root), files.open_input_stream(f"{root}/{name}") as file:
                return Holder.read(file.read())
        except StorageError:
            return Holder()

    def _write(self, name: str) -> None:
        with self._storage() as (files, root):
            if files.type_name not in ("s3", "gcs", "abfs"):
                files.create_dir(root)
            with files.open_output_stream(f"{root}/{name}", compression=None) as file:
                file.write(self._about)
