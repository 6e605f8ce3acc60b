"""What a study costs besides its trials, as whole commands: 1024 trivial trials, and 64 short ones of `synthetic`."""

import ctypes
import json
import os
import resource
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
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, prctl(2)


def rows() -> list[Row]:
    """Overhead a trial, whether it grows, and CPU and wall time against a plain loop over the same trials."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        tune(output, "trivial", str(TRIVIAL), "--trials", str(TRIALS))
        trivial = read(output / "studies" / "trivial")
        ends = [ended.ended for _, ended in trivial.results("trial")]
        each = (ends[-1] - min(e.ended - e.seconds for _, e in trivial.results("trial"))) / len(ends)
        first, last = (ends[99] - ends[0]) / 99, (ends[-1] - ends[-100]) / 99
        loop = measured("loop", output / "studies" / "trivial", 1)
        wall, cpu = tune(output, "short", "synthetic", "--trials", str(SHORT_TRIALS), *SHORT)
        loops = {threads: measured("loop", output / "studies" / "short", threads) for threads in (1, 2)}
    name = f"{SHORT_TRIALS} short trials of synthetic, two at a time"
    plain = "the same in one loop, {} thread"
    return [
        Row(
            f"a trivial trial in a study of {TRIALS}",
            each,
            "in a loop",
            loop[0] / len(ends),
            each / (loop[0] / len(ends)),
            "≤ 0.15 s",
        ),
        Row(f"a trial, the last 100 of {TRIALS}", last, "the first 100", first, last / first, "≤ 2"),
        *(Row(f"CPU time, {name}", cpu, plain.format(n), loops[n][1], cpu / loops[n][1], "≤ 1.15") for n in loops),
        *(Row(f"wall time, {name}", wall, plain.format(n), loops[n][0], wall / loops[n][0], "≤ 0.65") for n in loops),
    ]


def tune(output: Path, name: str, job: str, *words: str) -> tuple[float, float]:
    """Wall and CPU seconds of a whole ``concord tune``, every process of Ray and MLflow included."""
    return measured("tune", job, "--output", str(output), "--name", name, *ONLY_SEARCH, *words)


def measured(*words: Any) -> tuple[float, float]:
    """Wall and CPU seconds of one of the commands below, with all its processes."""
    command = [sys.executable, __file__, *map(str, words)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    wall, cpu = json.loads(said.splitlines()[-1])
    return wall, cpu


def _report_costs(command: list[str]) -> None:
    """Run a command to the end of its last process, and print its wall and CPU seconds."""
    # Processes whose parents ended become this one's children, so that none of their time is lost.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    wall = time.perf_counter() - started
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps([wall, used.ru_utime + used.ru_stime]))


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
    if sys.argv[1] == "tune":
        _report_costs([sys.executable, "-c", "from concord.cli import entry; entry()", *sys.argv[1:]])
    elif sys.argv[1] == "loop":
        _report_costs([sys.executable, __file__, "in-this-process", *sys.argv[2:]])
    else:
        _loop(Path(sys.argv[2]), int(sys.argv[3]))
