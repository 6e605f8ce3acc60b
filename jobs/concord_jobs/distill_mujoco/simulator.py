"""Returns of open-loop actions in a simulator: the states and rewards of a body after random actions.

An example is a state s, reached by random actions, 16 further random actions, and the 16 following states and rewards.
To predict the sum of rewards, a network sees s and the actions; the states in between are privileged.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from concord.extras import require_extra

Simulator = Literal["Swimmer", "Walker2d", "Hopper", "HalfCheetah"]
Split = Literal["train", "test", "validation"]

HORIZON = 16
SIZES = {"Swimmer": (8, 2), "Walker2d": (17, 6), "Hopper": (11, 3), "HalfCheetah": (17, 6)}
"""Dimensions of an observation and of an action."""

_WARM_UP = (10, 31)  # random steps before s


@dataclass(frozen=True)
class _Reward:
    """The reward of Gymnasium's version 4: forward velocity, a constant for being alive, a cost of actions.

    Attributes:
        control_cost: factor of the sum of squared actions.
        alive: the constant. A fallen body also earns it, as in the versions that end an episode after a fall.
        skipped: number of leading positions that are not observed.
        largest_velocity: bound at which observed velocities are cut.
    """

    control_cost: float
    alive: float = 0.0
    skipped: int = 1
    largest_velocity: float = np.inf


_REWARDS: dict[str, _Reward] = {
    "Swimmer": _Reward(1e-4, skipped=2),
    "Walker2d": _Reward(1e-3, alive=1.0, largest_velocity=10.0),
    "Hopper": _Reward(1e-3, alive=1.0, largest_velocity=10.0),
    "HalfCheetah": _Reward(0.1),
}


@dataclass(frozen=True)
class MujocoTrajectories:
    """Examples of returns.

    Attributes:
        state: s, ``(examples, observations)`` float32.
        actions: ``(examples, 16, actions)`` int8, each -1, 0 or 1.
        states: after each action, ``(examples, 16, observations)`` float32.
        rewards: of each action, ``(examples, 16)`` float64.
    """

    state: npt.NDArray[np.float32]
    actions: npt.NDArray[np.int8]
    states: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float64]

    @property
    def returns(self) -> npt.NDArray[np.float64]:
        """The sum of rewards, ``(examples,)``."""
        total: npt.NDArray[np.float64] = self.rewards.sum(1)
        return total


def simulate(simulator: Simulator, split: Split, seed: int, first: int, count: int) -> MujocoTrajectories:
    """Examples number ``first`` to ``first + count - 1`` of a split; each depends only on seed, split and number.

    From an initial state of the environment's own distribution 10 to 30 random actions lead to s; a random action is
    -1, 0 or 1 in each dimension. After a fall the simulation goes on. Rewards are those of Gymnasium's version 4
    (version 5 changed them), computed for all steps at once.
    """
    require_extra("mujoco", f"--simulator {simulator}")
    environment, step = make_environment(simulator)
    try:
        model, data, repeats = environment.model, environment.data, environment.frame_skip
        positions, width = model.nq, model.nq + model.nv
        visited = np.empty((count, HORIZON + 1, width))
        actions = np.empty((count, HORIZON, model.nu), np.int8)
        for index in range(count):
            drawn = np.random.default_rng([seed, get_args(Split).index(split), first + index])
            environment.np_random = drawn
            environment.reset()
            before = int(drawn.integers(*_WARM_UP))
            chosen = drawn.integers(-1, 2, (before + HORIZON, model.nu))
            actions[index] = chosen[before:]
            ctrl, position, velocity = data.ctrl, data.qpos, data.qvel
            rows = visited[index]
            for number, action in enumerate(chosen.astype(np.float64), -before):
                if number == 0:
                    rows[0, :positions], rows[0, positions:] = position, velocity
                ctrl[:] = action
                step(model, data, repeats)
                if number >= 0:
                    rows[number + 1, :positions], rows[number + 1, positions:] = position, velocity
        seconds = environment.dt
    finally:
        environment.close()
    return _observed(_REWARDS[simulator], visited, actions, positions, seconds)


def _observed(
    reward: _Reward, visited: npt.NDArray[np.float64], actions: npt.NDArray[np.int8], positions: int, seconds: float
) -> MujocoTrajectories:
    """Observations and rewards of the simulator's states ``(examples, 17, positions and velocities)``."""
    velocities = visited[..., positions:].clip(-reward.largest_velocity, reward.largest_velocity)
    seen = np.concatenate([visited[..., reward.skipped : positions], velocities], 2).astype(np.float32)
    forward = np.diff(visited[..., 0]) / seconds
    cost = reward.control_cost * np.square(actions.astype(np.float64)).sum(2)
    return MujocoTrajectories(seen[:, 0], actions, seen[:, 1:], forward + reward.alive - cost)


def make_environment(simulator: str) -> tuple[Any, Any]:
    """Gymnasium's environment without its wrappers, and the simulator's step; nothing is logged to a file."""
    import warnings

    import gymnasium
    import mujoco

    mujoco.set_mju_user_warning(lambda _: None)  # otherwise it writes MUJOCO_LOG.TXT into the working directory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the newer version 5
        environment = gymnasium.make(f"{simulator}-v4").unwrapped
    return environment, mujoco.mj_step


@dataclass(frozen=True)
class ReturnBins:
    """Returns as classes: equal bins of their quantiles in the training data.

    A return is mapped to [0, 1] by the empirical distribution of the training data, linear between training returns and
    cut outside of their range; equal returns get the mean of their ranks. So the bins have the same number of training
    examples, up to one and up to ties.
    """

    returns: npt.NDArray[np.float64]
    bins: int = 32

    def places(self, returns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The quantiles of returns, in [0, 1]."""
        there, counts = np.unique(self.returns, return_counts=True)
        middle = np.cumsum(counts) - (counts + 1) / 2  # the mean of the ranks 0, 1, … of equal returns
        last = len(self.returns) - 1
        return np.interp(returns, there, middle / last if last else np.full(1, 0.5))

    def labels(self, returns: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The bin of each return, from 0."""
        return np.minimum(self.places(returns) * self.bins, self.bins - 1).astype(np.int64)


def bin_values(bins: int) -> npt.NDArray[np.float64]:
    """The middle of each bin, in (0, 1)."""
    return (np.arange(bins) + 0.5) / bins


def squared_error_of_bins(outputs: Tensor, labels: Tensor) -> Tensor:
    """(expected value of the bin - value of the true bin)², in [0, 1), of logits ``(examples, bins)`` and labels."""
    values = torch.from_numpy(bin_values(outputs.shape[1])).to(outputs)
    return (outputs.softmax(1) @ values - values[labels.long()]).square()


@dataclass(frozen=True)
class Standardization:
    """Means and standard deviations of training data ``(dimensions,)``; constant dimensions are only shifted."""

    mean: npt.NDArray[np.float64]
    deviation: npt.NDArray[np.float64]

    @staticmethod
    def of(data: npt.NDArray[Any]) -> "Standardization":
        """The statistics of data ``(examples, ..., dimensions)``, over all but the last dimension."""
        rows = data.reshape(-1, data.shape[-1]).astype(np.float64)
        deviation = rows.std(0)
        return Standardization(rows.mean(0), np.where(deviation > 0, deviation, 1.0))

    def __call__(self, data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The data, standardized."""
        return ((data - self.mean) / self.deviation).astype(np.float32)


@dataclass(frozen=True)
class ReturnExamples:
    """The inputs and targets of networks.

    Attributes:
        inputs: s and the actions, ``(examples, observations + 16 · actions)`` float32.
        labels: the bin of the return, ``(examples,)`` int64.
        frames: states and rewards, ``(examples, 16, observations + 1)`` float32; privileged.
    """

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    frames: npt.NDArray[np.float32]


def standardized(train: MujocoTrajectories, wanted: MujocoTrajectories, bins: int = 32) -> ReturnExamples:
    """Examples, standardized and binned by the training data; the states in between are standardized like s."""

    def flat(actions: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
        return actions.reshape(len(actions), -1)

    state, action = Standardization.of(train.state), Standardization.of(flat(train.actions))
    reward = Standardization.of(train.rewards[..., None])
    return ReturnExamples(
        np.concatenate([state(wanted.state), action(flat(wanted.actions))], 1),
        ReturnBins(train.returns, bins).labels(wanted.returns),
        np.concatenate([state(wanted.states), reward(wanted.rewards[..., None])], 2),
    )


def disturbed(
    frames: npt.NDArray[np.float32], seed: int, permute: bool = False, noise: int = 0
) -> npt.NDArray[np.float32]:
    """Frames ``(examples, frames, numbers)`` with less information, as in the thesis's ablations.

    The last ``noise`` frames are N(0, 1); with ``permute`` the frames of each example are shuffled in another order.
    """
    drawn = np.random.default_rng([seed, 1])
    changed = frames.copy()
    if noise:
        changed[:, -noise:] = drawn.standard_normal(changed[:, -noise:].shape)
    if permute:
        order = drawn.permuted(np.tile(np.arange(frames.shape[1]), (len(frames), 1)), axis=1)
        changed = np.take_along_axis(changed, order[..., None], 1)
    return changed
