"""Trajectories of a folder as the examples of an environment, padded, and read as they are asked for."""

import torch
from torch import Tensor

from concord.dynamics.sequences import keys
from concord.environments.source import ExampleSource
from concord.environments.tree import Tree
from concord.errors import InputError
from concord_jobs.box2d.trajectories import Trajectories


class TrajectoryExamples(ExampleSource):
    """The first trajectories of a split (None: all), as :func:`~concord.dynamics.sequences` has them, with ``label``.

    Padded to this many frames, or to the longest of those that are taken. Environments that train together have one
    length.
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
        """Frames of the longest one."""
        return int(self._trajectories.lengths[: self._count].max())

    def padded(self, frames: int) -> "TrajectoryExamples":
        """The same, padded to this many frames."""
        return TrajectoryExamples(self._environment, self._trajectories, self._count, frames)

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:  # noqa: ARG002
        """Some of them."""
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
