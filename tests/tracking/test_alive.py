"""Everybody who reaches the store knows which runs are at work, and whose process is gone."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_server import Server
from recorded import described
from waiting import wait_for

from concord.interface.commands import runs
from concord.record import OpenRun, folder_of, write_record
from concord.tracking import Mirror, Store, alive
from concord.tracking.alive import ALIVE


@contextlib.contextmanager
def at_work(store: Store, folder: Path, name: str, group: OpenRun | None = None) -> Iterator[OpenRun]:
    """A run, or a run of a group, that has begun and is being sent; nothing is said of its end."""
    place = folder_of(folder, name)
    place.make()
    tags = {"concord.job": "mine", "concord.version": "1"}
    about = described(tracking={"experiment": "alive", "parameters": {}, "tags": tags, "key": name})
    with contextlib.closing(OpenRun(place, write_record(place, "run", about))) as run:
        mirror = Mirror(store)
        try:
            mirror.add(run, group)
            run.append("began", resumed=False)
            yield run
        finally:
            mirror.close(30.0)


def statuses(store: Store, status: str | None = None) -> dict[str, str]:
    """As a client sees them, who has the store alone."""
    found = runs(output="/nowhere/at/all", tracking_uri=store.uri, status=status, job="mine")
    return {run.name: run.status.lower() for run in found.tracked}


def tag(store: Store, run: OpenRun) -> str:
    return "" if run.run_id is None else store.run(run.run_id).tags.get(ALIVE, "")


def taken_for_dead(store: Store, run_id: str, last: int) -> None:
    store.client.set_tag(run_id, ALIVE, f"interrupted {last}")
    store.client.set_terminated(run_id, "KILLED", last)


def test_a_run_that_is_deleted_while_it_is_at_work_comes_back_with_its_next_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path)
    monkeypatch.setattr("concord.tracking.mirror.EVERY_SECONDS", 0.1)
    with at_work(store, tmp_path, "deleted") as run:
        wait_for(lambda: tag(store, run), 60)
        store.delete_run(str(run.run_id))
        wait_for(lambda: statuses(store) == {"deleted": "running"}, 60)
        run.append("ended", status="FINISHED")
    assert statuses(store) == {"deleted": "finished"}


@pytest.mark.parametrize("kind", ["file", pytest.param("server", marks=pytest.mark.slow)])
def test_a_run_that_fell_silent_is_interrupted_for_everybody_and_one_at_work_runs(
    kind: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path, server.uri if kind == "server" else None)
    monkeypatch.setattr("concord.tracking.mirror.EVERY_SECONDS", 0.1)
    before = {name: status for name, status in statuses(store).items() if name not in ("lost", "busy")}
    with at_work(store, tmp_path, "lost") as lost:
        wait_for(lambda: tag(store, lost), 60)
    last = int(tag(store, lost))
    with at_work(store, tmp_path, "busy") as busy:
        wait_for(lambda: tag(store, busy), 60)
        assert statuses(store) == before | {"lost": "running", "busy": "running"}
        monkeypatch.setattr(alive, "SILENT_SECONDS", time.time() - last / 1000 - 0.01)  # as if it were later
        first = tag(store, busy)
        wait_for(lambda: tag(store, busy) > first, 60)
        assert statuses(store) == before | {"lost": "interrupted", "busy": "running"}
        assert store.run(str(lost.run_id)).status == "KILLED"
        assert store.client.get_run(lost.run_id).info.end_time == last
        assert statuses(store, "interrupted") == {"lost": "interrupted"}
        assert "lost" not in statuses(store, "killed")

        # Somebody whose clock is wrong, or who looks in an outage, takes it for dead; its next sign says otherwise.
        seen = store.run(str(busy.run_id))
        wait_for(lambda: tag(store, busy) != seen.tags[ALIVE], 60)
        store.end_silent_run(seen, {ALIVE: f"interrupted {last}"}, last)  # it has said more since it was read
        assert store.run(str(busy.run_id)).status == "RUNNING"
        taken_for_dead(store, str(busy.run_id), last)
        wait_for(lambda: store.run(str(busy.run_id)).status == "RUNNING" and tag(store, busy).isdecimal(), 60)
        monkeypatch.setattr("concord.tracking.mirror.EVERY_SECONDS", 600.0)
        taken_for_dead(store, str(busy.run_id), last)
        busy.append("ended", status="KILLED")  # its own end counts
    assert statuses(store) == before | {"lost": "interrupted", "busy": "killed"}

    lost.began = None
    with at_work(store, tmp_path, "lost") as lost:  # resumed
        wait_for(lambda: tag(store, lost).isdecimal(), 60)
        lost.append("ended", status="KILLED")
    assert statuses(store)["lost"] == "killed"


def test_a_run_of_a_group_is_at_work_as_long_as_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    monkeypatch.setattr("concord.tracking.mirror.EVERY_SECONDS", 0.1)
    with at_work(store, tmp_path, "group") as group:
        wait_for(lambda: tag(store, group), 60)
        with at_work(store, tmp_path, "member", group) as member:
            wait_for(lambda: member.run_id, 60)
        assert tag(store, member) == ""
        monkeypatch.setattr(alive, "SILENT_SECONDS", 5.0)
        assert statuses(store) == {"group": "running", "member": "running"}
    monkeypatch.setattr(alive, "SILENT_SECONDS", 0.0)
    assert statuses(store) == {"group": "interrupted", "member": "interrupted"}


def test_a_run_that_says_nothing_of_itself_stays_as_it_is(tmp_path: Path) -> None:
    """Of another program, or of an earlier version."""
    store = Store.open(tmp_path)
    store.start_run("alive", "other", {}, {"concord.job": "mine", "concord.version": "1"})
    assert statuses(store) == {"other": "running"}
