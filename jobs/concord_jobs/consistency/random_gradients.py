"""Propositions 1 and 2: the norm of masked independent gradients, and the speed of masked descent.

The d environments' gradients of n components are independent and standard normal. The mask keeps a component if at
least t signs are the same, t > d/2 (AND-mask paper, appendix A.4 and A.5; τ = 2t/d - 1).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from concord.aggregation import AndMask, Mean, aggregate, chance_of

_ENVIRONMENTS, _PARAMETERS, _TERMS, _THRESHOLD, _STEPS = 5, 8, 6, 0.6, 200  # of a descent


def kept_probability(environments: int, signs: int) -> float:
    """The probability that a component is kept: 2 · 2⁻ᵈ Σ C(d, k) over k ≥ t (eq. 4)."""
    return chance_of((2 * signs - environments) / environments, environments)


def masked_squared_norm(components: int, environments: int, signs: int) -> float:
    """The exact E‖m ⊙ ∇L‖² of the masked average; without the mask it is n / d.

    n · 2⁻ᵈ Σ C(d, k) [(1 - 2/π) / d + (2/π) (2k - d)² / d²] over the k with max(k, d - k) ≥ t: given its signs, k of
    them positive, a component has the variance of half-normal magnitudes over d, and the mean √(2/π) (2k - d) / d.
    """
    d = environments
    of_signs = [
        math.comb(d, k) * ((1 - 2 / math.pi) / d + 2 / math.pi * (2 * k - d) ** 2 / d**2)
        for k in range(d + 1)
        if max(k, d - k) >= signs
    ]
    return components * math.fsum(of_signs) / 2.0**d


def decay_base(agreement: float) -> float:
    """c = 2 rʳ (1 - r)^(1 - r): the masked norm falls as n / cᵈ if t = r d signs must agree, 1/2 < r ≤ 1."""
    return 2 * math.exp(sum(part * math.log(part) for part in (agreement, 1 - agreement) if part))


def masked_norm_bound(components: int, environments: int, signs: int) -> float:
    """2 n (d - t + 1) / cᵈ, which :func:`masked_squared_norm` never exceeds (proposition 2, corrected).

    The paper's last line has the factor d - t, which is 0 if all signs must agree; d - t + 1 outcomes are summed.
    """
    return 2 * components * (environments - signs + 1) / decay_base(signs / environments) ** environments


class Simulated(NamedTuple):
    """The mean of random draws, and its standard error."""

    mean: float
    standard_error: float


def simulated_norms(components: int, environments: int, signs: int, draws: int, seed: int) -> list[Simulated]:
    """‖∇L‖² and ‖m ⊙ ∇L‖² of standard normal gradients of independent environments (Fig. 4)."""
    generator = np.random.default_rng([seed, environments])
    rules = Mean(), AndMask((2 * signs - environments) / environments)
    norms = np.empty((draws, 2))
    for draw in range(draws):
        gradients = torch.from_numpy(generator.standard_normal((environments, components), dtype=np.float32))
        norms[draw] = [float(aggregate(rule, gradients).value.double().square().sum()) for rule in rules]
    errors = norms.std(0, ddof=1) / math.sqrt(draws)
    return [Simulated(*each) for each in zip(norms.mean(0), errors, strict=True)]


def masked_descent(seed: int) -> tuple[float, float]:
    """Masked descent of a random problem, at the step where it is closest to breaking proposition 1.

    L_e(θ) = ½ (θ - c_e)ᵀ H_e (θ - c_e) + Σ_j log cosh(a_ejᵀ θ - b_ej) is smooth and never negative; it is not
    quadratic, and the environments' minima differ. η = 1 / L, and L is the largest eigenvalue of the mean of
    H_e + Σ_j a_ej a_ejᵀ, since the second derivative of log cosh is at most 1.

    Returns:
        the least of L(θᵢ) - η/2 ‖m ⊙ ∇L(θᵢ)‖² - L(θᵢ₊₁), which is at least 0, and the largest of
        min_{i<k} ‖m ⊙ ∇L(θᵢ)‖² over 2 L(θ⁰) / (ηk), which is at most 1.
    """
    draw = np.random.default_rng(seed)
    roots = draw.standard_normal((_ENVIRONMENTS, _PARAMETERS, _PARAMETERS))
    hessians = torch.from_numpy(roots @ roots.transpose(0, 2, 1) / _PARAMETERS)
    centres = torch.from_numpy(draw.standard_normal((_ENVIRONMENTS, _PARAMETERS)))
    slopes = torch.from_numpy(draw.standard_normal((_ENVIRONMENTS, _TERMS, _PARAMETERS)))
    offsets = torch.from_numpy(draw.standard_normal((_ENVIRONMENTS, _TERMS)))

    def at(place: Tensor) -> tuple[float, Tensor]:
        away, inner = place - centres, slopes @ place - offsets
        pulled = torch.einsum("eij,ej->ei", hessians, away)
        losses = 0.5 * (away * pulled).sum(1) + torch.log(torch.cosh(inner)).sum(1)
        return float(losses.mean()), pulled + torch.einsum("eji,ej->ei", slopes, torch.tanh(inner))

    rate = 1 / float(torch.linalg.eigvalsh((hessians + slopes.mT @ slopes).mean(0))[-1])
    place = torch.from_numpy(2 * draw.standard_normal(_PARAMETERS))
    first, gradients = at(place)
    loss, least, surplus, of_bound = first, math.inf, math.inf, 0.0
    for step in range(1, _STEPS + 1):
        update = aggregate(AndMask(_THRESHOLD), gradients).value
        norm = float(update.square().sum())
        place = place - rate * update
        after, gradients = at(place)
        least, surplus = min(least, norm), min(surplus, loss - rate / 2 * norm - after)
        of_bound, loss = max(of_bound, least * rate * step / (2 * first)), after
    return surplus, of_bound
