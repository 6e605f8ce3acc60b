"""The options of the network of a table; a module of its own, which needs no PyTorch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from concord.models.mlp_options import MLPOptions
from concord.options import Detail, options_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor, nn

    from concord.environments.table_rows import Table  # with pandas, which takes a third of a second


_BASELINES = {"ridge": ("ridge_penalty",), "boosting": ("boosting_trees", "boosting_rate", "boosting_leaves")}


@dataclass(frozen=True, kw_only=True)
class TableNetworkOptions(MLPOptions):
    """The network and its size, or a baseline in its place."""

    # fmt: off
    network: Literal["wide-and-deep", "mlp", "linear", "ridge", "boosting"] = "mlp"
    """Network; linear is logistic or linear regression, trained by steps, and wide-and-deep the sum of it and the MLP.
    Or a baseline of scikit-learn, fitted to all training rows at once: ridge (logistic or ridge regression), or
    boosting (histogram gradient boosting)."""
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
    def baseline(self) -> str | None:
        """The network, if it is a baseline."""
        return self.network if self.network in _BASELINES else None

    def unused(self) -> frozenset[str]:
        """The options of other baselines; those of a network, for a baseline."""
        others = {name for baseline, names in _BASELINES.items() if baseline != self.network for name in names}
        of_networks = options_of(MLPOptions).keys() if self.baseline is not None else set[str]()
        return super().unused() | others | of_networks

    def build(self, table: "Table", train: "Collection[str] | None" = None) -> "nn.Module":
        """The network for a table's columns and target.

        Counts and levels begin as constants of the environments ``train``, by default all that are for training.
        """
        from concord.models.table_network import TableNetwork, WideAndDeep

        if self.network == "boosting":
            from concord.models.table_baselines import BoostedTrees

            return BoostedTrees(*table.widest.widths, table.outputs, self.boosting_trees, self.boosting_leaves)
        layers = 0 if self.network in ("linear", "ridge") else self.hidden_layers
        kind = WideAndDeep if self.network == "wide-and-deep" else TableNetwork
        ordered = table.task == "ordinal" and self.baseline is None
        outputs = 1 if ordered else table.outputs
        network = kind(*table.widest.widths, outputs, layers, self.hidden_units, self.dropout)
        if ordered or table.task == "count":
            from concord.models.table_network import begin_at_shares

            return begin_at_shares(network, table, table.by_purpose["train"] if train is None else train)
        return network

    def fit(
        self, network: "nn.Module", inputs: "Tensor", targets: "Tensor", weights: "Tensor | None" = None, *, seed: int
    ) -> None:
        """Fit a baseline to all training rows, by their weights if they have some."""
        from concord.models.table_baselines import BoostedTrees, fit_linear
        from concord.models.table_network import TableNetwork

        if isinstance(network, BoostedTrees):
            network.fit(inputs, targets, self.boosting_rate, seed, weights)
        else:
            assert isinstance(network, TableNetwork)
            fit_linear(network, inputs, targets, self.ridge_penalty, weights)
