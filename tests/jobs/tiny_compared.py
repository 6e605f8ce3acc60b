"""The tiny job with tables to compare: one row is in both tables, and a table of its own has a failing row."""

import dataclasses
from pathlib import Path

from matplotlib.figure import Figure

from concord.source_file import run_source
from concord.training import Comparison, Run, Runs

_TINY = Path(__file__).with_name("tiny_study.py")
tiny = run_source(str(_TINY), _TINY.read_text(), "tiny", RuntimeError).job


def peak(run: Run) -> float:
    return max(at.metrics["ood_accuracy"] for at in run.history)


def dots(runs: Runs) -> Figure:
    figure = Figure()
    figure.subplots().plot([run.metrics["ood_accuracy"] for each in runs.values() for run in each], ".")
    return figure


AVERAGE = {"aggregator": "mean", "lr": 0.1}
columns = {"o.o.d.": "ood_accuracy", "at its peak": peak, "of a": "accuracy/train/a"}

job = dataclasses.replace(
    tiny,
    name="tiny-compared",
    comparisons={
        "masks": Comparison(
            {"average": AVERAGE, "and-mask": {"lr": 0.1, "threshold": 1.0}},
            seeds=3,
            columns=columns,
            paper={"average": {"o.o.d.": "88.5 ± 1.5", "of a": 90}, "best possible": {"o.o.d.": "95"}},
            percent=True,
            digits=1,
            figures={"dots": dots},
            title="few epochs",
        ),
        "rates": Comparison(
            {"0.1": AVERAGE, "0.01": {**AVERAGE, "lr": 0.01}}, seeds=2, columns={"o.o.d.": "ood_accuracy"}
        ),
        "broken": Comparison(
            {"average": AVERAGE, "raises": {"broken": "raises"}}, seeds=1, columns={"o.o.d.": "ood_accuracy"}
        ),
    },
)
