"""The convolutional network of IMPALA, with which Procgen's authors train agents."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from concord.models.pixels import Pixels


class ImpalaCNN(nn.Module):
    """Three blocks of convolution, pooling and two residual branches, then one hidden layer.

    The deep network of Espeholt et al. (IMPALA, 2018), in the size of Cobbe et al. (Leveraging procedural generation to
    benchmark reinforcement learning, 2020), with their initial weights: Glorot-uniform, biases zero.

    Input ``(images, 3, 64, 64)``, bytes (0 to 255) or floating point (0 to 1); output features ``(images, 256)``, after
    their ReLU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pixels = Pixels()
        self.blocks = nn.Sequential(_ImpalaBlock(3, 16), _ImpalaBlock(16, 32), _ImpalaBlock(32, 32))
        self.hidden = nn.Linear(32 * 8 * 8, 256)
        self.apply(_glorot)
        # Convolutions of few channels are several times faster so, on CPUs and on GPUs.
        for parameter in self.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Features."""
        seen = self.blocks(self.pixels(images).contiguous(memory_format=torch.channels_last))
        return relu(self.hidden(relu(seen).flatten(1)))


class _ImpalaBlock(nn.Sequential):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.MaxPool2d(3, 2, padding=1),
            _ImpalaResidual(width),
            _ImpalaResidual(width),
        )


class _ImpalaResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        branch: Tensor = self.second(relu(self.first(relu(inputs))))
        return inputs + branch


def _glorot(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
