"""Trajectories of images: what a task of simulated physics makes, and what is read of them, one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from concord.environments.sharded import ShardedData, Split


@dataclass(frozen=True)
class Trajectory:
    """What happens, from beginning to end.

    Attributes:
        frames: ``(length, channels, height, width)`` uint8.
        label: the class of what happens.
        rejected: how many tries before this one did not come to an end in time.
    """

    frames: npt.NDArray[np.uint8]
    label: int
    rejected: int = 0


class TrajectoryTask(Protocol):
    """Where trajectories come from, and what can be read in them."""

    @property
    def name(self) -> str:
        """Of the task."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels."""
        ...

    @property
    def frame(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        ...

    @property
    def folder(self) -> str:
        """The name of the folder that its data are in, unless another is given."""
        ...

    @property
    def command(self) -> str:
        """What makes its data."""
        ...

    def trajectory(self, key: Sequence[int]) -> Trajectory:
        """The trajectory of this key: the same wherever and whenever it is asked for."""
        ...

    def read_label(self, frames: Tensor, first: Tensor | None = None) -> Tensor:
        """The share of each class in frames: ``(..., length, *frame)`` uint8 or in [0, 1] to ``(..., classes)``.

        The shares sum to 1. ``first``, ``(..., *frame)``, is the frame that the trajectory begins with; the first
        of the frames if None.
        """
        ...


class Trajectories(Dataset[tuple[Tensor, Tensor]]):
    """The trajectories of one split: ``dataset[i]`` is ``(frames, label)``.

    Frames are ``(length, channels, height, width)`` uint8, the label an int64 scalar. Lengths vary. Only what is asked
    for is in memory.

    Args:
        data: each of whose row groups is a trajectory.
        split: which of them.

    Attributes:
        lengths: ``(trajectories,)`` int64.
        labels: ``(trajectories,)`` int64.

    Raises:
        InputError: there are none.
    """

    def __init__(self, data: ShardedData, split: Split) -> None:
        self._data, self._groups = data, data.groups(split)
        if not self._groups:
            raise data.error(f"no trajectories for {split}; {data.command} makes them in a new folder")
        self.lengths = torch.tensor([group.rows for group in self._groups])
        self.labels = torch.tensor([group.facts["label"] for group in self._groups])

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} trajectories, and no number {index}")
        return torch.from_numpy(self._data.read(self._groups[index])["frames"]), self.labels[index]
