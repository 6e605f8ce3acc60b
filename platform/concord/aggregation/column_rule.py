"""Rules that compare the environments' values of a component, such as the median, which no sum gives.

They run where all environments' gradients of a component lie side by side.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from concord.aggregation.asynchronous import is_asynchronous
from concord.aggregation.weighting import name_of
from concord.errors import InputError


@runtime_checkable
class ColumnRule(Protocol):
    """A rule that maps the environments' values of each component to the update's."""

    def combine(self, columns: Tensor) -> Tensor:
        """The update ``(components,)`` of gradients ``(environments, components)``, float32 or float64; read only."""
        ...


def combined(rule: ColumnRule, columns: Tensor) -> Tensor:
    """The rule's update of gradients ``(environments, components)``."""
    value = rule.combine(columns)
    if not isinstance(value, Tensor) or value.shape != columns.shape[1:]:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        problem = f"combine gives {found} for gradients of shape {tuple(columns.shape)}"
        raise InputError(f"rule {name_of(rule)}: {problem}; expected {tuple(columns.shape[1:])}")
    return value


def ordered(columns: Tensor) -> list[Tensor]:
    """The environments' values of each component from the smallest to the largest, each ``(components,)``.

    By Batcher's merge exchange (Knuth: The art of computer programming, volume 3, algorithm 5.2.2 M), whole rows at a
    time: of 32 rows twenty times as fast as ``sort`` on a CPU. On a GPU its hundreds of operations are slower
    than ``sort``, unless they are compiled. A component with a NaN has only NaN.
    """
    if is_asynchronous(columns.device) and not torch.compiler.is_compiling():
        sorted_rows = columns.sort(0).values
        return list(torch.where(sorted_rows[-1].isnan(), torch.nan, sorted_rows))
    rows, count = list(columns.unbind()), len(columns)
    width = 1
    while width < count:
        step = width
        while step >= 1:
            for first in range(step % width, count - step, 2 * step):
                for low in range(first, min(first + step, count - step)):
                    if low // (2 * width) == (low + step) // (2 * width):
                        one, other = rows[low], rows[low + step]
                        rows[low], rows[low + step] = torch.minimum(one, other), torch.maximum(one, other)
            step //= 2
        width *= 2
    return rows


@dataclass(frozen=True)
class WeightedSum:
    """Σ w_e g_e: what a :class:`~concord.aggregation.weighting.Weighting` becomes once its weights are known."""

    values: Tensor

    def combine(self, columns: Tensor) -> Tensor:
        """The weighted sum; environments of weight 0 may hold anything."""
        used = [environment for environment, weight in enumerate(self.values.tolist()) if weight != 0]
        if len(used) == len(columns):
            return self.values.to(columns) @ columns
        places = torch.tensor(used, device=columns.device, dtype=torch.int64)
        return self.values.to(columns)[places] @ columns[places]
