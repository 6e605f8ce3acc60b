"""A server or a storage that is away when a run begins, resumes or ends is waited for; everything is there once."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import s3_server
from command_line import outcome
from hypothesis import given
from hypothesis import strategies as st
from mlflow_server import Server

from concord.backoff import pauses
from concord.errors import InputError, RunFailedError, UnreachableError
from concord.execution import finish, patience
from concord.execution.patience import wait_for_answer
from concord.storage import Folder, filesystem
from concord.tracking import Store
from concord.tracking.client import TrackingError

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")


@given(st.floats(0.01, 10), st.floats(0.01, 100))
def test_a_pause_is_at_least_half_of_one_that_doubles_and_never_longer_than_the_longest(
    first: float, longest: float
) -> None:
    length = first
    for pause in itertools.islice(pauses(first, longest), 12):
        assert length / 2 <= pause <= length
        length = min(2 * length, longest)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that say what is waited for."""
    said: list[str] = []
    monkeypatch.setattr(patience, "info", said.append)
    monkeypatch.setattr(patience, "_FIRST_PAUSE_SECONDS", 0.01)
    return said


def answers(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def ask() -> str:
        if left:
            raise left.pop(0)
        return "yes"

    return ask


def test_what_answers_in_time_is_waited_for_with_one_line(lines: list[str]) -> None:
    assert wait_for_answer(answers(UnreachableError("no server"), TrackingError("gone again")), 1.0) == "yes"
    assert lines == ["no server; an answer is waited for, for up to 1 minutes (--tracking-patience)"]


@pytest.mark.parametrize("final", [InputError("a wrong name"), RunFailedError("refused")])
def test_a_final_answer_is_not_waited_for(lines: list[str], final: Exception) -> None:
    with pytest.raises(type(final), match=str(final)):
        wait_for_answer(answers(final), 1.0)
    assert lines == []


def test_what_does_not_answer_in_time_is_an_error(lines: list[str]) -> None:
    with pytest.raises(UnreachableError, match="no server"):
        wait_for_answer(answers(*[UnreachableError("no server")] * 1000), 0.001)
    assert len(lines) == 1
    with pytest.raises(UnreachableError):
        wait_for_answer(answers(UnreachableError("no server")), 0.0)
    assert len(lines) == 1


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("minutes", "in_time"), [(1.0, True), (0.5, False)])
def test_patience_counts_from_the_first_failure(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, minutes: float, in_time: bool
) -> None:
    clock, work, away = Clock(), 120.0, 45.0
    monkeypatch.setattr(patience, "time", clock)
    began, tries = clock.now, itertools.count()

    def ask() -> str:
        if next(tries) == 0:
            clock.sleep(work)
        if clock.now < began + work + away:
            raise UnreachableError("no server")
        return "yes"

    if in_time:
        assert wait_for_answer(ask, minutes) == "yes"
    else:
        with pytest.raises(UnreachableError):
            wait_for_answer(ask, minutes)
    assert len(lines) == 1
    assert clock.now <= began + work + 60 * minutes


@pytest.mark.slow
def test_a_tracking_server_that_is_away_at_the_beginning_and_the_end_gets_each_run_and_value_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[str] = []

    def come_back(line: str) -> None:
        waits.append(line)
        server.start()

    monkeypatch.setattr(patience, "info", come_back)
    monkeypatch.setattr(finish, "_draw", lambda *_: server.kill() or [])  # before the model is registered
    place = ("--output", str(tmp_path), "--tracking-uri", server.uri, "--name", "patient")
    server.kill()
    words = ("--epochs", "2", "--evaluations", "2", "--batch-size", "16", "--experiment", "patience")
    status, result = outcome(capsys, "train", JOB_FILE, *words, *place)
    assert (status, len(waits)) == (0, 2), result
    assert f"--tracking-uri {server.uri}: no MLflow server answers (Connection refused)" in waits[0]
    assert "could not be reached" in waits[1]
    assert result["model"] is not None
    server.kill()
    status, again = outcome(capsys, "train", JOB_FILE, "--resume", *place)
    assert (status, len(waits)) == (0, 3)
    assert again["run_id"] == result["run_id"]
    store = Store.open(tmp_path, server.uri)
    (run,) = (each for each in store.search("") if each.experiment == "patience")
    assert (run.status, run.run_id) == ("FINISHED", result["run_id"])
    points = store.client.get_metric_history(run.run_id, "train_accuracy")
    assert sorted({point.step for point in points}) == sorted(point.step for point in points)
    (version,) = store.client.search_model_versions(f"run_id = '{run.run_id}'")
    assert f"models:/{version.name}/{version.version}" == result["model"]


@pytest.mark.slow
def test_a_storage_that_is_away_when_a_run_begins_or_resumes_is_waited_for(
    s3: s3_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.use(monkeypatch)
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(filesystem, "_TRIES", 3)  # a second or two in place of 15
    waits: list[str] = []

    def come_back(line: str) -> None:
        waits.append(line)
        s3.start()

    monkeypatch.setattr(patience, "info", come_back)
    output = f"s3://{s3_server.BUCKET}/patience"
    place = ("--output", output, "--tracking-uri", f"sqlite:///{tmp_path / 'store.db'}", "--name", "patient")
    words = ("--epochs", "1", "--evaluations", "1", "--batch-size", "16", "--no-register")
    for number, more in enumerate((words, ("--resume",)), start=1):
        s3.stop()
        status, result = outcome(capsys, "train", JOB_FILE, *more, *place)
        assert (status, len(waits)) == (0, number), result
        assert waits[-1].startswith(f"--output {output}")
        assert f": no storage answers at {s3.url}" in waits[-1]


@pytest.mark.slow
def test_data_at_an_address_that_is_away_when_a_run_begins_are_waited_for(
    s3: s3_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.use(monkeypatch)
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(filesystem, "_TRIES", 3)
    rows = "".join(f"{'abc'[row % 3]},{row % 7},{row % 2}\n" for row in range(60))
    data = Path(f"s3://{s3_server.BUCKET}/patience-data/table.csv")
    Folder(data.parent).write(data.name, f"site,age,died\n{rows}".encode())
    waits: list[str] = []

    def come_back(line: str) -> None:
        waits.append(line)
        s3.start()

    monkeypatch.setattr(patience, "info", come_back)
    s3.stop()
    words = ("--data", str(data), "--environment", "site", "--target", "died", "--no-register", "--epochs", "1")
    words = (*words, "--evaluations", "1", "--checkpoints", "1", "--output", str(tmp_path))
    status, result = outcome(capsys, "train", "table", *words)
    assert status == 0, result
    assert len(waits) == 1
    assert f"no storage answers at {s3.url}" in waits[0]
    s3.stop()
    status, result = outcome(capsys, "train", "table", *words, "--tracking-patience", "0")
    s3.start()
    assert status == 2
    assert "no storage answers" in result["error"]
