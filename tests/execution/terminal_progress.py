"""The program that ``test_progress.py`` runs in a terminal: a line on standard input shows the next state."""

import sys
import termios

from concord.execution.progress import RunProgress
from concord.record import Evaluation, Run
from concord.studies.criterion import Criterion, TrialEvaluator
from concord.studies.proposals import GroupProgress, Trial


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
    criterion = Criterion("validation", "validation_accuracy", "max")
    done = Run.of([Evaluation(1, 1, {"validation_accuracy": 0.9})])
    with GroupProgress("trials", 20, info, criterion) as shown:
        input()
        for name in (done.name, "s-trial-1", "s-trial-2"):
            shown.evaluated(name, 0.0)
        shown.evaluated("s-trial-1", 50.0)
        input()
        shown.ended(done, "trial 0")
        shown.compared(Trial("trial", 0, {}, None, {}, {None: done}, TrialEvaluator(criterion)))
        input()


if __name__ == "__main__":
    settings = termios.tcgetattr(sys.stdin)
    settings[3] &= ~termios.ECHO  # hide the input lines
    termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
    for show in (run, resumed, study):
        show()
