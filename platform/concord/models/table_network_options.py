"""The options of the network of a table; a module of its own, which needs no PyTorch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from concord.models.mlp_options import MLPOptions
from concord.options import option_values

if TYPE_CHECKING:
    from concord.environments.table_rows import Table  # with pandas, which takes a third of a second
    from concord.models.table_network import TableNetwork


@dataclass(frozen=True, kw_only=True)
class TableNetworkOptions(MLPOptions):
    """The network and its size."""

    # fmt: off
    network: Literal["mlp", "linear"] = "mlp"
    """Network; linear is logistic or linear regression."""
    # fmt: on

    def build(self, table: "Table") -> "TableNetwork":
        """The network for a table's columns and target."""
        from concord.models.table_network import TableNetwork

        sizes = {**option_values(self), **({"hidden_layers": 0} if self.network == "linear" else {})}
        del sizes["network"]
        return TableNetwork(*table.widest.widths, table.outputs, **sizes)
