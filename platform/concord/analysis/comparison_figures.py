"""Figures of methods side by side: over seeds, the best runs of each with their curves, and environments left out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from concord.analysis.figures import BLUE, GREEN, ORANGE, PURPLE, new_figure, one_panel
from concord.analysis.method_names import method_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
_RESAMPLINGS = 10_000
_CYCLE = 10  # of Matplotlib's cycle; then the same colours have the next marker
_MARKERS = "os^Dv"
_MOST_ROWS = 30  # environments

Spread = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By environment: what was chosen without it, seed by seed, and what choosing by it would have given."""


def methods_figure(runs: Mapping[str, Mapping[str, Sequence[float]]], measure: str) -> "Figure":
    """Fig. 6 of the AND-mask paper: ``train`` and ``ood`` of every method, one number for each seed."""
    figure, axes = one_panel(1.5 + 1.1 * len(runs), 3.4)
    for offset, (split, label) in enumerate((("train", "training"), ("ood", "o.o.d. test"))):
        places = [index + 0.36 * (offset - 0.5) for index in range(len(runs))]
        boxes = axes.boxplot(
            [list(values[split]) for values in runs.values()],
            positions=places,
            widths=0.3,
            patch_artist=True,
            manage_ticks=False,
            medianprops={"color": "black"},
            flierprops={"markersize": 3},
        )
        for box in boxes["boxes"]:
            box.set(facecolor=(BLUE, ORANGE)[offset], alpha=0.75)
        boxes["boxes"][0].set_label(label)
    counts = [len(values["ood"]) for values in runs.values()]
    axes.set_xticks(
        range(len(runs)), [f"{method_name(name)}\n({n} seeds)" for name, n in zip(runs, counts, strict=True)]
    )
    axes.set(ylabel=measure)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return figure


def best_runs_figure(values: Mapping[str, Sequence[float]], measure: str) -> "Figure":
    """§3.3 of the AND-mask paper (Fig. 3.12 of the thesis): each of the best runs, one column for each method."""
    figure, axes = one_panel(1.5 + 1.2 * len(values), 3.2)
    jitter = np.random.default_rng(0)
    for index, each in enumerate(values.values()):
        places = index + jitter.uniform(-0.12, 0.12, len(each))
        axes.scatter(places, each, color=_COLOURS[index % 4], s=22, alpha=0.8, linewidths=0)
        axes.hlines(float(np.median(each)), index - 0.25, index + 0.25, color=_COLOURS[index % 4])
    names = [f"{method_name(method)}\n({len(each)} runs)" for method, each in values.items()]
    axes.set_xticks(range(len(values)), names)
    axes.set(xlim=(-0.6, len(values) - 0.4), ylabel=measure)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def mean_curves_figure(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[tuple[float, float]]]]], measure: str
) -> "Figure":
    """Fig. 18 of the AND-mask paper: training (left) and test (right), the mean over runs with its 95 % interval.

    By panel and method, the curve of each run is ``(fraction of the run, value)``.
    """
    figure = new_figure(3.6 * len(curves), 3.2)
    panels: list[Axes] = list(np.atleast_1d(figure.subplots(1, len(curves))))
    grid = np.linspace(0, 1, 101)
    for axes, (panel, methods) in zip(panels, curves.items(), strict=True):
        for index, (method, runs) in enumerate(methods.items()):
            lines = np.stack([np.interp(grid, *np.array(run).T) for run in runs])
            shown = grid >= max(run[0][0] for run in runs)
            low, high = bootstrapped_interval(lines)
            colour = _COLOURS[index % 4]
            axes.plot(
                grid[shown], lines.mean(0)[shown], color=colour, label=f"{method_name(method)} ({len(runs)} runs)"
            )
            axes.fill_between(grid[shown], low[shown], high[shown], color=colour, alpha=0.2, linewidth=0)
        axes.set(title=panel, xlabel="fraction of the run", ylabel=measure, yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(frameon=False, fontsize=8)
    return figure


def bootstrapped_interval(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The ends of the 95 % interval of the mean over runs, ``(runs, ...)``: quantiles over resampled runs."""
    generator = np.random.default_rng(0)
    runs = len(values)
    # The mean of a resampling needs only the count of each run in it.
    counts = generator.multinomial(runs, np.full(runs, 1 / runs), _RESAMPLINGS) / runs
    means = np.tensordot(counts, values, axes=1)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high


def left_out_figure(values: Mapping[str, Spread], measure: str) -> "Figure":
    """Mean and standard deviation over seeds in each environment; a hollow mark is the oracle's mean.

    More environments than a page has room for are points behind a box of each method.
    """
    environments = list(next(iter(values.values())))
    if len(environments) > _MOST_ROWS:
        return _left_out_boxes(values, measure)
    figure, axes = one_panel(6, 1.2 + 0.22 * len(environments) * (1 + len(values)))
    for index, (method, spread) in enumerate(values.items()):
        for place, name in enumerate(environments):
            chosen, oracle = spread[name]
            if not chosen:
                continue
            at = place + 0.8 * ((index + 0.5) / len(values) - 0.5)
            label, colour, marker = method_name(method) if place == 0 else None, f"C{index}", _MARKERS[index // _CYCLE]
            error = float(np.std(chosen, ddof=1)) if len(chosen) > 1 else None
            axes.errorbar(float(np.mean(chosen)), at, xerr=error, fmt=marker, color=colour, label=label)
            axes.plot(float(np.mean(oracle)), at, marker, markerfacecolor="none", color=colour)
    axes.set(yticks=range(len(environments)), yticklabels=environments, xlabel=f"{measure} where it is left out")
    axes.invert_yaxis()
    figure.legend(frameon=False, loc="outside upper center", ncols=3, title="hollow: chosen by it (oracle)")
    return figure


def _left_out_boxes(values: Mapping[str, Spread], measure: str) -> "Figure":
    """A box over the environments for each method, on the points of their means over seeds; the ends are named."""
    figure, axes = one_panel(7, 1.2 + 0.75 * len(values))
    jitter = np.random.default_rng(0)
    for place, spread in enumerate(values.values()):
        means = {name: float(np.mean(chosen)) for name, (chosen, _) in spread.items() if np.isfinite(chosen).any()}
        ranked = sorted(means, key=lambda name: means[name])
        if not ranked:
            continue
        found = [means[name] for name in ranked]
        heights = place + jitter.uniform(-0.2, 0.2, len(found))
        axes.scatter(found, heights, s=9, alpha=0.5, linewidths=0, color=f"C{place}")
        axes.boxplot(
            [found],
            positions=[place],
            widths=0.45,
            orientation="horizontal",
            showfliers=False,
            manage_ticks=False,
            medianprops={"color": "black"},
        )
        for name in (ranked[0], ranked[-1]):
            axes.text(means[name], place - 0.33, name, ha="center", fontsize=7)
    axes.set(yticks=range(len(values)), yticklabels=list(map(method_name, values)))
    axes.set(xlabel=f"{measure} where it is left out, of {len(next(iter(values.values())))} environments")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure
