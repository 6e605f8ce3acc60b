"""What a study costs besides its trials, as whole commands: 1024 trivial trials, and 64 short ones of `synthetic`.

Wall time: CPU time of processes that Ray starts and ends itself is not passed on to the command that started Ray.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from concord.benchmark import Row
from concord.space import Space
from concord.training import Place, load_job
from concord.training.job import Job
from concord.training.loop import Silent, training
from concord.training.process import tune_process
from concord.training.run import restored_config
from concord.tuning.journal import read, read_study
from concord.tuning.spaces import config_at
from concord.tuning.stopping import StopRule

TRIVIAL = Path(__file__).parent / "jobs" / "trivial.py"
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


def rows() -> list[Row]:
    """Overhead a trial, whether it grows, and wall time against a plain loop over the same trials."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        tune(output, "trivial", str(TRIVIAL), "--trials", str(TRIALS))
        trivial = read(output / "studies" / "trivial")
        ends = [ended.ended for _, ended in trivial.results("trial")]
        each = (ends[-1] - min(e.ended - e.seconds for _, e in trivial.results("trial"))) / len(ends)
        first, last = (ends[99] - ends[0]) / 99, (ends[-1] - ends[-100]) / 99
        loop = loop_over(output / "studies" / "trivial", 1) / len(ends)
        wall = tune(output, "short", "synthetic", "--trials", str(SHORT_TRIALS), *SHORT)
        loops = {threads: loop_over(output / "studies" / "short", threads) for threads in (1, 2)}
    name = f"{SHORT_TRIALS} short trials of synthetic, two at a time"
    plain = "the same in one loop, {} thread"
    return [
        Row(
            f"a trivial trial in a study of {TRIALS}",
            each,
            "in a loop",
            loop,
            each / loop,
            "≤ 0.15 s",
        ),
        Row(f"a trial, the last 100 of {TRIALS}", last, "the first 100", first, last / first, "≤ 2"),
        *(Row(f"wall time, {name}", wall, plain.format(n), loops[n], wall / loops[n], "≤ 0.65") for n in loops),
    ]


def tune(output: Path, name: str, job: str, *words: str) -> float:
    """Wall seconds of a whole ``concord tune``, Ray's start and end included."""
    given = ["tune", job, "--output", str(output), "--name", name, *ONLY_SEARCH, *words]
    return measured("-c", "from concord.cli import entry; entry()", *given)


def loop_over(folder: Path, threads: int) -> float:
    """Wall seconds of a process that trains a study's trials one after the other."""
    return measured(__file__, str(folder), str(threads))


def measured(*words: str) -> float:
    """Wall seconds of Python with these words."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def _loop(folder: Path, threads: int) -> None:
    """The trials of a study, one after the other in this process."""
    tune_process(threads)
    record, journal = read_study(folder), read(folder)
    job: Job[Any] = load_job(str(TRIVIAL) if record["job"] == "trivial" else record["job"]).job
    base = restored_config(job.config, record["config"])
    rule = StopRule.of([part for part in record["identity"]["stop_when"].split(" and ") if part])
    space = Space.from_json(record["identity"]["space"])
    for task, _ in journal.finished("trial"):
        for evaluation in training(job, config_at(base, space, task.point), Place(), Silent()):
            if rule.holds(evaluation.metrics):
                break


if __name__ == "__main__":
    _loop(Path(sys.argv[1]), int(sys.argv[2]))
