"""A sentence as the average of its words' vectors, and an MLP on it."""

import torch
from torch import Tensor, nn

from concord.models import MLP


class WordAverage(nn.Module):
    """Word vectors, averaged over the words of a sentence, and an MLP with ReLU.

    Word 0 is padding, which the average leaves out. Given ``vectors`` ``(words, size)`` are fixed; without them the
    vectors are learned. Input ``(batch, places)`` int64, output ``(batch, outputs)``.
    """

    def __init__(
        self,
        words: int,
        size: int,
        outputs: int,
        hidden_units: int = 128,
        hidden_layers: int = 1,
        dropout: float = 0.0,
        vectors: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, size)
        if vectors is None:
            nn.init.normal_(self.vectors.weight, std=0.1)
        else:
            self.vectors.weight = nn.Parameter(vectors.clone(), requires_grad=False)
        self.mlp = MLP(size, outputs, hidden_units, hidden_layers, dropout, activation="relu")

    def forward(self, words: Tensor) -> Tensor:
        """Logits ``(batch, outputs)``."""
        weight = self.vectors.weight
        # A bag takes a fiftieth of the time for whole environments, but has no rule for vmap.
        if not weight.requires_grad and not torch._C._are_functorch_transforms_active():
            average = nn.functional.embedding_bag(words, weight, mode="mean", padding_idx=0)
        else:
            there = (words != 0).to(weight.dtype)
            average = torch.einsum("bws,bw->bs", self.vectors(words), there) / there.sum(1, keepdim=True).clamp(min=1)
        outputs: Tensor = self.mlp(average)
        return outputs
