"""A network for encoded rows of a table: embeddings of categories beside the numbers, then a linear layer or an MLP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from concord.models.mlp import MLP
from concord.models.mlp_options import MLPOptions
from concord.options import Detail

if TYPE_CHECKING:
    from concord.environments.table import Table  # with pandas, which takes a third of a second


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


@dataclass(frozen=True, kw_only=True)
class TableNetworkOptions(MLPOptions):
    """The network and its size, or a baseline in its place."""

    # fmt: off
    network: Literal["mlp", "linear", "ridge", "boosting"] = "mlp"
    """Network; linear is logistic or linear regression, trained by steps. Or a baseline of scikit-learn, fitted to all
    training rows at once: ridge (logistic or ridge regression), or boosting (histogram gradient boosting)."""
    ridge_penalty: Detail[float] = 1.0
    """Penalty of ridge: half of it times the squared weights is added to the sum of the rows' losses."""
    boosting_trees: Detail[int] = 100
    """Number of trees of boosting, of more than two classes for each."""
    boosting_rate: Detail[float] = 0.1
    """Learning rate of boosting."""
    boosting_leaves: Detail[int] = 31
    """Largest number of leaves of a tree."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require("ridge_penalty", self.ridge_penalty > 0, "must be above 0")
        self.require("boosting_rate", 0 < self.boosting_rate <= 1, "must lie in (0, 1]")
        self.require_at_least(1, "boosting_trees")
        self.require("boosting_leaves", self.boosting_leaves >= 2, "must be at least 2")

    @property
    def fitted(self) -> bool:
        """Whether it is a baseline."""
        return self.network in ("ridge", "boosting")

    def build(self, table: "Table") -> nn.Module:
        """The network for a table's columns and target."""
        if self.network == "boosting":
            from concord.models.table_baselines import BoostedTrees

            return BoostedTrees(*table.widest.widths, table.outputs, self.boosting_trees, self.boosting_leaves)
        layers = self.hidden_layers if self.network == "mlp" else 0
        return TableNetwork(*table.widest.widths, table.outputs, layers, self.hidden_units, self.dropout)

    def fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, seed: int) -> None:
        """Fit a baseline to all training rows."""
        from concord.models.table_baselines import BoostedTrees, fit_linear

        if isinstance(network, BoostedTrees):
            network.fit(inputs, targets, self.boosting_rate, seed)
        else:
            assert isinstance(network, TableNetwork)
            fit_linear(network, inputs, targets, self.ridge_penalty)
