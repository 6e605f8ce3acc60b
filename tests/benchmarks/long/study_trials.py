"""The cost of a study besides its trials, as whole commands: 1024 trivial trials, and 64 short ones of `synthetic`.

CPU time is that of the command and of all its descendants, read from ``/proc`` (Linux) four times a second. The
system's own sum omits Ray's processes, since the command that started them does not wait for them.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from concord.benchmark import Row
from concord.execution.restored_options import restored_config
from concord.record import folder_of, require_run
from concord.space import Space
from concord.storage import Folder
from concord.studies.criterion import StopRule
from concord.studies.proposals import GroupRuns, Trial
from concord.studies.search import config_at
from concord.training import ProcessContext, load_job
from concord.training.context import Silent
from concord.training.job import Job
from concord.training.loop import training
from concord.training.process import tune_process

TRIVIAL = Path(__file__).parents[1] / "jobs" / "trivial.py"
TRIALS, SHORT_TRIALS = 1024, 64
ONLY_SEARCH = ["--shortlist", "0", "--reruns", "0", "--no-register"]
SHORT = [
    "--environments",
    "16",
    "--examples",
    "256",
    "--test-examples",
    "500",
    "--validation-environments",
    "16",
    "--revolutions",
    "1",
    "--epochs",
    "50",
    "--evaluations",
    "5",
    "--hidden-layers",
    "3",
    "--vary",
    "hidden_units=64,128",
    "batch_size=32,64",
    "--selection",
    "validation",
]


class Cost(NamedTuple):
    """Wall seconds and CPU seconds of a command."""

    wall: float
    cpu: float


def rows() -> Iterator[Row]:
    """Overhead of a trial, its growth, and wall and CPU time against a plain loop over the same trials."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        tune(output, "trivial", str(TRIVIAL), "--trials", str(TRIALS))
        trivial = trials(folder_of(output, "trivial", "study"))
        ends = [each.ended for each in trivial]
        each = (ends[-1] - min(each.ended - each.seconds for each in trivial)) / len(ends)
        first, last = (ends[99] - ends[0]) / 99, (ends[-1] - ends[-100]) / 99
        yield Row(f"a trial, the last 100 of {TRIALS}", last, "the first 100", first, last / first, "≤ 2")
        loop = loops_over(folder_of(output, "trivial", "study").path, 1, 1).wall / len(ends)
        yield Row(f"a trivial trial in a study of {TRIALS}", each, "in a loop", loop, each / loop, "≤ 0.15 s")
        yield from short_trials(output)


def short_trials(output: Path) -> Iterator[Row]:
    """A study against loops over its trials: one with a thread for each core, one with one thread, and two at once.

    Two plain loops at once, each over half of the trials, show the machine's limit: each is slower than one loop alone
    if the two share caches, memory or a core.
    """
    study = tune(output, "short", "synthetic", "--trials", str(SHORT_TRIALS), *SHORT)
    name = f"{SHORT_TRIALS} short trials of synthetic, two at a time"
    for reference, loops, threads in (
        ("the same in one loop, 2 threads", 1, 2),
        ("the same in one loop, 1 thread", 1, 1),
        ("the same in two loops at once, 1 thread each", 2, 1),
    ):
        loop = loops_over(folder_of(output, "short", "study").path, loops, threads)
        wall, cpu = study.wall / loop.wall, study.cpu / loop.cpu
        yield Row(f"wall time, {name}", study.wall, reference, loop.wall, wall, "≤ 0.65 (one loop)")
        yield Row(f"CPU time, {name}", study.cpu, reference, loop.cpu, cpu, "≤ 1.15")


def tune(output: Path, name: str, job: str, *words: str) -> Cost:
    """The cost of a whole ``concord tune``, Ray's start and end included."""
    given = ["tune", job, "--output", str(output), "--name", name, *ONLY_SEARCH, *words]
    return measured(["-c", "from concord.cli import entry; entry()", *given])


def loops_over(folder: Path, loops: int, threads: int) -> Cost:
    """The cost of processes that each train their part of a study's trials, one after the other."""
    return measured(*([__file__, str(folder), str(threads), str(part), str(loops)] for part in range(loops)))


def measured(*commands: list[str]) -> Cost:
    """The cost of Python with these words; several processes run at once."""
    started = time.perf_counter()
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen([sys.executable, *words], stdout=quiet, stderr=quiet) for words in commands]
    ours = {process.pid for process in processes}
    busy: dict[int, float] = {}
    while any(process.poll() is None for process in processes):
        now = processor_seconds()
        while new := {pid for pid, (parent, _) in now.items() if parent in ours} - ours:
            ours |= new
        busy |= {pid: seconds for pid, (_, seconds) in now.items() if pid in ours}
        time.sleep(0.25)
    wall = time.perf_counter() - started
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{commands}: exit status {[process.returncode for process in processes]}")
    return Cost(wall, sum(busy.values()))


def processor_seconds() -> dict[int, tuple[int, float]]:
    """The parent of every process, and its CPU seconds."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process may have ended
            # The name may contain any character, and ends at the last bracket.
            words = status.read_text().rpartition(")")[2].split()
            ticks = int(words[11]) + int(words[12])
            found[int(status.parent.name)] = (int(words[1]), ticks / os.sysconf("SC_CLK_TCK"))
    return found


def trials(folder: Folder) -> list[Trial]:
    """The trials of a study, in the order of their ends."""
    return GroupRuns(require_run(folder, "study")).finished("trial")


def _loop(folder: Path, threads: int, part: int, parts: int) -> None:
    """Train every ``parts``-th trial of a study from trial ``part`` on, one after the other."""
    tune_process(threads)
    record = require_run(Folder(folder), "study").record
    job: Job[Any] = load_job(str(TRIVIAL) if record["job"] == "trivial" else record["job"]).job
    base = restored_config(job.config, record["config"])
    rule = StopRule.read(record["deciding"]["stop_when"])
    space = Space.from_json(record["space"])
    for trial in trials(Folder(folder))[part::parts]:
        for evaluation in training(job, config_at(base, space, trial.point).resolve(), ProcessContext(), Silent()):
            if rule.holds(evaluation.metrics):
                break


if __name__ == "__main__":
    _loop(Path(sys.argv[1]), *map(int, sys.argv[2:]))
