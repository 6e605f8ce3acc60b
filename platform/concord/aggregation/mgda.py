"""MGDA (Désidéri: Multiple-gradient descent algorithm for multiobjective optimization, 2012, definition 3)."""

from dataclasses import dataclass

from torch import Tensor

from concord.aggregation.nonnegative import minimum_norm


@dataclass(frozen=True)
class MGDA:
    """The point of least norm in the convex hull of the gradients: min ‖Σ w_e g_e‖² over w ≥ 0, Σ w_e = 1.

    No environment's loss grows along this direction; if it is 0, no direction is good for all environments.
    """

    def weights(self, gram: Tensor) -> Tensor:
        """The weights of that point."""
        return minimum_norm(gram)
