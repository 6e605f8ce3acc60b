"""The network of adaptive skip intervals, from a frame to the logits of a later frame (thesis, appendix A.0.1)."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from concord.errors import ArgumentError, InputError
from concord.models.pixels import Pixels
from concord.options import OptionGroup

Architecture = Literal["plain", "dilated", "strided"]


class DynamicsNetwork(nn.Module):
    """Seven convolutions that keep the size of the frame; the input is concatenated before the last two.

    Three layers of n kernels of 5×5, then 7×7 and 5×5; then, with the input's channels concatenated, n of 1×1, and 1×1
    to the channels of a frame. ReLU follows all but the last; weights are uniform as by He et al., biases 0. With 3
    channels and n = 48 there are 292,179 parameters, 236,883 if strided.

    Args:
        channels: the number of a frame's channels.
        kernels: n, the number of kernels.
        architecture: ``plain``; ``dilated``, the fourth with dilation 2; or ``strided``, the second with stride 2, and
            the fourth the transposed one of that, 5×5.

    Raises:
        InputError: there is no such architecture, or a number is below 1.
    """

    def __init__(self, channels: int = 3, kernels: int = 48, architecture: Architecture = "plain") -> None:
        super().__init__()
        if architecture not in get_args(Architecture):
            raise ArgumentError("architecture", architecture, f"must be one of {', '.join(get_args(Architecture))}")
        for name, value in (("channels", channels), ("kernels", kernels)):
            if value < 1:
                raise ArgumentError(name, value, "must be at least 1")
        self.channels = channels
        self.pixels = Pixels()
        strided, dilation = architecture == "strided", 2 if architecture == "dilated" else 1
        fourth: nn.Module
        if strided:
            fourth = nn.ConvTranspose2d(kernels, kernels, 5, stride=2, padding=2, output_padding=1)
        else:
            fourth = nn.Conv2d(kernels, kernels, 7, padding=3 * dilation, dilation=dilation)
        self.first = nn.Conv2d(channels, kernels, 5, padding=2)
        self.second = nn.Conv2d(kernels, kernels, 5, padding=2, stride=2 if strided else 1)
        self.third = nn.Conv2d(kernels, kernels, 5, padding=2)
        self.fourth = fourth
        self.fifth = nn.Conv2d(kernels, kernels, 5, padding=2)
        self.sixth = nn.Conv2d(kernels + channels, kernels, 1)
        self.last = nn.Conv2d(kernels, channels, 1)
        for layer in self.children():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits ``(frames, channels, height, width)`` of frames of this shape, bytes or floating point.

        Raises:
            InputError: the frames have another number of channels.
        """
        if frames.ndim != 4 or frames.shape[1] != self.channels:
            raise InputError(f"frames {tuple(frames.shape)}: expected (frames, {self.channels}, height, width)")
        frames = self.pixels(frames).contiguous(memory_format=torch.channels_last)
        height, width = frames.shape[2:]
        hidden = self.second(self.first(frames).relu()).relu()
        hidden = self.fourth(self.third(hidden).relu())[..., :height, :width].relu()
        hidden = torch.cat([self.fifth(hidden).relu(), frames.to(hidden.dtype)], 1)
        logits: Tensor = self.last(self.sixth(hidden).relu())
        return logits


@dataclass(frozen=True, kw_only=True)
class DynamicsNetworkOptions(OptionGroup):
    """The network that predicts frames."""

    # fmt: off
    architecture: Architecture = "plain"
    """Seven convolutions, plain, one of them dilated, or in the middle at half the resolution."""
    kernels: int = 48
    """n, kernels of each convolution."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(1, "kernels")

    def network(self, channels: int) -> DynamicsNetwork:
        """A network for frames with this number of channels."""
        return DynamicsNetwork(channels, self.kernels, self.architecture)
