"""Networks for encoded rows of a table: embeddings of categories beside the numbers, then a linear layer, an MLP, or
both."""

import math
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from concord.models.mlp import MLP

if TYPE_CHECKING:
    from concord.environments.table_rows import Table  # with pandas


class TableNetwork(nn.Module):
    """A network on the inputs of :class:`~concord.environments.table_encoder.TableEncoder`.

    Args:
        numeric: the number of numeric inputs, which come first.
        levels: the number of codes of each category, in the order of the inputs.
        outputs: the number of classes, or 1.
        hidden_layers: 0 makes it linear: each level then has a weight for each output.
        hidden_units: width of the hidden layers.
        dropout: probability of dropping a hidden unit.
        embedding: the largest width of a category's embedding; half the number of its codes if that is less.

    Input ``(batch, numeric + categories)``, output ``(batch, outputs)``.

    The embeddings of missing and unknown levels begin at 0: if training has no such row, they stay there.

    Attributes:
        codes: the inputs' columns that are codes of categories, whose mean means nothing.
    """

    def __init__(
        self,
        numeric: int,
        levels: Sequence[int],
        outputs: int,
        hidden_layers: int = 1,
        hidden_units: int = 64,
        dropout: float = 0.0,
        embedding: int = 16,
    ) -> None:
        from concord.environments.table_encoder import FIRST_LEVEL

        super().__init__()
        self.numeric, self.levels, linear = numeric, tuple(levels), hidden_layers == 0
        self.codes = slice(numeric, None)
        widths = [outputs if linear else min(embedding, (count + 1) // 2) for count in levels]
        self.embeddings = nn.ModuleList(nn.Embedding(*each) for each in zip(levels, widths, strict=True))
        with torch.no_grad():
            for weight in self.embeddings.parameters():
                weight[: None if linear else FIRST_LEVEL] = 0
        if linear:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # a table without numbers
                self.rest: nn.Module = nn.Linear(numeric, outputs)
        else:
            self.rest = MLP(numeric + sum(widths), outputs, hidden_units, hidden_layers, dropout)
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        """Logits, or a number."""
        numbers = rows[:, : self.numeric]
        codes = rows[:, self.numeric :].long()
        embedded = [table(codes[:, place]) for place, table in enumerate(self.embeddings)]
        if self.linear:
            outputs: Tensor = self.rest(numbers)
            return outputs + sum(embedded) if embedded else outputs
        answer: Tensor = self.rest(torch.cat([numbers, *embedded], dim=1))
        return answer


def begin_at_shares(network: nn.Module, table: "Table", train: Collection[str]) -> nn.Module:
    """The network of counts, whose last bias begins at the mean's logarithm, or of levels, at their shares.

    Mean and shares are of the environments ``train``.
    """
    from concord.models.cumulative_logits import CumulativeLogits

    rows = table.rows(train)
    if table.classes is not None:
        return CumulativeLogits(network, [int((rows[table.target] == level).sum()) for level in table.classes])
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    scale = table.target_scale(rows)
    assert scale is not None
    with torch.no_grad():
        last.bias.fill_(math.log(max(scale.mean, 0.5 / len(rows))))  # all may be 0
    return network


class WideAndDeep(nn.Module):
    """The sum of a linear model and an MLP, both on all inputs (Cheng et al., Wide & Deep Learning for Recommender
    Systems, 2016).

    It begins as the constant 0, of a standardized target the mean: the linear part at 0, and the MLP's last layer as
    well, so that the MLP learns what the linear part leaves over.

    The arguments are those of :class:`TableNetwork`, with an MLP of at least one hidden layer.
    """

    def __init__(
        self,
        numeric: int,
        levels: Sequence[int],
        outputs: int,
        hidden_layers: int = 1,
        hidden_units: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.codes = slice(numeric, None)
        self.wide = TableNetwork(numeric, levels, outputs, hidden_layers=0)
        self.deep = TableNetwork(numeric, levels, outputs, hidden_layers, hidden_units, dropout)
        for part in (self.wide, self.deep):
            *_, last = (module for module in part.modules() if isinstance(module, nn.Linear))
            for parameter in last.parameters():
                nn.init.zeros_(parameter)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits, or a number."""
        answer: Tensor = self.wide(rows) + self.deep(rows)
        return answer
