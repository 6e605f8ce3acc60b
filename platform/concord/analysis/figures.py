"""The style and the format of all figures.

Matplotlib is imported where a figure is drawn: every command and every worker imports its job, and few draw.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from concord.storage import disk_errors_in_one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, whose colours differ for every kind of colour vision.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#777777"


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> "Figure":
    """An empty figure of this size, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def one_panel(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> "tuple[Figure, Axes]":
    """A figure of this size, in inches, with one panel."""
    figure = new_figure(width, height, layout)
    return figure, figure.subplots()


def finish(axes: "Axes", **legend: Any) -> None:
    """Hide the upper and right border, and draw a small legend without a frame."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, **legend)


def png(figure: "Figure") -> bytes:
    """The figure as a PNG of 150 dots an inch."""
    file = io.BytesIO()
    if figure.get_layout_engine() is None:
        figure.savefig(file, dpi=150, bbox_inches="tight")
    else:  # savefig would write the same bytes, after drawing everything once more for the layout
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure.set_dpi(150)
        FigureCanvasAgg(figure).print_png(file)  # type: ignore[no-untyped-call]
    return file.getvalue()


def save(figure: "Figure", path: Path) -> Path:
    """Write the figure as a PNG, making the folder; returns the path."""
    content = png(figure)
    with disk_errors_in_one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path
