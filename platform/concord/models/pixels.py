"""From pixels as they are stored to the numbers that a network takes."""

from torch import Tensor, nn


class Pixels(nn.Module):
    """Bytes (0 to 255) to float32 of 0 to 1; floating point stays as it is. Any shape."""

    def forward(self, images: Tensor) -> Tensor:
        """The scaled images."""
        return images if images.is_floating_point() else images.float().div_(255)
