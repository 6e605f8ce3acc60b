"""A network for a target of ordered levels: a score, and a cut point between each two neighbouring levels."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid


class CumulativeLogits(nn.Module):
    """The proportional odds model (McCullagh 1980): P(level ≤ k) = σ(θ_k - f(x)), with θ_1 < θ_2 < …

    Its outputs are the logarithms of the levels' probabilities, so that it takes the place of a network of classes:
    their cross entropy is the negative log likelihood.

    Args:
        score: f, with outputs ``(batch, 1)``.
        counts: of the rows of each level, two or more; the cut points begin where the levels have these shares.

    Input as f's, output ``(batch, levels)``.
    """

    def __init__(self, score: nn.Module, counts: Sequence[int]) -> None:
        super().__init__()
        self.score = score
        below = torch.tensor(list(accumulate(count + 1 for count in counts)), dtype=torch.float64)
        cuts = (below[:-1] / below[-1]).logit().float()
        self.first = nn.Parameter(cuts[:1])
        self.log_gaps = nn.Parameter(cuts.diff().log())

    @property
    def codes(self) -> slice | None:
        """The inputs' columns that are codes of categories, as the score's."""
        codes = getattr(self.score, "codes", None)
        return codes if isinstance(codes, slice) else None

    def forward(self, rows: Tensor) -> Tensor:
        """The logarithms of the levels' probabilities."""
        gaps = self.log_gaps.exp()
        margins = torch.cat([self.first, self.first + gaps.cumsum(0)]) - self.score(rows)
        # σ(b) - σ(a) = σ(b) σ(-a) (1 - exp(a - b)), exact for probabilities of any size.
        between = torch.nn.functional.pad((-torch.expm1(-gaps)).log(), (1, 1))
        up_to = torch.nn.functional.pad(logsigmoid(margins), (0, 1))
        above = torch.nn.functional.pad(logsigmoid(-margins), (1, 0))
        return up_to + above + between
