"""The protocol of a rule (statistics, sum, finish) and the sum over environments that lie stacked in one tensor."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from concord.aggregation.asynchronous import is_asynchronous
from concord.aggregation.draws import with_draws
from concord.aggregation.statistic import Statistic, Statistics, check_statistics
from concord.errors import InputError

# Elements of the stacked gradient that are mapped at once on a CPU: the temporaries of a statistic then stay in the
# cache instead of going through memory (1.5 instead of 3.1 ms for 32 × 131,000).
BLOCK_ELEMENTS = 1 << 19


class Update(NamedTuple):
    """The result of a rule.

    Attributes:
        value: the aggregated gradient, shaped as one environment's.
        kept: the part of every component that the rule let through, same shape: 0 or 1 for a hard mask, between
            them for a soft one. It may be an expanded view of one number; do not write to it.
    """

    value: Tensor
    kept: Tensor


class Aggregator(Protocol):
    """A rule: it works element by element, so it applies to any shape and to any part of a gradient.

    A rule that draws at random has two more attributes: ``draws``, names under which ``finish`` finds uniform numbers
    in [0, 1) beside the sums, and ``seed``; see :mod:`concord.aggregation.draws`.
    """

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistics that are summed over environments."""
        ...

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The update, from the statistics summed over ``environments`` (at least 1) environments."""
        ...


def accumulation_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which statistics of such gradients are summed: float32, or float64 for float64 gradients."""
    result = torch.float32
    for dtype in dtypes:
        result = torch.promote_types(result, dtype)
    return result


def sum_over_environments(
    rule: Aggregator, gradients: Tensor, out: Statistics | None = None, *, accumulate: bool = False
) -> Statistics:
    """Compute the rule's statistics of every environment, and add them.

    Args:
        rule: the rule.
        gradients: ``(environments, *shape)``, floating point. Half precision is summed in float32, so that a
            count of signs stays exact.
        out: where the sums go, each contiguous and ``shape``; new tensors if None. Statistics of the rule that
            are not among them are not computed.
        accumulate: add to ``out`` (which holds the sums of other environments) instead of overwriting it.

    Returns:
        The rule's statistics, each ``shape``; ``out`` if it was given.
    """
    if out is None:
        dtype = accumulation_dtype([gradients.dtype])
        out = new_statistics(rule, gradients.shape[1:], dtype, gradients.device)
    wanted = [(each, out[each.name]) for each in rule.statistics if each.name in out]
    add_statistics(wanted, gradients, accumulate=accumulate)
    return out


def add_statistics(wanted: Sequence[tuple[Statistic, Tensor]], gradients: Tensor, *, accumulate: bool = True) -> None:
    """Compute statistics of every environment, and add them.

    Args:
        wanted: the statistics, and where the sum of each goes: contiguous, ``shape``, in the dtype to compute in.
        gradients: ``(environments, *shape)``, floating point.
        accumulate: add to the present values instead of overwriting them.
    """
    environments = gradients.shape[0]
    flat = gradients.reshape(environments, -1)
    totals = [(statistic, total.view(-1)) for statistic, total in wanted]
    together = next((each.together for each, _ in wanted), None)
    if together is not None:
        together(totals, flat, accumulate)
        return
    components = flat.shape[1]
    width = components if is_asynchronous(gradients.device) else max(1, BLOCK_ELEMENTS // environments)
    for start in range(0, components, max(width, 1)):
        block = slice(start, start + width)
        add_block([(statistic, total[block]) for statistic, total in totals], flat[:, block], accumulate)


def add_block(wanted: Sequence[tuple[Statistic, Tensor]], gradients: Tensor, accumulate: bool) -> None:
    """Do what :func:`add_statistics` does with flat sums and gradients, all components at once."""
    seen = {dtype: gradients.to(dtype) for dtype in {total.dtype: None for _, total in wanted}}
    for statistic, total in wanted:
        values = statistic.of(seen[total.dtype]).to(total.dtype)
        if accumulate:
            total += values.sum(0) if len(values) > 1 else values[0]
        else:
            torch.sum(values, 0, out=total)


def new_statistics(rule: Aggregator, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Statistics:
    """Zeros for the rule's sums over gradients of this shape, in ``dtype`` or a wider one that a statistic needs."""
    return {
        each.name: torch.zeros(shape, dtype=torch.promote_types(dtype, each.dtype), device=device)
        for each in rule.statistics
    }


def aggregate(rule: Aggregator, gradients: Tensor, step: int = 0) -> Update:
    """Aggregate stacked gradients, ``(environments, *shape)``, into one update of shape ``shape``.

    Args:
        rule: the rule.
        gradients: of the environments, floating point.
        step: the step's number, for a rule that draws at random: it draws new numbers at each step.

    Raises:
        InputError: there is no environment, the gradients are no floating-point numbers, the rule's statistics are
            wrong, or its update has another shape.
    """
    if gradients.ndim == 0 or gradients.shape[0] == 0:
        raise InputError(f"gradients: shape {tuple(gradients.shape)}, expected (environments, *shape) with at least 1")
    if not gradients.is_floating_point():
        raise InputError(f"gradients: dtype {gradients.dtype}, expected a floating-point dtype")
    check_statistics(rule)
    sums = sum_over_environments(rule, gradients.detach())
    shape = gradients.shape[1:]
    sums = with_draws(rule, sums, step, lambda: torch.arange(shape.numel(), device=gradients.device).reshape(shape))
    update = Update(*rule.finish(sums, gradients.shape[0]))
    for part, values in update._asdict().items():
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if found != tuple(shape):
            given = f"finish gives {found} as the {part} of sums of shape {tuple(shape)}"
            raise InputError(f"rule {type(rule).__name__}: {given}; expected the same shape")
    return Update(update.value.to(gradients.dtype), update.kept.to(accumulation_dtype([gradients.dtype])))
