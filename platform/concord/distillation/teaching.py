"""Teaching losses: the distance of a student's activations from the teacher's targets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from concord.errors import ArgumentError, InputError

TeachingLoss = Callable[[Tensor, Any], Tensor]
"""Maps a layer's activations h ``(examples, ...)`` and what the teacher says of them to a scalar."""


def squared_error(activations: Tensor, targets: Tensor) -> Tensor:
    """The mean over examples and units of (h - h*)²."""
    _require_alike(activations, targets)
    return (activations - targets).square().mean()


def divergence(activations: Tensor, targets: Tensor) -> Tensor:
    """KL(teacher ‖ student) of two tensors of logits ``(examples, ..., classes)``, the mean over examples."""
    _require_alike(activations, targets)
    found, taught = (each.flatten(0, -2).log_softmax(1) for each in (activations, targets))
    return (taught.exp() * (taught - found)).sum() / len(taught)  # kl_div has no rule for vmap


@dataclass(frozen=True)
class GatedError:
    """The mean of σ(m / scale - offset) (h - h*)², for a teacher of h* and gates m, which can leave units untaught.

    Args:
        scale: the scale of the gates' logits m.
        offset: closes the gates nearly at first.

    Raises:
        InputError: the scale is not above 0, or a number is not finite.
    """

    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ArgumentError("scale", self.scale, "must be a finite number above 0")
        if not math.isfinite(self.offset):
            raise ArgumentError("offset", self.offset, "must be a finite number")

    def __call__(self, activations: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of activations against a pair (h*, m), all of one shape."""
        if not isinstance(targets, tuple | list) or len(targets) != 2:
            raise InputError(f"teacher: gives {type(targets).__name__} for a layer; a gated loss needs a pair (h*, m)")
        wanted, gates = targets
        for each in (wanted, gates):
            _require_alike(activations, each)
        return (torch.sigmoid(gates / self.scale - self.offset) * (activations - wanted).square()).mean()


@dataclass(frozen=True)
class Teaching:
    """The taught layers and the teaching loss, α Σ_k L_t(h_k, h*_k).

    Args:
        weight: α.
        loss: L_t, :func:`squared_error`, :func:`divergence`, a :class:`GatedError`, or a function of your own.
        layers: names (in ``model.named_modules()``) of the modules whose outputs are h_k. None: the model's outputs.
            The teacher returns one layer's argument of the loss; for several layers, a tuple of them.

    Raises:
        InputError: the weight is negative or not finite.
    """

    weight: float
    loss: TeachingLoss = squared_error
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ArgumentError("teaching_weight", self.weight, "must be a finite number, not below 0")

    def __call__(self, activations: Sequence[Tensor], targets: Any) -> Tensor:
        """The loss of all taught layers' activations, with its weight.

        Raises:
            InputError: the teacher's targets do not fit the layers.
        """
        if len(activations) == 1:
            return self.weight * self.loss(activations[0], targets)
        if not isinstance(targets, tuple | list) or len(targets) != len(activations):
            found = f"{len(targets)} targets" if isinstance(targets, tuple | list) else type(targets).__name__
            raise InputError(f"teacher: gives {found}; expected a tuple of {len(activations)}, one a layer")
        losses = [self.loss(each, target) for each, target in zip(activations, targets, strict=True)]
        return self.weight * torch.stack(losses).sum()


def _require_alike(activations: Tensor, targets: Any) -> None:
    """Refuse targets of another shape (InputError), which PyTorch would broadcast."""
    found = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
    if found != tuple(activations.shape):
        raise InputError(f"teacher: gives {found} for a layer of the student that has {tuple(activations.shape)}")
