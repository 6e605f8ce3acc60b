"""From rewards and values to what proximal policy optimization learns from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def advantages(
    rewards: Floats, values: Floats, ends: npt.NDArray[np.bool_], last: Floats, discount: float, decay: float
) -> Floats:
    """Generalized advantage estimates (Schulman et al., 2016, equation 16), of all environments at once.

    Args:
        rewards: ``(steps, environments)``, of each action.
        values: ``(steps, environments)``, of the states that the actions were chosen in.
        ends: ``(steps, environments)``, whether the episode ended with the action; nothing is expected after it.
        last: ``(environments,)``, the values of the states after the last action.
        discount: γ.
        decay: λ.

    Returns:
        ``(steps, environments)``; added to ``values`` they are the targets of the value function.
    """
    estimates = np.empty_like(rewards)
    following, estimate = last, np.zeros_like(last)
    for step in range(len(rewards) - 1, -1, -1):
        goes_on = discount * ~ends[step]
        estimate = rewards[step] + goes_on * following - values[step] + decay * goes_on * estimate
        estimates[step] = estimate
        following = values[step]
    return estimates


@dataclass
class RewardScale:
    """Divides rewards by the standard deviation of the discounted return so far, as OpenAI's baselines do.

    Attributes:
        discount: γ of the running return; theirs is .99 whatever the agent's is.
        limit: largest size of a scaled reward.
        count, mean, squares: how many returns were seen, their mean, and the sum of squared differences from it.
        running: ``(environments,)``, the discounted return of each environment since its episode began.
    """

    discount: float = 0.99
    limit: float = 10.0
    count: float = 1e-4
    mean: float = 0.0
    squares: float = 1e-4
    running: Floats | None = None

    def __call__(self, rewards: Floats, ends: npt.NDArray[np.bool_]) -> Floats:
        """The scaled rewards of one step, ``(environments,)``; the step's own returns are counted first."""
        if self.running is None or len(self.running) != len(rewards):
            self.running = np.zeros(len(rewards), np.float32)
        self.running = (self.running * self.discount + rewards).astype(np.float32)
        self._count(self.running)
        deviation = np.sqrt(self.squares / self.count + 1e-8)
        self.running[ends] = 0
        scaled: Floats = np.clip(rewards / deviation, -self.limit, self.limit).astype(np.float32)
        return scaled

    def _count(self, returns: Floats) -> None:
        """Chan's parallel update of mean and variance."""
        number, mean = len(returns), float(returns.mean())
        total = self.count + number
        self.squares += float(((returns - mean) ** 2).sum()) + (mean - self.mean) ** 2 * self.count * number / total
        self.mean += (mean - self.mean) * number / total
        self.count = total
