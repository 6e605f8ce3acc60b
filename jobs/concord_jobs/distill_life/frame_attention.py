"""A teacher whose target for each map of a convolutional student is a mixture of a trajectory's frames."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FrameAttention(nn.Module):
    """Targets h*_kf = Σ_t softmax_t(φ)_tkf · x_t (thesis, eq. 4.2 and 4.3), of T frames, N taught layers, F maps."""

    def __init__(self, frames: int, layers: int, maps: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(frames, layers, maps))

    @classmethod
    def pointing(cls, frames: Sequence[int], of: int, maps: int) -> "FrameAttention":
        """A teacher that attends to frame ``frames[k]`` in all maps of layer k."""
        made = cls(of, len(frames), maps)
        wanted = torch.full_like(made.phi, -torch.inf)
        for layer, frame in enumerate(frames):
            wanted[frame, layer] = 0.0
        made.phi = nn.Parameter(wanted, requires_grad=False)
        return made

    def forward(self, privileged: Tensor) -> tuple[Tensor, ...] | Tensor:
        """h* ``(examples, maps, ...)`` of each layer from frames ``(examples, frames, ...)``; one layer: no tuple."""
        attention = self.phi.softmax(0)
        targets = tuple(torch.einsum("bt...,tf->bf...", privileged, layer) for layer in attention.unbind(1))
        return targets if len(targets) > 1 else targets[0]
