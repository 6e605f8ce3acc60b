"""The rules by the names that the command line and configurations use."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from concord.aggregation.and_mask import AndMask
from concord.aggregation.cagrad import CAGrad
from concord.aggregation.chance import DEFAULT_SIGNIFICANCE, threshold_at_chance
from concord.aggregation.clipping import Clipping
from concord.aggregation.geometric_mean import GeometricMean
from concord.aggregation.krum import Krum
from concord.aggregation.mean import Mean
from concord.aggregation.median import Median
from concord.aggregation.mgda import MGDA
from concord.aggregation.pcgrad import PCGrad
from concord.aggregation.rule import Aggregator
from concord.aggregation.sand_mask import SandMask
from concord.aggregation.sign_mask import SignMask
from concord.aggregation.t_mask import TMask
from concord.aggregation.trimmed_mean import TrimmedMean
from concord.aggregation.upgrad import UPGrad
from concord.aggregation.xor_mask import XorMask
from concord.errors import ArgumentError

AggregatorName = Literal["mean", "and-mask", "geometric-mean", "xor-mask", "sand-mask", "t-mask"]
AGGREGATORS: tuple[str, ...] = get_args(AggregatorName)

# Rules that compare environments, for which sums are not enough; their fields have the names of options.
COMPARING: dict[str, type[Any]] = {
    "pcgrad": PCGrad,
    "mgda": MGDA,
    "cagrad": CAGrad,
    "upgrad": UPGrad,
    "krum": Krum,
    "clip": Clipping,
    "median": Median,
    "trimmed-mean": TrimmedMean,
}


_RULES: dict[str, Callable[[float], Aggregator]] = {
    "mean": lambda _: Mean(),
    "and-mask": AndMask,
    "geometric-mean": GeometricMean,
    "xor-mask": XorMask,
    "sand-mask": SandMask,
    "t-mask": lambda _: TMask(),
}
RULES: tuple[str, ...] = (*AGGREGATORS, *COMPARING)
# The SAND-mask is not among them: how much it keeps depends on magnitudes as well.
SIGN_MASKS: tuple[str, ...] = tuple(
    name for name, rule in _RULES.items() if isinstance(rule, type) and issubclass(rule, SignMask)
)
WITH_CHANCE: tuple[str, ...] = (*SIGN_MASKS, "t-mask")

# The published experiments have 0.8. With their 32 environments chance reaches it with probability 2.6e-6. With 20 it
# does with 4.0e-4, often enough to learn shortcuts; with 100 it does with 3e-17, and so does too little of what all
# of them share (``concord compare synthetic environments``). Below 0.5 fewer than three quarters of the signs have
# to agree: a shortcut of most environments would pass.
_USUAL, _LEAST = 0.8, 0.5
_BY_CHANCE: tuple[str, ...] = ("and-mask", "geometric-mean")


def aggregator(name: AggregatorName, threshold: float = 1.0) -> Aggregator:
    """The rule called ``name`` with agreement threshold τ (which ``mean`` and ``t-mask`` do not use).

    Raises:
        ArgumentError: no rule has this name, or τ is outside [0, 1].
    """
    if name not in _RULES:
        raise ArgumentError("aggregator", name, f"must be one of {', '.join(AGGREGATORS)}")
    return _RULES[name](threshold)


def default_threshold(name: str, environments: int) -> float:
    """The default τ: 0.8; for ``and-mask`` and ``geometric-mean`` the least from 0.5 with at most 1e-5 by chance.

    With 17 environments or fewer even full agreement is more probable by chance, and the default is 0.8.
    """
    by_chance = name in _BY_CHANCE and 2.0 ** (1 - environments) <= DEFAULT_SIGNIFICANCE
    return max(_LEAST, threshold_at_chance(DEFAULT_SIGNIFICANCE, environments)) if by_chance else _USUAL


def aggregator_at_chance(name: AggregatorName, significance: float, environments: int) -> Aggregator:
    """The rule called ``name`` that keeps a component of d environments by chance with at most this probability.

    Raises:
        ArgumentError: the rule decides by neither signs nor a test of the mean, or d signs cannot be as strict.
    """
    if name == "t-mask":
        return TMask(significance)
    if name not in SIGN_MASKS:
        raise ArgumentError("significance", significance, without_chance(name))
    return aggregator(name, threshold_at_chance(significance, environments))


def without_chance(name: str) -> str:
    """The reason why a rule cannot have a significance."""
    return f"{name} does not keep components by their signs alone; it is for {', '.join(WITH_CHANCE)}"
