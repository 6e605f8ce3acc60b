"""The gradients of a parameter for every group of examples, in the layers' forms, and their sums.

A group is an environment, or one example. No form holds the gradients of all groups. A form computes those of some
groups, ``of_groups``, and adds the statistics of all groups to running sums, ``add_to``: in blocks of bounded memory
that fit a CPU's cache, or, for statistics with known properties, without forming a gradient:

* A linear layer's gradient of one vector is an outer product, ``g_i x_j``. A multiplicative statistic, such as the
  gradient, its sign or square, has ``f(g x) = f(g) f(x)``, so its sum over groups is one matrix product,
  ``f(G)ᵀ f(X)``; an additive one, such as the logarithm of the magnitude, has the sum ``Σ_b f(g_bi) + Σ_b f(x_bj)``.
* An embedding's gradient is zero except in the rows of the group's own tokens.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from concord.aggregation import Statistic
from concord.aggregation.asynchronous import is_asynchronous
from concord.aggregation.rule import accumulation_dtype, add_statistics
from concord.aggregation.weighting import gram_of

Wanted = Sequence[tuple[Statistic, Tensor]]
"""Statistics, and the sum of each, to which is added: contiguous, shaped as the parameter."""

MEMORY_LIMIT = 1 << 28
"""Bytes of gradients by group that may exist at once."""


def cache_of_a_core() -> int:
    """The bytes of a core's second cache; half a MiB where the system does not tell."""
    try:
        return max(os.sysconf("SC_LEVEL2_CACHE_SIZE"), 1 << 19)
    except (AttributeError, OSError, ValueError):  # Windows has no such call, macOS no such name
        return 1 << 19


# Bytes of gradients that are formed at once on a CPU: they and what a rule maps them to stay in the cache.
_CACHED_BYTES = 2 * cache_of_a_core()
# The same for compiled statistics, which map to nothing that is kept.
_COMPILED_BYTES = 4 << 20
# Of convolutions of single examples on a CPU: examples that one convolution takes as its groups, positions from which
# on that is the faster way, and bytes of patches that may exist at once.
_EXAMPLES_TOGETHER = 4
_MANY_POSITIONS = 100
_BYTE = 127  # the largest number of eight bits
_PATCH_BYTES = 32 << 20
_PRODUCT_BYTES = 2 << 20
# Bytes of all groups' gradients of some components.
_COLUMN_BYTES = 8 << 20
# Bytes of the inner products of single examples, before they are added to those of the groups.
_GRAM_BYTES = 64 << 20


class GroupGradients(Protocol):
    """The gradients of one parameter for each group of examples."""

    def of_groups(self, part: slice) -> Tensor:
        """The gradients of some groups, ``(part, *shape of the parameter)``."""

    def add_to(self, wanted: Wanted, memory_limit: int) -> None:
        """Add the wanted statistics of all groups; at most ``memory_limit`` bytes of gradients exist at once."""


@dataclass(frozen=True)
class StoredGradients:
    """Computed gradients: ``values`` is ``(groups, *shape)``."""

    values: Tensor

    def of_groups(self, part: slice) -> Tensor:
        """Some of the values."""
        return self.values[part]

    def add_to(self, wanted: Wanted, memory_limit: int) -> None:
        """Map and sum the values."""
        add_statistics(wanted, self.values)


@dataclass(frozen=True)
class Product:
    """Matrix products: the gradient of group b is ``rows[b] @ columns[b]``.

    ``rows`` is ``(groups, m, positions)``, ``columns`` ``(groups, positions, n)``, and the parameter ``(m, n)``.
    """

    rows: Tensor
    columns: Tensor

    def of_groups(self, part: slice) -> Tensor:
        """The products of some groups."""
        return torch.bmm(self.rows[part], self.columns[part])

    def add_to(self, wanted: Wanted, memory_limit: int) -> None:
        """By matrix products where a group has one position and the statistic allows it, else block by block."""
        single = self.rows.shape[-1] == 1
        known = [each for each in wanted if single and each[0].on_products]
        others = [each for each in wanted if not (single and each[0].on_products)]
        for statistic, total in known:
            self._add_outer_products(statistic, total)
        if others:
            self._add_blocks(others, memory_limit)

    def _add_outer_products(self, statistic: Statistic, total: Tensor) -> None:
        left, right = self.rows[..., 0], self.columns[:, 0]
        if (
            statistic.on_products != "additive"
            and statistic.whole is not None
            and statistic.whole <= _BYTE
            and left.shape[1] > 1  # of a single row PyTorch's integer products are wrong (2.13, CPUs with VNNI)
            and has_integer_products(total.device)
            and not is_asynchronous(total.device)
        ):
            # Exact for any number of groups: sums are 32 bits wide. Half precision has these numbers, too.
            total += torch._int_mm(statistic.of(left).to(torch.int8).T, statistic.of(right).to(torch.int8))
            return
        left, right = (statistic.of(each.to(total.dtype)) for each in (left, right))
        if statistic.on_products == "additive":
            total += left.sum(0).unsqueeze(1) + right.sum(0)
        else:
            total.addmm_(left.T, right)

    def _add_blocks(self, wanted: Wanted, memory_limit: int) -> None:
        groups, m, _ = self.rows.shape
        row = self.columns.shape[-1] * self.rows.itemsize
        compiled = any(statistic.together is not None for statistic, _ in wanted)
        cached = _COMPILED_BYTES if compiled else _CACHED_BYTES
        limit = memory_limit if is_asynchronous(self.rows.device) else min(memory_limit, cached)
        height = max(1, min(m, limit // row))
        height = -(-m // -(-m // height))  # blocks of about equal height
        for top in range(0, m, height):
            block = [(statistic, total[top : top + height]) for statistic, total in wanted]
            for part in chunks(groups, limit // (height * row)):
                add_statistics(block, torch.bmm(self.rows[part, top : top + height], self.columns[part]))


class Geometry(NamedTuple):
    """The geometry of a convolution over its input, with the zeros before and behind each dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def backward(
        self, grad: Tensor, inputs: Tensor, weight: Tensor, wanted: Sequence[bool], times: int = 1
    ) -> list[Tensor | None]:
        """The gradients of inputs, weight and bias that are wanted, of ``times`` such convolutions side by side."""
        bias = [len(weight)] if wanted[2] else None
        none = [0] * len(self.stride)
        move = (self.stride, self.padding, self.dilation, False, none, self.groups * times)
        gradients: Any = torch.ops.aten.convolution_backward(grad, inputs, weight, bias, *move, wanted)
        return list(gradients)


@dataclass(frozen=True)
class Convolution:
    """Gradients of a convolution's weight, from its input and the gradient of its output.

    ``inputs`` is ``(groups, examples, channels, *places)``, ``gradients`` ``(groups, examples, out, *positions)``,
    ``shape`` the weight's.
    """

    inputs: Tensor
    gradients: Tensor
    shape: tuple[int, ...]
    geometry: Geometry

    def of_groups(self, part: slice) -> Tensor:
        """Of some groups: as one convolution with as many groups of channels, or from patches."""
        if self._single and (self._few_positions or is_asynchronous(self.inputs.device)):
            return torch.matmul(*self._factors(part)).reshape(-1, *self.shape)
        # The gradient of a grouped convolution's weight is that of each of its groups by itself.
        inputs, gradients = (each[part].transpose(0, 1).flatten(1, 2) for each in (self.inputs, self.gradients))
        times = gradients.shape[1] // self.shape[0]
        weight = gradients.new_empty(1).expand(times * self.shape[0], *self.shape[1:])
        gradient = self.geometry.backward(gradients, inputs, weight, (False, True, False), times)[1]
        assert gradient is not None
        return gradient.reshape(times, *self.shape)

    def add_to(self, wanted: Wanted, memory_limit: int) -> None:
        """Add some groups at a time: a few single examples, in the same memory if there are few positions."""
        if self._single and self._few_positions and not is_asynchronous(self.inputs.device):
            self._add_one_by_one(wanted, memory_limit)
            return
        at_once = memory_limit // (math.prod(self.shape) * self.gradients.itemsize)
        if not (self._single and is_asynchronous(self.inputs.device)):
            at_once = min(at_once, _EXAMPLES_TOGETHER if self._single else 1)
        for part in chunks(len(self.gradients), at_once):
            add_statistics(wanted, self.of_groups(part))

    @property
    def _single(self) -> bool:
        """Whether a group is one example."""
        return self.inputs.shape[1] == 1

    @property
    def _few_positions(self) -> bool:
        # Measured (a FastResNet's layers, 2 cores): convolutions with a group an example are up to twice as fast as
        # products of patches with 256 positions and more, as fast with 64, and ten times slower with 16.
        return math.prod(self.gradients.shape[3:]) < _MANY_POSITIONS

    def _add_one_by_one(self, wanted: Wanted, memory_limit: int) -> None:
        _, groups, positions, n = self._patches(slice(0, 1)).shape
        m = self.shape[0] // groups
        itemsize = self.gradients.itemsize
        # Product and sums of a block of rows stay in the cache while all examples go through it.
        height = max(1, min(m, _PRODUCT_BYTES // (n * itemsize)))
        product = self.gradients.new_empty(height, n)
        for part in chunks(len(self.gradients), min(memory_limit, _PATCH_BYTES) // (groups * positions * n * itemsize)):
            rows, columns = self._factors(part)
            for group in range(groups):
                for top in range(0, m, height):
                    first = group * m + top
                    end = min(first + height, (group + 1) * m)
                    block = [(statistic, total[first:end].flatten()) for statistic, total in wanted]
                    of_rows = rows[:, group, top : top + height].unbind()
                    for left, right in zip(of_rows, columns[:, group].unbind(), strict=True):
                        torch.mm(left, right, out=product[: end - first])
                        add_statistics(block, product[: end - first].view(1, -1))

    def _factors(self, part: slice) -> tuple[Tensor, Tensor]:
        """Two tensors ``(part, groups, m, positions)`` and ``(part, groups, positions, n)``, to be multiplied."""
        gradients, groups = self.gradients[part, 0], self.geometry.groups
        return gradients.reshape(len(gradients), groups, self.shape[0] // groups, -1), self._patches(part)

    def _patches(self, part: slice) -> Tensor:
        """The kernel's input at every position, ``(part, groups of channels, positions, n)``."""
        inputs, (stride, padding, dilation, groups) = self.inputs[part, 0], self.geometry
        if any(padding):
            inputs = functional.pad(inputs, [each for edge in reversed(padding) for each in (edge, edge)])
        inputs = inputs.contiguous()
        steps = inputs.stride()[2:]
        width = self.shape[1]
        positions, kernel = self.gradients.shape[3:], self.shape[2:]
        windows = inputs.as_strided(
            (len(inputs), groups, *positions, width, *kernel),
            (
                inputs.stride(0),
                width * inputs.stride(1),
                *(step * by for step, by in zip(steps, stride, strict=True)),
                inputs.stride(1),
                *(step * by for step, by in zip(steps, dilation, strict=True)),
            ),
        )
        return windows.reshape(len(inputs), groups, math.prod(positions), -1)


@dataclass(frozen=True)
class RowGradients:
    """Gradients of a table of which a group uses few rows: ``gradients[b, t]`` belongs to row ``places[b, t]``.

    ``places`` is ``(groups, positions)``, ``gradients`` ``(groups, positions, width)``, the table ``(height, width)``.
    Places that are ``left_out`` get no gradient.
    """

    places: Tensor
    gradients: Tensor
    height: int
    left_out: int | None = None

    def of_groups(self, part: slice) -> Tensor:
        """The tables of some groups, mostly zeros."""
        places, gradients = self.places[part], self._wanted()[part]
        table = gradients.new_zeros(len(places), self.height, gradients.shape[-1])
        return table.scatter_add_(1, places[..., None].expand_as(gradients), gradients)

    def add_to(self, wanted: Wanted, memory_limit: int) -> None:
        """Add each group's own rows; all other rows are zero."""
        width = self.gradients.shape[-1]
        # A token that a group holds twice has one gradient, the sum of both.
        group = torch.arange(len(self.places), device=self.places.device)[:, None]
        own, position = torch.unique(group * self.height + self.places, return_inverse=True)
        dtype = accumulation_dtype([self.gradients.dtype])
        gradients = torch.zeros(len(own), width, dtype=dtype, device=self.gradients.device)
        gradients.index_add_(0, position.flatten(), self._wanted().to(dtype).flatten(0, 1))
        rows = own % self.height
        seen = torch.zeros(self.height, dtype=dtype, device=rows.device)
        seen.index_add_(0, rows, torch.ones_like(rows, dtype=dtype))
        unseen = (len(self.places) - seen)[:, None]
        for statistic, total in wanted:
            of_zero = statistic.of(torch.zeros(1, dtype=total.dtype, device=rows.device)).to(total.dtype)
            total.index_add_(0, rows, statistic.of(gradients.to(total.dtype)).to(total.dtype))
            total += torch.where(unseen > 0, of_zero * unseen, 0).to(total.dtype)

    def _wanted(self) -> Tensor:
        if self.left_out is None:
            return self.gradients
        return self.gradients.masked_fill((self.places == self.left_out)[..., None], 0)


@dataclass(frozen=True)
class Recomputed:
    """Gradients of all parameters of a layer by name, which a function computes for some groups at a time.

    ``size`` is the number of bytes of one group's gradients while they are computed.
    """

    groups: int
    compute: Callable[[slice], dict[str, Tensor]]
    name: str
    size: int

    def of_groups(self, part: slice) -> Tensor:
        """The function's result for this parameter."""
        return self.compute(part)[self.name]

    def add_to(self, wanted: Wanted, memory_limit: int) -> None:
        """Compute, map and sum some groups at a time."""
        for part in chunks(self.groups, memory_limit // max(self.size, 1)):
            add_statistics(wanted, self.of_groups(part))


@dataclass(frozen=True)
class SummedGradients:
    """The sum of several gradients of one parameter, which each group uses more than once."""

    groups: int
    forms: Sequence[GroupGradients]

    def of_groups(self, part: slice) -> Tensor:
        """The sums of some groups' gradients."""
        first, *others = (form.of_groups(part) for form in self.forms)
        total = first.to(accumulation_dtype([first.dtype]))
        for other in others:
            total = total + other
        return total

    def add_to(self, wanted: Wanted, memory_limit: int) -> None:
        """Form, map and sum some groups at a time."""
        for part in chunks(self.groups, memory_limit // max(2 * wanted[0][1].nbytes, 1)):
            add_statistics(wanted, self.of_groups(part))


def forms_no_gradients(form: GroupGradients, statistics: Sequence[Statistic]) -> bool:
    """Whether the sums come from matrix products alone, so that no group's gradient is formed."""
    return isinstance(form, Product) and form.rows.shape[-1] == 1 and all(each.on_products for each in statistics)


def columns_of(form: GroupGradients, groups: int) -> Iterator[tuple[slice, Tensor]]:
    """The gradients of all groups, some components at a time: their slice, and ``(groups, components)``."""
    if not isinstance(form, Product):
        gradients = form.of_groups(slice(0, groups)).reshape(groups, -1)
        yield slice(0, gradients.shape[1]), gradients
        return
    m, n = form.rows.shape[1], form.columns.shape[2]
    for rows in chunks(m, _COLUMN_BYTES // (groups * n * form.rows.itemsize)):
        yield slice(rows.start * n, rows.stop * n), torch.bmm(form.rows[:, rows], form.columns).flatten(1)


def gram_of_groups(form: GroupGradients, groups: int) -> Tensor:
    """The inner products of the groups' gradients; for matrix products by (GGᵀ) ⊙ (XXᵀ) if that is less work."""
    if isinstance(form, Product):
        _, m, positions = form.rows.shape
        n = form.columns.shape[2]
        if groups * positions**2 * (m + n) < m * n * (positions + groups):
            rows, columns = form.rows.mT.reshape(-1, m), form.columns.reshape(-1, n)
            gram = torch.empty(groups, groups, dtype=torch.float64)
            for part in chunks(groups, _GRAM_BYTES // (positions * len(rows) * gram.itemsize)):
                some = slice(part.start * positions, part.stop * positions)
                products = gram_of(rows, some).mul_(gram_of(columns, some))
                torch.sum(products.view(-1, positions, groups, positions), (1, 3), out=gram[part])
            return gram
    return torch.stack([gram_of(columns) for _, columns in columns_of(form, groups)]).sum(0)


@functools.cache
def has_integer_products(device: torch.device) -> bool:
    """Whether the device has instructions for products of bytes; such products take half the time of others."""
    has = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return any(has.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


def chunks(groups: int, at_once: int) -> Iterator[slice]:
    """The groups in neighbouring parts of at most ``at_once`` (at least one)."""
    at_once = max(at_once, 1)
    return (slice(start, min(start + at_once, groups)) for start in range(0, groups, at_once))


def tolerances(half: bool) -> tuple[float, float]:
    """How far a sum over groups may be from backward's: in parts of the parameter's norm, and of all parameters'.

    Rounding may be all there is of a parameter's gradient, as of a bias before batch norm.
    """
    return (0.1, 0.05) if half else (0.02, 1e-4)
