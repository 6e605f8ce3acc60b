"""Records keep every appended event, a kill loses no line, and MLflow receives each event once."""

import contextlib
import dataclasses
import json
import logging
import math
import re
import resource
import shutil
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
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow_server import NOWHERE, Server
from recorded import described
from waiting import wait_for

from concord.errors import InputError, RunFailedError
from concord.record import (
    EVENTS,
    RECORD,
    OpenRun,
    Run,
    folder_of,
    read_events,
    read_record,
    read_run,
    require_run,
    write_record,
)
from concord.storage import Folder, JsonLines, append_line, read_lines
from concord.tracking import Mirror, Store, TrackedRun
from concord.tracking.mirror import CURSOR, track, tracking_key
from concord.tracking.store import PARENT


def logged(store: Store, run_id: str, key: str) -> list[tuple[int, float]]:
    """Every point in the store; a point that is stored twice appears twice."""
    return sorted((point.step, point.value) for point in store.client.get_metric_history(run_id, key))


def opened(folder: Path, *metrics: tuple[int, dict[str, float]], run_id: str | None = None) -> OpenRun:
    """A run's record, as it is or new, with these metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {"lr": 0.1, "api_key": "x"}
    tracking = {"experiment": "tests", "parameters": parameters, "tags": {"kind": "trial"}, "key": tracking_key()}
    about = described(run_id=run_id, tracking=tracking)
    run = OpenRun(Folder(folder), read_record(Folder(folder)) or write_record(Folder(folder), "run", about))
    for step, values in metrics:
        run.append("metrics", step=step, metrics=values)
    return run


def mirrored(store: Store, run: OpenRun, group: OpenRun | None = None) -> Mirror:
    """A mirror of this record."""
    mirror = Mirror(store)
    mirror.add(run, group)
    return mirror


def tracking_said(caplog: pytest.LogCaptureFixture, uri: str) -> list[str]:
    """What Concord's tracking logged of this store; the thread of a mirror that was left logs of its own."""
    said = [each.getMessage() for each in caplog.records if each.name == "concord.tracking"]
    return [line for line in said if line.startswith(f"tracking at {uri} ")]


def evaluations_of(folder: Path) -> dict[tuple[int, int], dict[str, float]]:
    """As they are read from the folder."""
    return require_run(Folder(folder)).evaluations


# --- the files


def test_a_record_is_read_as_written_and_only_as_what_it_is(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "output" / "runs" / "a")
    folder.make()
    assert read_record(folder) is None
    assert folder_of(tmp_path / "output", "a") == folder
    assert read_run(folder) is None
    with pytest.raises(InputError, match=r"^--name a: there is no such run in .*/output$"):
        require_run(folder)
    written = write_record(folder, "run", described(config={"lr": 0.1}))
    assert read_record(folder) == written
    with pytest.raises(InputError, match=r"^--name a: .*/a is a run, not a study; give another name$"):
        read_record(folder, "study")


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (RECORD, '{"version": 1, "kind": "run", "job": "j", "config": {}}', "has version 1, this Concord reads 2"),
        (RECORD, '{"job": "j"}', "cannot be read (version: Field required)"),
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
        st.tuples(
            st.just("checkpoint"), st.fixed_dictionaries({"name": st.sampled_from(["checkpoint_1", "checkpoint_2"])})
        ),
        st.tuples(st.just("began"), st.fixed_dictionaries({"resumed": st.booleans()})),
        st.tuples(st.just("ended"), st.fixed_dictionaries({"status": st.sampled_from(["FINISHED", "KILLED"])})),
    ),
    max_size=12,
)


@given(happened=_EVENTS, torn=st.integers(1, 30))
def test_what_was_appended_is_read_also_after_a_kill_in_mid_line(
    tmp_path_factory: pytest.TempPathFactory, happened: list[tuple[str, dict[str, Any]]], torn: int
) -> None:
    folder = tmp_path_factory.mktemp("record")
    run = opened(folder)
    for name, fields in happened:
        run.append(name, **fields)
    run.close()
    whole = (folder / EVENTS).read_bytes()
    with (folder / EVENTS).open("ab") as file:
        file.write(b'{"event": "metrics", "at": 1795193052061}'[:torn])
    again, read = opened(folder), read_run(Folder(folder))
    again.close()
    assert (folder / EVENTS).read_bytes() == whole
    assert read is not None
    for field in dataclasses.fields(Run):  # as text, since NaN is not equal to itself
        assert str(getattr(again, field.name)) == str(getattr(read, field.name)) == str(getattr(run, field.name))
    found = [(event.name, dict(event.fields)) for event in read_events(folder / EVENTS)]
    assert json.dumps(found) == json.dumps(happened)


def test_of_two_events_of_one_step_the_later_counts(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.append("began", resumed=False)
    for value in (1.0, 2.0):
        for epoch in (1, 2):
            run.append("evaluated", epoch=epoch, step=10 * epoch, metrics={"loss": value})
            run.append("checkpoint", name=f"checkpoint_{epoch}", step=10 * epoch)
        run.append("began", resumed=True)
    assert run.evaluations == {(1, 10): {"loss": 2.0}, (2, 20): {"loss": 2.0}}
    assert run.checkpoints == ["checkpoint_1", "checkpoint_2"]
    run.append("began", resumed=False)
    assert run.evaluations == {}
    assert evaluations_of(tmp_path) == run.evaluations


def test_a_resumed_run_that_ends_earlier_ends_with_its_own_evaluation(tmp_path: Path) -> None:
    """As where ``--stop-spread`` is reached earlier with another number of workers."""
    run = opened(tmp_path)
    run.append("began", resumed=False)
    for epoch in (1, 2, 3, 4):
        run.append("evaluated", epoch=epoch, step=10 * epoch, metrics={"loss": 1 / epoch})
        if epoch in (1, 4):  # the last one is damaged
            run.append("checkpoint", name=f"checkpoint_{epoch}", step=10 * epoch)
    run.append("began", resumed=True)
    assert list(run.evaluations) == [(1, 10), (2, 20), (3, 30), (4, 40)]
    run.append("evaluated", epoch=2, step=20, metrics={"loss": 0.4})
    run.append("checkpoint", name="checkpoint_2", step=20)
    assert run.evaluations == {(1, 10): {"loss": 1.0}, (2, 20): {"loss": 0.4}}
    assert run.checkpoints[-1] == "checkpoint_2"
    assert evaluations_of(tmp_path) == run.evaluations


def test_garbage_in_the_middle_is_refused_by_line_and_changes_nothing(tmp_path: Path) -> None:
    opened(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0})).close()
    lines = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    for garbage in (b"\x00\x00\n", b"[1, 2]\n", b'{"event": "metrics"}\n', b"{}\n"):
        content = lines[0] + garbage + lines[1]
        (tmp_path / EVENTS).write_bytes(content)
        with pytest.raises(
            InputError,
            match=r"events\.jsonl: line 2 is not an event \(.*\); restore the file, or give",
        ):
            OpenRun(Folder(tmp_path), {})
        assert (tmp_path / EVENTS).read_bytes() == content


def test_a_folder_that_was_removed_is_missed_at_the_next_event(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    run = opened(folder, (1, {"a": 1.0}))
    (folder / EVENTS).unlink()
    for act in (lambda: run.append("metrics", step=2, metrics={}), run.sync):
        with pytest.raises(RunFailedError, match=rf"^{folder}: was removed while the run was at work$"):
            act()


def test_a_full_disk_costs_metrics_and_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "concord.record")
    run = opened(tmp_path, (1, {"a": 1.0}))
    length = (tmp_path / EVENTS).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + 10, hard))  # ten bytes are left: a line is cut short
    try:
        run.append("metrics", step=2, metrics={"a": 2.0})
        run.append("metrics", step=3, metrics={"a": 3.0})
        with pytest.raises(RunFailedError, match=r"events\.jsonl: cannot be read or written \(File too large\)"):
            run.append("checkpoint", name="a", step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run.append("metrics", step=4, metrics={"a": 4.0})
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


def all_sent(folder: Path) -> bool:
    """Whether the store has taken all events."""
    return [*read_lines(folder / CURSOR)][-1:] == [(folder / EVENTS).stat().st_size]


def test_events_recorded_through_an_outage_arrive_exactly_once(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "concord.tracking")
    store = Store.open(tmp_path, server.uri)
    run_id = store.start_run("outage", "named", {}, {})
    folder = tmp_path / "run"
    run = opened(folder, *((step, {"loss": 1 / (step + 1)}) for step in range(100)), run_id=run_id)
    mirror = mirrored(store, run)
    wait_for(lambda: (folder / CURSOR).exists() and all_sent(folder))  # else the server may die in mid answer
    assert len(logged(store, run_id, "loss")) == 100

    server.kill()
    for step in range(100, 2000):
        run.append("metrics", step=step, metrics={"loss": 1 / (step + 1)})
    wait_for(lambda: len(tracking_said(caplog, server.uri)) == 1)
    time.sleep(2)  # a second attempt, but no second message
    reason = "(?:Connection refused|the connection broke in mid answer)"
    kept = rf"tracking at {server.uri} is not answering \({reason}\); events are kept in {folder / EVENTS}"
    (said,) = tracking_said(caplog, server.uri)
    assert re.fullmatch(kept, said)
    server.start()
    run.append("metrics", step=7, metrics={"odd": math.nan, "high": math.inf, "low": -math.inf})
    run.append("ended", status="FINISHED")
    wait_for(lambda: len(tracking_said(caplog, server.uri)) == 2)
    assert "answers again" in tracking_said(caplog, server.uri)[1]
    assert mirror.close(20.0) == 0

    assert len(tracking_said(caplog, server.uri)) == 2
    assert logged(store, run_id, "loss") == [(step, 1 / (step + 1)) for step in range(2000)]
    metrics = store.run(run_id).metrics
    assert math.isnan(metrics["odd"])
    assert (metrics["high"], metrics["low"]) == (math.inf, -math.inf)
    assert store.run(run_id).status == "FINISHED"


def test_what_a_store_had_not_taken_is_sent_later_and_nothing_twice(store: Store, run_id: str, tmp_path: Path) -> None:
    run = opened(tmp_path, (0, {"a": 0.0}), run_id=run_id)
    assert mirrored(store, run).close(10.0) == 0
    run.append("metrics", step=1, metrics={"a": 1.0, "b": 1.0})
    assert mirrored(Store(NOWHERE, None), run).close(0.0) == 1
    run.append("metrics", step=2, metrics={"a": 2.0})
    assert mirrored(store, run).close(10.0) == 0
    (tmp_path / CURSOR).unlink()  # without a record of the sent events
    assert mirrored(store, run).close(10.0) == 0
    assert logged(store, run_id, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert logged(store, run_id, "b") == [(1, 1.0)]


@pytest.mark.parametrize("lost", ["the last events", "a part of a line"])
def test_a_cursor_that_does_not_fit_the_events_sends_all_and_nothing_twice(
    store: Store, run_id: str, tmp_path: Path, lost: str
) -> None:
    """As where a machine lost the end of the file, or its storage has an earlier one."""
    run = opened(tmp_path, *((step, {"a": step}) for step in range(5)), run_id=run_id)
    run.close()
    assert mirrored(store, run).close(10.0) == 0
    first, *_ = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    if lost == "the last events":
        (tmp_path / EVENTS).write_bytes(first)
    else:
        append_line(tmp_path / CURSOR, len(first) + 5)
    run = opened(tmp_path)
    mirror = mirrored(store, run)
    for step in range(5, 10):
        run.append("metrics", step=step, metrics={"a": step})
    run.append("ended", status="FINISHED")
    assert mirror.close(10.0) == 0
    assert logged(store, run_id, "a") == [(step, float(step)) for step in range(10)]
    assert store.run(run_id).status == "FINISHED"


def test_a_killed_process_loses_no_event(store: Store, run_id: str, tmp_path: Path) -> None:
    code = f"""
        import os, pathlib, signal
        from concord.record import OpenRun, write_record
        from concord.storage import Folder
        from concord.tracking import Mirror, Store
        folder = Folder(pathlib.Path({str(tmp_path)!r}))
        run = OpenRun(folder, write_record(folder, "run", {described(run_id=run_id)!r}))
        mirror = Mirror(Store({NOWHERE!r}, None))
        mirror.add(run)
        for step in range(500):
            run.append("metrics", step=step, metrics={{"a": step, "b": -step}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -signal.SIGKILL
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"event":"metrics","at":179519305206')  # as after a crash of the machine
    run = opened(tmp_path, (500, {"a": 500, "b": -500}))
    run.close()
    assert mirrored(store, run).close(10.0) == 0
    assert logged(store, run_id, "a") == [(step, float(step)) for step in range(501)]
    assert logged(store, run_id, "b") == [(step, float(-step)) for step in range(501)]


def test_more_metrics_than_one_call_takes_arrive(store: Store, run_id: str, tmp_path: Path) -> None:
    many = {f"m{index}": float(index) for index in range(2500)}
    assert mirrored(store, opened(tmp_path, (1, many), (2, {"last": 1.0}), run_id=run_id)).close(20.0) == 0
    assert len(store.run(run_id).metrics) == 2501


def test_a_store_that_refuses_events_is_not_asked_for_ever(
    store: Store, run_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MlflowException("no metric of this name", INVALID_PARAMETER_VALUE)

    monkeypatch.setattr(store.client, "log_batch", refuse)
    caplog.set_level(logging.WARNING, "concord.tracking")
    run = opened(tmp_path, run_id=run_id)
    run.append("metrics", step=1, metrics={"a": 1.0})
    mirror = mirrored(store, run)
    wait_for(lambda: bool(tracking_said(caplog, store.uri)))
    run.append("metrics", step=2, metrics={"a": 2.0})
    assert mirror.close(10.0) == 2
    (message,) = tracking_said(caplog, store.uri)
    assert "refuses events" in message
    assert "no metric of this name" in message


@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("deleted", "before"),
        ("lost", "during"),
        *(
            pytest.param(what, when, marks=pytest.mark.slow)
            for what, when in (
                ("deleted", "during"),
                ("lost", "before"),
                *(("deleted with its experiment", at) for at in ("before", "during")),
            )
        ),
    ],
)
def test_a_run_that_is_deleted_or_lost_in_the_store_has_all_events_in_the_end(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, when: str
) -> None:
    caplog.set_level(logging.WARNING, "concord.tracking")
    experiment = f"{what} {when}"

    def remove() -> None:
        if what == "lost":
            _purge(store, run_id)
        elif what == "deleted":
            store.delete_run(run_id)
        else:
            store.client.delete_experiment(store.client.get_run(run_id).info.experiment_id)

    run = opened(tmp_path, (1, {"a": 1.0}))
    run.describe(tracking={**run.record["tracking"], "experiment": experiment})
    run_id = track(store, run)
    mirror = mirrored(store, run)
    wait_for(lambda: (tmp_path / CURSOR).exists() and all_sent(tmp_path))
    if when == "before":
        assert mirror.close(10.0) == 0
        remove()
        mirror = mirrored(store, run)
    else:
        remove()
    run.append("metrics", step=2, metrics={"a": 2.0})
    run.append("ended", status="FINISHED")
    assert mirror.close(20.0) == 0
    assert (run.run_id == run_id) == (what != "lost")
    assert logged(store, str(run.run_id), "a") == [(1, 1.0), (2, 2.0)]
    assert store.run(str(run.run_id)).status == "FINISHED"
    then = "lost run {}; a new run takes the whole record" if what == "lost" else "deleted run {}; it is restored"
    assert tracking_said(caplog, store.uri) == [f"tracking at {store.uri} has {then.format(run_id)}"]


def test_a_run_s_description_is_kept_with_its_record_and_sent_again(store: Store, tmp_path: Path) -> None:
    def description() -> str:
        return str(store.client.get_run(str(run.run_id)).data.tags["mlflow.note.content"])

    run = opened(tmp_path)
    mirror = mirrored(store, run)
    run.append("note", part="beginning", text="**mean** of 4 environments, in mongodb://ann:hunter2@host/x")
    assert mirror.close(20.0) == 0
    assert description() == "**mean** of 4 environments, in mongodb://ann:***@host/x"
    again = opened(tmp_path)  # a process that finishes it later; a killed one may have sent this before
    for _ in range(2):
        again.append("note", part="result", text="accuracy 0.9")
    mirror = mirrored(store, again)
    assert mirror.close(20.0) == 0
    assert description().splitlines()[0] == "accuracy 0.9"
    _purge(store, str(run.run_id))
    mirror = mirrored(store, again)
    assert mirror.close(20.0) == 0
    run = opened(tmp_path)
    assert description().startswith("accuracy 0.9\n\n**mean** of 4 environments")


def _purge(store: Store, run_id: str) -> None:
    """As ``mlflow gc`` does."""
    store.delete_run(run_id)
    store.client._tracking_client.store._hard_delete_run(run_id)


class Group:
    """A group in a store, and runs of it."""

    def __init__(self, store: Store, run_id: str, folder: Path) -> None:
        self.store, self.run_id, self.folder = store, run_id, folder
        self.run = opened(folder / "group", run_id=run_id)
        self.mirror = mirrored(store, self.run)

    def begin(self, number: int) -> OpenRun:
        """A run that begins, or goes on."""
        run = opened(self.folder / f"s-trial-{number}")
        self.mirror.add(run, self.run)
        run.append("began", resumed=bool(run.checkpoints))
        return run

    def children(self) -> list[TrackedRun]:
        """The runs that the store has, once it has all events."""
        assert self.mirror.close(20.0) == 0
        self.mirror = mirrored(self.store, self.run)
        found = self.store.search(f"tags.`mlflow.parentRunId` = '{self.run_id}'")
        return sorted(found, key=lambda run: (run.name, run.status))


def test_runs_of_a_group_are_children_with_parameters_tags_and_ends(store: Store, run_id: str, tmp_path: Path) -> None:
    group = Group(store, run_id, tmp_path)
    runs = [group.begin(number) for number in range(3)]
    for number, run in enumerate(runs):
        run.append("evaluated", epoch=1, step=5, metrics={"loss": number / 2, "accuracy/ood/d": 0.5})
    runs[0].append("ended", status="FINISHED", stopped="--stop-when loss < 1")
    runs[1].append("ended", status="FAILED", failure="--lr 1: too much")
    first = group.children()
    assert [(run.name, run.status) for run in first] == [
        ("s-trial-0", "FINISHED"),
        ("s-trial-1", "FAILED"),
        ("s-trial-2", "RUNNING"),
    ]
    assert (first[0].tags["concord.run"], first[0].tags["kind"]) == ("s-trial-0", "trial")
    assert first[0].tags["concord.stopped"] == "--stop-when loss < 1"
    assert first[1].tags["concord.failure"] == "--lr 1: too much"
    assert first[1].parameters == {"lr": "0.1", "api_key": "***"}
    assert first[2].metrics == {"loss": 1.0}  # the metrics of single environments are in the record alone
    assert [run.run_id for run in runs] == [run.run_id for run in first]

    # A killed run continues in its MLflow run, also after the cursor is lost; a failed one is trained anew in another.
    (tmp_path / "s-trial-2" / CURSOR).unlink()
    shutil.rmtree(tmp_path / "s-trial-1")
    for number in (1, 2):
        group.begin(number).append("ended", status="FINISHED")
    second = group.children()
    assert [(run.name, run.status) for run in second] == [
        ("s-trial-0", "FINISHED"),
        ("s-trial-1", "FAILED"),
        ("s-trial-1", "FINISHED"),
        ("s-trial-2", "FINISHED"),
    ]
    assert "concord.failure" not in second[2].tags
    assert second[3].run_id == first[2].run_id


@pytest.mark.parametrize("anew", [False, True])
def test_a_run_whose_id_was_not_recorded_is_found_by_its_key(
    store: Store, run_id: str, tmp_path: Path, anew: bool
) -> None:
    """As after a kill between MLflow's answer and the record; that of a run that is trained anew is another's."""
    folder = tmp_path / "s-trial-0"
    killed = opened(folder)
    killed.append("began", resumed=False)
    store.start_run("tests", "s-trial-0", {}, {PARENT: run_id}, key=killed.record["tracking"]["key"])
    if anew:
        shutil.rmtree(folder)
        opened(folder).append("began", resumed=False)
    group = Group(store, run_id, tmp_path)
    group.begin(0).append("ended", status="FINISHED")
    children = group.children()
    assert [run.status for run in children] == (["FINISHED", "RUNNING"] if anew else ["FINISHED"])
    assert children[0].parameters["lr"] == "0.1"  # which the killed process may not have sent


def test_a_run_that_the_store_refuses_does_not_hold_up_its_group(
    store: Store, run_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "concord.tracking")
    group = Group(store, run_id, tmp_path)
    for number in range(2):  # a parameter cannot be changed
        name = f"s-trial-{number}"
        opened(tmp_path / name, run_id=store.start_run("tests", name, {"lr": 9}, {PARENT: run_id})).close()
    for number in range(3):
        group.begin(number).append("ended", status="FINISHED")
    ended = [(f"s-trial-{number}", status) for number, status in enumerate(("RUNNING", "RUNNING", "FINISHED"))]
    assert [(run.name, run.status) for run in group.children()] == ended
    (message,) = tracking_said(caplog, store.uri)
    assert "refuses some runs" in message


def test_artifacts_are_sent_with_their_folder(store: Store, run_id: str, tmp_path: Path) -> None:
    run = opened(tmp_path, run_id=run_id)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.txt").write_text("a")
    run.append("artifact", path="figures/a.txt")
    run.append("artifact", path="figures/removed.txt")
    assert mirrored(store, run).close(20.0) == 0
    assert [each.path for each in store.client.list_artifacts(run_id, "figures")] == ["figures/a.txt"]


def test_recording_costs_the_loop_microseconds(tmp_path: Path) -> None:
    run = opened(tmp_path)
    metrics = dict.fromkeys(("loss", "accuracy", "kept", "norm", "rate"), 0.123456)
    start = time.thread_time()
    for step in range(10_000):
        run.append("metrics", step=step, metrics=metrics)
    assert time.thread_time() - start < 1.0
