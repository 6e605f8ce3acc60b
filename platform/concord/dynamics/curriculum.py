"""Schedules of exploration, of starts from frames of the data, and of the learning rate."""

import math
from dataclasses import dataclass

from concord.errors import ArgumentError


@dataclass(frozen=True)
class Curriculum:
    """The probabilities μ and ε at step i of the optimizer (thesis, appendix A.0.3).

    Args:
        exploration_steps: K; a target is drawn uniformly from the horizon with probability μ(i) = max(0, 1 - i/K).
            0: never.
        sampling_steps: S; a prediction starts from the frame of the data, not from the model's own, with probability
            ε(i) = 1 / (1 + i / (0.2 S)), as in the authors' published code. 0: never.

    Raises:
        InputError: a number of steps is negative.
    """

    exploration_steps: int = 0
    sampling_steps: int = 20_000

    def __post_init__(self) -> None:
        for name in ("exploration_steps", "sampling_steps"):
            if getattr(self, name) < 0:
                raise ArgumentError(name, getattr(self, name), "must not be negative")

    def exploration(self, step: int) -> float:
        """μ, the probability of a target drawn at random."""
        return max(0.0, 1 - step / self.exploration_steps) if self.exploration_steps else 0.0

    def sampling(self, step: int) -> float:
        """ε, the probability of a start from the frame of the data."""
        return 1 / (1 + step / (0.2 * self.sampling_steps)) if self.sampling_steps else 0.0


def staircase(every: int, steps: int) -> tuple[float, ...]:
    """The ``--milestones`` of a rate that falls every ``every`` steps, as fractions of a run of ``steps``.

    Args:
        every: steps between two falls; 0: none.
        steps: the steps of the whole run.

    Raises:
        InputError: ``every`` is negative.
    """
    if every < 0:
        raise ArgumentError("lr_decay_steps", every, "must not be negative")
    return tuple(every * fall / steps for fall in range(1, math.ceil(steps / every))) if every else ()
