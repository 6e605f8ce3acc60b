"""Risk extrapolation by the variance of the risks."""

from typing import ClassVar

from torch import Tensor

from concord.objectives.objective import Penalized, require_several
from concord.objectives.penalty_weight import scale


class VREx(Penalized):
    """The mean of the environments' risks and β times their variance, over max(1, β).

    Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, 2021, eq. 8, which has the sum of the
    risks in place of the mean: its β is ours times the number of environments. The published experiments have the mean.
    The weight is β.
    """

    default_weight: ClassVar[float | None] = 1e4

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """Mean and variance."""
        require_several(len(terms), "vrex")
        weight = self.weight.at(step)
        return (terms.mean() + weight * terms.var(correction=0)) * scale(weight)
