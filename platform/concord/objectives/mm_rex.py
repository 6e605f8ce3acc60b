"""Minimax risk extrapolation."""

from typing import ClassVar

from torch import Tensor

from concord.objectives.objective import Rescaled, require_several
from concord.space import Entries, LogUniform


class MMREx(Rescaled):
    """The largest of all affine combinations of the d risks whose coefficients are at least -w, over max(1, w).

    (1 + d w) max R_e - w Σ R_e: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, 2021,
    eq. 7, with λ_min = -w. With w = 0 it is the worst environment's risk; during a warm-up it is the mean. The weight
    is w.
    """

    default_weight: ClassVar[float | None] = 1.0
    warms_up_at_one: ClassVar[bool] = False
    display_name: ClassVar[str | None] = "MM-REx"
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(0.1, 10.0)}

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """The largest combination."""
        require_several(len(terms), "mm-rex")
        if step < self.weight.warmup:
            return terms.mean()
        weight = self.weight.weight
        return ((1 + len(terms) * weight) * terms.max() - weight * terms.sum()) * self.scale(step)
