"""From pixels as they are stored to numbers that a network likes."""

from torch import Tensor, nn


class Pixels(nn.Module):
    """Bytes (0 to 255) or floating point (0 to 1) to floating point of -1 to 1; shape as it is."""

    def forward(self, images: Tensor) -> Tensor:
        """The scaled images, float32 if they were bytes."""
        values = images if images.is_floating_point() else images.float().div_(255)
        return values * 2 - 1
