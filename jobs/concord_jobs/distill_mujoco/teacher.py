"""A teacher that sees a trajectory: convolutions over time, and a target and a gate for each unit of the student."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from concord.gradients.risk import autocast_to


class TrajectoryTeacher(nn.Module):
    """From frames x* to (h*, m) of several layers, for a :class:`~concord.distillation.GatedError`.

    Convolutions over time of width 3, one wide layer, and two numbers for each taught unit (thesis, C.2.2).
    Batches are normalized by their own statistics, without running averages. So the targets of a batch depend only on
    this batch, and one call computes the targets of all batches of a meta-gradient.

    Args:
        frames: number of frames of x*.
        numbers: numbers in each frame; x* is ``(examples, frames · numbers)``, or ``(examples, frames, numbers)``.
        units: number of units of each taught layer.
        channels: number of channels of each convolution.
        wide: number of units of the wide layer.
        autocast: dtype in which the layers compute. None disables autocast.
    """

    def __init__(
        self,
        frames: int,
        numbers: int,
        units: Sequence[int],
        channels: Sequence[int] = (96, 96, 96, 256),
        wide: int = 768,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.frames, self.numbers, self.units, self.autocast = frames, numbers, tuple(units), autocast
        convolutions = [
            part
            for into, out in pairwise((numbers, *channels))
            for part in (nn.Conv1d(into, out, 3, padding=1, bias=False), *_normalized(out))
        ]
        last = (channels[-1] if channels else numbers) * frames
        self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(last, wide, bias=False), *_normalized(wide))
        self.head = nn.Linear(wide, 2 * sum(units))

    def forward(self, privileged: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """h* and the gates' logits m of each layer, ``(examples, units)``."""
        frames = privileged.reshape(-1, self.frames, self.numbers)
        with autocast_to(privileged.device, self.autocast):
            outputs = self.head(self.layers(frames.mT))
        wanted, gates = (each.split(self.units, 1) for each in outputs.to(privileged.dtype).chunk(2, 1))
        return tuple(zip(wanted, gates, strict=True))


def _normalized(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm1d(channels, track_running_stats=False), nn.ReLU()
