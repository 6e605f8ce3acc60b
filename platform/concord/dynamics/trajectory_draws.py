"""Random numbers that depend on a seed, a trajectory and a step alone.

The place of a trajectory in its batch, the padding, the process and a resume change nothing: each number is a hash of
its counters (splitmix64, Steele et al. 2014).
"""

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def uniform(seed: int, keys: Tensor, step: int, predictions: int, each: int) -> Tensor:
    """Numbers in [0, 1), float64 ``(trajectories, predictions, each)``, on the CPU.

    ``keys`` of the trajectories are int64 ``(trajectories,)``. With fewer predictions the numbers are the
    first of these.
    """
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed], np.int64).view(np.uint64))
        state = _mixed(start ^ _mixed(keys.cpu().numpy().astype(np.int64).view(np.uint64)))
        state = _mixed(state + np.uint64(step) * _GOLDEN)
        counters = np.arange(predictions * each, dtype=np.uint64) * _GOLDEN
        words = _mixed(state[:, None] + counters)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53).view(-1, predictions, each)


def _mixed(words: _Words) -> _Words:
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed
