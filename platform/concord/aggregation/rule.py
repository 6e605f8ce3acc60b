"""The protocol of a rule (map, sum, finish) and the sum over environments that lie stacked in one tensor."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from concord.errors import InputError

Statistics = dict[str, Tensor]
"""What environments contribute, by name. A statistic called ``sign`` holds -1, 0 and 1: an exchange between
processes may send its sums as the smallest integer that holds them. Any other travels as it is."""

# Elements of the stacked gradient that are mapped at once on a CPU: the temporaries of a map then stay in the
# processor's cache instead of going through memory (2.6 instead of 3.4 ms for 32 × 140,000).
_BLOCK_ELEMENTS = 1 << 19


class Update(NamedTuple):
    """What a rule makes of the sums.

    Attributes:
        value: the aggregated gradient, shaped as one environment's.
        kept: the part of every component that the rule let through, same shape: 0 or 1 for a hard mask, between
            them for a soft one. It may be an expanded view of one number; do not write to it.
    """

    value: Tensor
    kept: Tensor


class Aggregator(Protocol):
    """A rule. Both functions work element by element, so they take any shape, any part of a gradient."""

    def map(self, gradient: Tensor) -> Statistics:
        """What an environment contributes; each statistic has the gradient's shape. Adding is left to the caller."""
        ...

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The update, from the statistics summed over ``environments`` (at least 1) environments."""
        ...


def accumulation_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which statistics of such gradients are summed: float32, or float64 where a gradient is that."""
    result = torch.float32
    for dtype in dtypes:
        result = torch.promote_types(result, dtype)
    return result


def sum_over_environments(
    rule: Aggregator, gradients: Tensor, out: Statistics | None = None, *, accumulate: bool = False
) -> Statistics:
    """Map and sum gradients that lie stacked.

    Args:
        rule: the rule.
        gradients: ``(environments, *shape)``, floating point. Half precision is summed in float32, so that a
            count of signs stays exact.
        out: where the sums go, each contiguous and ``shape``; new tensors if None. A statistic of the rule that is
            not among them is not wanted.
        accumulate: add to ``out`` (which holds the sums of other environments) instead of overwriting it.

    Returns:
        The rule's statistics, each ``shape``; ``out`` if it was given.
    """
    environments = gradients.shape[0]
    flat = gradients.reshape(environments, -1)
    components = flat.shape[1]
    dtype = accumulation_dtype([gradients.dtype])
    if out is None:
        out = new_statistics(rule, gradients.shape[1:], dtype, gradients.device)
    totals = {name: total.view(-1) for name, total in out.items()}
    width = components if gradients.is_cuda else max(1, _BLOCK_ELEMENTS // environments)
    for start in range(0, components, max(width, 1)):
        block = slice(start, start + width)
        contributions = rule.map(flat[:, block].to(dtype))
        for name, total in totals.items():
            if accumulate:
                total[block] += contributions[name].sum(0) if environments > 1 else contributions[name][0]
            else:
                torch.sum(contributions[name], 0, out=total[block])
    return out


def new_statistics(rule: Aggregator, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Statistics:
    """Room for the rule's sums over gradients of this shape; zeros."""
    names = rule.map(torch.ones(1))
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}


def aggregate(rule: Aggregator, gradients: Tensor) -> Update:
    """Aggregate gradients that lie stacked, ``(environments, *shape)``, into one update of shape ``shape``.

    Raises:
        InputError: there is no environment, or the gradients are no floating-point numbers.
    """
    if gradients.ndim == 0 or gradients.shape[0] == 0:
        raise InputError(f"gradients: shape {tuple(gradients.shape)}, expected (environments, *shape) with at least 1")
    if not gradients.is_floating_point():
        raise InputError(f"gradients: dtype {gradients.dtype}, expected a floating-point dtype")
    value, kept = rule.finish(sum_over_environments(rule, gradients.detach()), gradients.shape[0])
    return Update(value.to(gradients.dtype), kept)
