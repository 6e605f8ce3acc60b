"""The picture of a table's columns: what they say of the target, and what they do for the model, by environment."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.analysis.columns.relations import Numbers
from concord.analysis.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMED = 40  # environments with a name
_MOST_COLUMNS = 40
_LONGEST = 28  # letters of a name
_NOISE = 0.35  # the opacity of a number that may be noise


def columns_figure(columns: Sequence[Mapping[str, Any]], purposes: Mapping[str, str], title: str) -> "Figure":
    """Columns × environments, those that break first: the relation with the target, and the loss if shuffled.

    Pale cells may be noise, grey ones have no number. Lines separate training, validation and test environments.
    """
    order = sorted(columns, key=lambda each: (each["turns"], each["fades"]), reverse=True)[:_MOST_COLUMNS]
    names = list(purposes)
    panels = [("rank correlation with the target", [(each["relation"], each["votes"]) for each in order])]
    if all(each["use"] for each in order):
        of_model = [(each["use"]["shuffled"], each["use"]["helps"]) for each in order]
        panels.append(("increase of the loss if shuffled", of_model))
    named = len(names) <= _MOST_NAMED
    shown = [_shortened(name) for name in names] if named else []
    height = 0.22 * max(len(order), 4)
    letters = max(map(len, shown), default=0)
    width = 2.2 + len(panels) * (1.4 + 0.24 * max(len(names), 6) if named else 7.0)
    figure = new_figure(width, height + 1.5 + 0.075 * letters)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, rows) in zip(grid, panels, strict=True):
        values = np.array([[numbers.get(name, np.nan) for name in names] for numbers, _ in rows])
        certain = np.array([[name in signs for name in names] for _, signs in rows])
        _heat_map(axes, values, certain, label, pad=0.25 / height)
        _separate(axes, [purposes[name] for name in names], named)
        axes.set_xticks(range(len(shown)), shown, rotation=90, fontsize=8)
    grid[0].set_yticks(range(len(order)), [_shortened(each["term"]) for each in order], fontsize=8)
    more = f" ({len(order)} of {len(columns)} columns)" if len(order) < len(columns) else ""
    figure.suptitle(f"{title}{more}; pale: may be noise, grey: too few rows", fontsize=9)
    return figure


def _heat_map(axes: "Axes", values: Numbers, certain: NDArray[np.bool_], label: str, pad: float) -> None:
    from matplotlib import colormaps

    known = np.abs(values[~np.isnan(values)])
    limit = float(np.quantile(known, 0.98)) if len(known) else 0.0
    limit = limit or 1.0
    opacity = np.where(certain | np.isnan(values), 1.0, _NOISE)
    colours = colormaps["PuOr_r"].with_extremes(bad="#cccccc")
    drawn = axes.imshow(values, cmap=colours, vmin=-limit, vmax=limit, alpha=opacity, aspect="auto")
    bar = axes.figure.colorbar(drawn, ax=axes, location="top", shrink=0.8, aspect=30, pad=pad)
    bar.ax.tick_params(labelsize=7)
    bar.set_label(label, fontsize=8)


def _separate(axes: "Axes", purposes: Sequence[str], named: bool) -> None:
    """Lines between the environments of different purposes, which are named above them or, in many, below all."""
    begins = [place for place in range(1, len(purposes)) if purposes[place] != purposes[place - 1]]
    for place in begins:
        axes.axvline(place - 0.5, color="black", linewidth=1)
        if named:
            axes.text(place - 0.4, -0.55, purposes[place], fontsize=7, va="bottom")
    if not named:
        counts = [f"{purposes.count(each)} {each}" for each in dict.fromkeys(purposes)]
        axes.set_xlabel(f"environments: {', '.join(counts)}", fontsize=8)


def _shortened(name: str) -> str:
    """The name with its end, by which long names often differ."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 11]}…{name[-10:]}"
