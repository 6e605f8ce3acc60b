"""Propositions 1 and 2 tried out: the AND-mask itself on random problems, beside what the formulas say."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from concord.aggregation import AndMask, Mean, aggregate
from concord.analysis.consistency.random_gradients import descent_bound
from concord.errors import ArgumentError


@dataclass(frozen=True)
class Simulated:
    """A mean over draws.

    Attributes:
        mean: of the draws.
        standard_error: of that mean.
    """

    mean: float
    standard_error: float


def simulated_norms(
    components: int, environments: int, signs: int, draws: int, seed: int = 0
) -> tuple[Simulated, Simulated]:
    """‖∇L‖² and ‖m ⊙ ∇L‖² of standard normal gradients of independent environments (Fig. 4).

    Args:
        components: n.
        environments: d.
        signs: t; so many of the d have to agree.
        draws: how many gradients of each environment.
        seed: of the draws.

    Raises:
        ArgumentError: there are fewer than two draws.
    """
    if draws < 2:
        raise ArgumentError("draws", draws, "must be at least 2")
    generator = np.random.default_rng([seed, environments])
    rules = Mean(), AndMask((2 * signs - environments) / environments)
    norms = np.empty((draws, 2))
    for draw in range(draws):
        gradients = torch.from_numpy(generator.standard_normal((environments, components), dtype=np.float32))
        norms[draw] = [float(aggregate(rule, gradients).value.double().square().sum()) for rule in rules]
    means, errors = norms.mean(0), norms.std(0, ddof=1) / math.sqrt(draws)
    return Simulated(means[0], errors[0]), Simulated(means[1], errors[1])


@dataclass(frozen=True)
class MaskedDescent:
    """How masked gradient descent keeps proposition 1, at the step where it is closest to breaking it.

    Attributes:
        surplus: the least of L(θᵢ) - η/2 ‖m ⊙ ∇L(θᵢ)‖² - L(θᵢ₊₁); not below 0.
        of_bound: the largest of min_{i<k} ‖m ⊙ ∇L(θᵢ)‖² over 2 L(θ⁰) / (ηk); 1 at most.
        masked: the fraction of components that were masked.
    """

    surplus: float
    of_bound: float
    masked: float


def masked_descent(
    seed: int, environments: int = 5, parameters: int = 8, terms: int = 6, threshold: float = 0.6, steps: int = 200
) -> MaskedDescent:
    """Run it on random losses that are smooth, neither quadratic nor minimal at one place, and nowhere negative.

    L_e(θ) = ½ (θ - c_e)ᵀ H_e (θ - c_e) + Σ_j log cosh(a_ejᵀ θ - b_ej), with η = 1 / L. L is the largest eigenvalue of
    the mean of H_e + Σ_j a_ej a_ejᵀ, since log cosh curves by 1 at most.

    Args:
        seed: of the problem.
        environments: d.
        parameters: n.
        terms: j.
        threshold: τ of the mask.
        steps: k.
    """
    draw = np.random.default_rng(seed)
    roots = draw.standard_normal((environments, parameters, parameters))
    hessians = torch.from_numpy(roots @ roots.transpose(0, 2, 1) / parameters)
    centres = torch.from_numpy(draw.standard_normal((environments, parameters)))
    slopes = torch.from_numpy(draw.standard_normal((environments, terms, parameters)))
    offsets = torch.from_numpy(draw.standard_normal((environments, terms)))

    def at(place: Tensor) -> tuple[float, Tensor]:
        away, inner = place - centres, slopes @ place - offsets
        pulled = torch.einsum("eij,ej->ei", hessians, away)
        losses = 0.5 * (away * pulled).sum(1) + torch.log(torch.cosh(inner)).sum(1)
        return float(losses.mean()), pulled + torch.einsum("eji,ej->ei", slopes, torch.tanh(inner))

    smooth = (hessians + slopes.mT @ slopes).mean(0)
    rate = 1 / float(torch.linalg.eigvalsh(smooth)[-1])
    place = torch.from_numpy(2 * draw.standard_normal(parameters))
    first, gradients = at(place)
    loss = first
    rule, surplus, of_bound, least, masked = AndMask(threshold), math.inf, 0.0, math.inf, 0.0
    for step in range(1, steps + 1):
        update = aggregate(rule, gradients)
        norm = float(update.value.square().sum())
        place = place - rate * update.value
        after, gradients = at(place)
        least, surplus = min(least, norm), min(surplus, loss - rate / 2 * norm - after)
        of_bound, loss = max(of_bound, least / descent_bound(first, rate, step)), after
        masked += float(1 - update.kept.double().mean()) / steps
    return MaskedDescent(surplus, of_bound, masked)
