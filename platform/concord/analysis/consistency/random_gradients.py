"""What a mask leaves of gradients that have nothing in common: proposition 2, and proposition 1 of its descent.

The d environments' gradients of n components are independent and standard normal. The mask keeps a component where t
signs at least are the same, t > d/2 (AND-mask paper, appendix A.4 and A.5; τ = 2t/d - 1).
"""

import math

from concord.aggregation import chance_of
from concord.errors import ArgumentError


def kept_probability(environments: int, signs: int) -> float:
    """How often a component is kept: 2 · 2⁻ᵈ Σ C(d, k) over k ≥ t (eq. 4).

    Raises:
        ArgumentError: t is not above d/2, where the equation counts outcomes twice, or more than d.
    """
    _check(environments, signs)
    return chance_of((2 * signs - environments) / environments, environments)


def squared_norm(components: int, environments: int) -> float:
    """E‖∇L‖² of the average gradient: n / d."""
    return components / environments


def masked_squared_norm(components: int, environments: int, signs: int) -> float:
    """E‖m ⊙ ∇L‖² of the masked average, exactly.

    n · 2⁻ᵈ Σ C(d, k) [(1 - 2/π) / d + (2/π) (2k - d)² / d²] over the k with max(k, d - k) ≥ t: given its signs, k of
    them positive, a component has the variance of half-normal magnitudes over d, and the mean √(2/π) (2k - d) / d.

    Raises:
        ArgumentError: as :func:`kept_probability`.
    """
    _check(environments, signs)
    kept = [k for k in range(environments + 1) if max(k, environments - k) >= signs]
    of_signs = [
        math.comb(environments, k)
        * ((1 - 2 / math.pi) / environments + 2 / math.pi * (2 * k - environments) ** 2 / environments**2)
        for k in kept
    ]
    return components * math.fsum(of_signs) / 2.0**environments


def decay_base(agreement: float) -> float:
    """c = 2 rʳ (1 - r)^(1 - r): the masked norm falls as n / cᵈ where t = r d signs have to agree, 1/2 < r ≤ 1.

    Raises:
        ArgumentError: r is not above 1/2, or above 1.
    """
    if not 0.5 < agreement <= 1:
        raise ArgumentError("agreement", agreement, "must lie above 1/2, and be 1 at most")
    rest = 1 - agreement
    return 2 * math.exp(sum(part * math.log(part) for part in (agreement, rest) if part))


def masked_norm_bound(components: int, environments: int, signs: int) -> float:
    """2 n (d - t + 1) / cᵈ, which :func:`masked_squared_norm` never exceeds (proposition 2, corrected).

    The paper's last line has the factor d - t, which is 0 where all signs have to agree; d - t + 1 outcomes are summed.

    Raises:
        ArgumentError: as :func:`kept_probability`.
    """
    _check(environments, signs)
    base = decay_base(signs / environments)
    return 2 * components * (environments - signs + 1) / base**environments


def descent_bound(loss: float, learning_rate: float, steps: int) -> float:
    """What the least ‖m ⊙ ∇L‖² of so many masked steps does not exceed: 2 L(θ⁰) / (ηk) (proposition 1).

    For a loss that is nowhere negative and has an L-Lipschitz gradient, with η ≤ 1 / L: a masked step lowers it by
    η/2 · ‖m ⊙ ∇L‖² at least.

    Args:
        loss: L(θ⁰), at the first step.
        learning_rate: η.
        steps: k.

    Raises:
        ArgumentError: η or k is not above 0, or the loss is negative.
    """
    for name, value, right in (
        ("loss", loss, loss >= 0),
        ("learning_rate", learning_rate, learning_rate > 0),
        ("steps", steps, steps >= 1),
    ):
        if not right:
            raise ArgumentError(name, value, "must be positive")
    return 2 * loss / (learning_rate * steps)


def _check(environments: int, signs: int) -> None:
    if not environments / 2 < signs <= environments:
        raise ArgumentError("signs", signs, f"must be more than half of {environments} environments, and at most all")
