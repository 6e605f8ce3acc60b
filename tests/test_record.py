"""Records keep every appended event, a kill loses no line, and MLflow receives each event once."""

import contextlib
import json
import logging
import math
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow_server import NOWHERE, Server
from waiting import wait_for

from concord.errors import InputError, RunFailedError
from concord.record import (
    EVENTS,
    RECORD,
    Events,
    read_events,
    read_history,
    read_record,
    require_record,
    write_record,
)
from concord.storage import Folder, JsonLines, append_line, read_lines
from concord.tracking import Mirror, Store
from concord.tracking.mirror import CURSOR


def logged(store: Store, run_id: str, key: str) -> list[tuple[int, float]]:
    """Every point in the store; a point that is stored twice appears twice."""
    return sorted((point.step, point.value) for point in store.client.get_metric_history(run_id, key))


def events_of(folder: Path, *metrics: tuple[int, dict[str, float]]) -> Events:
    folder.mkdir(parents=True, exist_ok=True)
    events = Events(Folder(folder))
    for step, values in metrics:
        events.append("metrics", step=step, metrics=values)
    return events


# --- the files


def test_a_record_is_read_as_written_and_only_as_what_it_is(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "output" / "runs" / "a")
    folder.make()
    assert read_record(folder) is None
    with pytest.raises(InputError, match=r"^--name a: there is no such run in .*/output$"):
        require_record(folder)
    written = write_record(folder, "run", {"job": "j", "config": {"lr": 0.1}})
    assert read_record(folder) == written
    with pytest.raises(InputError, match=r"^--name a: .*/a is a run, not a study; give another name$"):
        read_record(folder, "study")


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (RECORD, '{"version": 2, "kind": "run", "job": "j", "config": {}}', "has version 2, this Concord reads 1"),
        (RECORD, '{"job": "j"}', "cannot be read (not a record)"),
        (RECORD, '{"job": ', "cannot be read (Expecting value"),
        ("run.json", '{"job": "j", "run_id": "1", "config": {}}', "run.json is of an earlier version of Concord"),
        ("study.json", "{}", "study.json is of an earlier version of Concord"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_in_a_line(tmp_path: Path, file: str, text: str, problem: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(InputError) as refused:
        read_record(Folder(tmp_path))
    assert problem in str(refused.value)
    assert str(refused.value).startswith(f"--name {tmp_path.name}: ")
    assert "\n" not in str(refused.value)


_METRICS = st.dictionaries(st.text(max_size=5), st.floats(), max_size=3)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("metrics"), st.fixed_dictionaries({"step": st.integers(0, 9), "metrics": _METRICS})),
        st.tuples(
            st.just("evaluated"),
            st.fixed_dictionaries({"epoch": st.integers(1, 4), "step": st.integers(0, 9), "metrics": _METRICS}),
        ),
        st.tuples(st.just("checkpoint"), st.fixed_dictionaries({"name": st.sampled_from("abc")})),
        st.tuples(st.just("began"), st.fixed_dictionaries({"resumed": st.booleans()})),
        st.tuples(st.just("ended"), st.fixed_dictionaries({"status": st.sampled_from(["FINISHED", "KILLED"])})),
    ),
    max_size=12,
)


@given(happened=_EVENTS, run=st.sampled_from(["", "trial 3"]), torn=st.integers(1, 30))
def test_what_was_appended_is_read_also_after_a_kill_in_mid_line(
    tmp_path_factory: pytest.TempPathFactory, happened: list[tuple[str, dict[str, Any]]], run: str, torn: int
) -> None:
    folder = tmp_path_factory.mktemp("record")
    events = Events(Folder(folder))
    for name, fields in happened:
        events.append(name, run, **fields)
    events.close()
    whole = (folder / EVENTS).read_bytes()
    with (folder / EVENTS).open("ab") as file:
        file.write(b'{"event": "metrics", "at": 1795193052061}'[:torn])
    again = Events(Folder(folder))
    again.close()
    assert (folder / EVENTS).read_bytes() == whole
    assert str(again.history) == str(events.history)  # as text, since NaN is not equal to itself
    found = [(event.name, event.run, dict(event.fields)) for event in read_events(folder / EVENTS)]
    assert json.dumps(found) == json.dumps([(name, run, fields) for name, fields in happened])


def test_of_two_events_of_one_step_the_later_counts(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    events.append("began", resumed=False)
    for value in (1.0, 2.0):
        for epoch in (1, 2):
            events.append("evaluated", epoch=epoch, step=10 * epoch, metrics={"loss": value})
            events.append("checkpoint", name=f"checkpoint_{epoch}", step=10 * epoch)
        events.append("began", resumed=True)
    assert events.own.evaluations == {(1, 10): {"loss": 2.0}, (2, 20): {"loss": 2.0}}
    assert events.own.checkpoints == ["checkpoint_1", "checkpoint_2"]
    events.append("began", resumed=False)
    assert events.own.evaluations == {}
    assert read_history(Folder(tmp_path))[""] == events.own


def test_a_resumed_run_that_ends_earlier_ends_with_its_own_evaluation(tmp_path: Path) -> None:
    """As where ``--stop-spread`` is reached earlier with another number of workers."""
    events = events_of(tmp_path)
    events.append("began", resumed=False)
    for epoch in (1, 2, 3, 4):
        events.append("evaluated", epoch=epoch, step=10 * epoch, metrics={"loss": 1 / epoch})
        if epoch in (1, 4):  # the last one is damaged
            events.append("checkpoint", name=f"checkpoint_{epoch}", step=10 * epoch)
    events.append("began", resumed=True)
    assert list(events.own.evaluations) == [(1, 10), (2, 20), (3, 30), (4, 40)]
    events.append("evaluated", epoch=2, step=20, metrics={"loss": 0.4})
    events.append("checkpoint", name="checkpoint_2", step=20)
    assert events.own.evaluations == {(1, 10): {"loss": 1.0}, (2, 20): {"loss": 0.4}}
    assert events.own.checkpoints[-1] == "checkpoint_2"
    assert read_history(Folder(tmp_path))[""] == events.own


def test_garbage_in_the_middle_is_refused_by_line_and_changes_nothing(tmp_path: Path) -> None:
    events_of(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0})).close()
    lines = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    for garbage in (b"\x00\x00\n", b"[1, 2]\n", b'{"event": "metrics"}\n', b"{}\n"):
        content = lines[0] + garbage + lines[1]
        (tmp_path / EVENTS).write_bytes(content)
        with pytest.raises(InputError, match=r"events\.jsonl: line 2 is not an event; restore the file, or give"):
            Events(Folder(tmp_path))
        assert (tmp_path / EVENTS).read_bytes() == content


def test_a_folder_that_was_removed_is_missed_at_the_next_event(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    events = events_of(folder, (1, {"a": 1.0}))
    (folder / EVENTS).unlink()
    for act in (lambda: events.append("metrics", step=2, metrics={}), events.sync):
        with pytest.raises(RunFailedError, match=rf"^{folder}: was removed while the run was at work$"):
            act()


def test_a_full_disk_costs_metrics_and_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "concord.record")
    events = events_of(tmp_path, (1, {"a": 1.0}))
    length = (tmp_path / EVENTS).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + 10, hard))  # ten bytes are left: a line is cut short
    try:
        events.append("metrics", step=2, metrics={"a": 2.0})
        events.append("metrics", step=3, metrics={"a": 3.0})
        with pytest.raises(RunFailedError, match=r"events\.jsonl: no space left on the disk"):
            events.append("checkpoint", name="a", step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    events.append("metrics", step=4, metrics={"a": 4.0})
    assert len([message for message in caplog.messages if "metrics are being lost" in message]) == 1
    assert [event.fields["step"] for event in read_events(tmp_path / EVENTS)] == [1, 4]


def test_what_is_left_of_a_torn_line_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "lines.jsonl"
    append_line(file, {"a": 1})
    whole = file.read_bytes()
    for torn in (b'{"a": 2', b"x" * 200_000):
        file.write_bytes(whole + torn)
        append_line(file, {"a": 3})
        assert list(read_lines(file)) == [{"a": 1}, {"a": 3}]
    file.write_bytes(b'{"a"')
    with contextlib.closing(JsonLines(file)) as lines:
        assert lines.end == 0
        lines.append(4)
    assert list(read_lines(file)) == [4]


# --- the mirror


def test_events_recorded_through_an_outage_arrive_exactly_once(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "concord.tracking")
    store = Store.open(tmp_path, server.uri)
    run_id = store.start_run("outage", "named", {}, {})
    folder = tmp_path / "run"
    events = events_of(folder, *((step, {"loss": 1 / (step + 1)}) for step in range(100)))
    mirror = Mirror(store, run_id, Folder(folder))
    wait_for(lambda: mirror.unsent == 0)  # else the server may die in mid answer
    assert len(logged(store, run_id, "loss")) == 100

    server.kill()
    for step in range(100, 2000):
        events.append("metrics", step=step, metrics={"loss": 1 / (step + 1)})
    wait_for(lambda: len(caplog.messages) == 1)
    time.sleep(2)  # a second attempt, but no second message
    assert caplog.messages == [
        f"tracking at {server.uri} is not answering (Connection refused); events are kept in {folder / EVENTS}"
    ]
    server.start()
    events.append("metrics", step=7, metrics={"odd": math.nan, "high": math.inf, "low": -math.inf})
    events.append("ended", status="FINISHED")
    wait_for(lambda: len(caplog.messages) == 2)
    assert "answers again" in caplog.messages[1]
    assert mirror.close(20.0) == 0

    assert len(caplog.messages) == 2
    assert logged(store, run_id, "loss") == [(step, 1 / (step + 1)) for step in range(2000)]
    metrics = store.run(run_id).metrics
    assert math.isnan(metrics["odd"])
    assert (metrics["high"], metrics["low"]) == (math.inf, -math.inf)
    assert store.run(run_id).status == "FINISHED"


def test_what_a_store_had_not_taken_is_sent_later_and_nothing_twice(store: Store, run_id: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    events = events_of(tmp_path, (0, {"a": 0.0}))
    assert Mirror(store, run_id, folder).close(10.0) == 0
    events.append("metrics", step=1, metrics={"a": 1.0, "b": 1.0})
    assert Mirror(Store(NOWHERE, None), run_id, folder).close(0.0) == 1
    events.append("metrics", step=2, metrics={"a": 2.0})
    assert Mirror(store, run_id, folder).close(10.0) == 0
    (tmp_path / CURSOR).unlink()  # without a record of the sent events
    assert Mirror(store, run_id, folder).close(10.0) == 0
    assert logged(store, run_id, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert logged(store, run_id, "b") == [(1, 1.0)]


@pytest.mark.parametrize("lost", ["the last events", "a part of a line"])
def test_a_cursor_that_does_not_fit_the_events_sends_all_and_nothing_twice(
    store: Store, run_id: str, tmp_path: Path, lost: str
) -> None:
    """As where a machine lost the end of the file, or its storage has an earlier one."""
    folder = Folder(tmp_path)
    events_of(tmp_path, *((step, {"a": step}) for step in range(5))).close()
    assert Mirror(store, run_id, folder).close(10.0) == 0
    first, *_ = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    if lost == "the last events":
        (tmp_path / EVENTS).write_bytes(first)
    else:
        append_line(tmp_path / CURSOR, len(first) + 5)
    events = events_of(tmp_path)
    mirror = Mirror(store, run_id, folder)
    for step in range(5, 10):
        events.append("metrics", step=step, metrics={"a": step})
    events.append("ended", status="FINISHED")
    assert mirror.close(10.0) == 0
    assert logged(store, run_id, "a") == [(step, float(step)) for step in range(10)]
    assert store.run(run_id).status == "FINISHED"


def test_a_killed_process_loses_no_event(store: Store, run_id: str, tmp_path: Path) -> None:
    code = f"""
        import os, pathlib, signal
        from concord.record import Events
        from concord.storage import Folder
        from concord.tracking import Mirror, Store
        folder = Folder(pathlib.Path({str(tmp_path)!r}))
        events = Events(folder)
        mirror = Mirror(Store({NOWHERE!r}, None), {run_id!r}, folder)
        for step in range(500):
            events.append("metrics", step=step, metrics={{"a": step, "b": -step}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -signal.SIGKILL
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"event":"metrics","at":179519305206')  # as after a crash of the machine
    events = events_of(tmp_path, (500, {"a": 500, "b": -500}))
    events.close()
    assert Mirror(store, run_id, Folder(tmp_path)).close(10.0) == 0
    assert logged(store, run_id, "a") == [(step, float(step)) for step in range(501)]
    assert logged(store, run_id, "b") == [(step, float(-step)) for step in range(501)]


def test_more_metrics_than_one_call_takes_arrive(store: Store, run_id: str, tmp_path: Path) -> None:
    events_of(tmp_path, (1, {f"m{index}": float(index) for index in range(2500)}), (2, {"last": 1.0}))
    assert Mirror(store, run_id, Folder(tmp_path)).close(20.0) == 0
    assert len(store.run(run_id).metrics) == 2501


def test_a_run_that_is_gone_is_not_asked_for_for_ever(
    store: Store, run_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "concord.tracking")
    events = events_of(tmp_path, (1, {"a": 1.0}))
    mirror = Mirror(store, "0" * 32, Folder(tmp_path))
    wait_for(lambda: bool(caplog.messages))
    events.append("metrics", step=2, metrics={"a": 2.0})
    assert mirror.close(10.0) == 2
    (message,) = caplog.messages
    assert "refuses events" in message
    assert "not found" in message
    assert Mirror(store, run_id, Folder(tmp_path)).close(10.0) == 0  # another run accepts the events
    assert logged(store, run_id, "a") == [(1, 1.0), (2, 2.0)]


def test_runs_of_a_group_are_children_with_parameters_tags_and_ends(store: Store, run_id: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    events = events_of(tmp_path)
    for trial in range(3):
        key = f"trial {trial}"
        events.append("began", key, name=f"s {key}", parameters={"lr": trial, "api_key": "x"}, tags={"kind": "trial"})
        events.append("evaluated", key, epoch=1, step=5, metrics={"loss": trial / 2})
    events.append("ended", "trial 0", status="FINISHED", metrics={"loss": 0.0})
    events.append("ended", "trial 1", status="FAILED", failure="--lr 1: too much")
    assert Mirror(store, run_id, folder).close(20.0) == 0

    def children() -> dict[str, Any]:
        found = store.search(f"tags.`mlflow.parentRunId` = '{run_id}'")
        return {run.run_id: run for run in found}

    first = children()
    assert sorted((run.name, run.status) for run in first.values()) == [
        ("s trial 0", "FINISHED"),
        ("s trial 1", "FAILED"),
        ("s trial 2", "RUNNING"),
    ]
    by_name = {run.name: run for run in first.values()}
    assert by_name["s trial 1"].tags["concord.failure"] == "--lr 1: too much"
    assert by_name["s trial 1"].parameters == {"lr": "1", "api_key": "***"}
    assert by_name["s trial 2"].metrics == {"loss": 1.0}

    # A killed trial continues in its child run, and a failed trial gets a second one; also after the cursor is lost.
    (tmp_path / CURSOR).unlink()
    events.append("began", "trial 2", name="s trial 2", parameters={"lr": 2})
    events.append("ended", "trial 2", status="FINISHED")
    events.append("began", "trial 1", name="s trial 1", parameters={"lr": 1}, anew=True)
    events.append("ended", "trial 1", status="FINISHED")
    assert Mirror(store, run_id, folder).close(20.0) == 0
    second = children()
    assert len(second) == 4
    assert second[by_name["s trial 2"].run_id].status == "FINISHED"
    assert sorted(run.status for run in second.values() if run.name == "s trial 1") == ["FAILED", "FINISHED"]


def test_artifacts_are_sent_with_their_folder(store: Store, run_id: str, tmp_path: Path) -> None:
    events = events_of(tmp_path)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.txt").write_text("a")
    events.append("artifact", path="figures/a.txt")
    events.append("artifact", path="figures/removed.txt")
    assert Mirror(store, run_id, Folder(tmp_path)).close(20.0) == 0
    assert [each.path for each in store.client.list_artifacts(run_id, "figures")] == ["figures/a.txt"]


def test_recording_costs_the_loop_microseconds(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    metrics = dict.fromkeys(("loss", "accuracy", "kept", "norm", "rate"), 0.123456)
    start = time.thread_time()
    for step in range(10_000):
        events.append("metrics", step=step, metrics=metrics)
    assert time.thread_time() - start < 1.0
