"""A network of two classes with one output."""

from torch import Tensor, nn


class OneLogit(nn.Module):
    """A network with one output, the logit of class 1; that of class 0 is always 0.

    So cross-entropy of the two is binary cross-entropy of the one.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``(examples, 2)``."""
        return nn.functional.pad(self.network(inputs), (1, 0))
