"""Curves of a run: training, held-out and out-of-distribution accuracy (or loss) by epoch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from concord.analysis.figures import BLUE, GREEN, ORANGE, RED, finish, one_panel
from concord.record import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SPLITS = {
    "train": ("training environments", BLUE),
    "held_out": ("held out of them", GREEN),
    "validation": ("validation environments", ORANGE),
    "ood": ("o.o.d. test", RED),
}


Histories = Sequence[Sequence[Evaluation]]
"""The evaluations of runs that differ in their seed alone."""


def draw_by_epoch(
    axes: "Axes", runs: Histories, metric: str, colour: object, label: str | None, style: str = "-"
) -> None:
    """The mean of a metric over runs as a line, and their range as a band."""
    epochs = sorted(set.intersection(*({at.epoch for at in run if metric in at.metrics} for run in runs)))
    if epochs:
        values = np.array([[at.metrics[metric] for at in run if at.epoch in epochs] for run in runs])
        axes.plot(epochs, values.mean(0), style, color=colour, label=label, linewidth=1.4)
        if len(runs) > 1:
            axes.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def training_curves(history: Sequence[Evaluation], measure: str) -> "Figure":
    """One panel with a line for each split: ``{split}_{measure}`` by epoch."""
    figure, axes = one_panel(5, 3.2, layout=None)
    for split, (label, colour) in _SPLITS.items():
        points = [(at.epoch, at.metrics[f"{split}_{measure}"]) for at in history if f"{split}_{measure}" in at.metrics]
        if points:
            # The first line is broad, so that it is visible below another line.
            width = 4.0 if split == "train" else 1.5
            axes.plot(*zip(*points, strict=True), label=label, color=colour, linewidth=width, marker=".", markersize=4)
    axes.set(xlabel="epoch", ylabel=measure)
    if measure == "accuracy":
        axes.set_ylim(-0.02, 1.02)
    finish(axes, loc="lower right" if measure == "accuracy" else "best")
    return figure
