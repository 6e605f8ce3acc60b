"""The network of the synthetic task, with two outputs or one."""

from typing import Any

from torch import Tensor, nn

from concord.models import MLP


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


def network(features: int, one_logit: bool, **options: Any) -> nn.Module:
    """An MLP with LeakyReLU; ``options`` are those of :class:`~concord.models.MLP`."""
    return OneLogit(MLP(features, 1, **options)) if one_logit else MLP(features, 2, **options)
