"""Regression over environments: histograms of inputs and targets."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from concord.analysis.figures import BLUE, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 50


def histograms(environments: Mapping[str, tuple[Tensor, Tensor]]) -> "Figure":
    """A row of histograms for each environment, one for each input and each target, all on one scale.

    An input's title has its correlation with the (first) target, ρ. Inputs are ``(examples, features)``, targets
    ``(examples, targets)``.
    """
    columns = {}
    for name, pair in environments.items():
        inputs, targets = (values.numpy() for values in pair)
        columns[name] = [
            (f"input {place}, ρ {np.corrcoef(values, targets[:, 0])[0, 1]:.3f}", BLUE, values)
            for place, values in enumerate(inputs.T)
        ]
        columns[name] += [("target", ORANGE, values) for values in targets.T]
    width = max(map(len, columns.values()))
    figure = new_figure(1.7 * width, 1.25 * len(columns))
    grid = figure.subplots(len(columns), width, sharex=True, sharey=True, squeeze=False)
    largest = max(float(np.quantile(np.abs(values), 0.999)) for row in columns.values() for _, _, values in row)
    for axes_row, (name, row) in zip(grid, columns.items(), strict=True):
        for axes, (title, colour, values) in zip(axes_row, row, strict=True):
            axes.hist(values, bins=_BINS, range=(-largest, largest), color=colour)
            axes.set_yticks([])
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.set_title(title, fontsize=8)
        axes_row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    # Clip the axis: narrow distributions would flatten all others.
    grid[0][0].set_ylim(0, max(len(each) for each in (row[0][2] for row in columns.values())) / 8)
    return figure
