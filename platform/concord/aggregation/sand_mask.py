"""The SAND-mask (Shahtalebi, Gagnon-Audet, Laleh, Faramarzi, Ahuja, Rish: SAND-mask, 2021, arXiv 2106.02266)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import softshrink

from concord.aggregation.agreement import check_threshold
from concord.aggregation.rule import Update
from concord.aggregation.statistic import GRADIENT, SIGN, SQUARE, Statistic, Statistics
from concord.errors import ArgumentError
from concord.space import Entries, Uniform


@dataclass(frozen=True)
class SandMask:
    """The average gradient under a soft mask that also asks for magnitudes that agree: m ⊙ Σg / d.

    m = max(0, tanh(k / σ² · (|Σ sign g| / d - τ))), with σ² the unbiased variance of the component over the
    environments. Where σ² is zero (one environment, equal gradients) m is 1 above the threshold, else 0.
    """

    threshold: float = 0.8
    """Agreement threshold τ, in [0, 1]; with 1 nothing passes."""
    steepness: float = 10.0
    """k, above 0."""

    display_name: ClassVar[str] = "SAND-mask"
    constants: ClassVar[tuple[str, ...]] = ("steepness",)
    space: ClassVar[Entries] = {"threshold": Uniform(0.0, 0.95)}  # at 1 no component ever passes
    # σ² is a small difference of Σg² and (Σg)² / d: in float32 nothing would be left of it where σ is 1e-3 of the mean.
    statistics: ClassVar[tuple[Statistic, ...]] = (
        replace(GRADIENT, dtype=torch.float64),
        SIGN,
        replace(SQUARE, dtype=torch.float64),
    )

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        if not self.steepness > 0:
            raise ArgumentError("steepness", self.steepness, "the steepness of the SAND-mask must be positive")

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The softly masked average."""
        total, square, signs = sums["gradient"], sums["square"], sums["sign"]
        # (d - 1) σ². Where gradients are equal it is rounding, which grows with their number: that is made negative.
        rounding = (4 + environments) * torch.finfo(square.dtype).eps
        deviations = torch.addcmul(square, total, total, value=-(1 + rounding) / environments).to(signs.dtype)
        # max(0, |Σ sign g| - τd); as τ is meant as a decimal, so is τd.
        excess = softshrink(signs, round(self.threshold * environments, 9)).abs_()
        shares = excess.div_(deviations.clamp_(min=torch.finfo(signs.dtype).tiny))
        kept = shares.mul_(self.steepness * max(environments - 1, 1) / environments).tanh_().nan_to_num_(0)
        return Update((total / environments).mul_(kept), kept)
