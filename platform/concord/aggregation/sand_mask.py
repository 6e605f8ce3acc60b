"""The SAND-mask (Shahtalebi, Gagnon-Audet, Laleh, Faramarzi, Ahuja, Rish: SAND-mask, 2021, arXiv 2106.02266)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from concord.aggregation.agreement import check_threshold
from concord.aggregation.rule import Statistics, Update
from concord.errors import InputError


@dataclass(frozen=True)
class SandMask:
    """The average gradient under a soft mask that also asks for magnitudes that agree.

    m = max(0, tanh(k / σ² · (|Σ sign g| / d - τ))), update m ⊙ Σg / d, with σ² the unbiased variance of the
    component over the environments, formed from Σg and Σg².

    Where the variance is zero (one environment, or equal gradients) the argument is infinite: m is 1 above the
    threshold and 0 at or below it. With τ = 1 nothing passes.

    In float32, d environments that differ by less than about √(ε (d + 4)) of their mean (0.2 % for 32) count as equal,
    and where gradients are so large that their squares overflow (from about 1e19) nothing passes.

    Args:
        threshold: the agreement threshold τ in [0, 1].
        steepness: k > 0.
    """

    threshold: float = 0.8
    steepness: float = 10.0

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        if not self.steepness > 0:
            raise InputError(f"--steepness {self.steepness}: the steepness of the SAND-mask must be positive")

    def map(self, gradient: Tensor) -> Statistics:
        """The gradient, its sign and its square."""
        return {"gradient": gradient, "sign": gradient.sign(), "square": gradient.square()}

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The softly masked average over ``environments``."""
        mean = sums["gradient"] / environments
        # Where the gradients are equal, Σg² - d·mean² is not zero but a rounding beside it, which grows with the
        # length of the sums (measured: up to 0.4·d where environments were added one by one).
        numbers = torch.finfo(mean.dtype)
        # Squares that overflow are an infinite variance, not a variance of zero: the clamps keep ∞ - ∞ away.
        deviations = sums["square"] - (environments * mean.square()).clamp_(max=numbers.max)
        rounding = ((4 + environments) * numbers.eps * sums["square"]).clamp_(max=numbers.max)
        variance = torch.where(deviations > rounding, deviations, 0) / max(environments - 1, 1)
        excess = (sums["sign"].abs() / environments - self.threshold).clamp_(min=0)
        kept = torch.where(excess > 0, torch.tanh(self.steepness * excess / variance), 0)
        return Update(mean * kept, kept)
