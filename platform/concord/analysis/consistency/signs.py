"""Agreement of the environments' gradients in sign at a solution, layer by layer, beside what chance alone gives.

At convergence gradients are noise, so their norms stand beside their agreement.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from concord.aggregation import chance_of
from concord.aggregation.agreement import check_threshold, required_agreement
from concord.analysis.consistency.environment_losses import Add, EnvironmentLosses, own_sum
from concord.errors import ArgumentError


@dataclass(frozen=True)
class LayerSigns:
    """How one layer's gradients agree.

    Attributes:
        agreement: mean over components and batches of |Σ sign| / d.
        kept: part of the components with |Σ sign| ≥ τd, mean over batches.
        norm: of the mean gradient over environments, mean over batches.
    """

    agreement: float
    kept: float
    norm: float


@dataclass(frozen=True)
class SignAgreement:
    """How the environments' gradients agree in sign.

    Attributes:
        layers: by the parameter's name.
        whole: of all components together.
        chance_agreement, chance_kept: what both are where signs are independent and fair.
        threshold: τ.
        batches: how many batches of each environment it is of.
    """

    layers: dict[str, LayerSigns]
    whole: LayerSigns
    chance_agreement: float
    chance_kept: float
    threshold: float
    batches: int


def sign_agreement(
    losses: EnvironmentLosses,
    threshold: float,
    batches: int,
    add: Add = own_sum,
    environments: int | None = None,
) -> SignAgreement:
    """The agreement of gradients at θ*, on so many batches of every environment, one after the other.

    Args:
        losses: of the network, in the environments of this process; each one's examples are divided into the batches
            in their order.
        threshold: τ, above 0 where anything is to be left out.
        batches: at least 1, and no more than the smallest environment has examples.
        add: adds a tensor over processes that have other environments.
        environments: how many all processes have; None: those of this one.

    Raises:
        ArgumentError: τ is outside [0, 1], or the number of batches does not fit.
    """
    check_threshold(threshold)
    fewest = min(losses.examples(name) for name in losses.names)
    if not 1 <= batches <= fewest:
        raise ArgumentError("batches", batches, f"must be 1 at least, and {fewest} at most: so many examples there are")
    d = environments or len(losses.names)
    required = required_agreement(threshold, d)
    parts = dict.fromkeys(losses.layout.names, (0.0, 0.0, 0.0))
    for batch in range(batches):
        signs = torch.zeros(losses.size, device=losses.device)
        mean = torch.zeros(losses.size, device=losses.device, dtype=losses.dtype)
        for name in losses.names:
            count = losses.examples(name) // batches
            gradient = losses.gradient(name, None, slice(batch * count, (batch + 1) * count))
            signs += gradient.sign()
            mean += gradient / d
        signs, mean = add(signs), add(mean)
        of_signs, of_means = losses.by_layer(signs.abs()), losses.by_layer(mean)
        for name, seen in parts.items():
            now = _sums(of_signs[name], of_means[name], required)
            parts[name] = tuple(before + new for before, new in zip(seen, now, strict=True))  # type: ignore[assignment]
    sizes = {name: len(values) for name, values in of_signs.items()}
    layers = {name: _of(seen, sizes[name], d, batches) for name, seen in parts.items()}
    agreed, kept, _ = (sum(each) for each in zip(*parts.values(), strict=True))
    whole = LayerSigns(
        agreed / d / losses.size / batches,
        kept / losses.size / batches,
        math.sqrt(sum(layer.norm**2 for layer in layers.values())),
    )
    return SignAgreement(layers, whole, chance_agreement(d), chance_of(threshold, d), threshold, batches)


def chance_agreement(environments: int) -> float:
    """E|Σ sign| / d of d independent fair signs."""
    d = environments
    return math.fsum(math.comb(d, k) * abs(2 * k - d) for k in range(d + 1)) / 2.0**d / d


def _sums(signs: Tensor, mean: Tensor, required: float) -> tuple[float, float, float]:
    return float(signs.double().sum()), float((signs >= required).sum()), float(mean.double().norm())


def _of(sums: tuple[float, float, float], components: int, environments: int, batches: int) -> LayerSigns:
    agreed, kept, norms = (each / batches for each in sums)
    return LayerSigns(agreed / environments / components, kept / components, norms)
