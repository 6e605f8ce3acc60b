"""The loop of adaptive skip intervals: predict, find the frame that is meant, go on from there (thesis, algorithm 1).

For one trajectory x[0], …, x[last]::

    t = 0; x = x[0]
    while t < last:
        p = f(x); T = min(t + H, last)
        t = one of t+1, …, T, drawn evenly with probability μ, else argmin ℓ(p, x[s]) over t < s <= T
        add ℓ(p, x[t])
        x = x[t] with probability ε, else p

No gradient passes through the argmin; where p is fed back, it passes through f again and again, to the beginning or to
the last frame of the data that was fed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from concord.dynamics.matching import CrossEntropy, FrameLoss, as_float, best_match
from concord.errors import ArgumentError, InputError


@dataclass(frozen=True)
class Skips:
    """How far a prediction reaches.

    Args:
        horizon: H, the farthest frame that it may match.
        stride: so many frames, always; a last piece that is shorter is left out. None: what it matches best.

    Raises:
        InputError: a number is below 1.
    """

    horizon: int = 21
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ArgumentError("horizon", self.horizon, "must be at least 1")
        if self.stride is not None and self.stride < 1:
            raise ArgumentError("stride", self.stride, "must be at least 1")

    @property
    def shortest(self) -> int:
        """Frames that a trajectory needs."""
        return 1 + (self.stride or 1)


@dataclass(frozen=True)
class Unrolled:
    """What a batch of trajectories gave.

    Attributes:
        losses: Σℓ of each trajectory, ``(trajectories,)``, differentiable in the model's parameters.
        times: int64 ``(trajectories, most predictions + 1)``: 0, and the frame that each prediction was compared with;
            -1 after the last one. On the CPU.
    """

    losses: Tensor
    times: Tensor

    @property
    def counts(self) -> Tensor:
        """How many predictions each trajectory had, int64 ``(trajectories,)``."""
        return (self.times >= 0).sum(1) - 1


def unroll(
    model: Callable[[Tensor], Tensor],
    frames: Tensor,
    lengths: Tensor,
    skips: Skips,
    *,
    loss: FrameLoss | None = None,
    exploration: float = 0.0,
    sampling: float = 0.0,
    draws: Tensor | None = None,
) -> Unrolled:
    """Follow trajectories with the model's predictions.

    A trajectory that has come to its end is no longer in the model's batch.

    Args:
        model: maps frames ``(trajectories, ...)``, floating point, to outputs of the same shape.
        frames: ``(trajectories, longest, ...)``, bytes for 0 to 1, or floating point. What is beyond a trajectory's
            length is never looked at.
        lengths: of the trajectories, in frames; int64 ``(trajectories,)``.
        skips: how far a prediction reaches.
        loss: of outputs; None: :class:`CrossEntropy`.
        exploration: μ.
        sampling: ε.
        draws: numbers in [0, 1), ``(trajectories, predictions, 3)``, on the CPU: whether to explore, where to, and
            whether to go on from the data. None: from PyTorch's default generator.

    Raises:
        InputError: a trajectory is too short or is not in ``frames``, or the outputs are not of the frames' shape.
    """
    loss = loss or CrossEntropy()
    lengths = lengths.cpu()
    _check(frames, lengths, skips)
    trajectories, device = len(frames), frames.device
    if draws is None:
        draws = torch.rand(trajectories, int(lengths.max()) - 1, 3, dtype=torch.float64)
    last, reach = lengths - 1, skips.stride or 1
    rows, at = torch.arange(trajectories), torch.zeros(trajectories, dtype=torch.int64)
    state = as_float(frames[:, 0])
    sums, added = torch.zeros(trajectories, device=device), []
    times = [at]
    while len(rows):
        outputs = model(state)
        if outputs.shape != state.shape:
            raise InputError(f"model: gives {tuple(outputs.shape)} for frames {tuple(state.shape)}; they must be alike")
        coins, places = draws[rows, len(times) - 1], rows.to(device)
        at = _next(loss, outputs, frames, places, at, last[rows], skips, exploration, coins)
        targets = as_float(frames[places, at.to(device)])
        added.append((places, loss(outputs, targets)))
        times.append(torch.full((trajectories,), -1).index_put((rows,), at))
        state = _fed(loss, outputs, targets, coins[:, 2] < sampling)
        going = at + reach <= last[rows]
        if not bool(going.all()):
            rows, at, state = rows[going], at[going], state[going.to(device)]
    for places, losses in added:
        sums = sums.to(losses.dtype).index_add(0, places, losses)
    return Unrolled(sums, torch.stack(times, 1))


def _next(
    loss: FrameLoss,
    outputs: Tensor,
    frames: Tensor,
    places: Tensor,
    at: Tensor,
    last: Tensor,
    skips: Skips,
    exploration: float,
    coins: Tensor,
) -> Tensor:
    """The frames that the outputs are compared with."""
    if skips.stride is not None:
        return at + skips.stride
    width = (last - at).clamp(max=skips.horizon)
    explored = coins[:, 0] < exploration
    ahead = (coins[:, 1] * width).long().minimum(width - 1)
    if not bool(explored.all()):
        ahead = torch.where(explored, ahead, best_match(loss, outputs, frames, places, at + 1, width))
    return at + 1 + ahead


def _fed(loss: FrameLoss, outputs: Tensor, targets: Tensor, known: Tensor) -> Tensor:
    """The frames from which to go on: those of the data where ``known``, elsewhere those predicted."""
    if bool(known.all()):
        return targets
    if not bool(known.any()):
        return loss.frames(outputs)
    mask = known.to(outputs.device).view(-1, *[1] * (outputs.ndim - 1))
    return torch.where(mask, targets, loss.frames(outputs))


def _check(frames: Tensor, lengths: Tensor, skips: Skips) -> None:
    if frames.ndim < 2 or lengths.shape != frames.shape[:1] or len(lengths) == 0:
        raise InputError(
            f"frames {tuple(frames.shape)} and lengths {tuple(lengths.shape)}: expected (trajectories, longest, ...) "
            "and (trajectories,), at least one"
        )
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < skips.shortest:
        needed = "at least 2" if skips.stride is None else f"{skips.shortest} with --stride {skips.stride}"
        number = int(lengths.argmin())
        raise InputError(f"trajectory {number} of the batch: it has {shortest} frames; it needs {needed}")
    if longest > frames.shape[1]:
        raise InputError(f"lengths: {longest} is more than the {frames.shape[1]} frames that are there")
