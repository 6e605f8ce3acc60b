"""Functions of gradients under ``torch.compile``: one pass over the gradients in place of several.

They are a rule's statistics, finish or combination, and the gradients of norms by group of examples
(:mod:`~concord.gradients.layer_gradients`).

What is compiled is tried first: the first call of each form computes both ways, and the compiled one is used from then
on if the results agree. What PyTorch cannot compile (a rule that reads values, a machine without a compiler) is
computed as ever, and a line says why, once.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from concord.aggregation import Aggregator, ColumnRule, Rule, Statistic, Statistics, Weighting
from concord.aggregation.rule import Update, add_block
from concord.aggregation.weighting import name_of
from concord.logs import info

AGREEMENT = 1e-3
"""How far a compiled result may be from the ordinary one, in parts of its norm. Both round, each in its own order; a
mask may have another component where a number is a threshold up to rounding."""

# Forms of one function's calls that are compiled, of some seconds each: numbers of environments, dtypes, dimensions.
_MOST_FORMS = 8
# Environments whose values a compiled network of comparisons orders: of 32 it has 191, of 64 already 543.
_MOST_ORDERED = 32


class Compiled:
    """A function of tensors, compiled.

    Args:
        function: of a sequence of tensors and constants; returns a sequence of tensors, and may write to the first ones
            that it gets.
        name: of what it computes, in messages.

    Attributes:
        refused: whether every call is computed the ordinary way.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], name: str) -> None:
        self._function, self._name = function, name
        self._compiled: Callable[..., Sequence[Tensor]] | None = None
        self._tried: set[Hashable] = set()
        self._told = False
        self.refused = False

    def __call__(self, tensors: Sequence[Tensor], *constants: Hashable, changed: int = 0) -> Sequence[Tensor]:
        """The function's result; ``changed`` is the number of tensors to which it writes."""
        if self.refused or torch._C._len_torch_dispatch_stack() > 0:  # which follows the single operations
            return self._function(tensors, *constants)
        try:
            # Whether a length is 1 or any other is all that a compilation depends on.
            forms = ((each.dtype, each.device, *(min(length, 2) for length in each.shape)) for each in tensors)
            key = (*constants, *forms)
            if key in self._tried and self._compiled is not None:
                with torch.no_grad():
                    return self._compiled(tensors, *constants)
        except Exception as error:  # of any kind, from Dynamo, Inductor or a compiler
            self._refuse(_reason(error))
            return self._function(tensors, *constants)
        if len(self._tried) >= _MOST_FORMS and not self._told:
            self._told = True
            info(f"{self._name}: compiled for {_MOST_FORMS} forms of its tensors, and for no others")
        if self._told or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._function(tensors, *constants)
        return self._first(tensors, constants, changed, key)

    @torch.no_grad()
    def _first(
        self, tensors: Sequence[Tensor], constants: tuple[Hashable, ...], changed: int, key: Hashable
    ) -> Sequence[Tensor]:
        """The ordinary result, and whether the compiled one agrees."""
        copies = [each.clone() for each in tensors[:changed]]
        found: Sequence[Tensor] | None = None
        try:
            found = self._compile()([*copies, *tensors[changed:]], *constants)
        except Exception as error:  # of any kind; one of the function's own is raised below
            self._refuse(_reason(error))
        expected = self._function(tensors, *constants)
        if found is not None and all(map(_agree, [*copies, *found], [*tensors[:changed], *expected])):
            self._tried.add(key)
        elif found is not None:
            self._refuse("its result is not the ordinary one")
        return expected

    def _compile(self) -> Callable[..., Sequence[Tensor]]:
        import torch._dynamo  # here: it takes a second

        if self._compiled is None:
            compile_function: Any = torch.compile  # its types lack two of its arguments
            self._compiled = compile_function(
                self._function, fullgraph=True, dynamic=True, recompile_limit=4 * _MOST_FORMS, isolate_recompiles=True
            )
        # Lengths may vary; a rule's own numbers, such as a threshold, are compiled as they are.
        patch: Any = torch._dynamo.config.patch
        compiled: Callable[..., Sequence[Tensor]] = patch(specialize_int=True, specialize_float=True)(self._compiled)
        return compiled

    def _refuse(self, reason: str) -> None:
        self.refused = True
        self._tried.clear()
        self._compiled = None
        info(f"{self._name}: not compiled, since {reason}")


def _reason(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:2]) or type(error).__name__


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether a result is the ordinary one up to rounding, and infinite or undefined in the same places."""
    finite = expected.isfinite()
    if (found.shape, found.dtype) != (expected.shape, expected.dtype) or not torch.equal(found.isfinite(), finite):
        return False
    one, other = (torch.where(finite, each, 0).double() for each in (found, expected))
    return float((one - other).norm()) <= AGREEMENT * float(other.norm())


@dataclass(frozen=True)
class CompiledRule:
    """A rule of sums whose statistics are added together, and whose finish is one pass."""

    wrapped: Aggregator
    statistics: tuple[Statistic, ...]
    compiled: Compiled
    draws: tuple[str, ...]
    seed: int

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The rule's update."""
        return Update(*self.compiled(list(sums.values()), tuple(sums), environments))


@dataclass(frozen=True)
class CompiledColumns:
    """A column rule in one pass."""

    wrapped: ColumnRule
    compiled: Compiled

    def combine(self, columns: Tensor) -> Tensor:
        """The rule's update."""
        if len(columns) > _MOST_ORDERED:
            return self.wrapped.combine(columns)
        return self.compiled([columns], len(columns))[0]


def compiled_rule(rule: Rule) -> Rule:
    """The rule, compiled where it is first used; equal rules share what is compiled."""
    if isinstance(rule, Weighting):
        info(f"{name_of(rule)}: not compiled, since its weights are computed on the host")
        return rule
    return _cached(rule) if isinstance(rule, Hashable) else _compiled(rule)


def _compiled(rule: Any) -> Rule:
    name = name_of(rule)
    if isinstance(rule, ColumnRule):

        def combine(tensors: Sequence[Tensor], environments: int) -> list[Tensor]:
            del environments  # of which each number is compiled
            return [rule.combine(tensors[0])]

        return CompiledColumns(rule, Compiled(combine, name))

    def finish(tensors: Sequence[Tensor], names: tuple[str, ...], environments: int) -> tuple[Tensor, ...]:
        return tuple(rule.finish(dict(zip(names, tensors, strict=True)), environments))

    added = Compiled(_added, f"the sums of {name}")

    def together(wanted: Sequence[tuple[Statistic, Tensor]], gradients: Tensor, accumulate: bool) -> None:
        statistics, totals = zip(*wanted, strict=True)
        added([*totals, gradients], statistics, accumulate, changed=len(totals))

    statistics = tuple(replace(each, together=together) for each in rule.statistics)
    draws, seed = getattr(rule, "draws", ()), getattr(rule, "seed", 0)
    return CompiledRule(rule, statistics, Compiled(finish, name), draws, seed)


_cached = functools.lru_cache(maxsize=64)(_compiled)


def _added(tensors: Sequence[Tensor], statistics: tuple[Statistic, ...], accumulate: bool) -> Sequence[Tensor]:
    *totals, gradients = tensors
    add_block(list(zip(statistics, totals, strict=True)), gradients, accumulate)
    return ()
