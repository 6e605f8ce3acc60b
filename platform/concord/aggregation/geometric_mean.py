"""The element-wise geometric mean of gradients (learning explanations that are hard to vary, §2.2 and §2.3)."""

from dataclasses import dataclass

from torch import Tensor

from concord.aggregation.agreement import check_threshold, kept_where_signs_agree
from concord.aggregation.rule import Statistics, Update


@dataclass(frozen=True)
class GeometricMean:
    """sign(Σg) · exp(Σ log|g| / d) where |Σ sign g| ≥ τd, zero elsewhere.

    The sign is the average gradient's, and the magnitude is formed in the log domain, so that a product of many
    small numbers does not underflow. A component that is zero in one environment is zero (log 0 = -∞). It is
    defined for any τ, but with τ < 1 the magnitude also counts the environments that disagree.

    Args:
        threshold: the agreement threshold τ in [0, 1].
    """

    threshold: float = 1.0

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    def map(self, gradient: Tensor) -> Statistics:
        """The gradient, its sign and the logarithm of its magnitude (natural)."""
        return {"gradient": gradient, "sign": gradient.sign(), "log_magnitude": gradient.abs().log_()}

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The masked geometric mean over ``environments``."""
        kept = kept_where_signs_agree(sums["sign"], self.threshold, environments)
        magnitude = (sums["log_magnitude"] / environments).exp_()
        return Update(magnitude.mul_(sums["gradient"].sign()).mul_(kept), kept)
