"""The best runs of every method, and their curves, as in the AND-mask paper's figures of behavioural cloning."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from concord.analysis.figures import BLUE, GREEN, ORANGE, PURPLE, method_name, one_panel

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
_RESAMPLINGS = 10_000


def best_runs_figure(values: Mapping[str, Sequence[float]], measure: str) -> Figure:
    """The panel in §3.3 of the paper (Fig. 3.12 of the thesis): each of the best runs, one column for each method."""
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
) -> Figure:
    """Fig. 18 of the paper: training (left) and test (right), the mean over runs with its 95 % interval.

    By panel and method, the curve of each run is ``(fraction of the run, value)``.
    """
    figure = Figure(figsize=(3.6 * len(curves), 3.2), layout="constrained")
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


def bootstrapped_interval(
    values: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The ends of the 95 % interval of the mean over runs, ``(runs, ...)``: quantiles over resampled runs."""
    generator = np.random.default_rng(0)
    runs = len(values)
    # The mean of a resampling needs only the count of each run in it.
    counts = generator.multinomial(runs, np.full(runs, 1 / runs), _RESAMPLINGS) / runs
    means = np.tensordot(counts, values, axes=1)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high
