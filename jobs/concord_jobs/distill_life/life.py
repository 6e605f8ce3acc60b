"""Conway's Game of Life: random boards and their next states."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from concord.analysis.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALIVE = 0.4
Boards = npt.NDArray[np.uint8]
"""``(..., rows, columns)``; 1 is alive, 0 is dead."""


def following(boards: Boards) -> Boards:
    """The next state; cells beyond the border are dead."""
    rows, columns = boards.shape[-2:]
    padded = np.pad(boards, [(0, 0)] * (boards.ndim - 2) + [(1, 1), (1, 1)])
    around = sum(
        padded[..., down : down + rows, right : right + columns]
        for down in range(3)
        for right in range(3)
        if (down, right) != (1, 1)
    )
    alive: Boards = ((around == 3) | ((around == 2) & (boards == 1))).astype(np.uint8)
    return alive


def random_trajectories(examples: int, seed: int, size: int = 17, steps: int = 3) -> Boards:
    """Random boards, a cell alive with probability .4, and their next states: ``(examples, 1 + steps, size, size)``."""
    states = [(np.random.default_rng(seed).random((examples, size, size)) < ALIVE).astype(np.uint8)]
    for _ in range(steps):
        states.append(following(states[-1]))
    return np.stack(states, 1)


def boards_figure(trajectories: Boards) -> "Figure":
    """Trajectories ``(examples, 1 + steps, rows, columns)``, one in each row, the label's cell framed (Fig. 4.5)."""
    from matplotlib.patches import Rectangle

    examples, states, rows, columns = trajectories.shape
    figure = new_figure(1.8 * states, 1.9 * examples)
    for row, boards in zip(figure.subplots(examples, states, squeeze=False), trajectories, strict=True):
        for step, (axes, board) in enumerate(zip(row, boards, strict=True)):
            axes.imshow(board, cmap="binary")
            axes.set(xticks=[], yticks=[], title=f"after step {step}" if step else "x")
        middle = (columns // 2 - 0.5, rows // 2 - 0.5)
        row[-1].add_patch(Rectangle(middle, 1, 1, fill=False, edgecolor="red", linewidth=1.5))
    return figure
