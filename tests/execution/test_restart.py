"""A head node dies: ``submit --restart N`` waits for it and submits again, and no run is trained twice."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import outcome
from hypothesis import given
from hypothesis import strategies as st
from ray_head import Head
from recorded import comparable
from waiting import wait_for

from concord.cli import main
from concord.errors import InputError, RunFailedError
from concord.execution import lifecycle
from concord.execution.submission import restart
from concord.execution.submission.admission import Submission
from concord.execution.submission.cluster import ConnectionLostError, TakenError
from concord.execution.submission.restart import follow_restarting
from concord.record import EVENTS, folder_of, read_events, require_run
from concord.submitted import SUBMISSION
from concord.tracking import Store

JOB = Path(__file__).parents[1] / "jobs" / "shared_rule.py"


def submission(status: str, lost: bool = False) -> Submission:
    return Submission("mine", status, "train", "job", "mine", "ann", 0.0, None, None, "", "", lost)


class Cluster:
    """A cluster of one submission, whose log is a line a second; the head dies at these seconds, and may forget."""

    def __init__(self, deaths: list[int], length: int, persistent: bool) -> None:
        self.deaths, self.length, self.persistent = sorted(deaths), length, persistent
        self.second, self.done = 0, 0
        self.known: Submission | None = None
        self.begun: list[int] = []

    def submit(self) -> None:
        if self.known is not None:
            raise TakenError("taken")
        self.known = submission("running")
        self.begun.append(self.done)

    def status(self, _: str) -> str:
        if self.known is None:
            raise RunFailedError("there is no such submission")
        return self.known.status

    def follow(self, _: str, show: Callable[[str], None]) -> Submission:
        if self.known is None:
            raise InputError("there is no such submission")
        show("".join(f"{number}\n" for number in range(self.begun[-1], self.done)))
        while self.done < self.length:
            if self.deaths and self.second >= self.deaths[0]:
                self.deaths.pop(0)
                self.known = submission("failed", lost=True) if self.persistent else None
                raise ConnectionLostError("the connection broke")
            show(f"{self.done}\n")
            self.second, self.done = self.second + 1, self.done + 1
        self.known = submission("succeeded")
        return self.known

    def submissions(self) -> list[Submission]:
        return [] if self.known is None else [self.known]

    def forget(self, _: str) -> None:
        assert self.known is not None
        assert self.known.lost
        self.known = None


@pytest.fixture(scope="module", autouse=True)
def _without_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restart, "_FIRST_PAUSE_SECONDS", 0.0)
        yield


@given(st.lists(st.integers(0, 8), max_size=4), st.integers(0, 4), st.booleans())
def test_a_submission_is_sent_again_once_for_each_death_and_at_most_n_times(
    deaths: list[int], restarts: int, persistent: bool
) -> None:
    cluster: Any = Cluster(deaths, 6, persistent)
    cluster.submit()
    lines: list[str] = []
    counted = len([second for second in deaths if second < 6])
    fits = counted <= restarts
    try:
        ended = follow_restarting(cluster, "mine", lines.append, cluster.submit, restarts, lambda _: None)
        assert fits
        assert ended.status == "succeeded"
        assert "".join(lines).split() == [str(number) for number in range(6)]
    except RunFailedError:
        assert not fits
    assert len(cluster.begun) == 1 + min(counted, restarts)


def test_a_connection_that_broke_alone_submits_nothing_and_shows_no_line_twice() -> None:
    cluster: Any = Cluster([2, 4], 6, persistent=False)
    cluster.submit()
    lines: list[str] = []

    def follow(identity: str, show: Callable[[str], None]) -> Submission:
        try:
            return Cluster.follow(cluster, identity, show)
        except ConnectionLostError:
            cluster.known = submission("running")  # it was the network alone
            raise

    cluster.follow = follow
    assert follow_restarting(cluster, "mine", lines.append, cluster.submit, 1, lambda _: None).status == "succeeded"
    assert cluster.begun == [0]
    assert "".join(lines).split() == [str(number) for number in range(6)]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--restart", "-1"], "--restart -1: must not be negative"),
        (["--restart", "2", "--no-wait"], "--restart 2: needs this command to wait; leave out --no-wait"),
    ],
)
def test_a_restart_that_cannot_be_is_one_line(words: list[str], line: str, refused: Callable[..., str]) -> None:
    assert refused("submit", "train", "synthetic", "--address", "127.0.0.1:1", *words) == line


def test_the_same_submission_continues_its_run_and_another_is_refused(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("train", str(JOB), "--name", "a", "--output", str(output), "--no-register")
    run += ("--epochs", "2", "--evaluations", "2", "--batch-size", "16")
    monkeypatch.setenv(SUBMISSION, "first")
    status, begun = outcome(capsys, *run)
    assert status == 0
    status, again = outcome(capsys, *run)
    assert (status, again) == (0, begun)
    began = [each for each in read_events(folder_of(output, "a").path / EVENTS) if each.name == "began"]
    assert len(began) == 1
    monkeypatch.setenv(SUBMISSION, "second")
    status, refused = outcome(capsys, *run)
    assert (status, "there is a run of this name" in refused["error"]) == (2, True)


def test_an_earlier_process_of_the_same_submission_is_waited_for(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(output, "a")
    folder.make()
    monkeypatch.setenv(SUBMISSION, "first")
    monkeypatch.setattr(lifecycle, "_EVERY_SECONDS", 0.01)
    held, ended = threading.Event(), threading.Event()

    def earlier() -> None:
        with folder.locked("run", "ann"):
            held.set()
            ended.wait(60)

    holder = threading.Thread(target=earlier)
    holder.start()
    assert held.wait(60)
    monkeypatch.setattr(lifecycle.logs, "info", lambda line: (lines.append(line), ended.set()))
    lines: list[str] = []
    run = ("train", str(JOB), "--name", "a", "--output", str(output), "--no-register", "--epochs", "1")
    status, result = outcome(capsys, *run, "--evaluations", "1", "--batch-size", "16")
    holder.join()
    assert status == 0, result
    assert "another process is using this run: ann on " in lines[0]
    assert lines[0].endswith("it is of this submission, and its end is waited for")


@pytest.mark.slow
def test_a_run_whose_head_is_killed_twice_is_finished_once_and_equal_to_an_undisturbed_one(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head(tmp_path_factory.mktemp("killed"))
    monkeypatch.chdir(JOB.parent)
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    run = ["submit", "train", JOB.name, "--epochs", "30", "--evaluations", "30", "--checkpoints", "30"]
    run += ["--batch-size", "16", "--pause", "0.02", "--no-register", *where]
    output = head.folder / "runs"
    events = folder_of(output, "twice").path / EVENTS
    killed: list[int] = []

    def kill() -> None:
        for evaluations in (3, 12):
            wait_for(lambda least=evaluations: _checkpoints(events) >= least, 240)
            killed.append(_checkpoints(events))
            head.stop()
            head.start()

    try:
        head.start()
        assert main([*run, "--name", "calm", "--json"]) == 0, capfd.readouterr().err
        killer = threading.Thread(target=kill)
        killer.start()
        status = main([*run, "--name", "twice", "--restart", "3", "--json"])
        killer.join()
        printed = capfd.readouterr()
        assert status == 0, printed.err
        result = json.loads(printed.out.strip().splitlines()[-1])
        assert result["status"] == "succeeded"
    finally:
        head.stop()
    assert len(killed) == 2
    assert printed.err.count("is submitted again") == 2
    calm, twice = (require_run(folder_of(output, name)) for name in ("calm", "twice"))
    assert comparable(twice.metrics) == comparable(calm.metrics)
    tracked = [each for each in Store.open(output).search("") if each.name == "twice"]
    assert [each.status for each in tracked] == ["FINISHED"]


def _checkpoints(events: Path) -> int:
    return sum(each.name == "checkpoint" for each in read_events(events)) if events.exists() else 0
