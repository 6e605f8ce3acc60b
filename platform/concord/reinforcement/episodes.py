"""Whole episodes of a policy: their returns and frames."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from concord.reinforcement.procgen_environment import ProcgenVectorEnv

Policy = Callable[[Tensor], Tensor]
"""Maps frames ``(frames, 64, 64, 3)`` uint8 to logits ``(frames, actions)``."""


_NOTHING = 4  # the action that presses no key


@dataclass(frozen=True)
class Step:
    """One step of the environments whose episode counts.

    Attributes:
        frames: ``(rows, 64, 64, 3)`` uint8, before the action.
        logits: ``(rows, actions)`` float32.
        episodes: ``(rows,)``, the number of each row's episode, in the order of their beginnings.
        levels: ``(rows,)``, the levels' seeds.
        ended: ``(rows,)``, whether the episode ended with this step.
        returns: ``(rows,)``, of the episodes that ended; 0 elsewhere.
    """

    frames: npt.NDArray[np.uint8]
    logits: npt.NDArray[np.float32]
    episodes: npt.NDArray[np.int64]
    levels: npt.NDArray[np.int32]
    ended: npt.NDArray[np.bool_]
    returns: npt.NDArray[np.float32]


@torch.no_grad()
def steps(policy: Policy, environment: "ProcgenVectorEnv", episodes: int, generator: torch.Generator) -> Iterator[Step]:
    """Play until the first ``episodes`` to begin have ended, drawing actions from the policy.

    The first episodes to end would be the short ones. Environments whose episode does not count press no key until the
    others have finished, and are not passed to the policy. Frames are CPU tensors.
    """
    frames, info = environment.reset()
    number = np.arange(environment.num_envs)
    begun = environment.num_envs
    nothing = np.zeros(environment.num_envs)
    while (rows := np.flatnonzero(number < episodes)).size:
        seen = frames if rows.size == len(frames) else frames[rows]
        logits = policy(torch.from_numpy(seen)).float().cpu()
        actions = np.full(environment.num_envs, _NOTHING)
        actions[rows] = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1).numpy()
        levels = info["level_seed"]
        frames, _, ended, _, info = environment.step(actions)
        returns = info["episode"]["r"] if "episode" in info else nothing
        yield Step(seen, logits.numpy(), number[rows], levels[rows], ended[rows], returns[rows].astype(np.float32))
        number[ended] = begun + np.arange(int(ended.sum()))
        begun += int(ended.sum())


@dataclass(frozen=True)
class Played:
    """Returns of a policy's episodes, ``(episodes,)``, in the order of their beginnings."""

    returns: npt.NDArray[np.float32]

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean return."""
        return float(self.returns.std() / np.sqrt(len(self.returns)))


def play(policy: Policy, environment: "ProcgenVectorEnv", episodes: int) -> Played:
    """Returns of a number of episodes; see :func:`steps`."""
    returns = np.zeros(episodes, np.float32)
    for step in steps(policy, environment, episodes, torch.Generator().manual_seed(0)):
        returns[step.episodes[step.ended]] = step.returns[step.ended]
    return Played(returns)
