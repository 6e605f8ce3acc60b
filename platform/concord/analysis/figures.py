"""How every figure of the project looks and is written."""

from pathlib import Path

from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every kind of colour vision.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#777777"


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as a PNG of 150 dots an inch, making the folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return path
