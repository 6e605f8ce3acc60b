"""The AND-mask (Parascandolo et al., Learning explanations that are hard to vary, ICLR 2021, §2.3)."""

from dataclasses import dataclass

from torch import Tensor

from concord.aggregation.agreement import check_threshold, kept_where_signs_agree
from concord.aggregation.rule import Statistics, Update


@dataclass(frozen=True)
class AndMask:
    """The average gradient where the environments' signs agree, zero elsewhere.

    [m_τ]_j = 1[τd ≤ |Σ_e sign([∇L_e]_j)|], update m_τ ⊙ Σ_e ∇L_e / d.

    τ = 0 keeps everything (the plain average), τ = 1 keeps a component only if all d environments have the same
    sign there. A zero component counts for neither sign; with one environment every component but zeros is kept;
    where nothing agrees the update is zero.

    Args:
        threshold: the agreement threshold τ in [0, 1].
    """

    threshold: float = 1.0

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    def map(self, gradient: Tensor) -> Statistics:
        """The gradient and its sign."""
        return {"gradient": gradient, "sign": gradient.sign()}

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The masked average over ``environments``."""
        kept = kept_where_signs_agree(sums["sign"], self.threshold, environments)
        return Update((sums["gradient"] / environments).mul_(kept), kept)
