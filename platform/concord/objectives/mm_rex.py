"""Minimax risk extrapolation."""

import torch
from torch import Tensor

from concord.objectives.objective import ByEnvironment, Loss, require_several
from concord.objectives.penalty_weight import PenaltyWeight, scale


class MMREx(ByEnvironment):
    """The largest of all affine combinations of the d risks whose coefficients are at least -w, over max(1, w).

    (1 + d w) max R_e - w Σ R_e: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, 2021,
    eq. 7, with λ_min = -w. With w = 0 it is the worst environment's risk; during a warm-up it is the mean.

    Args:
        loss: the risk.
        weight: w.
        autocast: what layers compute in.
    """

    def __init__(self, loss: Loss, weight: PenaltyWeight, autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, autocast)
        self.weight = weight

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """The largest combination."""
        require_several(terms, "mm-rex")
        if step < self.weight.warmup:
            return terms.mean()
        weight = self.weight.weight
        return ((1 + len(terms) * weight) * terms.max() - weight * terms.sum()) * scale(weight)
