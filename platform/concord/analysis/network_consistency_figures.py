"""Figures of a trained network's consistency: slices of its losses, its layers, and runs side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from concord.analysis.consistency.network import NetworkConsistency
from concord.analysis.consistency.slices import Slice
from concord.analysis.figures import BLUE, GREY, ORANGE, method_name

_MOST_PANELS = 4  # of single environments
_MOST_LAYERS = 40
_LEAST = 1e-6  # a loss is drawn as this where it is less
_LEVELS = 24
_LOGARITHMIC = 10.0  # values that lie further apart than by this factor are on a logarithmic scale


def plane_figure(found: Slice, title: str, first: str, second: str) -> Figure:
    """Losses over a plane: those environments that differ most from the mean, the arithmetic and the geometric mean.

    Args:
        found: the losses.
        title: above all panels.
        first, second: what the two directions are.
    """
    apart = np.abs(np.log(np.maximum(found.losses, _LEAST)) - np.log(np.maximum(found.arithmetic, _LEAST)))
    order = apart.reshape(len(found.names), -1).mean(1).argsort()[::-1][:_MOST_PANELS]
    panels = {found.names[place]: found.losses[place] for place in sorted(order.tolist())}
    panels |= {"arithmetic mean": found.arithmetic, "geometric mean": found.geometric}
    values = np.stack([np.maximum(panel, _LEAST) for panel in panels.values()])
    norm = LogNorm(float(values.min()), max(float(values.max()), float(values.min()) * 1.001))
    levels = np.geomspace(norm.vmin or _LEAST, norm.vmax or 1.0, _LEVELS)
    columns = -(-len(panels) // 2)
    figure = Figure(figsize=(2.6 * columns + 0.9, 5.2), layout="constrained")
    grid = figure.subplots(2, columns, sharex=True, sharey=True, squeeze=False)
    drawn = None
    for axes, (name, panel) in zip(grid.flat, panels.items(), strict=False):
        drawn = axes.contourf(found.first, found.second, np.maximum(panel, _LEAST), levels, norm=norm, cmap="viridis")
        axes.plot(0, 0, "*", color="white", markeredgecolor="black", markersize=9)
        axes.set_title(name, fontsize=9)
        axes.set_aspect("equal")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    if drawn is not None:
        ticks = 10.0 ** np.arange(np.ceil(np.log10(levels[0])), np.floor(np.log10(levels[-1])) + 1)
        figure.colorbar(drawn, ax=grid, label="loss", shrink=0.8, ticks=ticks)
    figure.supxlabel(first, fontsize=9)
    figure.supylabel(second, fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def line_figure(found: Slice, title: str, along: str) -> Figure:
    """Every environment's loss along a line, with the arithmetic and the geometric mean."""
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, losses in enumerate(found.losses):
        label = f"{len(found.names)} environments" if place == 0 else None
        axes.plot(found.first, np.maximum(losses, _LEAST), color=GREY, linewidth=0.7, alpha=0.6, label=label)
    for name, mean, colour in (
        ("arithmetic mean", found.arithmetic, ORANGE),
        ("geometric mean", found.geometric, BLUE),
    ):
        axes.plot(found.first, np.maximum(mean, _LEAST), color=colour, linewidth=2, label=name)
    axes.set_yscale("log")
    axes.set_xlabel(along)
    axes.set_ylabel("loss")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def layers_figure(measured: NetworkConsistency, null: NetworkConsistency | None, title: str) -> Figure:
    """By layer: agreement of signs and log ratio of curvatures, beside those of pseudo-environments and chance."""
    panels: list[tuple[str, Mapping[str, float], Mapping[str, float], float | None]] = []
    if measured.signs is not None:
        by_chance = null.signs.layers if null is not None and null.signs is not None else {}
        panels.append(
            (
                "agreement of gradient signs, |Σ sign| / d",
                {name: layer.agreement for name, layer in measured.signs.layers.items()},
                {name: layer.agreement for name, layer in by_chance.items()},
                measured.signs.chance_agreement,
            )
        )
    if measured.log_ratios:
        pooled = null.log_ratios if null is not None else {}
        panels.append(("log of arithmetic over geometric mean of curvatures", measured.log_ratios, pooled, None))
    names = list(panels[0][1])[:_MOST_LAYERS]
    figure = Figure(figsize=(4.4 * len(panels) + 0.6, 0.32 * len(names) + 1.5), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, true, pseudo, chance) in zip(grid, panels, strict=True):
        _bars(axes, names, true, pseudo)
        if chance is not None:
            axes.axvline(chance, color="black", linestyle=":", linewidth=1, label="fair coins")
        axes.set_xlabel(label, fontsize=8)
        axes.legend(fontsize=7, frameon=False)
    grid[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return figure


def _bars(axes: Axes, names: Sequence[str], true: Mapping[str, float], pseudo: Mapping[str, float]) -> None:
    places = np.arange(len(names))
    axes.barh(places - 0.2, [true[name] for name in names], 0.38, color=BLUE, label="environments")
    if pseudo:
        axes.barh(places + 0.2, [pseudo[name] for name in names], 0.38, color=GREY, label="dealt out at random")
    axes.set_yticks(places, names, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class RunPoint:
    """One run in a figure of several.

    Attributes:
        method: that trained it.
        value, null: what was found on its environments, and on pseudo-environments.
        accuracy: o.o.d., or None where the job reports none.
    """

    method: str
    value: float
    null: float
    accuracy: float | None


def runs_figure(panels: Mapping[str, Sequence[RunPoint]], accuracy: str) -> Figure:
    """Runs side by side: what was found against the o.o.d. accuracy, a panel for each number.

    Args:
        panels: the runs, by what the panel shows.
        accuracy: what the metric is called.
    """
    figure = Figure(figsize=(3.4 * len(panels) + 0.6, 3.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    colours = _colours([point.method for points in panels.values() for point in points])
    for axes, (label, points) in zip(grid, panels.items(), strict=True):
        known = all(point.accuracy is not None for point in points)
        for method, colour in colours.items():
            of_method = [point for point in points if point.method == method]
            heights: NDArray[np.float64] = np.array(
                [point.accuracy if known else list(colours).index(method) for point in of_method], dtype=np.float64
            )
            name = method_name(method)
            axes.scatter([p.value for p in of_method], heights, color=colour, s=26, label=name)
            axes.scatter(
                [p.null for p in of_method], heights, facecolors="none", edgecolors=colour, s=26, label=f"{name}, null"
            )
        seen = [number for point in points for number in (point.value, point.null) if number > 0]
        if max(seen, default=1.0) > _LOGARITHMIC * min(seen, default=1.0):
            axes.set_xscale("log")
        axes.set_xlabel(label, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if not known:
            axes.set_yticks(range(len(colours)), [method_name(method) for method in colours])
    grid[0].set_ylabel(accuracy)
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _colours(methods: Sequence[str]) -> dict[str, str]:
    palette = (BLUE, ORANGE, "#009E73", "#D55E00", "#CC79A7", GREY)
    return {method: palette[place % len(palette)] for place, method in enumerate(dict.fromkeys(methods))}
