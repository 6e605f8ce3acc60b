"""The rule's update from sums: the same for sums of one process and for a slice of several processes' sums."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from concord.aggregation import Aggregator, ColumnRule, Statistics, rescaling_factor
from concord.aggregation.asynchronous import is_asynchronous
from concord.aggregation.column_rule import combined
from concord.aggregation.draws import with_draws
from concord.aggregation.weighting import name_of
from concord.errors import InputError
from concord.gradients.compiled import CompiledColumns, CompiledRule
from concord.gradients.layout import Layers

# Components that are finished at once on a CPU, so that what a rule forms of them stays in the cache: of 6.6 million,
# 12, 24 and 72 ms (AND-mask, geometric mean, SAND-mask) in place of 32, 56 and 207.
_BLOCK = 1 << 16


def finish_in_blocks(
    rule: Aggregator,
    sums: Callable[[slice], Statistics],
    out: Tensor,
    layers: Layers,
    start: int,
    environments: int,
    step: int,
) -> Tensor:
    """Apply the rule to neighbouring components, block by block.

    Args:
        rule: the rule.
        sums: returns the summed statistics of a slice of ``out``.
        out: the memory for the update, flat; ``sums`` may read from it, and its dtype may differ from the sums'.
        layers: the layers of the run that contains ``out``, from ``start`` on.
        start: the beginning of ``out`` in that run.
        environments: the number of environments in the sums; with none the update is zero.
        step: the step's number, for rules that draw at random.

    Returns:
        The kept components of each layer within ``out``, ``(layers,)``, float32.
    """
    device, at_once = out.device, is_asynchronous(out.device)
    if environments == 0:
        out.zero_()
        return torch.zeros(len(layers.sizes), dtype=torch.float32, device=device)
    counted = [0.0] * len(layers.sizes)
    width = max(1, len(out) if at_once or isinstance(rule, CompiledRule) else _BLOCK)
    for first in range(0, len(out), width):
        block = slice(first, min(first + width, len(out)))
        part = slice(start + block.start, start + block.stop)
        drawn = with_draws(rule, sums(block), step, functools.partial(layers.components, part, device))
        value, mask = rule.finish(drawn, environments)
        if value.shape != out[block].shape or mask.shape != value.shape:
            raise InputError(
                f"rule {name_of(rule)}: gives an update of shape {tuple(value.shape)} and a mask of shape "
                f"{tuple(mask.shape)} for sums of shape {tuple(out[block].shape)}; expected the same"
            )
        out[block] = value
        pieces = layers.within(part)
        if at_once and pieces:
            return _sums_by_layer(mask, pieces, len(layers.sizes))
        for index, piece in pieces:
            counted[index] += float(mask[piece].sum(dtype=torch.float32))
    return torch.tensor(counted, dtype=torch.float32, device=device)


def _sums_by_layer(mask: Tensor, pieces: Sequence[tuple[int, slice]], layers: int) -> Tensor:
    """The kept components of each of the layers, of which ``pieces`` are the numbers and slices in the mask."""
    indices, sizes = zip(*((index, piece.stop - piece.start) for index, piece in pieces), strict=True)
    if mask.stride() == (0,):  # one number, expanded
        sums = mask[0].float() * _on_device(sizes, torch.float32, mask.device)
    else:
        sums = torch.stack(torch._foreach_norm(mask.float().split(sizes), 1))  # no mask is negative
    if len(pieces) == layers:
        return sums
    return sums.new_zeros(layers).index_copy(0, _on_device(indices, torch.int64, mask.device), sums)


def finish_whole(
    rule: Aggregator, sums: Statistics, out: Tensor, layers: Layers, environments: int, step: int, *, rescale: bool
) -> Tensor:
    """Apply the rule to a whole run of components; return the kept fraction of each layer, float32."""

    def part(block: slice) -> Statistics:
        return {name: flat[block] for name, flat in sums.items()}

    kept = finish_in_blocks(rule, part, out, layers, 0, environments, step)
    kept = kept / component_counts(layers, kept.device)
    if rescale:
        rescale_layers(out, layers, kept)
    return kept


def combine_in_blocks(rule: ColumnRule, columns: Callable[[slice], Tensor], out: Tensor) -> None:
    """Combine ``(environments, components)``, the environments' values of each slice of ``out``."""
    width = max(1, len(out) if is_asynchronous(out.device) or isinstance(rule, CompiledColumns) else _BLOCK)
    for first in range(0, len(out), width):
        block = slice(first, min(first + width, len(out)))
        out[block] = combined(rule, columns(block))


def component_counts(layers: Layers, device: torch.device) -> Tensor:
    """The components of each layer, ``(layers,)``, float32, as divisors: of a layer without any, 1."""
    return _on_device(tuple(max(size, 1) for size in layers.sizes), torch.float32, device)


@functools.lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers, which are sent once: they are the same at every step."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def rescale_layers(out: Tensor, layers: Layers, kept_fraction: Tensor) -> None:
    """Divide each layer of a whole run by the fraction of it that was kept, in float32 at least.

    The factor goes up to 1e10, which float16 cannot hold.
    """
    factors = rescaling_factor(kept_fraction)
    if is_asynchronous(out.device):
        sizes = _on_device(layers.sizes, torch.int64, out.device)
        each = torch.repeat_interleave(factors, sizes, output_size=len(out))
        out.copy_(out.float() * each) if out.itemsize < 4 else out.mul_(each)
        return
    parts = [out[layer] for layer in layers.slices]
    if out.itemsize >= 4:
        torch._foreach_mul_(parts, list(factors.to(out.dtype).unbind()))
        return
    for part, factor in zip(parts, factors.unbind(), strict=True):
        part.copy_(part.float() * factor)


def poison(out: Tensor, finite: Tensor) -> None:
    """Make an update not finite if ``finite`` (a scalar) is not, even if the rule made it finite."""
    out[:1] += (finite.float() * 0).to(out.dtype)
