"""The AND-mask (Parascandolo et al., Learning explanations that are hard to vary, ICLR 2021, §2.3)."""

from dataclasses import dataclass
from typing import ClassVar

from concord.aggregation.agreement import kept_where_signs_agree
from concord.aggregation.rule import Update
from concord.aggregation.sign_mask import SignMask
from concord.aggregation.statistic import GRADIENT, SIGN, Statistic, Statistics


@dataclass(frozen=True)
class AndMask(SignMask):
    """The average gradient where the environments' signs agree: Σg / d where |Σ sign g| ≥ τd, zero elsewhere.

    τ = 0 keeps everything (the plain average), τ = 1 keeps a component only if all d environments have the same
    sign there. A zero component counts for neither sign; with one environment every component except zeros is kept.
    """

    display_name: ClassVar[str] = "AND-mask"
    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, SIGN)

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The masked average."""
        kept = kept_where_signs_agree(sums["sign"], self.threshold, environments)
        return Update((sums["gradient"] / environments).mul_(kept), kept)
