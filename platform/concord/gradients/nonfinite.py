"""Finds environments or examples whose gradients are not finite, and applies the policy for them."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from concord.errors import ArgumentError
from concord.gradient_policies import NonFinite


class NonFiniteGradientError(FloatingPointError):
    """An environment's gradient has an infinite or undefined component.

    Attributes:
        environments: the names of those environments.
        step: the step at which it happened, counted from 0.
    """

    def __init__(self, environments: Sequence[str], step: int) -> None:
        self.environments = tuple(environments)
        self.step = step
        super().__init__(
            f"the gradient of environment {', '.join(self.environments)} is not finite at step {step}; "
            "lower the learning rate, clip, or leave such environments out of the step with nonfinite=skip"
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # The default would call the class with the message alone when the error crosses a process boundary.
        return NonFiniteGradientError, (self.environments, self.step)


def check_nonfinite(nonfinite: Any) -> None:
    """Refuse a value that is neither a :data:`NonFinite` nor None (ArgumentError)."""
    if nonfinite is not None and nonfinite not in get_args(NonFinite):
        raise ArgumentError("nonfinite", nonfinite, f"must be one of {', '.join(get_args(NonFinite))}")


def presence(gradient: Tensor) -> Tensor:
    """1 where all components of a flat gradient are finite, -1 where they are not: ``(1,)``, float32."""
    # Extremes, since a sum of finite numbers may overflow; as fast as a sum, and twenty times as isfinite().all().
    lowest, highest = gradient.aminmax()
    return torch.where(torch.isfinite(lowest) & torch.isfinite(highest), 1.0, -1.0)[None]


def collect_finite(
    groups: int,
    policy: NonFinite,
    device: torch.device,
    collect: Callable[[Tensor | None], object],
    finite: Callable[[], bool],
    find: Callable[[Tensor | None], Tensor],
) -> Tensor | None:
    """Sum the gradients of all groups (environments or examples); with ``skip`` of the finite groups alone.

    Args:
        groups: the number of groups.
        policy: the policy; with ``propagate`` the gradients are summed once and not checked.
        device: the device of the random numbers.
        collect: sums the gradients of the groups of these numbers (None: all).
        finite: returns whether the sums are finite.
        find: returns which groups of these numbers have finite gradients, bool.

    Returns:
        Whether each group is in the sums, ``(groups,)`` bool; None: all are.
    """
    left: Tensor | None = None
    while True:
        if policy == "propagate":  # the host does not wait for the device
            collect(left)
            break
        random = random_state(device)
        collect(left)
        if finite():
            break
        # Seldom: look at each gradient, drawing at random what was drawn before, so that the same ones come.
        set_random_state(device, random)
        found = find(left)
        left = torch.arange(groups, device="cpu") if left is None else left
        left = left[found] if not bool(found.all()) else left[:0]  # a sum that alone is not finite cannot be used
        if policy == "raise" or len(left) == 0:
            break
    if left is None:
        return None
    return torch.zeros(groups, dtype=torch.bool, device="cpu").index_fill(0, left, value=True)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The state of the default generators, the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Restore a state of :func:`random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
