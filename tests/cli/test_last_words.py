"""A command that ends without output still leaves a line, whatever ended it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Command
from waiting import wait_for

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
        ("os._exit(0)", 0),
        ("ctypes.string_at(0)", -signal.SIGSEGV),
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


def test_a_command_that_ends_by_itself_leaves_its_own_line_alone(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "concord", "train", "synthetic", "--lr", "-1", "--output", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("concord: --lr -1")
