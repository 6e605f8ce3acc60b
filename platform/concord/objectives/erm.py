"""Empirical risk minimization: each environment counts once, or by a weight."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from concord.gradients.risk import Loss, Risk
from concord.objectives.objective import Objective, require_all


class ERM(Objective):
    """The mean of the environments' risks: (1/d) Σ R_e(f)."""

    display_name: ClassVar[str | None] = "ERM"
    coupled: ClassVar[bool] = False
    averages = True
    compares: ClassVar[bool] = False


class WeightedERM(Objective):
    """The weighted mean of the environments' risks: Σ w_e R_e(f) / Σ w_e.

    With the numbers of their examples as weights it is the mean over all examples.

    Args:
        loss: the loss or the risk of one environment.
        weights: of the environments, above 0.
        autocast: the dtype in which layers compute.
    """

    every: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    def __init__(self, loss: Loss | Risk, weights: Sequence[float], autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, autocast)
        self.weights = torch.tensor(weights) / sum(weights)

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """The weighted mean."""
        require_all(len(terms), len(self.weights), "the weighted mean")
        return (self.weights.to(terms) * terms).sum()
