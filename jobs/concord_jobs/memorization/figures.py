"""The figures of memorization and label noise, in the form of the AND-mask paper's Fig. 8, 9 and 16."""

from typing import TYPE_CHECKING

import numpy as np

from concord.analysis.figures import BLUE, GREEN, GREY, ORANGE, RED, new_figure, one_panel
from concord.analysis.training_curves import Histories, draw_by_epoch
from concord.training import Runs
from concord.training.comparison import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def memorization_figure(compared: Runs) -> "Figure":
    """Fig. 8: training accuracy (solid) and test accuracy (dashed) by epoch, a panel for each kind of runs."""
    from matplotlib import colormaps

    curves = _by_threshold(compared)
    figure = new_figure(4.2 * len(curves), 3.4, None)
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    thresholds = sorted({threshold for by_threshold in curves.values() for threshold in by_threshold})
    shades = colormaps["viridis"](np.linspace(0, 0.9, max(len(thresholds), 2)))
    colours = dict(zip(thresholds, shades, strict=False))
    for axes, (panel, by_threshold) in zip(panels, sorted(curves.items()), strict=True):
        for threshold, runs in sorted(by_threshold.items()):
            draw_by_epoch(axes, runs, "train_accuracy", colours[threshold], f"τ = {threshold:g}")
            draw_by_epoch(axes, runs, "ood_accuracy", colours[threshold], None, style="--")
        axes.set_title(panel, fontsize=10)
        _finish(axes)
    panels[0].set_ylabel("accuracy (solid: training, dashed: test)")
    panels[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def thresholds_figure(compared: Runs) -> "Figure":
    """Fig. 16: final training (solid) and test (dashed) accuracy of the same runs by threshold, a dot for each run."""
    curves = _by_threshold(compared)
    figure, axes = one_panel(4.6, 3.4, layout=None)
    thresholds = sorted({threshold for by_threshold in curves.values() for threshold in by_threshold})
    for (panel, by_threshold), colour in zip(sorted(curves.items()), (ORANGE, BLUE, RED, GREEN) * 2, strict=False):
        for metric, style, name in (("train_accuracy", "-", "training"), ("ood_accuracy", "--", "test")):
            places, means = [], []
            for threshold, runs in sorted(by_threshold.items()):
                values = [run[-1].metrics[metric] for run in runs]
                places.append(thresholds.index(threshold))
                means.append(np.mean(values))
                axes.plot([places[-1]] * len(values), values, ".", color=colour, markersize=4)
            if places:
                axes.plot(places, means, style, color=colour, label=f"{panel}, {name}")
    axes.set_xticks(range(len(thresholds)), [f"{threshold:g}" for threshold in thresholds])
    _finish(axes, "agreement threshold τ")
    axes.set_ylabel("accuracy")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def label_noise_figure(compared: Runs) -> "Figure":
    """Fig. 9: accuracy by epoch on the wrongly labelled part of the training set, on the rest, and on the test set."""
    curves = {key: [run.history for run in each] for key, each in grouped(compared, "threshold", "lr").items()}
    figure = new_figure(11, 3.4, None)
    panels = figure.subplots(1, 3)
    titles = {"wrong_labels": "wrongly labelled (as labelled)", "right_labels": "rightly labelled", "ood": "test"}
    rates = sorted({rate for _, rate in curves})
    styles = dict(zip(rates, ["-", "--", ":", "-."] * len(rates), strict=False))
    for axes, (part, title) in zip(panels, titles.items(), strict=True):
        for (threshold, rate), runs in sorted(curves.items()):
            colour = ORANGE if threshold == 0 else BLUE
            name = "average" if threshold == 0 else f"AND-mask, τ = {threshold:g}"
            draw_by_epoch(axes, runs, f"{part}_accuracy", colour, f"{name}, learning rate {rate:g}", style=styles[rate])
        axes.set_title(title, fontsize=10)
        _finish(axes)
    panels[0].axhline(0.1, color=GREY, linewidth=0.8, linestyle=":")
    panels[0].text(
        1, 0.1, "chance", color=GREY, fontsize=8, ha="right", va="bottom", transform=panels[0].get_yaxis_transform()
    )
    panels[0].set_ylabel("accuracy")
    panels[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _by_threshold(runs: Runs) -> dict[str, dict[float, Histories]]:
    """A panel for each kind of labels and, if there are several, for each definition of an example's gradient."""
    found = grouped(runs, "labels", "example_gradient", "threshold")
    several = len({gradient for _, gradient, _ in found}) > 1
    curves: dict[str, dict[float, Histories]] = {}
    for (labels, gradient, threshold), each in found.items():
        panel = f"{labels} labels" + (f", by {gradient}" if several else "")
        curves.setdefault(panel, {})[threshold] = [run.history for run in each]
    return curves


def _finish(axes: "Axes", across: str = "epoch") -> None:
    axes.set(xlabel=across, ylim=(-0.02, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
