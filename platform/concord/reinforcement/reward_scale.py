"""Rewards divided by the standard deviation of the returns so far, as in the training of Procgen's authors."""

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers.utils import RunningMeanStd

Floats = npt.NDArray[np.float32]


class ScaledRewards(VectorWrapper):
    """Divides rewards by the standard deviation of the discounted return so far, as OpenAI's baselines do.

    Gymnasium's NormalizeReward carries the last reward of an episode into the next one if episodes restart within a
    step; this changes the scale of a game that is rewarded at its end. The discount of the running return is always
    .99, not the agent's; scaled rewards are cut to ``limit``. ``returns`` has mean and variance of the running returns.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], discount: float = 0.99, limit: float = 10.0) -> None:
        super().__init__(env)
        self.returns: Any = RunningMeanStd(shape=())  # type: ignore[no-untyped-call]
        self._discount, self._limit = discount, limit
        self._running = np.zeros(env.num_envs, np.float32)

    def step(self, actions: Any) -> Any:
        """One action each, with scaled rewards; the step's own returns are counted first."""
        frames, rewards, ended, cut, info = self.env.step(actions)
        self._running = (self._running * self._discount + rewards).astype(np.float32)
        self.returns.update(self._running)
        self._running[ended] = 0
        scaled = np.clip(rewards / np.sqrt(self.returns.var + 1e-8), -self._limit, self._limit)
        return frames, scaled.astype(np.float32), ended, cut, info

    def reset(self, **options: Any) -> Any:
        """Begin new episodes; the scale remains."""
        self._running[:] = 0
        return self.env.reset(**options)
