"""From pixels as they are stored to the numbers that a network takes."""

from torch import Tensor, nn


class ChannelsFirst(nn.Module):
    """Frames as environments give them, ``(frames, height, width, channels)``, to images with their channels first."""

    def forward(self, frames: Tensor) -> Tensor:
        """The images, a view: in memory they are what PyTorch calls channels-last, and fast."""
        return frames.permute(0, 3, 1, 2)


class Pixels(nn.Module):
    """Bytes (0 to 255) to float32 of 0 to 1; floating point stays as it is. Any shape."""

    def forward(self, images: Tensor) -> Tensor:
        """The scaled images."""
        return images if images.is_floating_point() else images.float().div_(255)
