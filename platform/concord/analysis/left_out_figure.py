"""The figure of environments left out in turn: each method in each environment."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from concord.analysis.figures import method_name, one_panel

COLOURS = 10  # of Matplotlib's cycle; then the same colours have the next marker
MARKERS = "os^Dv"

Spread = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By environment: what was chosen without it, seed by seed, and what choosing by it would have given."""


def left_out_figure(values: Mapping[str, Spread], measure: str) -> Figure:
    """Mean and standard deviation over seeds in each environment; a hollow mark is the oracle's mean."""
    environments = list(next(iter(values.values())))
    figure, axes = one_panel(6, 1.2 + 0.22 * len(environments) * (1 + len(values)))
    for index, (method, spread) in enumerate(values.items()):
        for place, name in enumerate(environments):
            chosen, oracle = spread[name]
            if not chosen:
                continue
            at = place + 0.8 * ((index + 0.5) / len(values) - 0.5)
            label, colour, marker = method_name(method) if place == 0 else None, f"C{index}", MARKERS[index // COLOURS]
            error = float(np.std(chosen, ddof=1)) if len(chosen) > 1 else None
            axes.errorbar(float(np.mean(chosen)), at, xerr=error, fmt=marker, color=colour, label=label)
            axes.plot(float(np.mean(oracle)), at, marker, markerfacecolor="none", color=colour)
    axes.set(yticks=range(len(environments)), yticklabels=environments, xlabel=f"{measure} where it is left out")
    axes.invert_yaxis()
    figure.legend(frameon=False, loc="outside upper center", ncols=4, title="hollow: chosen by it (oracle)")
    return figure
