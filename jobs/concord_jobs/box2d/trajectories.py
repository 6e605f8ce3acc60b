"""Trajectories of images: simulated tasks generate them, and a data set reads them one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from concord.dynamics.sequences import keys
from concord.environments.sharded import ShardedData, Split
from concord.environments.source import ExampleSource
from concord.environments.tree import Tree
from concord.errors import ArgumentError, InputError
from concord.extras import require_extra


@dataclass(frozen=True)
class Trajectory:
    """Frames ``(length, channels, height, width)`` uint8, their class, and the number of rejected attempts before."""

    frames: npt.NDArray[np.uint8]
    label: int
    rejected: int = 0


@dataclass(frozen=True, kw_only=True)
class TrajectoryTask(ABC):
    """A simulated task, which makes trajectories and reads labels from frames."""

    perturbed: bool = False
    """Whether the physics is perturbed."""

    name: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]
    """The names of the labels."""

    @property
    @abstractmethod
    def frame(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""

    @property
    def folder(self) -> str:
        """The default name of the folder with its data."""
        return self.name + ("-perturbed" if self.perturbed else "")

    @property
    def command(self) -> str:
        """The command that makes its data."""
        return f"concord data {self.name}{' --perturbed' if self.perturbed else ''}"

    @abstractmethod
    def attempt(self, rng: np.random.Generator) -> Trajectory | None:
        """One random trajectory; None if it does not end in time."""

    def trajectory(self, key: Sequence[int]) -> Trajectory:
        """The trajectory of this key, the same in every process: the first attempt that ends in time."""
        require_extra("box2d", "making trajectories")
        rejected = 0
        while (found := self.attempt(np.random.default_rng([*key, rejected]))) is None:
            rejected += 1
        return replace(found, rejected=rejected)

    @abstractmethod
    def read_label(self, frames: Tensor, first: Tensor | None = None) -> Tensor:
        """The share of each class in frames: ``(..., length, *frame)`` uint8 or in [0, 1] to ``(..., classes)``.

        The shares sum to 1. ``first``, ``(..., *frame)``, is the first frame of the trajectory; the default is the
        first of these frames. Frames of another size are refused (InputError).
        """

    @abstractmethod
    def sees_object(self, frames: Tensor) -> Tensor:
        """Whether the moving object is visible in each frame: ``(..., *frame)`` to ``(...)`` bool."""

    def require_frames(self, frames: Tensor) -> None:
        """Refuse frames of another size (InputError)."""
        if frames.shape[-3:] != self.frame:
            raise ArgumentError("frames", tuple(frames.shape), f"must end with {self.frame}")


class Trajectories(Dataset[tuple[Tensor, Tensor]]):
    """The trajectories of one split: ``dataset[i]`` is ``(frames, label)``.

    Frames are ``(length, channels, height, width)`` uint8 and read on demand, labels int64 scalars. Each row group of
    the data is a trajectory. ``lengths`` and ``labels`` are ``(trajectories,)`` int64.
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


class TrajectoryExamples(ExampleSource):
    """The first trajectories of a split (None: all), as :func:`~concord.dynamics.sequences` with ``label``.

    Trajectories are padded to ``padded`` frames; the default is the longest of the taken ones. Environments that train
    together have the same length.
    """

    def __init__(
        self, environment: str, trajectories: Trajectories, count: int | None = None, padded: int | None = None
    ) -> None:
        if count is not None and count > len(trajectories):
            raise InputError(f"environment {environment}: it has {len(trajectories)} trajectories, not {count}")
        self._trajectories, self._count = trajectories, len(trajectories) if count is None else count
        self._environment = environment
        self._keys, self._length = keys(environment, self._count), padded

    def __len__(self) -> int:
        return self._count

    @property
    def longest(self) -> int:
        """The number of frames of the longest trajectory."""
        return int(self._trajectories.lengths[: self._count].max())

    def padded(self, frames: int) -> "TrajectoryExamples":
        """The same trajectories, padded to this number of frames."""
        return TrajectoryExamples(self._environment, self._trajectories, self._count, frames)

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:
        """The sequences and labels of these examples."""
        chosen = torch.arange(self._count)[examples]
        longest = self._length or int(self._trajectories.lengths[chosen].max())
        flat = chosen.flatten().tolist()
        first, _ = self._trajectories[flat[0]]
        frames = first.new_zeros(len(flat), longest, *first.shape[1:])
        for row, index in zip(frames, flat, strict=True):
            found, _ = self._trajectories[index]
            row[: len(found)] = found
        return {
            "frames": frames.view(*chosen.shape, *frames.shape[1:]),
            "length": self._trajectories.lengths[chosen],
            "key": self._keys[chosen],
            "label": self._trajectories.labels[chosen],
        }
