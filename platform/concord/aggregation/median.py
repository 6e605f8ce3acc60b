"""The coordinate-wise median (Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning, ICML 2018)."""

from dataclasses import dataclass

from torch import Tensor

from concord.aggregation.column_rule import ordered


@dataclass(frozen=True)
class Median:
    """The median of the environments' values of each component; of an even number, the mean of the middle two."""

    def combine(self, columns: Tensor) -> Tensor:
        """The medians (definition 1)."""
        values, count = ordered(columns), len(columns)
        return (values[(count - 1) // 2] + values[count // 2]) / 2
