"""The average gradient: empirical risk minimization, the baseline of all rules."""

from dataclasses import dataclass
from typing import ClassVar

from concord.aggregation.rule import Update
from concord.aggregation.statistic import GRADIENT, Statistic, Statistics


@dataclass(frozen=True)
class Mean:
    """Σg / d; every component is kept."""

    display_name: ClassVar[str] = "average"
    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The average."""
        value = sums["gradient"] / environments
        return Update(value, value.new_ones(()).expand_as(value))
