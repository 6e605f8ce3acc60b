"""Statistics of a gradient, which a rule sums over environments, and their known properties."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from concord.errors import InputError

Statistics = dict[str, Tensor]
"""Sums of statistics by their names."""


@dataclass(frozen=True)
class Statistic:
    """A function of one environment's gradient, element by element, the values of which are added over environments.

    The name and the function are enough for every way in which gradients are computed. Known properties make some of
    these ways faster; they are checked on a few numbers first::

        Statistic("clipped", lambda gradient: gradient.clamp(-1, 1))
        Statistic("sign", torch.sign, on_products="multiplicative", degree=0, whole=1)

    Args:
        name: the key of its sum in the argument of the rule's ``finish``.
        of: maps a gradient of any shape to values of this shape, and leaves the gradient as it is.
        on_products: ``multiplicative``: f(a·b) = f(a)·f(b). ``additive``: f(a·b) = f(a) + f(b). None: neither is known.
        degree: p, where f(c·a) = cᵖ·f(a) for every c > 0. None: unknown, or none.
        whole: the values are whole numbers of at most this magnitude, so that sums may be sent as integers.
        dtype: the least dtype in which it is computed and summed, where float32 is too coarse.
        together: adds it and the statistics beside it, in place of
            :func:`~concord.aggregation.rule.add_block`; for a compiled rule.
    """

    name: str
    of: Callable[[Tensor], Tensor]
    on_products: Literal["multiplicative", "additive"] | None = None
    degree: float | None = None
    whole: int | None = None
    dtype: torch.dtype = torch.float32
    together: "Callable[[Sequence[tuple[Statistic, Tensor]], Tensor, bool], None] | None" = field(
        default=None, compare=False, repr=False
    )

    def wire_dtype(self, environments: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the sum over ``environments`` is sent: the smallest integer type, or ``dtype``."""
        integers = (torch.int8, torch.int16, torch.int32) if self.whole is not None else ()
        fitting = (each for each in integers if environments * (self.whole or 0) <= torch.iinfo(each).max)
        return next(fitting, torch.promote_types(dtype, self.dtype))

    def unscaled(self, total: Tensor, scale: float, environments: int) -> Tensor:
        """The sum over ``environments``, of gradients that were ``scale`` times as large when ``total`` was formed.

        Raises:
            InputError: the statistic has no degree, so its dependence on the gradient's scale is unknown.
        """
        if self.degree is not None:
            return total / float(scale**self.degree)
        if self.on_products is None:
            raise InputError(
                f"scale={scale}: how the statistic {self.name} follows the loss's scale is not known; give its degree, "
                "or give the scaler before backward, so that gradients are unscaled first"
            )
        of_scale = float(self.of(torch.tensor(scale, dtype=torch.float64, device="cpu")))
        if self.on_products == "multiplicative":
            return total / of_scale
        return total - environments * of_scale


def _log_magnitude(gradient: Tensor) -> Tensor:
    return gradient.abs().log_()


GRADIENT = Statistic("gradient", torch.Tensor.detach, "multiplicative", degree=1)
"""The gradient itself; backward passes sum it anyway."""
SIGN = Statistic("sign", torch.sign, "multiplicative", degree=0, whole=1)
"""-1, 0 or 1."""
SQUARE = Statistic("square", torch.square, "multiplicative", degree=2)
LOG_MAGNITUDE = Statistic("log_magnitude", _log_magnitude, "additive")
"""The natural logarithm of the magnitude; -∞ of zero."""

# Positive, negative, large, small, whole, and zero.
_PROBE = torch.tensor([[-3.0, -0.75, 0.0], [0.3, 1.0, 250.0]], device="cpu")


def check_statistics(rule: Any) -> None:
    """Refuse a rule whose statistics are wrong on a few numbers.

    Raises:
        InputError: the rule has none, two have one name, or one of them gives another shape, is no function of single
            components, writes into the gradient, or lacks a property that it claims.
    """
    statistics = getattr(rule, "statistics", None)
    kind = type(rule).__name__
    known = isinstance(statistics, Sequence) and all(isinstance(each, Statistic) for each in statistics)
    if isinstance(rule, type):
        raise InputError(f"rule {rule.__name__}: is a class; give an instance, {rule.__name__}()")
    if not known or not statistics or not callable(getattr(rule, "finish", None)):
        if callable(getattr(rule, "weights", None)) or callable(getattr(rule, "combine", None)):
            raise InputError(f"rule {kind}: compares whole gradients; give it to a gradient source (StackedGradients)")
        raise InputError(f"rule {kind}: needs statistics, a tuple of Statistic, and finish(sums, environments)")
    names = [each.name for each in statistics] + list(getattr(rule, "draws", ()))
    if len(set(names)) < len(names):
        raise InputError(f"rule {kind}: two of its statistics have the same name ({', '.join(names)})")
    for statistic in statistics:
        problem = (_known_problem if isinstance(statistic.of, Hashable) else _problem)(statistic)
        if problem is not None:
            raise InputError(f"rule {kind}: its statistic {statistic.name} {problem}")


def _problem(statistic: Statistic) -> str | None:
    probe = _PROBE.to(statistic.dtype, copy=True)
    values = statistic.of(probe)
    if not isinstance(values, Tensor) or values.shape != probe.shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        return f"maps a gradient of shape {tuple(probe.shape)} to {found}; expected the gradient's shape"
    if not torch.equal(probe, _PROBE.to(statistic.dtype)):
        return "writes into the gradient, which the others need as it is; compute it out of place"
    values = values.double()
    parts = torch.stack([statistic.of(each[None])[0] for each in probe.flatten()]).reshape(probe.shape)
    if not _alike(parts, values):
        return "gives a component another value beside other components; expected a function of each by itself"
    whole = torch.equal(values, values.round()) and bool((values.abs() <= (statistic.whole or 0)).all())
    if statistic.whole is not None and not whole:
        return f"claims whole numbers up to {statistic.whole}, and gives others"
    left, right = values[:, :, None], statistic.of(probe.flatten()).double()
    product = statistic.of(probe[:, :, None] * probe.flatten()).double()
    if statistic.on_products == "multiplicative" and not _alike(product, left * right):
        return "claims to be multiplicative, and is not: f(a·b) is not f(a)·f(b)"
    if statistic.on_products == "additive" and not _alike(product, left + right):
        return "claims to be additive on products, and is not: f(a·b) is not f(a) + f(b)"
    if statistic.degree is not None and not _alike(statistic.of(2 * probe), 2**statistic.degree * values):
        return f"claims degree {statistic.degree:g}, and has another: f(2a) is not 2^{statistic.degree:g}·f(a)"
    return None


_known_problem = functools.lru_cache(maxsize=256)(_problem)


def _alike(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
