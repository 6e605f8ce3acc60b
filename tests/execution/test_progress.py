"""The display of a run and a study on a terminal of 80 columns, and without a terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import Command

from concord.execution.progress import RunProgress
from concord.gradients import EnvironmentStep

SCRIPT = Path(__file__).with_name("terminal_progress.py")
COLUMNS = 80
SECONDS = 180  # a busy machine takes a minute to import what the script needs


class Terminal:
    """A terminal on which a process is at work."""

    def __init__(self, start: Callable[[Path], subprocess.Popen[bytes] | Command]) -> None:
        self._side, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERM", "xterm-256color")
            patch.delenv("CONCORD_LOG", raising=False)
            self.process = start(Path(os.ttyname(other)))
        self._other = other
        self._seen = ""

    def line(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches, in what was shown since the last call that found one."""
        end = time.monotonic() + SECONDS
        while True:
            for line in (lines := re.split(r"[\r\n]+", _without_control(self._seen)))[:-1]:
                assert len(line) <= COLUMNS, line
                if found := re.search(pattern, line):
                    self._seen = ""
                    return found
            left = end - time.monotonic()
            assert left > 0, f"no line {pattern!r} in {lines}"
            if select.select([self._side], [], [], left)[0]:
                self._seen += os.read(self._side, 1 << 16).decode(errors="replace")

    def go_on(self) -> None:
        os.write(self._side, b"\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        for side in (self._side, self._other):
            os.close(side)


def _without_control(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def _script(terminal: Path) -> subprocess.Popen[bytes]:
    with terminal.open("r+b", buffering=0) as stream:
        return subprocess.Popen([sys.executable, str(SCRIPT)], stdin=stream, stdout=stream, stderr=stream)


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    """The states of :mod:`terminal_progress`, one after the other."""
    terminal = Terminal(_script)
    yield terminal
    terminal.close()


def moves(terminal: Terminal, pattern: str) -> None:
    """The line is drawn again, with another sign in front."""
    signs = {terminal.line(rf"^(\S) {pattern}").group(1)}
    while len(signs) < 3:
        signs.add(terminal.line(rf"^(\S) {pattern}").group(1))


BAR = "[━╸╺]{10,}"


def test_a_run_shows_its_bar_and_the_time_left_in_80_columns(terminal: Terminal) -> None:
    moves(terminal, f"starting Ray {BAR}")
    terminal.go_on()
    moves(terminal, f"starting workers {BAR}")
    terminal.go_on()
    terminal.line(f"training {BAR} 12/50 epochs 0:00:")
    terminal.line(r"^  train_accuracy.0\.245  ood_accuracy.0\.245  train_loss.0\.245  ood_loss.0\.245 *$")
    terminal.go_on()
    terminal.line(rf"training {BAR} 13/50 epochs 0:00:\d\d \d+ (s|min) left$")
    terminal.line(r"^  train_accuracy.0\.255")
    terminal.go_on()
    moves(terminal, f"drawing figures, registering the model {BAR}")
    terminal.go_on()


def test_the_bar_of_a_resumed_run_begins_where_the_run_does(terminal: Terminal) -> None:
    moves(terminal, f"starting workers {BAR}")  # and not yet at the 40 epochs of the process before
    terminal.go_on()
    terminal.line("^training resumes from epoch 40 with 2 workers, 60 s after that checkpoint")
    terminal.line(f"training {BAR} 40/50 epochs 0:00:.. *$")  # nothing is known of the time yet
    terminal.go_on()
    terminal.line(rf"training {BAR} 41/50 epochs 0:00:\d\d \d+ (s|min) left")
    terminal.go_on()


def test_a_study_shows_its_bar_and_the_best_so_far_in_80_columns(terminal: Terminal) -> None:
    moves(terminal, f"starting trials {BAR}")
    terminal.go_on()
    terminal.line(f"trials {BAR} 0/20 0:00:")
    terminal.line("^  3 running")
    terminal.go_on()
    terminal.line(rf"trials {BAR} 1/20 0:00:\d\d \d+ (s|min) left")
    terminal.line(r"^  2 running, best validation_accuracy 0\.9000 \(trial 0\)")
    terminal.go_on()
    terminal.process.wait(SECONDS)
    assert terminal.process.returncode == 0


def test_a_run_in_this_process_starts_no_workers(tmp_path: Path) -> None:
    job = tmp_path / "slow.py"
    job.write_text(SLOW)
    words = ("train", str(job), "--epochs", "1", "--no-register", "--output", str(tmp_path / "output"))
    terminal = Terminal(lambda place: Command(*words, terminal=place))
    assert terminal.line(rf"^\S (starting workers|loading data) {BAR}").group(1) == "loading data"
    terminal.close()


def test_without_a_terminal_a_long_epoch_shows_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("concord.execution.progress.time.monotonic", lambda: now)
    monkeypatch.setattr("concord.execution.progress.on_terminal", lambda: False)
    lines: list[str] = []
    shown = RunProgress(lines.append)
    shown.training(5, "loading data")
    result = EnvironmentStep(torch.tensor([0.5, 1.5]), torch.tensor([]), (), torch.ones(2), 2)
    for now, step in ((4.0, 1), (11.0, 2), (15.0, 3), (22.0, 4)):  # noqa: B007
        shown.on_step(step, torch.nn.Linear(1, 1), result)
    assert lines == ["epoch 0/5  step 2 loss 1.000", "epoch 0/5  step 4 loss 1.000"]
    shown.show({"epoch": 1.0, "train_loss": 0.25})
    assert shown.line() == "epoch 1/5  train_loss 0.250"


SLOW = """
import time
import torch
from concord.environments import Environments
from concord.training import Job

def environments(config):
    time.sleep(1)  # longer than the bar takes to be drawn again
    return Environments.from_arrays({"a": (torch.randn(64, 3), torch.arange(64) % 2)})

job = Job(environments, lambda config: torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
"""
