"""Empirical risk minimization."""

from concord.objectives.objective import Separable


class ERM(Separable):
    """The mean of the environments' risks: (1/d) Σ R_e(f)."""
