"""ResNet-18, as its authors describe it for large images."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from concord.models.pixels import Pixels


class ResNet18(nn.Module):
    """Eight residual blocks of two convolutions (He et al., Deep residual learning for image recognition, 2016).

    A convolution of 7 × 7 with stride 2 and a pooling come first, so frames of 64 × 64 reach the blocks as 16 × 16;
    their widths are 64, 128, 256 and 512. With three channels and 15 classes it has 11,184,207 parameters.

    Args:
        channels: the number of the images' channels.
        classes: the number of outputs.

    Input ``(images, channels, height, width)``, bytes (0 to 255) or floating point (0 to 1); output logits
    ``(images, classes)``.
    """

    def __init__(self, channels: int = 3, classes: int = 15) -> None:
        super().__init__()
        self.pixels = Pixels()
        self.stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        blocks, before = [], 64
        for width in (64, 128, 256, 512):
            blocks += [_ResNetBlock(before, width, stride=1 if width == 64 else 2), _ResNetBlock(width, width)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        seen = self.pixels(images).contiguous(memory_format=torch.channels_last)
        seen = self.blocks(self.pool(relu(self.stem_norm(self.stem(seen)))))
        logits: Tensor = self.classifier(seen.mean((2, 3)))
        return logits


class _ResNetBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, inputs: Tensor) -> Tensor:
        branch: Tensor = self.second_norm(self.second(relu(self.first_norm(self.first(inputs)))))
        return relu(branch + self.shortcut(inputs))
