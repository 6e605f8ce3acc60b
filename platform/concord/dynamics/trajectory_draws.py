"""Random numbers that depend on a seed, a trajectory and a step alone.

The place of a trajectory in its batch, the padding, the process and a resume change nothing: each number is a hash of
its counters.
"""

import torch
from torch import Tensor

from concord.aggregation.draws import GAMMA, mixed, shifted


def uniform(seed: int, keys: Tensor, step: int, predictions: int, each: int) -> Tensor:
    """Numbers in [0, 1), float64 ``(trajectories, predictions, each)``, on the CPU.

    ``keys`` of the trajectories are int64 ``(trajectories,)``. With fewer predictions the numbers are the
    first of these.
    """
    start = mixed(torch.tensor([seed], device="cpu") + GAMMA)
    state = mixed((start ^ mixed(keys.cpu().long() + GAMMA)) + GAMMA)
    state = mixed(state + torch.tensor(step, device="cpu") * GAMMA + GAMMA)
    words = mixed(state[:, None] + torch.arange(predictions * each, device="cpu") * GAMMA + GAMMA)
    return (shifted(words, 11).double() * 2.0**-53).view(-1, predictions, each)
