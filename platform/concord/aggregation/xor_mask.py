"""The XOR-mask: what the AND-mask takes away (learning explanations that are hard to vary, §3.1, Fig. 7)."""

from dataclasses import dataclass

from torch import Tensor

from concord.aggregation.agreement import check_threshold, kept_where_signs_agree
from concord.aggregation.rule import Statistics, Update


@dataclass(frozen=True)
class XorMask:
    """The average gradient where the environments' signs disagree: Σg / d where |Σ sign g| < τd, zero elsewhere.

    A diagnostic: it shows what consistent components contribute by leaving them out. τ = 0 keeps nothing.

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
        """The average over ``environments`` of the components that the AND-mask drops."""
        kept = 1 - kept_where_signs_agree(sums["sign"], self.threshold, environments)
        return Update((sums["gradient"] / environments).mul_(kept), kept)
