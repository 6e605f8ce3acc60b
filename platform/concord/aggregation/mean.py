"""The average gradient: empirical risk minimization, and the baseline of everything here."""

from dataclasses import dataclass

from torch import Tensor

from concord.aggregation.rule import Statistics, Update


@dataclass(frozen=True)
class Mean:
    """Σg / d; every component is kept."""

    def map(self, gradient: Tensor) -> Statistics:
        """The gradient itself."""
        return {"gradient": gradient}

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The average over ``environments``."""
        value = sums["gradient"] / environments
        return Update(value, value.new_ones(()).expand_as(value))
