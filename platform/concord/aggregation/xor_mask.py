"""The XOR-mask: the components that the AND-mask drops (learning explanations that are hard to vary, §3.1, Fig. 7)."""

from dataclasses import dataclass
from typing import ClassVar

from concord.aggregation.agreement import kept_where_signs_agree
from concord.aggregation.rule import Update
from concord.aggregation.sign_mask import SignMask
from concord.aggregation.statistic import GRADIENT, SIGN, Statistic, Statistics


@dataclass(frozen=True)
class XorMask(SignMask):
    """The average gradient where the environments' signs disagree: Σg / d where |Σ sign g| < τd, zero elsewhere.

    A diagnostic: it leaves out the consistent components, and so shows what they contribute. τ = 0 keeps nothing.
    """

    display_name: ClassVar[str] = "XOR-mask"
    threshold_by_chance: ClassVar[bool] = False
    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, SIGN)

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The part of the average that the AND-mask drops."""
        kept = 1 - kept_where_signs_agree(sums["sign"], self.threshold, environments)
        return Update((sums["gradient"] / environments).mul_(kept), kept)

    def chance(self, environments: int) -> float:
        """The part of the components whose signs do not agree by chance."""
        return 1 - super().chance(environments)
