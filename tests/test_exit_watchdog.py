"""What is done when a process ends, whatever ended it: a line, the end of a server, the end of Ray's agents."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Command
from process_table import linux, lives
from waiting import wait_for

from concord import exit_watchdog

PATIENCE = 120.0

JOB = """
import ctypes, os, signal, torch
from concord.environments import Environments
from concord.training import Job

def loss(outputs, targets):
    {end}

def environments(config):
    return Environments.from_arrays({{name: (torch.zeros(20, 3), torch.arange(20) % 2) for name in "abc"}})

job = Job(environments, lambda config: torch.nn.Linear(3, 2), loss)
"""
LINE = (
    "concord: the command's process ended without an error message: it was killed, crashed, or its job called os._exit"
)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("os._exit(0)", 0, marks=pytest.mark.slow),
        pytest.param("ctypes.string_at(0)", -signal.SIGSEGV, marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_command_that_ends_without_a_word_leaves_a_line(tmp_path: Path, end: str, status: int) -> None:
    file = tmp_path / "mine.py"
    file.write_text(JOB.format(end=end))
    began = time.monotonic()
    with Command("train", file, "--output", tmp_path / "runs", "--json") as done:
        assert done.communicate(120)[0] == ""
        assert done.returncode == status
        wait_for(lambda: any(line.startswith(LINE) for line in done.communicate()[1].splitlines()), 60)
    assert time.monotonic() - began < 100


def test_a_command_that_is_told_to_end_at_its_start_says_that_it_was_stopped(tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    file, reached = tmp_path / "mine.py", tmp_path / "at" / "reached"
    file.write_text(f"import signal\nopen({str(reached)!r}, 'w').close()\nsignal.pause()\n")
    with Command("train", file, "--output", tmp_path / "runs") as started:
        wait_for(reached.exists, 60)
        started.send_signal(signal.SIGTERM)
        out, error = started.communicate(60)
    assert (started.returncode, out, error) == (1, "", "concord: stopped\n")


@pytest.mark.slow
def test_a_command_whose_watchdog_dies_ends_as_without_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    kill = "os.system(f'pkill -KILL -P {os.getpid()} -f exit_watchdog.py')"
    file.write_text(JOB.format(end=kill + "; return torch.nn.functional.cross_entropy(outputs, targets)"))
    with Command("train", file, "--epochs", "1", "--no-register", "--output", tmp_path / "runs") as done:
        error = done.communicate(120)[1]
    assert done.returncode == 0, error


def test_a_command_that_ends_by_itself_leaves_its_own_line_alone(tmp_path: Path) -> None:
    with Command("train", "synthetic", "--lr", "-1", "--output", tmp_path) as done:
        (line,) = done.communicate(120)[1].splitlines()
    assert done.returncode == 2
    assert line.startswith("concord: --lr -1")


# A server as MLflow's is: a process that starts others.
SERVER = """
import pathlib, subprocess, sys
others = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
pathlib.Path(sys.argv[1] + ".new").write_text("".join(f"{other.pid} " for other in others))
pathlib.Path(sys.argv[1] + ".new").rename(sys.argv[1])
others[0].wait()
"""
STARTER = "import os, sys; from concord.exit_watchdog import run_group; sys.exit(run_group(sys.argv[1:], os.environ))"


@linux
@pytest.mark.parametrize(
    "number",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
)
def test_a_servers_processes_end_with_the_process_that_started_it(number: int, tmp_path: Path) -> None:
    said = tmp_path / "pids"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, sys.executable, "-c", SERVER, str(said)], stderr=subprocess.DEVNULL
    )
    wait_for(said.exists)
    pids = list(map(int, said.read_text().split()))
    assert all(map(lives, pids))
    starter.send_signal(number)
    starter.wait(PATIENCE)
    wait_for(lambda: not any(map(lives, pids)))


@linux
def test_a_server_that_ends_leaves_no_process_and_tells_its_status(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    ending = SERVER.replace("others[0].wait()", "sys.exit(7)")
    done = subprocess.run([sys.executable, "-c", STARTER, sys.executable, "-c", ending, str(said)], timeout=PATIENCE)
    assert done.returncode == 7
    wait_for(lambda: not any(map(lives, map(int, said.read_text().split()))))


@linux
def test_ray_s_agents_end_with_their_driver_and_other_processes_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, sleep = ["ray::DashboardA", "ray::RuntimeEnv", "other"], str(shutil.which("sleep"))
    for name in names:
        shutil.copy(sleep, tmp_path / name)
    raylet = tmp_path / "raylet"
    children = "".join(f"{tmp_path / name} 60 >&2 & echo $!; " for name in names)
    raylet.write_text(f"#!/bin/sh\n{children} exec >&-; wait\n")
    raylet.chmod(0o755)
    # The pipe closes as soon as all agents are known.
    monkeypatch.setattr("select.select", lambda *given: ([0] if given[3] is None else [], [], []))
    # A driver of its own: this process may have Ray, whose agents would be ended.
    with subprocess.Popen(["sh", "-c", f"{raylet} & exec >&-; wait"], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        *agents, other = map(int, started.stdout.read().split())
        try:
            exit_watchdog._end_ray_agents(str(started.pid))
            wait_for(lambda: not any(map(lives, agents)))
            assert lives(other)
        finally:
            os.kill(other, signal.SIGKILL)
