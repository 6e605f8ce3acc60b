"""Options of the network that classifies images."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from concord.models.fast_resnet import FastResNet
from concord.models.mlp import MLP
from concord.models.pixels import Pixels
from concord.options import OptionGroup


@dataclass(frozen=True, kw_only=True)
class ImageNetworkOptions(OptionGroup):
    """The network that classifies the images."""

    # fmt: off
    model: Literal["fast-resnet", "mlp"] = "fast-resnet"
    """The AND-mask paper's FastResNet (halves an image three times: at least 8 × 8), or a small MLP."""
    hidden_units: int = 256
    """Width of the MLP's hidden layers."""
    hidden_layers: int = 2
    """Number of the MLP's hidden layers."""
    batch_norm: bool = False
    """Batch normalization in the MLP; FastResNet has it."""
    # fmt: on

    def unused(self) -> frozenset[str]:
        """The MLP's options where there is none."""
        return frozenset({"hidden_units", "hidden_layers", "batch_norm"} if self.model != "mlp" else ())

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(1, "hidden_units", "hidden_layers")

    def network(self, channels: int, height: int, width: int, classes: int) -> nn.Module:
        """A network for images of this size, which takes them as bytes."""
        if self.model == "fast-resnet":
            self.require("model", min(height, width) >= 8, f"images of {height} × {width} are too small; take mlp")
            return FastResNet(channels, classes)
        size = channels * height * width
        return nn.Sequential(
            Pixels(), MLP(size, classes, self.hidden_units, self.hidden_layers, batch_norm=self.batch_norm)
        )
