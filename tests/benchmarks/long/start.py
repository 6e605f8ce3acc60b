"""The time from the command to the first training step: seconds, and CPU seconds of all processes."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from concord.benchmark import Row
from concord.record import EVENTS, read_events

WORKERS, REPEATS = (2, 4), 3
_EVERY_SECONDS = 0.05
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Start(NamedTuple):
    """The time from the command to the first step."""

    seconds: float
    cpu: float


def rows() -> Iterator[Row]:
    """Workers on Ray Train against one worker in the command's own process, measured in turn."""
    for workers in WORKERS:
        pairs = [(measured(workers), measured(1)) for _ in range(REPEATS)]
        for field, what in (("seconds", "seconds"), ("cpu", "CPU seconds")):
            several, one = ([getattr(each, field) for each in side] for side in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in zip(several, one, strict=True))
            name = f"{what} from the command to the first step, workers: {workers}"
            yield Row(name, statistics.median(several), "one worker", statistics.median(one), ratio, "")


def measured(workers: int, *options: str) -> Start:
    """Run the synthetic task for two epochs in a separate process, and measure it."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "synthetic", "--workers", str(workers), "--epochs", "2", "--name", "run", *options]
        words += ["--output", folder, "--json"]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        began = time.time()
        with subprocess.Popen(
            [sys.executable, "-m", "concord", *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            usage = _Usage(process.pid)
            while process.poll() is None:
                usage.look()
                time.sleep(_EVERY_SECONDS)
            if process.returncode:
                assert process.stderr is not None
                raise RuntimeError(process.stderr.read())
        first = _first_step(Path(folder) / "runs" / "run" / EVENTS)
        return Start(first - began, usage.until(first))


def _first_step(file: Path) -> float:
    """End of the first step, in seconds since 1970. Steps are logged at the end of their epoch, with their speed."""
    steps = 0
    for event in read_events(file):
        metrics: dict[str, float] = event.fields.get("metrics", {})
        if "step/loss" in metrics and not steps:
            at = event.at / 1000
        if "steps_per_second" in metrics:
            return at - (steps - 1) / metrics["steps_per_second"]
        steps += "step/loss" in metrics
    raise ValueError(f"{file}: no step was recorded")


class _Usage:
    """CPU seconds of a process and all its descendants, over time; Linux only.

    Each process is counted by itself, up to the last measurement of it.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._family: dict[tuple[int, str], float] = {}
        self._looks: list[tuple[float, float]] = []

    def look(self) -> None:
        """Measure now."""
        running: dict[int, tuple[int, str, float]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # it has just ended
                    continue
                running[int(folder.name)] = (int(fields[1]), fields[19], (int(fields[11]) + int(fields[12])) * _TICK)
        members = {key for key in self._family if key[0] in running and running[key[0]][1] == key[1]}
        if self._root in running:
            members.add((self._root, running[self._root][1]))
        ours = {process for process, _ in members}
        while more := {process for process, (parent, _, _) in running.items() if parent in ours} - ours:
            ours |= more
        for process in ours:
            _, started, seconds = running[process]
            self._family[process, started] = seconds
        self._looks.append((time.time(), sum(self._family.values())))

    def until(self, moment: float) -> float:
        """CPU seconds up to a moment, in seconds since 1970."""
        return max((seconds for at, seconds in self._looks if at <= moment), default=0.0)


if __name__ == "__main__":  # arguments: numbers of workers, and further words for the command
    for count in sys.argv[1].split(","):
        print(count, *(f"{value:.1f}" for value in measured(int(count), *sys.argv[2:])), flush=True)
