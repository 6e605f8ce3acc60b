"""How often signs agree by chance, and the threshold that they seldom reach by chance.

If environments have nothing in common, each sign of a component is a fair coin. At most u of d such signs are in the
minority with probability 2 · Σ C(d, i) / 2ᵈ over i ≤ u < d/2, and then |Σ sign g| ≥ d - 2u (learning explanations that
are hard to vary, appendix A.4, equation 4, where t = d - u). Counts are compared as whole numbers, not rounded::

    chance_of(0.8, 20)               # 4.0e-4: the part of unrelated components that pass at τ = 0.8
    threshold_at_chance(1e-6, 32)    # 0.875: 30 of 32 signs
"""

import functools
import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, Context

from concord.aggregation.agreement import check_threshold, required_agreement
from concord.errors import ArgumentError

DEFAULT_SIGNIFICANCE = 1e-5
"""The default significance: the largest part of the components that chance may keep."""

MUCH_BY_CHANCE = 0.01
"""A run warns where chance alone lets more than this part of the components pass."""


@functools.lru_cache(maxsize=1024)
def chance_of(threshold: float, environments: int) -> float:
    """The probability that independent fair signs of d environments reach threshold τ: |Σ sign| ≥ τd.

    Raises:
        ArgumentError: τ is outside [0, 1], or there is no environment.
    """
    asked = 2 * agreeing_signs(threshold, environments) - environments
    count = next(count for agreement, count in _outcomes(environments) if agreement == asked)
    return count / (1 << environments)


def agreeing_signs(threshold: float, environments: int) -> int:
    """The number of equal signs among d, none of them zero, for which |Σ sign| ≥ τd.

    Raises:
        ArgumentError: τ is outside [0, 1], or there is no environment.
    """
    check_threshold(threshold)
    _check_environments(environments)
    return (environments + math.ceil(required_agreement(threshold, environments)) + 1) // 2


@functools.lru_cache(maxsize=1024)
def threshold_at_chance(significance: float, environments: int) -> float:
    """The least threshold τ that independent fair signs of d environments reach with at most this probability.

    Args:
        significance: the probability, above 0 and at most 1.
        environments: d, at least 1.

    Returns:
        The required agreement |Σ sign|, divided by d.

    Raises:
        ArgumentError: even full agreement is more probable, or an argument is out of its range.
    """
    if not 0 < significance <= 1:
        raise ArgumentError("significance", significance, "must be a probability above 0 and at most 1")
    _check_environments(environments)
    numerator, denominator = significance.as_integer_ratio()
    most = (numerator << environments) // denominator
    agreements = [agreement for agreement, count in _outcomes(environments, most)]
    if not agreements:
        full = 2.0 ** (1 - environments)
        agree = "environments agree" if environments > 1 else "environment agrees"
        could_be = Context(prec=2, rounding=ROUND_CEILING).create_decimal_from_float(full)
        raise ArgumentError(
            "significance",
            significance,
            f"by chance {environments} {agree} fully with probability {format_chance(full)}; give "
            f"{format_chance(float(could_be))} or more, or at least {least_environments(significance)} environments",
        )
    return agreements[-1] / environments


def least_environments(significance: float) -> int:
    """The least d whose signs agree fully with at most this probability by chance: 2^(1 - d)."""
    return max(1, 2 - math.frexp(significance)[1])


def format_chance(probability: float) -> str:
    """Two digits, such as ``2.6e-6``, or ``1``."""
    mantissa, _, exponent = f"{probability:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if int(exponent) else "1"


def _outcomes(environments: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Agreements |Σ sign| from d downwards, and the number of the 2ᵈ outcomes that reach each, up to ``most``."""
    count, ways = 0, 1
    for minority in range(environments // 2 + 1):
        count += ways if 2 * minority == environments else 2 * ways
        if most is not None and count > most:
            return
        yield environments - 2 * minority, count
        ways = ways * (environments - minority) // (minority + 1)


def _check_environments(environments: int) -> None:
    if environments < 1:
        raise ArgumentError("environments", environments, "must be at least 1")
