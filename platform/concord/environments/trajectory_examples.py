"""Trajectories of a folder as the examples of an environment: padded to the longest of a batch, read as they are asked
for, or all of them in memory."""

import torch
from torch import Tensor

from concord.dynamics.sequences import keys
from concord.environments.source import ExampleSource
from concord.environments.trajectories import Trajectories
from concord.environments.tree import Tree
from concord.errors import InputError


class TrajectoryExamples(ExampleSource):
    """The first trajectories of a split, as :func:`~concord.dynamics.sequences` has them, with ``label``.

    Args:
        environment: its name, which the keys depend on.
        trajectories: of a split.
        count: so many of them; None: all.

    Raises:
        InputError: there are fewer.
    """

    def __init__(self, environment: str, trajectories: Trajectories, count: int | None = None) -> None:
        if count is not None and count > len(trajectories):
            raise InputError(f"environment {environment}: it has {len(trajectories)} trajectories, not {count}")
        self._trajectories, self._count = trajectories, len(trajectories) if count is None else count
        self._keys = keys(environment, self._count)

    def __len__(self) -> int:
        return self._count

    @property
    def longest(self) -> int:
        """Frames of the longest one."""
        return int(self._trajectories.lengths[: self._count].max())

    def take(self, examples: slice | Tensor) -> Tree:
        """Some of them, padded to the longest of these."""
        chosen = torch.arange(self._count)[examples]
        lengths = self._trajectories.lengths[chosen]
        return self._padded(chosen, int(lengths.max()))

    def in_memory(self, longest: int | None = None) -> dict[str, Tensor]:
        """All of them, padded to so many frames; None: to the longest."""
        return self._padded(torch.arange(self._count), longest or self.longest)

    def _padded(self, chosen: Tensor, longest: int) -> dict[str, Tensor]:
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
