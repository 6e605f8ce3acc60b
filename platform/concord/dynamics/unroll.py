"""The loop of adaptive skip intervals: predict, match a frame, continue from there (thesis, algorithm 1).

For one trajectory x[0], …, x[last]::

    t = 0; x = x[0]
    while t < last:
        p = f(x); T = min(t + H, last)
        t = one of t+1, …, T, drawn uniformly with probability μ, else argmin ℓ(p, x[s]) over t < s <= T
        add ℓ(p, x[t])
        x = x[t] with probability ε, else p

No gradient passes through the argmin. If p is fed back, the gradient passes through f repeatedly, back to the last
frame of the data that was fed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from concord.dynamics.matching import CrossEntropy, FrameLoss, as_float, best_match
from concord.errors import ArgumentError, InputError


@dataclass(frozen=True)
class SkipConfig:
    """The matching of predictions.

    Args:
        horizon: H, the largest distance of a matched frame.
        stride: a fixed distance in frames; a shorter rest of a trajectory is left out. None takes the best match.

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
        """The least number of frames of a trajectory."""
        return 1 + (self.stride or 1)


@dataclass(frozen=True)
class Unrolled:
    """The result of :func:`unroll` for a batch.

    Attributes:
        losses: Σℓ of each trajectory, ``(trajectories,)``, differentiable in the model's parameters.
        times: int64 ``(trajectories, most predictions + 1)``: 0, then the matched frame of each prediction, then -1.
            On the CPU.
    """

    losses: Tensor
    times: Tensor

    @property
    def counts(self) -> Tensor:
        """The number of predictions of each trajectory, int64 ``(trajectories,)``."""
        return (self.times >= 0).sum(1) - 1


def unroll(
    model: Callable[[Tensor], Tensor],
    frames: Tensor,
    lengths: Tensor,
    skips: SkipConfig,
    *,
    loss: FrameLoss | None = None,
    exploration: float = 0.0,
    sampling: float = 0.0,
    draws: Tensor | None = None,
) -> Unrolled:
    """Predict along trajectories, and sum the losses of the predictions.

    Finished trajectories leave the model's batch. With a fixed stride the segments between two frames of the data are
    predicted in one batch.

    Args:
        model: maps frames ``(trajectories, ...)``, floating point, to outputs of the same shape.
        frames: ``(trajectories, longest, ...)``, bytes for 0 to 1, or floating point. Frames beyond a
            trajectory's length are never read.
        lengths: the trajectories' numbers of frames; int64 ``(trajectories,)``.
        skips: the matching of predictions.
        loss: the loss of frames; None takes :class:`CrossEntropy`.
        exploration: μ, the probability of a random target.
        sampling: ε, the probability of a start from the frame of the data.
        draws: numbers in [0, 1), ``(trajectories, predictions, 3)``, on the CPU, for exploration, its target,
            and sampling. None draws from PyTorch's default generator.

    Raises:
        InputError: a trajectory is too short, or longer than ``frames``; the outputs have another shape than the
            frames; or there are too few draws.
    """
    loss = loss or CrossEntropy()
    lengths = lengths.cpu()
    _check(frames, lengths, skips)
    needed = (len(frames), int(lengths.max()) - 1, 3)
    if draws is None:
        draws = torch.rand(*needed, dtype=torch.float64)
    elif draws.ndim != 3 or draws.shape[::2] != needed[::2] or draws.shape[1] < needed[1]:
        raise InputError(f"draws {tuple(draws.shape)}: expected {needed}, or of more predictions")
    stride = 1 if skips.horizon == 1 and skips.stride is None else skips.stride
    if stride is not None:
        return _strided(model, frames, lengths, stride, loss, draws[..., 2] < sampling)
    return _adaptive(model, frames, lengths, skips.horizon, loss, exploration, sampling, draws)


def _adaptive(
    model: Callable[[Tensor], Tensor],
    frames: Tensor,
    lengths: Tensor,
    horizon: int,
    loss: FrameLoss,
    exploration: float,
    sampling: float,
    draws: Tensor,
) -> Unrolled:
    """Predict one after the other: each prediction is matched before the next one."""
    trajectories, device, last = len(frames), frames.device, lengths - 1
    rows, at = torch.arange(trajectories), torch.zeros(trajectories, dtype=torch.int64)
    state, times, added = as_float(frames[:, 0]), [at], []
    while len(rows):
        outputs = _predicted(model, state)
        coins, places = draws[rows, len(times) - 1], rows.to(device)
        at = _matched(loss, outputs, frames, places, at, last[rows], horizon, exploration, coins)
        targets = as_float(frames[places, at.to(device)])
        added.append((places, loss(outputs, targets)))
        times.append(torch.full((trajectories,), -1).index_put((rows,), at))
        state = _fed(loss, outputs, targets, coins[:, 2] < sampling)
        going = at < last[rows]
        if not bool(going.all()):
            rows, at, state = rows[going], at[going], state[going.to(device)]
    return Unrolled(_sums(added, trajectories, device), torch.stack(times, 1))


def _strided(
    model: Callable[[Tensor], Tensor], frames: Tensor, lengths: Tensor, stride: int, loss: FrameLoss, known: Tensor
) -> Unrolled:
    """Predict in parallel where the next frame is known beforehand.

    Pieces begin with a frame of the data: one batch holds the first predictions of all pieces, the next their second
    ones. ``known`` is whether to continue from the data after a prediction, bool ``(trajectories, predictions or
    more)``.
    """
    counts, device = (lengths - 1) // stride, frames.device
    number = torch.arange(int(counts.max()))
    made = number < counts[:, None]
    begins = torch.cat([made[:, :1], known[:, : len(number) - 1]], 1) & made
    rows, first = begins.nonzero(as_tuple=True)
    following = torch.cat([first[1:], first[:1]])
    ends = torch.cat([rows[1:] == rows[:-1], torch.tensor([False])])
    predictions, order = (torch.where(ends, following, counts[rows]) - first).sort(descending=True, stable=True)
    rows, at = rows[order], first[order] * stride
    state, added = as_float(frames[rows.to(device), at.to(device)]), []
    for going in (predictions > torch.arange(int(predictions[0]))[:, None]).sum(1).tolist():
        rows, at = rows[:going], at[:going] + stride
        outputs, places = _predicted(model, state[:going]), rows.to(device)
        added.append((places, loss(outputs, as_float(frames[places, at.to(device)]))))
        state = loss.frames(outputs)
    times = torch.where(made, (number + 1) * stride, -1)
    start = torch.zeros(len(frames), 1, dtype=torch.int64)
    return Unrolled(_sums(added, len(frames), device), torch.cat([start, times], 1))


def _predicted(model: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
    outputs = model(state)
    if outputs.shape != state.shape:
        raise InputError(f"model: gives {tuple(outputs.shape)} for frames {tuple(state.shape)}; they must be alike")
    return outputs


def _sums(added: Sequence[tuple[Tensor, Tensor]], trajectories: int, device: torch.device) -> Tensor:
    """The sum of each trajectory's losses, over batches of predictions."""
    sums = torch.zeros(trajectories, device=device)
    for places, losses in added:
        sums = sums.to(losses.dtype).index_add(0, places, losses)
    return sums


def _matched(
    loss: FrameLoss,
    outputs: Tensor,
    frames: Tensor,
    places: Tensor,
    at: Tensor,
    last: Tensor,
    horizon: int,
    exploration: float,
    coins: Tensor,
) -> Tensor:
    """The frames that the outputs are compared with."""
    width = (last - at).clamp(max=horizon)
    explored = coins[:, 0] < exploration
    ahead = (coins[:, 1] * width).long().minimum(width - 1)
    if not bool(explored.all()):
        ahead = torch.where(explored, ahead, best_match(loss, outputs, frames, places, at + 1, width))
    return at + 1 + ahead


def _fed(loss: FrameLoss, outputs: Tensor, targets: Tensor, known: Tensor) -> Tensor:
    """The frames to continue from: those of the data where ``known``, elsewhere the predicted ones."""
    if bool(known.all()):
        return targets
    if not bool(known.any()):
        return loss.frames(outputs)
    mask = known.to(outputs.device).view(-1, *[1] * (outputs.ndim - 1))
    return torch.where(mask, targets, loss.frames(outputs))


def _check(frames: Tensor, lengths: Tensor, skips: SkipConfig) -> None:
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
