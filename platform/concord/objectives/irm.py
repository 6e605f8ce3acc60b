"""Invariant risk minimization with the gradient penalty."""

from typing import Literal

import torch
from torch import Tensor
from torch.func import grad_and_value

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
        risk, penalty = _risk_and_penalty(self.loss, outputs, targets, self.estimator)
        return (risk + weight * penalty) * scale(weight)


def irm_penalty(loss: Loss, outputs: Tensor, targets: Tensor, estimator: Estimator = "squared") -> Tensor:
    """IRMv1's penalty of one environment, a scalar, from outputs ``(batch, ...)`` and targets ``(batch, ...)``."""
    return _risk_and_penalty(loss, outputs, targets, estimator)[1]


def _risk_and_penalty(loss: Loss, outputs: Tensor, targets: Tensor, estimator: Estimator) -> tuple[Tensor, Tensor]:
    if estimator == "squared":
        slope, risk = _slope_and_risk(loss, outputs, targets)
        return risk, slope.square()
    (first, one), (second, other) = (_slope_and_risk(loss, outputs[at::2], targets[at::2]) for at in (0, 1))
    half = len(outputs[::2]) / len(outputs)  # the loss is a mean
    return half * one + (1 - half) * other, first * second


def _slope_and_risk(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of the risk by a factor on the outputs, at 1, and the risk."""
    # By the chain rule, which leaves the factor out: a third of the operations for a small network.
    gradient, risk = grad_and_value(loss)(outputs, targets)
    return (gradient * outputs).sum(), risk
