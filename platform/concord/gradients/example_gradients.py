"""The gradients of a parameter for every example of a batch, in the forms that layers have them, and their sums.

No form holds the gradients of all examples. A form can make those of some examples, ``formed``, and adds the
statistics of all examples to running sums, ``add_to``: in blocks of bounded memory that stay in a CPU's cache, or,
where the rule allows it, without ever forming a gradient:

* The gradient of a linear layer is an outer product, ``g_i x_j``. Gradient, sign and square are multiplicative,
  ``f(g x) = f(g) f(x)``, so their sum over examples is one matrix product, ``f(G)ᵀ f(X)``; the logarithm of the
  magnitude is additive, so its sum is ``Σ_b log|g_bi| + Σ_b log|x_bj|``.
* An embedding's gradient is zero but for the rows of an example's own tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from concord.aggregation import Aggregator, Statistics, sum_over_environments
from concord.aggregation.rule import accumulation_dtype

MULTIPLICATIVE = frozenset({"gradient", "sign", "square"})
"""Statistics with ``f(a·b) = f(a)·f(b)``, element by element."""
ADDITIVE = frozenset({"log_magnitude"})
"""Statistics with ``f(a·b) = f(a) + f(b)``."""

# Bytes of gradients that are formed at once on a CPU: they and what a rule maps them to stay in the cache.
_CACHED_BYTES = 1 << 20


class ExampleGradients(Protocol):
    """The gradients of one parameter for each of ``examples`` examples."""

    @property
    def examples(self) -> int:
        """How many examples there are."""
        ...

    def formed(self, part: slice) -> Tensor:
        """The gradients of some examples, ``(part, *shape of the parameter)``."""
        ...

    def add_to(self, totals: Statistics, rule: Aggregator, memory_limit: int) -> None:
        """Add the statistics of all examples.

        Args:
            totals: the sums by name, each contiguous and shaped as the parameter; a statistic of the rule that is
                not among them is not wanted.
            rule: the rule.
            memory_limit: bytes of gradients that may exist at once.
        """
        ...


@dataclass(frozen=True)
class Formed:
    """Gradients that are there already: ``values`` is ``(examples, *shape)``."""

    values: Tensor

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return len(self.values)

    def formed(self, part: slice) -> Tensor:
        """Some of the values."""
        return self.values[part]

    def add_to(self, totals: Statistics, rule: Aggregator, memory_limit: int) -> None:  # noqa: ARG002
        """Map and sum the values."""
        sum_over_environments(rule, self.values, totals, accumulate=True)


@dataclass(frozen=True)
class Product:
    """Matrix products: example b's gradient is ``rows[b] @ columns[b]``, seen as the parameter's shape.

    ``rows`` is ``(examples, groups, m, positions)``, ``columns`` ``(examples, groups, positions, n)``, and ``layout``
    says how the ``(groups, m, n)`` of a gradient become the parameter's shape: the sizes into which that is
    unflattened, and the order of those (a permutation).
    """

    rows: Tensor
    columns: Tensor
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return len(self.rows)

    def formed(self, part: slice) -> Tensor:
        """The products of some examples."""
        products = torch.matmul(self.rows[part], self.columns[part])
        return self._arranged(products.reshape(len(products), -1))

    def add_to(self, totals: Statistics, rule: Aggregator, memory_limit: int) -> None:
        """By matrix products where an example has one position and the rule allows it, else block by block."""
        _, groups, m, positions = self.rows.shape
        n = self.columns.shape[-1]
        dtype = next(iter(totals.values())).dtype
        straight = self.order == tuple(range(len(self.order)))
        # Where the parameter lies in another order, sum in the products' order and turn the sums once at the end.
        sums = {
            name: total.view(groups, m, n) if straight else torch.zeros(groups, m, n, dtype=dtype, device=total.device)
            for name, total in totals.items()
        }
        if positions == 1 and sums.keys() <= MULTIPLICATIVE | ADDITIVE:
            self._add_outer_products(sums, rule)
        else:
            self._add_blocks(sums, rule, memory_limit)
        if not straight:
            for name, total in totals.items():
                total += self._arranged(sums[name].view(1, -1))[0]

    def _arranged(self, flat: Tensor) -> Tensor:
        turned: Tensor = flat.unflatten(1, self.sizes).permute(0, *(1 + at for at in self.order))
        return turned.contiguous()

    def _add_outer_products(self, sums: Statistics, rule: Aggregator) -> None:
        dtype = next(iter(sums.values())).dtype
        left = rule.map(self.rows[..., 0].to(dtype))  # (examples, groups, m)
        right = rule.map(self.columns[..., 0, :].to(dtype))  # (examples, groups, n)
        for name, total in sums.items():
            if name in MULTIPLICATIVE:
                for group, part in enumerate(total):
                    part.addmm_(left[name][:, group].T, right[name][:, group])
            else:
                total += left[name].sum(0).unsqueeze(-1) + right[name].sum(0).unsqueeze(-2)

    def _add_blocks(self, sums: Statistics, rule: Aggregator, memory_limit: int) -> None:
        examples, groups, m, _ = self.rows.shape
        n = self.columns.shape[-1]
        itemsize = self.rows.itemsize
        limit = memory_limit if self.rows.is_cuda else min(memory_limit, _CACHED_BYTES)
        height = max(1, min(m, limit // (n * itemsize)))
        height = -(-m // -(-m // height))  # blocks of about equal height
        count = max(1, min(examples, limit // (height * n * itemsize)))
        for group in range(groups):
            rows, columns = self.rows[:, group], self.columns[:, group]
            for top in range(0, m, height):
                block = {name: total[group, top : top + height] for name, total in sums.items()}
                for start in range(0, examples, count):
                    products = torch.bmm(
                        rows[start : start + count, top : top + height], columns[start : start + count]
                    )
                    sum_over_environments(rule, products, block, accumulate=True)


@dataclass(frozen=True)
class Rows:
    """Gradients of a table of which an example sees a few rows: ``gradients[b, t]`` goes to row ``places[b, t]``.

    ``places`` is ``(examples, positions)``, ``gradients`` ``(examples, positions, width)``, the table ``(height,
    width)``. Places that are ``left_out`` get no gradient.
    """

    places: Tensor
    gradients: Tensor
    height: int
    left_out: int | None = None

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return len(self.places)

    def formed(self, part: slice) -> Tensor:
        """The tables of some examples, mostly zeros."""
        places, gradients = self.places[part], self._wanted()[part]
        table = gradients.new_zeros(len(places), self.height, gradients.shape[-1])
        return table.scatter_add_(1, places[..., None].expand_as(gradients), gradients)

    def add_to(self, totals: Statistics, rule: Aggregator, memory_limit: int) -> None:  # noqa: ARG002
        """Map each example's own rows; all others count as zeros."""
        dtype = next(iter(totals.values())).dtype
        width = self.gradients.shape[-1]
        # A token that an example holds twice has one gradient, the sum of both.
        example = torch.arange(self.examples, device=self.places.device)[:, None]
        own, position = torch.unique(example * self.height + self.places, return_inverse=True)
        gradients = torch.zeros(len(own), width, dtype=dtype, device=self.gradients.device)
        gradients.index_add_(0, position.flatten(), self._wanted().to(dtype).flatten(0, 1))
        rows = own % self.height
        seen = torch.zeros(self.height, dtype=dtype, device=rows.device)
        seen.index_add_(0, rows, torch.ones_like(rows, dtype=dtype))
        of_zero = rule.map(torch.zeros(1, dtype=dtype, device=rows.device))
        unseen = (self.examples - seen)[:, None]
        for name, contribution in rule.map(gradients).items():
            if name in totals:
                totals[name].index_add_(0, rows, contribution)
                totals[name] += torch.where(unseen > 0, of_zero[name] * unseen, 0)

    def _wanted(self) -> Tensor:
        if self.left_out is None:
            return self.gradients
        return self.gradients.masked_fill((self.places == self.left_out)[..., None], 0)


@dataclass(frozen=True)
class Recomputed:
    """Gradients that a function makes for some examples at a time: ``(part, *shape)``.

    ``size`` is the bytes that one example's gradients need while they are made.
    """

    examples: int
    make: Callable[[slice], Tensor]
    size: int

    def formed(self, part: slice) -> Tensor:
        """What the function makes."""
        return self.make(part)

    def add_to(self, totals: Statistics, rule: Aggregator, memory_limit: int) -> None:
        """Make, map and sum some examples at a time."""
        for part in chunks(self.examples, memory_limit // max(self.size, 1)):
            sum_over_environments(rule, self.make(part), totals, accumulate=True)


@dataclass(frozen=True)
class Added:
    """The sum of several forms: of a parameter that is used more than once for each example."""

    forms: Sequence[ExampleGradients]

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return self.forms[0].examples

    def formed(self, part: slice) -> Tensor:
        """The sums of some examples' gradients."""
        first, *others = (form.formed(part) for form in self.forms)
        total = first.to(accumulation_dtype([first.dtype]))
        for other in others:
            total = total + other
        return total

    def add_to(self, totals: Statistics, rule: Aggregator, memory_limit: int) -> None:
        """Form, map and sum some examples at a time."""
        shape = next(iter(totals.values()))
        for part in chunks(self.examples, memory_limit // max(2 * shape.nbytes, 1)):
            sum_over_environments(rule, self.formed(part), totals, accumulate=True)


def chunks(examples: int, at_once: int) -> Iterator[slice]:
    """The examples in neighbouring parts of at most ``at_once`` (at least one)."""
    at_once = max(at_once, 1)
    return (slice(start, min(start + at_once, examples)) for start in range(0, examples, at_once))
