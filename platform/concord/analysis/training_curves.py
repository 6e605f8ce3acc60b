"""Curves of a run: training, held-out and out-of-distribution accuracy (or loss) by epoch."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.figure import Figure

from concord.analysis.figures import BLUE, GREEN, ORANGE, RED

_SPLITS = {
    "train": ("training environments", BLUE),
    "held_out": ("held out of them", GREEN),
    "validation": ("validation environments", ORANGE),
    "ood": ("o.o.d. test", RED),
}


class Evaluated(Protocol):
    """An evaluation: the epoch, and metrics by name."""

    @property
    def epoch(self) -> int:
        """Epochs done."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """All metrics then."""


def training_curves(history: Sequence[Evaluated], measure: str) -> Figure:
    """One panel with a line a split, ``{split}_{measure}`` of each evaluation against epochs."""
    figure = Figure(figsize=(5, 3.2))
    axes = figure.subplots()
    for split, (label, colour) in _SPLITS.items():
        points = [(at.epoch, at.metrics[f"{split}_{measure}"]) for at in history if f"{split}_{measure}" in at.metrics]
        if points:
            # The first line is broad, so that it is seen where another covers it.
            width = 4.0 if split == "train" else 1.5
            axes.plot(*zip(*points, strict=True), label=label, color=colour, linewidth=width, marker=".", markersize=4)
    axes.set(xlabel="epoch", ylabel=measure)
    if measure == "accuracy":
        axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right" if measure == "accuracy" else "best")
    return figure
