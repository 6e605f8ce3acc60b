"""Agreement of the environments' gradients in sign at a solution, by layer, beside the agreement by chance.

At convergence gradients are noise, so the norms are measured beside the agreement.
"""

import math

import torch

from concord.aggregation import chance_of
from concord.aggregation.agreement import required_agreement
from concord.analysis.consistency.environment_losses import Add, EnvironmentLosses
from concord.analysis.consistency.measurement import Measurement, layer_means


def sign_agreement(
    losses: EnvironmentLosses,
    threshold: float,
    batches: int,
    add: Add = lambda values: values,
    environments: int | None = None,
) -> list[Measurement]:
    """The agreement of gradients at θ* on batches of every environment, of the whole network and by layer.

    ``agreement`` is the mean of |Σ sign| / d over components and batches, ``kept_fraction`` the part of the components
    with |Σ sign| ≥ τd, ``norm`` that of the mean gradient. ``chance_agreement`` and ``chance_fraction`` are the
    values of the first two for independent fair signs.

    Args:
        losses: the network's losses in the environments of this process; an environment's examples are divided into
            batches in their order.
        threshold: τ.
        batches: the number of batches, from 1 to the number of examples of the smallest environment.
        add: adds a tensor over the processes.
        environments: the number of environments of all processes; None takes this process's number.
    """
    d = environments or len(losses.names)
    agreed, kept = (torch.zeros(losses.size, dtype=torch.float64, device=losses.device) for _ in range(2))
    norms = dict.fromkeys(losses.layout.names, 0.0)
    for batch in range(batches):
        signs = torch.zeros(losses.size, device=losses.device)
        mean = torch.zeros_like(losses.solution)
        for name in losses.names:
            count = losses.examples(name) // batches
            gradient = losses.gradient(name, None, slice(batch * count, (batch + 1) * count))
            signs += gradient.sign()
            mean += gradient / d
        signs, mean = add(signs).abs(), add(mean)
        agreed += signs / d / batches
        kept += (signs >= required_agreement(threshold, d)).double() / batches
        for name, part in losses.by_layer(mean).items():
            norms[name] += float(part.double().norm()) / batches
    return [
        *layer_means("agreement", agreed, losses.by_layer(agreed)),
        *layer_means("kept_fraction", kept, losses.by_layer(kept)),
        Measurement("norm", math.hypot(*norms.values())),
        *(Measurement("norm", norm, layer=name) for name, norm in norms.items()),
        Measurement("chance_agreement", chance_agreement(d)),
        Measurement("chance_fraction", chance_of(threshold, d)),
    ]


def chance_agreement(environments: int) -> float:
    """E|Σ sign| / d of d independent fair signs."""
    d = environments
    return math.comb(d - 1, (d - 1) // 2) / (1 << (d - 1))  # whole numbers: as floats they overflow from 1024 on
