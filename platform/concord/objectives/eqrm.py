"""Empirical quantile risk minimization."""

from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from concord.errors import ArgumentError
from concord.gradients.risk import Loss, Risk
from concord.objectives.objective import WARMUPS, Objective, require_several
from concord.space import Entries, Uniform

_BISECTIONS = 60  # as many as halve an interval to the last bit


class EQRM(Objective):
    """The α-quantile of the risks, F⁻¹(α) with F(r) = (1/d) Σ Φ((r - R_e) / h), h = 1.06 σ d^(-1/5).

    Φ is the normal distribution, σ the standard deviation of the risks (over d - 1): a kernel density estimate of the
    risks' distribution over environments; a fraction α of environments has at most this risk. Eastwood et al., Probable
    Domain Generalization via Quantile Risk Minimization, 2022, section 4, with the bandwidth of the authors' code. The
    gradient is that of the implicit function.

    Args:
        loss: the loss or the risk of one environment.
        quantile: Quantile α of the risks that eqrm minimizes, in (0, 1).
        warmup: first steps, which minimize the mean risk.
        autocast: the dtype in which layers compute.

    Raises:
        InputError: α is not in (0, 1).
    """

    display_name: ClassVar[str | None] = "EQRM"
    space: ClassVar[Entries] = {"quantile": Uniform(0.5, 0.99), "penalty_warmup": WARMUPS}

    def __init__(
        self, loss: Loss | Risk, quantile: float = 0.75, warmup: int = 0, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__(loss, autocast)
        if not 0 < quantile < 1:
            raise ArgumentError("quantile", quantile, "must lie in (0, 1)")
        self.quantile, self.warmup = quantile, warmup

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """The quantile; if all risks are equal, their value."""
        require_several(len(terms), "eqrm")
        variance = terms.var()
        if step < self.warmup or not variance > 0:
            return terms.mean()
        width = 1.06 * variance.sqrt() * len(terms) ** -0.2
        quantile = terms.new_tensor(self._quantile(terms.tolist(), width.item()))
        # Two steps of Newton's from the root: the first has the implicit function's derivative, both its second one.
        for _ in range(2):
            distance = (quantile - terms) / width
            excess = torch.special.ndtr(distance).mean() - self.quantile
            density = (-distance.square() / 2).exp().mean() / (width * (2 * torch.pi) ** 0.5)
            quantile = quantile - excess / density
        return quantile

    def _quantile(self, risks: list[float], width: float) -> float:
        """The root of F(r) = α, by bisection."""
        standard = NormalDist()
        at = width * standard.inv_cdf(self.quantile)
        low, high = min(risks) + at, max(risks) + at
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = sum(standard.cdf((middle - risk) / width) for risk in risks) / len(risks)
            low, high = (middle, high) if below < self.quantile else (low, middle)
        return high
