"""What ``test_progress.py`` runs in a terminal: each state of a display, until a line arrives on standard input."""

import sys
import termios
from pathlib import Path

from concord.runs import progress
from concord.runs.progress import RunProgress
from concord.studies.journal import TrialResult, TrialSpec
from concord.studies.progress import StudyProgress
from concord.studies.selection import Criterion
from concord.tracking import Store

progress._LOOK_EVERY_SECONDS = 0.05


def info(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(epoch: int) -> dict[str, float]:
    names = ("train_accuracy", "ood_accuracy", "train_loss", "ood_loss", "kept_fraction")
    return {"epoch": float(epoch), **dict.fromkeys(names, 0.125 + epoch / 100)}


def run(output: Path) -> None:
    store = Store.open(output)
    run_id = store.start_run("terminal", "run", {}, {})
    with RunProgress(info) as shown:
        shown.waiting("starting Ray")
        input()
        with shown.training(store, run_id, 50):
            input()
            store.log_metrics(run_id, measured(12), 12)
            input()
            store.log_metrics(run_id, measured(13), 13)
            input()
        shown.waiting("drawing figures, registering the model")
        input()


def resumed(output: Path) -> None:
    store = Store.open(output)
    run_id = store.start_run("terminal", "resumed", {}, {})
    store.log_metrics(run_id, measured(40), 40)
    with RunProgress(info) as shown, shown.training(store, run_id, 50):
        input()
        resumption = {"resumed/epoch": 40.0, "resumed/workers": 2.0, "resumed/seconds": 60.0}
        store.log_metrics(run_id, resumption, 40)
        input()
        store.log_metrics(run_id, measured(41), 41)
        input()


def study(output: Path) -> None:
    tasks = [TrialSpec("trial", number, {}) for number in range(3)]
    shown = StudyProgress("trials", 20, Criterion("validation", "validation_accuracy", "max"), info)
    with shown:
        input()
        for task in tasks:
            shown.began(task)
        shown.evaluated(tasks[1], 50.0)
        input()
        shown.ended(tasks[0], TrialResult({"validation_accuracy": 0.9}, [], 1.0, 0.0))
        input()


if __name__ == "__main__":
    settings = termios.tcgetattr(sys.stdin)
    settings[3] &= ~termios.ECHO  # the lines that go on to the next state are not to be seen
    termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
    for show in (run, resumed, study):
        show(Path(sys.argv[1]))
