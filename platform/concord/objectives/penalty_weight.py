"""The weight of a penalty over the steps of a run."""

import math
from dataclasses import dataclass

from concord.errors import ArgumentError


@dataclass(frozen=True)
class PenaltyWeight:
    """A weight that is at most 1 during a warm-up, as in the experiments of IRM's authors.

    Arjovsky et al., Invariant Risk Minimization, 2019: the published Colored MNIST experiment has a weight of 1
    for 190 of 501 steps, and about 91,000 afterwards.

    Args:
        weight: the full weight, not negative.
        warmup: the number of steps before the full weight.

    Raises:
        InputError: the weight is negative or not finite, or the warm-up negative.
    """

    weight: float
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ArgumentError("penalty_weight", self.weight, "must be a finite number, not below 0")
        if self.warmup < 0:
            raise ArgumentError("warmup", self.warmup, "must not be negative")

    def at(self, step: int) -> float:
        """The weight at this step, counted from 0."""
        return self.weight if step >= self.warmup else min(1.0, self.weight)

    def after_warmup(self, step: int) -> float:
        """The weight at this step, counted from 0; 0 during the warm-up."""
        return self.weight if step >= self.warmup else 0.0

    def scale(self, step: int) -> float:
        """1 / max(1, weight) at this step: the factor of an objective that a large weight must not make large."""
        return 1 / max(self.at(step), 1.0)
