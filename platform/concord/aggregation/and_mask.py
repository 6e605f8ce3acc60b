"""The AND-mask (Parascandolo et al., Learning explanations that are hard to vary, ICLR 2021, §2.3)."""

from dataclasses import dataclass
from typing import ClassVar

from concord.aggregation.agreement import check_threshold, kept_where_signs_agree
from concord.aggregation.rule import Update
from concord.aggregation.statistic import GRADIENT, SIGN, Statistic, Statistics


@dataclass(frozen=True)
class AndMask:
    """The average gradient where the environments' signs agree: Σg / d where |Σ sign g| ≥ τd, zero elsewhere.

    τ = 0 keeps everything (the plain average), τ = 1 keeps a component only if all d environments have the same
    sign there. A zero component counts for neither sign; with one environment every component but zeros is kept.
    """

    threshold: float = 1.0
    """Agreement threshold τ, in [0, 1]; 1 asks all environments to agree."""

    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, SIGN)

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The masked average."""
        kept = kept_where_signs_agree(sums["sign"], self.threshold, environments)
        return Update((sums["gradient"] / environments).mul_(kept), kept)
