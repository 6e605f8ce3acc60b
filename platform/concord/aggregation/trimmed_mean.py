"""The coordinate-wise trimmed mean (Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning, 2018)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concord.aggregation.column_rule import ordered
from concord.errors import ArgumentError
from concord.space import Entries, Uniform


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each component without its βd smallest and its βd largest values, rounded up; β is the fraction."""

    trimmed_fraction: float = 0.1
    """Fraction of the environments that trimmed-mean leaves out at each end, in [0, 0.5)."""
    space: ClassVar[Entries] = {"trimmed_fraction": Uniform(0.0, 0.45)}

    def __post_init__(self) -> None:
        if not 0 <= self.trimmed_fraction < 0.5:
            raise ArgumentError("trimmed_fraction", self.trimmed_fraction, "must be at least 0, and below 0.5")

    def combine(self, columns: Tensor) -> Tensor:
        """The trimmed means (definition 2); at least the middle value stays."""
        count = len(columns)
        left_out = min(math.ceil(self.trimmed_fraction * count - 1e-9), (count - 1) // 2)
        if left_out == 0:
            return columns.mean(0)
        return torch.stack(ordered(columns)[left_out : count - left_out]).mean(0)
