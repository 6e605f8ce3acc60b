"""Empirical risk minimization."""

from torch import Tensor

from concord.objectives.objective import Separable


class ERM(Separable):
    """The mean of the environments' risks: (1/d) Σ R_e(f)."""

    def term(self, outputs: Tensor, targets: Tensor, step: int = 0) -> Tensor:  # noqa: ARG002
        """The risk."""
        return self.loss(outputs, targets)
