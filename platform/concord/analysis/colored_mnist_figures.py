"""Accuracies over environments that mislead more and more, in the form of the meta-IRM paper."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from concord.analysis.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, method_name

Runs = Mapping[float, Sequence[float]]
"""The values of all runs at each place on the horizontal axis."""

_COLOURS = {
    "erm": GREY,
    "irm": BLUE,
    "mm-rex": PURPLE,
    "vrex": GREEN,
    "meta-irm": RED,
    "erm, grey": ORANGE,
}


def flips_figure(panels: Mapping[str, Mapping[str, Runs]], optimal: float | None = 0.75) -> Figure:
    """Fig. 3, 5 and 8: test accuracy against p_e, mean and standard deviation over runs.

    Args:
        panels: by title and method, the accuracies at each p_e.
        optimal: a line to be reached at best.
    """
    figure = Figure(figsize=(1.2 + 3.4 * len(panels), 3.1), layout="constrained")
    row = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axes, (title, methods) in zip(row, panels.items(), strict=True):
        for index, (method, runs) in enumerate(methods.items()):
            _dots(axes, method, runs, index, 0.008 * (index - (len(methods) - 1) / 2))
        if optimal is not None:
            axes.axhline(optimal, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlabel("p_e of the test")
        axes.set_title(method_name(title), fontsize=10)
        axes.set_ylim(0, 1)
    row[0].set_ylabel("test accuracy")
    row[-1].legend(fontsize=8, frameon=False)
    return figure


def band_figure(methods: Mapping[str, Runs], across: str, measure: str) -> Figure:
    """Fig. 4 and 10: a line a method, mean and a band of one standard deviation.

    Args:
        methods: the values at each place.
        across: what the horizontal axis is.
        measure: what the vertical one is.
    """
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")
    axes = figure.subplots()
    for index, (method, runs) in enumerate(methods.items()):
        places = np.array(sorted(runs))
        values = [np.array(runs[place]) for place in places]
        mean = np.array([each.mean() for each in values])
        spread = np.array([each.std(ddof=1) if len(each) > 1 else 0.0 for each in values])
        axes.plot(places, mean, color=_colour(method, index), label=method_name(method), marker="o", markersize=3)
        axes.fill_between(places, mean - spread, mean + spread, color=_colour(method, index), alpha=0.2, linewidth=0)
    axes.set_xlabel(across)
    axes.set_ylabel(measure)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def penalty_figure(curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> Figure:
    """Fig. 6: the penalty of IRMv1 over training, the mean over runs, on a logarithmic axis.

    Args:
        curves: by label, the curve of each run as ``(fraction of the run, penalty)``.
    """
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")
    axes = figure.subplots()
    for index, (label, runs) in enumerate(curves.items()):
        values = np.array([[value for _, value in run] for run in runs])
        axes.plot([place for place, _ in runs[0]], values.mean(0), color=_colour("", index), label=label)
    axes.set_yscale("log")
    axes.set_xlabel("part of the run")
    axes.set_ylabel("penalty")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def layers_figure(similarities: Mapping[str, Sequence[float]]) -> Figure:
    """Fig. 9: similarity of each layer before and after the inner steps, a bar with its standard deviation."""
    figure = Figure(figsize=(3.4, 3.1), layout="constrained")
    axes = figure.subplots()
    values = [np.array(each) for each in similarities.values()]
    spread = [each.std(ddof=1) if len(each) > 1 else 0.0 for each in values]
    axes.bar(range(len(values)), [each.mean() for each in values], yerr=spread, color=BLUE, width=0.6, capsize=3)
    axes.set_xticks(range(len(values)), list(similarities))
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("PWCCA similarity")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _dots(axes: Axes, method: str, runs: Runs, index: int, shift: float) -> None:
    places = sorted(runs)
    values = [np.array(runs[place]) for place in places]
    mean = [each.mean() for each in values]
    spread = [each.std(ddof=1) if len(each) > 1 else 0.0 for each in values]
    axes.errorbar(
        np.array(places) + shift, mean, yerr=spread, fmt="o-", color=_colour(method, index), label=method_name(method),
        markersize=3, linewidth=1, capsize=2,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)


def _colour(method: str, index: int) -> str:
    return _COLOURS.get(method, list(_COLOURS.values())[1 + index % 5])
