"""The model-based baseline (thesis, C.2.2.3): a network predicts one state after another, and so the return."""

from typing import Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from concord.gradients.risk import Batch, pair
from concord_jobs.distill_mujoco.simulator import HORIZON, MujocoTrajectories, ReturnBins, Standardization


class DynamicsModel(nn.Module):
    """Logits of a return's bins, from the rewards of predicted states.

    The network gets a state and an action, and predicts the next state and the reward. From x, the first state and all
    actions, it gets its own predicted state at each further step. The logits are those of the distribution over the
    two bins nearest to the predicted return's quantile whose mean is this quantile.

    Args:
        network: maps ``(..., observations + actions)`` to ``(..., observations + 1)``, all of them standardized.
        observations: number of observations in a state.
        totals: increasing sums of standardized rewards, ``(knots,)``.
        places: the quantile of each of them, in [0, 1]; linear in between.
        bins: number of bins.
    """

    totals: Tensor
    places: Tensor

    def __init__(self, network: nn.Module, observations: int, totals: Tensor, places: Tensor, bins: int) -> None:
        super().__init__()
        self.network, self.observations, self.bins = network, observations, bins
        self.register_buffer("totals", totals)
        self.register_buffer("places", places)

    @classmethod
    def of(cls, network: nn.Module, train: MujocoTrajectories, bins: int) -> Self:
        """A model for the returns of these training data."""
        reward = Standardization.of(train.rewards[..., None])
        shift, scale = HORIZON * reward.mean[0], reward.deviation[0]
        totals = np.unique(((train.returns - shift) / scale).astype(np.float32))  # increasing also in float32
        places = ReturnBins(train.returns, bins).places(totals * scale + shift).astype(np.float32)
        return cls(network, train.state.shape[1], torch.from_numpy(totals), torch.from_numpy(places), bins)

    def parts(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The state ``(examples, observations)`` and the actions ``(examples, 16, actions)`` of x."""
        state, actions = inputs[:, : self.observations], inputs[:, self.observations :]
        return state, actions.unflatten(1, (HORIZON, -1))

    def trajectory(self, state: Tensor, actions: Tensor) -> Tensor:
        """States and rewards, each predicted from the state before it, ``(examples, 16, observations + 1)``."""
        frames = []
        for action in actions.unbind(1):
            frames.append(self.network(torch.cat([state, action], 1)))
            state = frames[-1][:, :-1]
        return torch.stack(frames, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``(examples, bins)``."""
        total = self.trajectory(*self.parts(inputs))[..., -1].sum(1)
        last = len(self.totals) - 1
        right = torch.searchsorted(self.totals, total).clamp(1, last)
        left = right - 1
        share = (total - self.totals[left]) / (self.totals[right] - self.totals[left])
        place = torch.lerp(self.places[left], self.places[right], share.clamp(0, 1))
        middle = torch.arange(self.bins, device=inputs.device)
        near = (1 - (place[:, None] * self.bins - 0.5).clamp(0, self.bins - 1).sub(middle).abs()).clamp(min=1e-12)
        return near.log()


def trajectory_error(model: nn.Module, batch: Batch, step: int) -> Tensor:
    """The mean squared error of x*, predicted from the first state alone."""
    del step
    dynamics, state, actions, frames = _parts(model, batch)
    return mse_loss(dynamics.trajectory(state, actions), frames)


def transition_error(model: nn.Module, batch: Batch, step: int) -> Tensor:
    """The mean squared error of x*, each state and reward predicted from the true state before it."""
    del step
    dynamics, state, actions, frames = _parts(model, batch)
    before = torch.cat([state[:, None], frames[:, :-1, :-1]], 1)
    return mse_loss(dynamics.network(torch.cat([before, actions], 2)), frames)


def _parts(model: nn.Module, batch: Batch) -> tuple[DynamicsModel, Tensor, Tensor, Tensor]:
    dynamics = cast(DynamicsModel, model)
    inputs, targets = pair(batch)
    state, actions = dynamics.parts(inputs)
    return dynamics, state, actions, targets[:, 1:].unflatten(1, (HORIZON, -1))
