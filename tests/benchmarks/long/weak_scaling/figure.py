"""Bytes, messages and seconds of a step against the number of workers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from concord.analysis.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from concord.analysis.method_names import method_name

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class ScalingCurve:
    """One network with one number of environments a worker.

    Attributes:
        network: the network's name.
        environments: number of environments of each worker.
        workers: numbers of workers, one for each value of the following.
        wire: mean bytes that a worker gives to TCP in a step.
        plain_wire: the same for plain DDP.
        messages: mean number of messages that a worker sends in a step.
        seconds: modelled time of a step's exchange.
    """

    network: str
    environments: int
    workers: Sequence[int]
    wire: Sequence[float]
    plain_wire: Sequence[float]
    messages: Sequence[float]
    seconds: Sequence[float]


def scaling_figure(curves: Sequence[ScalingCurve], rule: str) -> Figure:
    """Bytes, bytes beside plain DDP's, messages and seconds, each against workers."""
    networks = list(dict.fromkeys(curve.network for curve in curves))
    counts = sorted({curve.environments for curve in curves})
    figure = Figure(figsize=(9.5, 7.2), layout="constrained")
    (bytes_axes, ratio_axes), (messages_axes, seconds_axes) = figure.subplots(2, 2)
    for curve in curves:
        look: dict[str, Any] = {
            "color": _COLOURS[networks.index(curve.network) % len(_COLOURS)],
            "linestyle": _STYLES[counts.index(curve.environments) % len(_STYLES)],
            "linewidth": 1.2 + 0.9 * (len(networks) - 1 - networks.index(curve.network)),  # for coinciding lines
        }
        # One worker sends nothing, and a logarithmic axis cannot show 0.
        several = [place for place, workers in enumerate(curve.workers) if workers > 1]
        workers = [curve.workers[place] for place in several]
        bytes_axes.plot(workers, [curve.wire[place] / 1e6 for place in several], **look)
        ratio_axes.plot(workers, [curve.wire[place] / curve.plain_wire[place] for place in several], **look)
        messages_axes.plot(workers, [curve.messages[place] for place in several], **look)
        seconds_axes.plot(curve.workers, curve.seconds, **look)
    _label(bytes_axes, "given to TCP by a worker in a step (MB)")
    _label(ratio_axes, "given to TCP, as a multiple of plain DDP's", logarithmic=False)
    _label(messages_axes, "messages sent by a worker in a step")
    ratio_axes.axhline(1, color="black", linewidth=0.8)
    _label(seconds_axes, "a step's exchange, modelled (s)")
    colours = [Line2D([], [], color=_COLOURS[index % len(_COLOURS)], label=each) for index, each in enumerate(networks)]
    styles = [
        Line2D([], [], color="black", linestyle=style, label=f"{count} environment{'s' if count > 1 else ''} a worker")
        for count, style in zip(counts, itertools.cycle(_STYLES), strict=False)
    ]
    bytes_axes.legend(handles=colours, fontsize=8, frameon=False)
    messages_axes.legend(handles=styles, fontsize=8, frameon=False)
    figure.suptitle(f"{method_name(rule)} over gloo, weak scaling", fontsize=11)
    return figure


def _label(axes: Axes, measure: str, *, logarithmic: bool = True) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(2, numticks=20))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if logarithmic:
        axes.set_yscale("log")
    axes.set(xlabel="workers", ylabel=measure)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
