"""Risk extrapolation by the variance of the risks."""

import torch
from torch import Tensor

from concord.objectives.objective import ByEnvironment, Loss, require_several
from concord.objectives.penalty_weight import PenaltyWeight, scale


class VREx(ByEnvironment):
    """The mean of the environments' risks and β times their variance, over max(1, β).

    Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, 2021, eq. 8, which has the sum of the
    risks in place of the mean: its β is ours times the number of environments. The published experiments have the mean.

    Args:
        loss: the risk.
        weight: β.
        autocast: what layers compute in.
    """

    def __init__(self, loss: Loss, weight: PenaltyWeight, autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, autocast)
        self.weight = weight

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """Mean and variance."""
        require_several(terms, "vrex")
        weight = self.weight.at(step)
        return (terms.mean() + weight * terms.var(correction=0)) * scale(weight)
