"""The figures of the tables on simulated trajectories, in the form of the thesis."""

from typing import TYPE_CHECKING

import numpy as np

from concord.analysis.figures import BLUE, GREEN, ORANGE, PURPLE, RED, new_figure
from concord.errors import InputError
from concord.training import Runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE)


def accuracy_figure(runs: Runs, metric: str = "validation_soft_accuracy") -> "Figure":
    """Fig. 2.9 to 2.11: a metric by epochs (left) and by evaluations of the model in training (right).

    The mean over the runs of a method, and the range of the middle half of them.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(9.5, 3.2)
    panels = figure.subplots(1, 2, sharey=True)
    found = False
    for colour, (name, each) in zip(_COLOURS * len(runs), runs.items(), strict=False):
        histories = [[at for at in run.history if metric in at.metrics] for run in each]
        shortest = min((len(history) for history in histories), default=0)
        if shortest == 0:
            continue
        found = True
        values = np.array([[at.metrics[metric] for at in history[:shortest]] for history in histories])
        low, high = np.quantile(values, [0.25, 0.75], axis=0)
        epochs = np.array([[at.epoch for at in history[:shortest]] for history in histories]).mean(0)
        counted = [[at.metrics.get("model_evaluations", np.nan) for at in each[:shortest]] for each in histories]
        for axes, places in zip(panels, (epochs, np.array(counted).mean(0)), strict=True):
            axes.plot(places, values.mean(0), color=colour, label=name)
            axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    if not found:
        raise InputError(f"metric {metric}: none of the runs has it")
    panels[0].set(xlabel="epoch", ylabel=metric.replace("_", " "))
    panels[1].set(xlabel="evaluations of the model in training")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].xaxis.set_major_locator(MaxNLocator(4))
    panels[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
