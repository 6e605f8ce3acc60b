"""Invariant risk minimization with the gradient penalty."""

from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from concord.objectives.objective import Loss, Separable
from concord.objectives.penalty_weight import PenaltyWeight, scale

Estimator = Literal["squared", "halves"]
"""``squared``: the squared gradient of the whole batch, which sampling noise makes too large on average.
``halves``: the product of two half batches' gradients, right on average, and below zero at times."""


class IRMv1(Separable):
    """The mean of the environments' risks and penalties, (1/d) Σ R_e(f) + λ D_e, over max(1, λ).

    D_e = ‖∇_w R_e(w·f)‖² at w = 1: how far the environment would like all outputs scaled (Arjovsky et al., Invariant
    Risk Minimization, 2019, eq. IRMv1). The published experiments divide by λ where it is above 1.

    Args:
        loss: the risk.
        weight: λ.
        estimator: of the penalty; ``squared`` is that of the published experiments, ``halves`` of the paper's
            appendix D, which takes every other example for each half.
        autocast: what layers compute in.
    """

    def __init__(
        self,
        loss: Loss,
        weight: PenaltyWeight,
        estimator: Estimator = "squared",
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(loss, autocast)
        self.weight = weight
        self.estimator = estimator

    def term(self, outputs: Tensor, targets: Tensor, step: int = 0) -> Tensor:
        """Risk and penalty."""
        weight = self.weight.at(step)
        penalty = irm_penalty(self.loss, outputs, targets, self.estimator)
        return (self.loss(outputs, targets) + weight * penalty) * scale(weight)


def irm_penalty(loss: Loss, outputs: Tensor, targets: Tensor, estimator: Estimator = "squared") -> Tensor:
    """IRMv1's penalty of one environment, a scalar, from outputs ``(batch, ...)`` and targets ``(batch, ...)``."""

    def slope(outputs: Tensor, targets: Tensor) -> Tensor:
        by_factor: Tensor = grad(lambda factor: loss(outputs * factor, targets))(outputs.new_ones(()))
        return by_factor

    if estimator == "squared":
        return slope(outputs, targets).square()
    return slope(outputs[::2], targets[::2]) * slope(outputs[1::2], targets[1::2])
