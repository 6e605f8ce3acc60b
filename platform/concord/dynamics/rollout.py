"""Rollouts: from one frame on the model receives only its own predictions (thesis, §2.3.1)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from concord.dynamics.matching import CrossEntropy, FrameLoss, as_float
from concord.errors import ArgumentError, InputError


@torch.no_grad()
def rollout(model: Callable[[Tensor], Tensor], first: Tensor, depth: int, *, loss: FrameLoss | None = None) -> Tensor:
    """The frames that a model predicts after the first ones.

    Args:
        model: maps frames to outputs of the same shape.
        first: the first frames, ``(trajectories, ...)``, bytes or floating point.
        depth: D, the number of predictions.
        loss: the loss that turns outputs into frames; None takes :class:`CrossEntropy`.

    Returns:
        floating point ``(trajectories, depth, ...)``, without the first frames.

    Raises:
        InputError: the depth is below 1.
    """
    if depth < 1:
        raise ArgumentError("depth", depth, "must be at least 1")
    loss = loss or CrossEntropy()
    state, found = as_float(first), []
    for _ in range(depth):
        state = loss.frames(model(state))
        found.append(state)
    return torch.stack(found, 1)


def rollout_depth(predictions: Tensor) -> int:
    """The number of predictions of a rollout: 1 more than the 99th percentile of the number that matching needs.

    As in the authors' code the percentile is of means over batches of two, by linear interpolation.

    Args:
        predictions: the number of predictions of each trajectory, ``(trajectories,)``.
    """
    means = torch.stack([part.double().mean() for part in predictions.split(2)])
    return 1 + math.ceil(float(means.quantile(0.99)) - 1e-9)


def accuracies(shares: Tensor, labels: Tensor) -> tuple[float, float]:
    """The soft and the hard accuracy of the shares of classes.

    Args:
        shares: ψ, the share of each class, ``(trajectories, classes)``, not negative, of any sum above 0.
        labels: the true classes, int64 ``(trajectories,)``.

    Returns:
        The mean share of the true class, as in the thesis, and the fraction of trajectories where it is the largest; a
        tie between n classes counts 1 / n.

    Raises:
        InputError: shapes do not fit.
    """
    if shares.ndim != 2 or labels.shape != shares.shape[:1]:
        raise InputError(f"shares {tuple(shares.shape)} and labels {tuple(labels.shape)}: do not fit each other")
    normed = shares / shares.sum(1, keepdim=True)
    labels = labels.to(shares.device)
    soft = normed.gather(1, labels[:, None]).mean()
    largest = (shares == shares.amax(1, keepdim=True)).double()
    hard = largest.gather(1, labels[:, None])[:, 0] / largest.sum(1)
    return float(soft), float(hard.mean())
