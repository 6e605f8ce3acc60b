"""Figures of a trained network's consistency: slices of its losses, its layers, and runs side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from concord.analysis.consistency.measurement import ACCURACIES, Consistency, Measurement
from concord.analysis.consistency.slices import Slice
from concord.analysis.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, finish, new_figure, one_panel
from concord.analysis.method_names import method_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 4  # of single environments
_MOST_LAYERS = 40
_LEAST = 1e-6  # smaller losses are drawn as this
_LEVELS = 24
_LOGARITHMIC = 10.0  # values with a larger ratio are on a logarithmic scale


def plane_figure(found: Slice, title: str, first: str, second: str) -> "Figure":
    """Losses over a plane: the environments that differ most from the mean, and the arithmetic and geometric means."""
    from matplotlib.colors import LogNorm

    apart = np.abs(np.log(np.maximum(found.losses, _LEAST)) - np.log(np.maximum(found.arithmetic, _LEAST)))
    order = apart.reshape(len(found.names), -1).mean(1).argsort()[::-1][:_MOST_PANELS]
    panels = {found.names[place]: found.losses[place] for place in sorted(order.tolist())}
    panels |= {"arithmetic mean": found.arithmetic, "geometric mean": found.geometric}
    values = np.stack([np.maximum(panel, _LEAST) for panel in panels.values()])
    norm = LogNorm(float(values.min()), max(float(values.max()), float(values.min()) * 1.001))
    levels = np.geomspace(norm.vmin or _LEAST, norm.vmax or 1.0, _LEVELS)
    columns = -(-len(panels) // 2)
    figure = new_figure(2.6 * columns + 0.9, 5.2)
    grid = figure.subplots(2, columns, sharex=True, sharey=True, squeeze=False)
    drawn = None
    for axes, (name, panel) in zip(grid.flat, panels.items(), strict=False):
        drawn = axes.contourf(found.places, found.places, np.maximum(panel, _LEAST), levels, norm=norm, cmap="viridis")
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


def line_figure(found: Slice, title: str, along: str) -> "Figure":
    """Every environment's loss along a line, with the arithmetic and the geometric mean."""
    figure, axes = one_panel(5.6, 3.4)
    for place, losses in enumerate(found.losses):
        label = f"{len(found.names)} environments" if place == 0 else None
        axes.plot(found.places, np.maximum(losses, _LEAST), color=GREY, linewidth=0.7, alpha=0.6, label=label)
    for name, mean, colour in (
        ("arithmetic mean", found.arithmetic, ORANGE),
        ("geometric mean", found.geometric, BLUE),
    ):
        axes.plot(found.places, np.maximum(mean, _LEAST), color=colour, linewidth=2, label=name)
    axes.set_yscale("log")
    axes.set_xlabel(along)
    axes.set_ylabel("loss")
    axes.set_title(title, fontsize=10)
    finish(axes)
    return figure


def slice_figures(found: Consistency, title: str, parts: Sequence[str], through: str | None) -> "dict[str, Figure]":
    """The figures of a line and a plane, if measured; without curvature the directions are random."""
    if found.line is None or found.plane is None:
        return {}
    names = ["a random direction", "another random direction"]
    if "curvature" in parts:
        names = [f"the direction of the {which} ratio of curvatures" for which in ("largest", "next largest")]
    first, second = names if through is None else (f"the line to {through}", names[0])
    return {
        "line": line_figure(found.line, title, f"along {first}"),
        "plane": plane_figure(found.plane, title, f"along {first}", f"along {second}"),
    }


_LAYER_PANELS = {
    "agreement": "agreement of gradient signs, |Σ sign| / d",
    "log_ratio": "log of arithmetic over geometric mean of curvatures",
}


def layers_figure(found: Consistency, title: str) -> "Figure | None":
    """By layer: agreement of signs and log ratio of curvatures, beside those of pseudo-environments and chance."""
    panels: dict[str, list[Measurement]] = {}
    for name, label in _LAYER_PANELS.items():
        if layers := [each for each in found.measurements if each.name == name and each.layer is not None]:
            panels[label] = layers[:_MOST_LAYERS]
    if not panels:
        return None
    names = [str(each.layer) for each in next(iter(panels.values()))]
    places = np.arange(len(names))
    figure = new_figure(4.4 * len(panels) + 0.6, 0.32 * len(names) + 1.5)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, layers) in zip(grid, panels.items(), strict=True):
        axes.barh(places - 0.2, [each.value for each in layers], 0.38, color=BLUE, label="environments")
        null = [each.null for each in layers if each.null is not None]
        if null:
            axes.barh(places + 0.2, null, 0.38, color=GREY, label="dealt out at random")
        axes.set_yticks(places, names, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if layers[0].name == "agreement":
            chance = found.of("chance_agreement")[0].value
            axes.axvline(chance, color="black", linestyle=":", linewidth=1, label="fair coins")
        axes.set_xlabel(label, fontsize=8)
        axes.legend(fontsize=7, frameon=False)
    grid[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return figure


_RUN_PANELS = {
    "bound": "$I^\\epsilon$ at least, true losses",
    "quadratic_low": "$I^\\epsilon$ of the quadratic at least",
    "log_ratio": "log ratio of curvatures",
}


def runs_figure(runs: Sequence[tuple[str, Sequence[Measurement]]]) -> "Figure | None":
    """Runs side by side: numbers at the largest ε against the accuracy, a panel for each number."""
    whole_networks = [
        (method, {each.name: each for each in found if each.whole}) for method, found in runs
    ]  # the largest ε
    names = [name for name in _RUN_PANELS if all(name in found for _, found in whole_networks)]
    if not names:
        return None
    accuracy = next((name for name in ACCURACIES if all(name in found for _, found in whole_networks)), None)
    methods = list(dict.fromkeys(method for method, _ in runs))
    figure = new_figure(3.4 * len(names) + 0.6, 3.6)
    grid = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(grid, names, strict=True):
        for place, method in enumerate(methods):
            found = [each for own, each in whole_networks if own == method]
            heights = [place if accuracy is None else each[accuracy].value for each in found]
            colour, label = _COLOURS[place % len(_COLOURS)], method_name(method)
            axes.scatter([each[name].value for each in found], heights, color=colour, s=26, label=label)
            null = [each[name].null for each in found]
            axes.scatter(null, heights, facecolors="none", edgecolors=colour, s=26, label=f"{label}, null")
        _draw_axis(axes, [number for _, found in whole_networks for number in (found[name].value, found[name].null)])
        epsilon = whole_networks[0][1][name].epsilon
        axes.set_xlabel(_RUN_PANELS[name] + ("" if epsilon is None else f", ε = {epsilon:g}"), fontsize=9)
        if accuracy is None:
            axes.set_yticks(range(len(methods)), [method_name(method) for method in methods])
    grid[0].set_ylabel((accuracy or "").replace("_", " ").replace("ood", "o.o.d."))
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, GREY)


def _draw_axis(axes: "Axes", numbers: Sequence[float | None]) -> None:
    seen = [number for number in numbers if number is not None and number > 0]
    if max(seen, default=1.0) > _LOGARITHMIC * min(seen, default=1.0):
        axes.set_xscale("log")
    axes.spines[["top", "right"]].set_visible(False)
