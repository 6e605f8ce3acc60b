"""Steps of an agent in its environments, gathered as proximal policy optimization wants them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import log_softmax

from concord.reinforcement.advantages import RewardScale, advantages
from concord.reinforcement.procgen_environment import ProcgenVectorEnv


@dataclass(frozen=True)
class Samples:
    """What an agent did and saw; row i of each array is one step in one environment.

    Attributes:
        frames: ``(rows, 64, 64, 3)`` uint8, what the action was chosen from.
        actions: ``(rows,)`` int64.
        logits: ``(rows, actions)`` float32, of the policy that chose.
        log_probabilities: ``(rows,)`` float32, of the actions.
        advantages: ``(rows,)`` float32, generalized advantage estimates of scaled rewards.
        targets: ``(rows,)`` float32, of the value function.
        returns: sums of rewards (not scaled) of the episodes that ended.
        lengths: steps of those episodes.
    """

    frames: npt.NDArray[np.uint8]
    actions: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    log_probabilities: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    targets: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.actions)


class Sampler:
    """An agent's environments, which go on from one call to the next.

    Args:
        environment: with as many environments as are to be stepped together.
        steps: of each environment, a call.
        discount, decay: γ and λ of the advantages.
        autocast: what the network computes in.
        device: where the network is.
    """

    def __init__(
        self,
        environment: ProcgenVectorEnv,
        *,
        steps: int,
        discount: float,
        decay: float,
        autocast: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.environment = environment
        self.scale = RewardScale()
        self._steps, self._discount, self._decay = steps, discount, decay
        self._autocast, self._device = autocast, torch.device(device)
        self._frames: npt.NDArray[np.uint8] | None = None

    @torch.no_grad()
    def sample(self, network: nn.Module) -> Samples:
        """Let the network act, drawing from its policy, for the sampler's number of steps.

        Args:
            network: maps frames to logits and values, as :class:`~concord.reinforcement.actor_critic.ActorCritic`.
        """
        environment, steps, count = self.environment, self._steps, self.environment.num_envs
        if self._frames is None:
            self._frames, _ = environment.reset()
        shape = (steps, count)
        frames = np.empty((*shape, *self._frames.shape[1:]), np.uint8)
        # A buffer for each kind of number, in which the network's answers are kept where they were computed.
        logits: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        chosen: list[torch.Tensor] = []
        rewards, ends = np.empty(shape, np.float32), np.empty(shape, np.bool_)
        returns: list[Any] = []
        lengths: list[Any] = []
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast != torch.float32):
            for step in range(steps):
                frames[step] = self._frames
                answer, value = network(torch.from_numpy(self._frames).to(self._device))
                action = torch.multinomial(answer.softmax(1), 1).squeeze(1)
                self._frames, reward, ended, _, info = environment.step(action.cpu().numpy())
                logits.append(answer)
                values.append(value)
                chosen.append(action)
                rewards[step], ends[step] = self.scale(reward, ended), ended
                if "episode" in info:
                    returns.append(info["episode"]["r"][ended])
                    lengths.append(info["episode"]["l"][ended])
            last = network(torch.from_numpy(self._frames).to(self._device))[1].cpu().numpy()
        all_logits, actions = torch.stack(logits), torch.stack(chosen)
        log_probabilities = log_softmax(all_logits, 2).gather(2, actions[..., None]).squeeze(2)
        expected = torch.stack(values).cpu().numpy()
        estimates = advantages(rewards, expected, ends, last, self._discount, self._decay)
        return Samples(
            frames=frames.reshape(-1, *frames.shape[2:]),
            actions=actions.flatten().cpu().numpy(),
            logits=all_logits.flatten(0, 1).cpu().numpy(),
            log_probabilities=log_probabilities.flatten().cpu().numpy(),
            advantages=estimates.ravel(),
            targets=(estimates + expected).ravel(),
            returns=np.concatenate(returns) if returns else np.empty(0, np.float32),
            lengths=np.concatenate(lengths) if lengths else np.empty(0, np.int64),
        )
