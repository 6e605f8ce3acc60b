"""Risk extrapolation by the variance of the risks."""

from typing import ClassVar

from torch import Tensor

from concord.objectives.objective import WARMUPS, Rescaled, require_several
from concord.space import Entries, LogUniform


class VREx(Rescaled):
    """The mean of the environments' risks and β times their variance, over max(1, β).

    Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, 2021, eq. 8, which has the sum of the
    risks in place of the mean: its β is ours times the number of environments. The published experiments have the mean.
    The weight is β.
    """

    default_weight: ClassVar[float | None] = 1e4
    compared_weight: ClassVar[float | None] = 1.0
    display_name: ClassVar[str | None] = "V-REx"
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(1e-2, 1e4), "penalty_warmup": WARMUPS}

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """Mean and variance."""
        require_several(len(terms), "vrex")
        return (terms.mean() + self.weight.at(step) * terms.var(correction=0)) * self.scale(step)
