"""The figure of distillation's task B, in the form of the thesis's Fig. 4.4."""

import matplotlib
from matplotlib.figure import Figure

from concord.analysis.training_curves import draw_by_epoch
from concord.training import Runs


def curves_figure(compared: Runs) -> Figure:
    """The test's KL(p ‖ ŷ) by epoch, a line a row."""
    figure = Figure(figsize=(7.6, 3.8))
    axes = figure.subplots()
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for colour, (row, runs) in zip(colours, compared.items(), strict=False):
        draw_by_epoch(axes, [run.history for run in runs], "ood_kl", colour, row)
    axes.set(xlabel="epoch", ylabel="KL(p ‖ ŷ) on the test", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
