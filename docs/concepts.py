"""Draws how the concepts belong together: ``make concepts`` writes docs/figures/concepts.png."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FIGURE = Path(__file__).parent / "figures" / "concepts.png"
TRAIN, OTHER, PLAIN = "#dbe9f4", "#f4e3d7", "#f2efe6"
# Signs of the gradients of two parameters: the environments agree on the first.
SIGNS = {"north": "+  +", "south": "+  −", "east": "+  +"}


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str = PLAIN) -> None:
    """A box with its centre at (x, y)."""
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x - width / 2, y - 0.36), width, 0.72, boxstyle=style, fc=color, ec="#555"))
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """An arrow with a text above its middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#777"})
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.14)
    axes.text(*middle, text, ha="center", fontsize=8.5, color="#444")


def draw() -> None:
    """Write the picture."""
    figure = Figure(figsize=(11, 5))
    axes = figure.add_subplot()
    headings = {1: "environments,\nby purpose", 3.9: "objective:\na gradient each", 6.1: "votes", 8.1: "rule"}
    for column, heading in headings.items():
        axes.text(column, 5.15, heading, ha="center", va="center", fontsize=11, weight="bold")
    for row, (name, signs) in enumerate(SIGNS.items()):
        y = 4.2 - row
        box(axes, 1, y, 1.9, f"{name}: train", TRAIN)
        box(axes, 3.9, y, 2, f"gradient of {name}")
        box(axes, 6.1, y, 1, signs)
        arrow(axes, (2, y), (2.85, y), "batch")
        arrow(axes, (4.95, y), (5.55, y))
        arrow(axes, (6.65, y), (7.2, 3.2 + 0.2 * (1 - row)))
    box(axes, 8.1, 3.2, 1.7, "AND-mask\nupdates  ✓  ✗")
    arrow(axes, (9, 3.2), (9.55, 3.2))
    box(axes, 10.6, 3.2, 1.9, "trained model")
    box(axes, 1, 1.2, 1.9, "lake: validation", OTHER)
    box(axes, 1, 0.2, 1.9, "west: test", OTHER)
    arrow(axes, (2, 1.2), (9.55, 1.2), "criterion: chooses between models")
    arrow(axes, (2, 0.2), (9.55, 0.2), "only reported")
    box(axes, 10.6, 1.2, 1.9, "champion\nin the registry")
    box(axes, 10.6, 0.2, 1.9, "metrics of the run")
    arrow(axes, (10.6, 2.8), (10.6, 1.6))
    axes.plot([-0.15, 9.3, 9.3, -0.15, -0.15], [4.72, 4.72, 1.72, 1.72, 4.72], color="#aaa", linestyle="--")
    axes.text(
        9.15, 1.9, "a run: its key says\nwhat it depends on", ha="right", fontsize=9.5, color="#444", style="italic"
    )
    axes.set(xlim=(-0.3, 11.7), ylim=(-0.3, 5.6))
    axes.set_axis_off()
    figure.savefig(FIGURE, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw()
