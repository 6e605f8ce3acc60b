"""The element-wise geometric mean of gradients (learning explanations that are hard to vary, §2.2 and §2.3)."""

from dataclasses import dataclass
from typing import ClassVar

from concord.aggregation.agreement import kept_where_signs_agree
from concord.aggregation.rule import Update
from concord.aggregation.sign_mask import SignMask
from concord.aggregation.statistic import GRADIENT, LOG_MAGNITUDE, SIGN, Statistic, Statistics


@dataclass(frozen=True)
class GeometricMean(SignMask):
    """sign(Σg) · exp(Σ log|g| / d) where |Σ sign g| ≥ τd, zero elsewhere.

    In the log domain a product of small numbers does not underflow; one zero makes the component zero (log 0 = -∞).
    """

    display_name: ClassVar[str] = "geometric mean"
    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, SIGN, LOG_MAGNITUDE)

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The masked geometric mean."""
        kept = kept_where_signs_agree(sums["sign"], self.threshold, environments)
        magnitude = (sums["log_magnitude"] / environments).exp_()
        return Update(magnitude.mul_(sums["gradient"].sign()).mul_(kept), kept)
