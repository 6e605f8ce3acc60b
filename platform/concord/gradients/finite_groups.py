"""Groups whose gradients are not finite are found, and left out of a step; a group is an environment or an example."""

from collections.abc import Callable

import torch
from torch import Tensor

from concord.gradients.nonfinite import NonFinite


def collect_finite(
    groups: int,
    policy: NonFinite,
    device: torch.device,
    collect: Callable[[Tensor | None], object],
    finite: Callable[[], bool],
    find: Callable[[Tensor | None], Tensor],
) -> Tensor:
    """Sum the gradients of all groups, and then of those alone that are finite, where that is the policy.

    Args:
        groups: the number of groups.
        policy: with ``propagate`` they are summed once, and nothing is looked at.
        device: where random numbers are drawn.
        collect: sums the gradients of the groups of these numbers; None: of all.
        finite: whether the sums are.
        find: which groups of these numbers have finite gradients, bool.

    Returns:
        Which groups are in the sums, ``(groups,)`` bool.
    """
    left: Tensor | None = None
    while True:
        random = random_state(device)
        collect(left)
        if policy == "propagate" or finite():  # under propagate the host does not wait for the device
            break
        # Seldom: look at each gradient, drawing at random what was drawn before, so that the same ones come.
        set_random_state(device, random)
        found = find(left)
        left = torch.arange(groups) if left is None else left
        left = left[found] if not bool(found.all()) else left[:0]  # a sum that alone is not finite cannot be used
        if policy == "raise" or len(left) == 0:
            break
    in_sums = torch.full((groups,), left is None)
    return in_sums if left is None else in_sums.index_fill(0, left, value=True)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The state of the default generators, the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Draw again what was drawn after :func:`random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
