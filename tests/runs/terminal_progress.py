"""The program that ``test_progress.py`` runs in a terminal: a line on standard input shows the next state."""

import sys
import termios

from concord.runs.progress import RunProgress
from concord.studies.criterion import Criterion
from concord.studies.group_progress import GroupProgress
from concord.studies.proposals import EndedRun, RunProposal
from concord.training import Evaluation


def info(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(epoch: int) -> dict[str, float]:
    names = ("train_accuracy", "ood_accuracy", "train_loss", "ood_loss", "kept_fraction")
    return {"epoch": float(epoch), **dict.fromkeys(names, 0.125 + epoch / 100)}


def run() -> None:
    with RunProgress(info) as shown:
        shown.waiting("starting Ray")
        input()
        shown.training(50, "starting workers")
        input()
        shown.show(measured(12))
        input()
        shown.show(measured(13))
        input()
        shown.waiting("drawing figures, registering the model")
        input()


def resumed() -> None:
    with RunProgress(info) as shown:
        shown.training(50, "starting workers")
        input()
        shown.show({"resumed/epoch": 40.0, "resumed/workers": 2.0, "resumed/seconds": 60.0})
        input()
        shown.show(measured(41))
        input()


def study() -> None:
    runs = [RunProposal("trial", number, {}) for number in range(3)]
    shown = GroupProgress("trials", 20, info, Criterion("validation", "validation_accuracy", "max"))
    with shown:
        input()
        for run in runs:
            shown.evaluated(run, 0.0)
        shown.evaluated(runs[1], 50.0)
        input()
        shown.ended(EndedRun(runs[0], [Evaluation(1, 1, {"validation_accuracy": 0.9})], 1.0, 0.0))
        input()


if __name__ == "__main__":
    settings = termios.tcgetattr(sys.stdin)
    settings[3] &= ~termios.ECHO  # hide the input lines
    termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
    for show in (run, resumed, study):
        show()
