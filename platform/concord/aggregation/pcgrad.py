"""PCGrad (Yu, Kumar, Gupta, Levine, Hausman, Finn: Gradient surgery for multi-task learning, NeurIPS 2020)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class PCGrad:
    """The sum of the gradients, each without its parts against the others: g_i ← g_i - ⟨g_i, g_j⟩ / ‖g_j‖² g_j.

    For every j in a random order, where the inner product is negative (algorithm 1). A gradient that is below the
    rounding errors of the largest, in float32, has no direction of its own: nothing is projected onto it.
    """

    seed: int = 0
    """Of the random orders."""
    draws: ClassVar[tuple[str, ...]] = ("order",)

    def weights(self, gram: Tensor, order: Tensor) -> Tensor:
        """Algorithm 1 on the weights of each gradient i, in the order of row i, summed over i."""
        count, squares = len(gram), gram.diagonal()
        smallest = torch.finfo(torch.float32).eps ** 2 * squares.max()
        weights = torch.eye(count, dtype=gram.dtype, device=gram.device)
        rows = torch.arange(count, device=gram.device)
        for other in order.argsort(1).unbind(1):
            inner = (weights * gram[other]).sum(1)
            against = (inner < 0) & (other != rows) & (squares[other] > smallest)
            weights[rows, other] -= torch.where(against, inner / squares[other], 0)
        return weights.sum(0)
