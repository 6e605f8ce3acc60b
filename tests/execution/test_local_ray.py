"""The Ray of a command does not receive the SIGTERM of a whole job, and ends with the command."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from forked import Command, start_server
from process_table import linux, lives
from tracked import tracked_runs
from waiting import wait_for

from concord.cli import main
from concord.errors import RunFailedError
from concord.execution.execute import CHECKPOINTS
from concord.execution.failures import sigterm_as_interrupt
from concord.execution.local_ray import receive_sigterm, sigterm_blocked
from concord.execution.session import ray_session
from concord.record import folder_of
from concord.tracking import Store
from concord.training import TrainConfig

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")


def test_what_starts_with_ray_does_not_receive_sigterm_and_workers_do() -> None:
    with sigterm_blocked():
        deaf = subprocess.Popen(["sleep", "600"])
        hearing = subprocess.Popen(["sleep", "600"], preexec_fn=receive_sigterm)
    for process in (deaf, hearing):
        process.terminate()
    assert hearing.wait(60) == -signal.SIGTERM
    assert deaf.poll() is None
    deaf.kill()
    deaf.wait()


def send_to_all(process: Command, number: signal.Signals = signal.SIGTERM) -> list[int]:
    """A signal to every process of a command, as by ``scancel``; return their ids."""
    started = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in started:
        each.send_signal(number)
    return [each.pid for each in started]


def stopped(words: list[str], when: Callable[[], object]) -> tuple[str, list[int]]:
    """The last line of a command whose processes all receive SIGTERM, and their ids."""
    with Command(*words) as process:
        wait_for(lambda: process.poll() is not None or when(), 240)
        pids = send_to_all(process)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert "PlacementGroupCleaner" not in errors
    return errors.splitlines()[-1], pids


def statuses(output: Path) -> set[str]:
    return {run.status for run in tracked_runs(Store.open(output, None), "shared-rule", finished_only=False)}


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_with_too_long_a_path_for_sockets_is_named(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    start_server()  # has a socket itself
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv(variable, str(folder))
    with Command("train", JOB_FILE, "--workers", "2", "--output", output) as process:
        _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert errors.splitlines()[-1].startswith(
        f"concord: {variable}={folder}: Ray cannot have its files and sockets there"
    )
    assert "Traceback" not in errors
    assert not (output / "runs").exists()


def test_sigterm_that_ray_takes_while_it_starts_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # another thread receives what this one blocks
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(
        "concord.execution.local_ray.shutdown", lambda: None
    )  # none was started but that of other tests
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt() as termination, ray_session(TrainConfig()):
        pass
    assert termination.requested
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup. This could happen because the raylet failed"),
        RuntimeError("Failed to start GCS."),
        ConnectionError("the address is away"),
        TimeoutError("no port was written\nin time"),
    ],
)
def test_a_ray_that_does_not_start_in_time_is_one_line_that_says_to_try_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("concord.execution.local_ray.shutdown", lambda: None)
    with pytest.raises(RunFailedError) as said, ray_session(TrainConfig()):
        pass
    why = str(error).partition("\n")[0]
    line = f"Ray did not start here ({why}): the machine is busy; run the same command again"
    assert str(said.value) == line


def test_a_start_of_ray_that_takes_long_is_said_and_a_quick_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = threading.Event()

    def init(**_: object) -> None:
        assert said.wait(60)
        raise RuntimeError("over")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("concord.execution.local_ray.shutdown", lambda: None)
    monkeypatch.setattr("concord.logs.info", lambda text: [print(text), said.set()])
    for seconds in (0.0, 3600.0):
        monkeypatch.setattr("concord.execution.session._USUAL_SECONDS", seconds)
        with pytest.raises(RunFailedError, match="over"), ray_session(TrainConfig()):
            pass
    assert capsys.readouterr().out == "waiting for Ray to start on this machine\n"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("started", ["gcs_server", "raylet"])
def test_a_run_told_to_end_while_ray_starts_leaves_nothing(output: Path, number: signal.Signals, started: str) -> None:
    with Command("train", JOB_FILE, "--output", output, "--name", "a", "--workers", "2", "--epochs", "50") as process:
        command = psutil.Process(process.pid)
        wait_for(lambda: started in {each.name() for each in command.children()}, 240)
        pids = send_to_all(process, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert re.fullmatch(r"concord: stopped.*", errors.splitlines()[-1]), errors
    assert "Traceback" not in errors
    wait_for(lambda: not any(map(lives, pids)))
    assert "RUNNING" not in statuses(output)


@pytest.mark.slow
@linux
def test_a_study_ends_in_order_when_all_its_processes_are_told_to(output: Path) -> None:
    words = ["tune", JOB_FILE, "--output", str(output), "--name", "s", "--trials", "4", "--pause", "0.1"]
    words += ["--shortlist", "0", "--reruns", "0", "--no-register"]
    first = folder_of(output, "s-trial-0").path / "events.jsonl"
    line, pids = stopped(words, lambda: first.exists() and "evaluated" in first.read_text())
    assert re.fullmatch(r"concord: stopped after \d of 4 trials; continue with concord tune .*", line), line
    assert "RUNNING" not in statuses(output)
    wait_for(lambda: not any(map(lives, pids)))


@linux
@pytest.mark.slow
def test_a_run_of_two_workers_ends_in_order_when_all_its_processes_are_told_to(output: Path) -> None:
    words = ["train", JOB_FILE, "--output", str(output), "--name", "a", "--workers", "2", "--epochs", "8"]
    words += ["--evaluations", "8", "--pause", "0.1"]
    line, pids = stopped(words, lambda: folder_of(output, "a").names(CHECKPOINTS))
    assert line == "concord: stopped; continue with --name a --resume"
    assert statuses(output) == {"KILLED"}
    wait_for(lambda: not any(map(lives, pids)))
    assert main(["train", JOB_FILE, "--output", str(output), "--name", "a", "--resume", "--workers", "1"]) == 0


# A job whose worker with the environment north stops, with all its threads, in its fifth step; signs come faster here.
STOPS = """
import os, signal, torch
import concord.execution.channel, concord.execution.ray_train as ray_train
from concord.environments import Environments
from concord.training import Job

concord.execution.channel.SIGN_SECONDS = ray_train.SIGN_SECONDS = 0.2
ray_train._STILL_SECONDS = 2.0
steps = 0

class Stopping(torch.nn.Linear):
    def forward(self, inputs):
        global steps
        steps += self.training and inputs[0, 0].item() == 1
        if steps == 5:
            steps += 1
            with open({pid!r}, "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(inputs)

def environments(config):
    return Environments.from_arrays(
        {{name: (torch.full((8, 3), float(name == "north")), torch.arange(8) % 2) for name in ("south", "north")}}
    )

job = Job(environments, lambda config: Stopping(3, 2), torch.nn.functional.cross_entropy)
"""


@pytest.mark.slow
@linux
def test_a_worker_that_the_others_wait_for_is_named(ray_cluster: None, output: Path, tmp_path: Path) -> None:
    file, pid = tmp_path / "mine.py", tmp_path / "pid"
    file.write_text(STOPS.format(pid=str(pid)))
    words = ["train", str(file), "--output", str(output), "--workers", "2", "--vectorize", "one-by-one"]
    words += ["--no-register", "--address", ray.get_runtime_context().gcs_address]
    with Command(*words, "--epochs", "8") as process:
        stopped = int(wait_for(lambda: pid.exists() and pid.read_text(), 240))
        said = Path(process._written.name) / "error"
        # On a fast machine it stops before its second sign, which names its environments.
        worker = r"worker 1 on \S+ \(environments: (north|not known yet)\)"
        line = rf"no step since [\d:]+: {worker} has not answered for \d+ s, and the others wait for it"
        wait_for(lambda: re.search(line, said.read_text()), 120)
        os.kill(stopped, signal.SIGCONT)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
