"""Options of the size of a multilayer perceptron."""

from dataclasses import dataclass

from concord.options import OptionGroup


@dataclass(frozen=True, kw_only=True)
class MLPOptions(OptionGroup):
    """The size of the network."""

    # fmt: off
    hidden_units: int = 256
    """Width of the hidden layers."""
    hidden_layers: int = 1
    """Number of hidden layers."""
    dropout: float = 0.0
    """Dropout probability of the hidden layers."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require("dropout", 0 <= self.dropout < 1, "must lie in [0, 1)")
        self.require_at_least(1, "hidden_units", "hidden_layers")
