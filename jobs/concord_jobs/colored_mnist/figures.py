"""Accuracies over environments with increasingly misleading colours, in the form of the meta-IRM paper."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from concord.analysis.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, finish, new_figure, one_panel
from concord.analysis.method_names import method_name
from concord.training import Run, Runs
from concord.training.comparison import at_end, grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
ByPlace = Mapping[float, Sequence[float]]
"""The values of all runs at each place on the horizontal axis."""

SLOPES = "scale_slope/train/"  # the penalty is computed from these metrics
ADAPTED = "pwcca_adapted_"
_COLOURS = {
    "erm": GREY,
    "irm": BLUE,
    "mm-rex": PURPLE,
    "vrex": GREEN,
    "meta-irm": RED,
    "meta-irm, without the test": GREEN,
    "meta-irm, without the test, two layers": ORANGE,
    "erm, grey": ORANGE,
    "meta-irm, oracle": "black",
}


def flips_figure(panels: Mapping[str, Mapping[str, ByPlace]]) -> "Figure":
    """Fig. 3, 5 and 8: test accuracy by title, method and p_e, mean and standard deviation over runs."""
    figure = new_figure(1.2 + 3.4 * len(panels), 3.1)
    row = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axes, (title, methods) in zip(row, panels.items(), strict=True):
        for index, (method, runs) in enumerate(methods.items()):
            mean, spread = _mean_and_spread(runs.values())
            places = np.array(list(runs)) + 0.008 * (index - (len(methods) - 1) / 2)
            label, colour = method_name(method), _colour(method, index)
            axes.errorbar(places, mean, spread, fmt="o-", color=colour, label=label, ms=3, linewidth=1, capsize=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(0.75, color="black", linewidth=0.8, linestyle=":")  # the best possible accuracy
        axes.set_xlabel("p_e of the test")
        axes.set_title(method_name(title), fontsize=10)
        axes.set_ylim(0, 1)
    row[0].set_ylabel("test accuracy")
    row[-1].legend(fontsize=8, frameon=False)
    return figure


def images_figure(environments: Mapping[str, tuple[Tensor, Tensor]]) -> "Figure":
    """The first eight images ``(examples, colours, side, side)`` and labels of each environment, in a row (Fig. 7).

    A patch is bright in every colour, and therefore white.
    """
    from matplotlib.colors import hsv_to_rgb

    columns = 8
    figure = new_figure(0.8 * columns + 1.2, 1.1 * len(environments))
    for row, (name, (images, labels)) in zip(
        figure.subplots(len(environments), columns), environments.items(), strict=True
    ):
        hues = np.arange(images.shape[1]) / images.shape[1]
        saturation = np.full_like(hues, len(hues) > 1)  # one channel is grey
        colours = hsv_to_rgb(np.stack([hues, saturation, np.ones_like(hues)], 1))
        shown = np.einsum("ncij,cr->nijr", images[:columns].numpy() / 255, colours).clip(0, 1)
        for axes, image, label in zip(row, shown, labels.tolist(), strict=False):
            axes.imshow(image)
            axes.set_title(f"class {label}", fontsize=8)
        row[0].set_ylabel(name)
        for axes in row:
            axes.set(xticks=[], yticks=[])
    return figure


def band_figure(methods: Mapping[str, ByPlace], across: str, measure: str) -> "Figure":
    """Fig. 4 and 10: a line for each method, with the mean and a band of one standard deviation."""
    figure, axes = one_panel(4.6, 3.1)
    for index, (method, runs) in enumerate(methods.items()):
        places = np.array(sorted(runs))
        mean, spread = _mean_and_spread([runs[place] for place in places])
        axes.plot(places, mean, color=_colour(method, index), label=method_name(method), marker="o", markersize=3)
        axes.fill_between(places, mean - spread, mean + spread, color=_colour(method, index), alpha=0.2, linewidth=0)
    axes.set(xlabel=across, ylabel=measure)
    finish(axes, loc="lower left")
    return figure


def by_flip(runs: Sequence[Run]) -> ByPlace:
    """Each run's final accuracy at each p_e, in the monitored environments and in the test."""
    accuracies: dict[float, list[float]] = {}
    for run in runs:
        at = {float(flip): f"flip-{flip:g}_accuracy" for flip in run.options["observed_flips"]}
        at[float(run.options["test_flip"])] = "ood_accuracy"
        for flip, metric in at.items():
            accuracies.setdefault(flip, []).append(run.metrics[metric])
    return dict(sorted(accuracies.items()))


def all_methods(runs: Runs) -> "Figure":
    """Fig. 3 and 8: every row's accuracies, in one panel."""
    return flips_figure({"": {method: by_flip(each) for method, each in runs.items()}})


def all_sizes(runs: Runs) -> "Figure":
    """Fig. 5: a panel for each method, a line for each number of examples."""
    panels: dict[str, dict[str, ByPlace]] = {}
    for row, each in runs.items():
        method, _, examples = row.rpartition(", ")
        panels.setdefault(method, {})[examples] = by_flip(each)
    return flips_figure(panels)


def penalties(runs: Runs) -> "Figure":
    """Fig. 6: the mean penalty of the runs during training, a line for each number of examples, logarithmic."""
    figure, axes = one_panel(4.6, 3.1)
    for index, (examples, each) in enumerate(grouped(runs, "examples").items()):
        values = np.array([[_penalty(at.metrics) for at in run.history] for run in each])
        places = [at.epoch / each[0].history[-1].epoch for at in each[0].history]
        axes.plot(places, values.mean(0), color=_colour("", index), label=f"{examples:,} examples")
    axes.set(yscale="log", xlabel="part of the run", ylabel="penalty")
    finish(axes)
    return figure


def noise_gaps(runs: Runs) -> "Figure":
    """Fig. 4: test accuracy, a line for each method."""
    lines: dict[str, dict[float, list[float]]] = {}
    for row, each in runs.items():
        method, gap = row.rpartition(", ")[0], each[0].options["noise_gap"]
        lines.setdefault(method, {})[gap] = at_end(each, "ood_accuracy")
    return band_figure(lines, "gap between the environments' label noise", "test accuracy at p_e = .9")


def similarities(runs: Runs) -> "Figure":
    """Fig. 10: similarity of representations by p_e, a line for each row that measures it."""
    lines = {
        method: {
            float(flip): at_end(each, f"pwcca_{flip:g}")
            for flip in (*each[0].options["observed_flips"], each[0].options["test_flip"])
        }
        for method, each in runs.items()
    }
    return band_figure(lines, "p_e of the test", "PWCCA similarity with p_e = .1")


def adapted_layers(runs: Runs) -> "Figure":
    """Fig. 9: similarity of each layer before and after the inner steps, a bar with its standard deviation."""
    layers: dict[str, list[float]] = {}
    for each in runs.values():
        for run in each:
            for name, value in run.metrics.items():
                if name.startswith(ADAPTED):
                    layers.setdefault(f"layer {int(name.removeprefix(ADAPTED).split('_')[0]) + 1}", []).append(value)
    figure, axes = one_panel(3.4, 3.1)
    mean, spread = _mean_and_spread(layers.values())
    axes.bar(range(len(mean)), mean, yerr=spread, color=BLUE, width=0.6, capsize=3)
    axes.set_xticks(range(len(mean)), list(layers))
    axes.set(ylim=(0, 1.05), ylabel="PWCCA similarity")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def adapted(layer: int) -> Callable[[Run], float]:
    """The similarity of a layer before and after the inner steps, the mean over the environments."""

    def similarity(run: Run) -> float:
        found = [value for name, value in run.metrics.items() if name.startswith(f"{ADAPTED}{layer}_")]
        return sum(found) / len(found)

    return similarity


def largest_penalty(run: Run) -> float:
    """The largest penalty of all evaluations: that of the average, before the penalty has its weight."""
    return max(_penalty(at.metrics) for at in run.history)


def last_penalty(run: Run) -> float:
    """The penalty at the end of the run."""
    return _penalty(run.metrics)


def distance_at_stop(part: float, spread: float, paper: Mapping[str, float]) -> Callable[[Run], float]:
    """The largest distance of an accuracy from the paper's, for the model that ``--stop-spread`` would take of a run.

    It is the first one after this part of the run whose held-out losses have a smaller spread, or else the one with
    the smallest.
    """

    def distance(run: Run) -> float:
        seen = [each.metrics for each in run.history if each.epoch >= math.ceil(part * run.history[-1].epoch)]
        below = (each for each in seen if each["held_out_spread"] < spread)
        stopped = next(below, None) or min(seen, key=lambda each: each["held_out_spread"])
        return max(abs(stopped[name] - accuracy) for name, accuracy in paper.items())

    return distance


def _penalty(metrics: Mapping[str, float]) -> float:
    slopes = [value for name, value in metrics.items() if name.startswith(SLOPES)]
    return sum(slope**2 for slope in slopes) / len(slopes)


def _mean_and_spread(runs: Iterable[Sequence[float]]) -> tuple[Numbers, Numbers]:
    """Means, and standard deviations, over runs."""
    values = [np.array(each) for each in runs]
    spread = [each.std(ddof=1) if len(each) > 1 else 0.0 for each in values]
    return np.array([each.mean() for each in values]), np.array(spread)


def _colour(method: str, index: int) -> str:
    return _COLOURS.get(method, list(_COLOURS.values())[1 + index % 5])
