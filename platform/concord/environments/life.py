"""Conway's Game of Life: random boards, and what becomes of them."""

import numpy as np
import numpy.typing as npt

from concord.errors import ArgumentError

Boards = npt.NDArray[np.uint8]
"""``(..., rows, columns)``; 1 is alive, 0 is dead."""


def following(boards: Boards) -> Boards:
    """The next state. Beyond the border all is dead."""
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


def random_trajectories(examples: int, seed: int, size: int = 17, steps: int = 3, alive: float = 0.4) -> Boards:
    """Boards whose cells are alive with a probability, and their next states.

    Args:
        examples: how many boards.
        seed: of the boards.
        size: rows, and columns.
        steps: next states of each.
        alive: the probability of each cell.

    Returns:
        ``(examples, 1 + steps, size, size)`` uint8.

    Raises:
        InputError: a number is out of its range.
    """
    for name, value in (("examples", examples), ("size", size)):
        if value < 1:
            raise ArgumentError(name, value, "must be at least 1")
    if steps < 0:
        raise ArgumentError("steps", steps, "must not be negative")
    if not 0 <= alive <= 1:
        raise ArgumentError("alive", alive, "must lie in [0, 1]")
    boards = (np.random.default_rng(seed).random((examples, size, size)) < alive).astype(np.uint8)
    states = [boards]
    for _ in range(steps):
        states.append(following(states[-1]))
    return np.stack(states, 1)
