"""Finds the frame of a window that a prediction matches best, and defines the losses of frames.

A loss of frames has three functions of a model's ``outputs``: the frames that are fed back, the differentiable loss
against one target, and the losses against every frame of a window, without a gradient::

    loss = CrossEntropy()
    loss.frames(outputs)            # (trajectories, ...)
    loss(outputs, targets)          # (trajectories,), to be differentiated
    loss.costs(outputs, window)     # (trajectories, window), for an argmin

Any object with these three functions can be the loss of :func:`~concord.dynamics.unroll`.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus


class FrameLoss(Protocol):
    """The loss of a model's outputs, ``(trajectories, ...)``, as predictions of frames of the same shape."""

    def frames(self, outputs: Tensor) -> Tensor:
        """The frames of these outputs, differentiable; they are fed back."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each trajectory, ``(trajectories,)``, differentiable in the outputs."""

    def costs(self, outputs: Tensor, window: Tensor) -> Tensor:
        """``(trajectories, window)``: the losses against ``window`` ``(trajectories, window, ...)``.

        They may differ from the loss by a constant for each trajectory, which does not change the argmin.
        """


def as_float(frames: Tensor) -> Tensor:
    """Bytes (0 to 255) as float32 of 0 to 1; floating point is unchanged."""
    return frames if frames.is_floating_point() else frames.to(torch.float32) / 255


class CrossEntropy:
    """Binary cross-entropy of logits s, the mean over pixels: ℓ(x) = mean softplus(s) - ⟨x, s⟩/P.

    Thesis, appendix A.0.1 and A.0.2; computed from logits, it is finite also if the sigmoid is saturated, without
    a small number inside the logarithm. It is linear in its target, so a gray frame is never matched exactly.
    """

    def frames(self, outputs: Tensor) -> Tensor:
        """The probabilities, float32."""
        return outputs.float().sigmoid()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Nats a pixel; targets are in [0, 1]."""
        logits = outputs.float()
        return (softplus(logits) - targets * logits).flatten(1).mean(1)

    def costs(self, outputs: Tensor, window: Tensor) -> Tensor:
        """Nats a pixel, less the cost of the window's first frame.

        One product of the window with the logits. Successive frames are nearly equal, so the product takes their
        differences from the first one: these are exact in float32, and small sums tell near-ties apart. Equal frames
        cost the same.
        """
        logits = outputs.detach().float().flatten(1)
        differences = window.flatten(2).to(torch.float32)
        differences = differences - differences[:, :1]
        scale = logits.shape[1] * (1 if window.is_floating_point() else 255)
        # Not by a matrix product, in which rows that are alike may be rounded differently: of equal frames the first
        # is to be found.
        return differences.mul_(logits[:, None]).sum(2) / -scale


class SquaredError:
    """The mean of squared differences, for states of any range; outputs are the frames themselves."""

    def frames(self, outputs: Tensor) -> Tensor:
        """The outputs."""
        return outputs

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the numbers of a frame."""
        return (outputs - targets).square().flatten(1).mean(1)

    def costs(self, outputs: Tensor, window: Tensor) -> Tensor:
        """The mean over the numbers of a frame."""
        return (as_float(window) - outputs.detach()[:, None]).square().flatten(2).mean(2)


@torch.no_grad()
def best_match(loss: FrameLoss, outputs: Tensor, frames: Tensor, rows: Tensor, first: Tensor, width: Tensor) -> Tensor:
    """The distance from ``first`` to the frame that each output matches best; of equals the nearest.

    Args:
        loss: the loss of frames.
        outputs: the model's outputs, ``(trajectories, ...)``.
        frames: the frames of all trajectories, ``(all, length, ...)``; bytes or floating point.
        rows: the row in ``frames`` of each output, ``(trajectories,)`` int64, on the device of ``frames``.
        first: the beginning of each window, int64 ``(trajectories,)``, on the CPU.
        width: the number of frames of each window, at least 1; int64 ``(trajectories,)``, on the CPU.

    Returns:
        int64 ``(trajectories,)``, on the CPU, from 0 to ``width`` - 1.
    """
    ahead = torch.arange(int(width.max()))
    beyond = ahead >= width[:, None]
    places = first[:, None] + ahead.minimum(width[:, None] - 1)  # never a frame of the padding
    costs = loss.costs(outputs, frames[rows[:, None], places.to(frames.device)])
    return costs.masked_fill(beyond.to(costs.device), torch.inf).argmin(1).cpu()
