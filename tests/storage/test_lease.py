"""Of machines that share an address or a network disk one works in a folder; the others are told who.

Nobody waits for a dead one.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3_server
from command_line import outcome

from concord.errors import InputError
from concord.record import folder_of
from concord.storage import Folder, lease, leased
from concord.storage.filesystem import StorageError

OUTPUT = Path(f"s3://{s3_server.BUCKET}/leases")


@pytest.fixture
def folder(s3: s3_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    s3.use(monkeypatch)
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / "cache"))
    folder = folder_of(OUTPUT, tmp_path.name)
    yield folder
    assert files(folder) == []


def files(folder: Folder) -> list[str]:
    return Folder(OUTPUT / "leases" / "runs" / folder.place.name).names()


def test_a_second_machine_is_told_who_works_and_since_when(folder: Folder) -> None:
    with leased(folder, "run", "ann"):
        assert len(files(folder)) == 1
        began = time.monotonic()
        with pytest.raises(InputError) as refused, leased(folder, "run", "bob"):
            pass
        assert time.monotonic() - began < 2 * lease._TRIES
        line = (
            rf"--name {folder.place.name}: another process is using this run: ann on \S+ since [\d: -]+ UTC, whose last"
        )
        assert re.match(line, str(refused.value))
        assert len(files(folder)) == 1
    with leased(folder, "run", "bob"):
        pass


def test_the_lease_of_a_dead_holder_runs_out(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = lease._Lease(folder, "run", "ann")
    dead.take()
    with pytest.raises(InputError), leased(folder, "run", "bob"):
        pass
    monkeypatch.setattr(lease, "SILENT_SECONDS", -1.0)  # as if it were later
    with leased(folder, "run", "bob"):
        assert dead.own not in files(folder)
        # Its process was only stopped, and finds that another one works there now.
        ended = threading.Event()
        monkeypatch.setattr(lease, "EVERY_SECONDS", 0.01)
        monkeypatch.setattr(lease.os, "_exit", lambda status: ended.set() if status == 1 else None)
        over = threading.Event()
        signs = threading.Thread(target=dead.sign_until, args=(over,), daemon=True)
        signs.start()
        assert ended.wait(30)
        over.set()
        signs.join()


def test_a_holder_at_work_keeps_its_lease(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs are by the storage's clock, in whole seconds here."""
    monkeypatch.setattr(lease, "EVERY_SECONDS", 0.1)
    monkeypatch.setattr(lease, "SILENT_SECONDS", 2.0)
    with leased(folder, "run", "ann"):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            with (
                pytest.raises(InputError, match="another process is using this run: ann"),
                leased(folder, "run", "bob"),
            ):
                pass


class Interrupted(lease._Lease):
    """A lease whose process does something else between its question and its answer."""

    def __init__(self, folder: Folder, between: Callable[[lease._Lease], None]) -> None:
        super().__init__(folder, "run", "ann")
        self.between = between

    def _others(self, just_written: str) -> tuple[dict[str, float], list[str]]:
        found = super()._others(just_written)
        if just_written.endswith(".asks"):
            self.between(self)
        return found


def test_who_stood_still_until_its_question_ran_out_finds_the_other_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = lease._Lease(folder, "run", "bob")

    def stand_still(_: lease._Lease) -> None:
        with monkeypatch.context() as later:
            later.setattr(lease, "SILENT_SECONDS", -1.0)
            other.take()

    with pytest.raises(InputError, match="another process is using this run: bob"):
        Interrupted(folder, stand_still).take()
    assert files(folder) == [other.own]
    other.remove(other.own)


def test_a_holder_whose_lease_was_taken_while_it_signs_gives_up(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = lease._Lease(folder, "run", "bob")

    class Slow(lease._Lease):
        def _write(self, name: str) -> None:
            if self.own in self._times():  # it stands still between its look and its sign
                with monkeypatch.context() as later:
                    later.setattr(lease, "SILENT_SECONDS", -1.0)
                    other.take()
            super()._write(name)

    slow = Slow(folder, "run", "ann")
    slow.take()
    assert not slow.sign()
    assert files(folder) == [other.own]
    assert other.sign()
    other.remove(other.own)


def test_a_question_that_another_removed_is_asked_again(folder: Folder) -> None:
    removed = list[str]()

    class Removed(lease._Lease):
        def _write(self, name: str) -> None:
            super()._write(name)
            if name.endswith(".asks") and not removed:
                self.remove(name)
                removed.append(name)

    asking = Removed(folder, "run", "ann")
    asking.take()
    assert removed
    assert files(folder) == [asking.own]
    asking.remove(asking.own)


def test_an_outage_after_the_question_leaves_no_question(folder: Folder) -> None:
    def away(_: lease._Lease) -> None:
        raise StorageError("away")

    with pytest.raises(StorageError, match="away"):
        Interrupted(folder, away).take()
    assert files(folder) == []


def test_of_many_that_come_at_once_at_most_one_works(folder: Folder) -> None:
    at_work, most, refused, lock = 0, 0, 0, threading.Lock()

    def work() -> None:
        nonlocal at_work, most, refused
        try:
            with leased(folder, "run", "ann"):
                with lock:
                    at_work += 1
                    most = max(most, at_work)
                time.sleep(0.02)
                with lock:
                    at_work -= 1
        except InputError:
            with lock:
                refused += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 1


def test_a_run_that_works_elsewhere_is_refused_before_anything_is_made(
    folder: Folder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    words = ["--output", OUTPUT, "--tracking-uri", store, "--name", folder.place.name, "--epochs", "1"]
    with leased(folder, "run", "ann"):
        status, result = outcome(capsys, "train", "synthetic", *map(str, words))
    assert status == 2
    assert result["error"].startswith(f"--name {folder.place.name}: another process is using this run: ann on ")
    assert folder.names() == []


def test_on_a_network_disk_a_lease_separates_machines_whose_locks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, "a")
    with leased(folder, "run", "ann"), leased(folder, "run", "bob"):  # a disk of this machine: its lock is enough
        assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(lease, "on_network_disk", lambda _: True)
    with leased(folder, "run", "ann"):
        with (
            pytest.raises(InputError, match="another process is using this run: ann on "),
            leased(folder, "run", "bob"),
        ):
            pass
        with leased(folder_of(tmp_path, "b"), "run", "bob"):
            pass
    assert not [*tmp_path.iterdir()]


def test_a_network_disk_is_known_by_its_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    kinds = {"": "ext4", "lab": "nfs4", "lab/scratch disk": "ext4", "bucket": "fuse.s3fs", "laborious": "xfs"}
    lines = [f"x {tmp_path / name} {kind} rw 0 0".replace("scratch ", r"scratch\040") for name, kind in kinds.items()]
    mounts.write_text("\n".join(lines))
    shared = {"lab", "lab/runs", "bucket/runs"}
    for name in (*shared, "runs", "lab/scratch disk/runs", "laborious/runs"):
        assert lease.on_network_disk(tmp_path / name, mounts) == (name in shared), name
    assert not lease.on_network_disk(tmp_path, tmp_path / "nothing")


def test_a_run_that_works_elsewhere_is_not_deleted(
    folder: Folder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = ["--tracking-uri", f"sqlite:///{tmp_path / 'store.db'}", "--output", str(OUTPUT)]
    words = ["--epochs", "1", "--no-register", "--name", folder.place.name]
    assert outcome(capsys, "train", "synthetic", *words, *store)[0] == 0
    with leased(folder, "run", "ann"):
        status, result = outcome(capsys, "runs", "delete", folder.place.name, "--yes", *store)
    assert status == 2
    assert "another process is using this run: ann on " in result["error"]
    assert "record.json" in folder.names()
