"""Converts stored pixels to the inputs of a network."""

from torch import Tensor, nn


class ChannelsFirst(nn.Module):
    """Frames ``(frames, height, width, channels)``, as of environments, to images with the channels first."""

    def forward(self, frames: Tensor) -> Tensor:
        """The images, a view, in PyTorch's memory format channels-last, which is fast."""
        return frames.permute(0, 3, 1, 2)


class Pixels(nn.Module):
    """Bytes (0 to 255) to float32 of 0 to 1; floating point stays as it is. Any shape."""

    def forward(self, images: Tensor) -> Tensor:
        """The scaled images."""
        return images if images.is_floating_point() else images.float().div_(255)
