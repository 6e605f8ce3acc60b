"""The figure of distillation's task B, in the form of the thesis's Fig. 4.4."""

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from concord.training import Runs


def curves_figure(compared: Runs) -> Figure:
    """The test's KL(p ‖ ŷ) by epoch, a line a row: the mean over seeds, their least and largest as a band.

    Args:
        compared: runs that report ``ood_kl``.
    """
    figure = Figure(figsize=(7.6, 3.8))
    axes = figure.subplots()
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for colour, (row, runs) in zip(colours, compared.items(), strict=False):
        epochs = sorted(set.intersection(*({at.epoch for at in run.history} for run in runs)))
        values = np.array([[at.metrics["ood_kl"] for at in run.history if at.epoch in epochs] for run in runs])
        axes.plot(epochs, values.mean(0), color=colour, label=row, linewidth=1.4)
        axes.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="epoch", ylabel="KL(p ‖ ŷ) on the test", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
