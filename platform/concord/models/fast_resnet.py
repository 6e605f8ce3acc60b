"""The FastResNet of PyTorch-Ignite's CIFAR-10 example, which the AND-mask paper trains (§3.2, appendix B.5)."""

from torch import Tensor, nn

from concord.models.pixels import Pixels

_OUTPUT_SCALE = 0.125


class FastResNet(nn.Module):
    """A residual network of eight convolutions for small images (Page, How to train your ResNet, 2018).

    Every convolution is 3 × 3 without bias, with batch norm and ReLU after it; the logits are scaled by 1/8. With
    three channels and ten classes it has 6,573,120 parameters.

    Args:
        channels: the number of the images' channels.
        classes: number of classes.

    Input ``(images, channels, height, width)``, bytes (0 to 255) or floating point (0 to 1), at least 8 × 8; output
    logits ``(images, classes)``.
    """

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.pixels = Pixels()
        self.features = nn.Sequential(
            _convolution(channels, 64),
            _convolution(64, 128),
            nn.MaxPool2d(2),
            _FastResidual(128),
            _convolution(128, 256),
            nn.MaxPool2d(2),
            _convolution(256, 512),
            nn.MaxPool2d(2),
            _FastResidual(512),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(512, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(self.features(self.pixels(images)))
        return logits * _OUTPUT_SCALE


class _FastResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(_convolution(channels, channels), _convolution(channels, channels))

    def forward(self, inputs: Tensor) -> Tensor:
        branch: Tensor = self.branch(inputs)
        return branch + inputs


def _convolution(channels: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )
