"""A lower bound on a network's inconsistency by its true losses: searches for points of N_e and checks them.

From θ* the search moves along a direction and climbs |L_e' - L_e(θ*)| within N_e: along the gradient of L_e' without
its part along the gradient of L_e, which would leave N_e first. A step is taken only if L_e is within ε of L_e(θ*) at
its end and at points between. So a path within N_e from θ* is known, and the value at its end is a lower bound of I^ε,
except that L_e between the points is unknown.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from concord.analysis.consistency.environment_losses import EnvironmentLosses

_HALVINGS = 12  # of the first step along a direction
_STEPS = 8  # of the climb
_BACKTRACKS = 5  # of a step of the climb
_FIRST_STEP, _LONGER = 0.1, 1.5  # of the radius, the first step's length; how much longer the next one is tried
_CHECKS = 3  # points of each segment at which L_e is checked, its end among them


class Bound(NamedTuple):
    """The largest |L_e'(θ) - L_e(θ*)| found for a pair of environments, and the path of offsets to it."""

    value: float
    path: tuple[Tensor, ...]


def certified_bound(
    losses: EnvironmentLosses, own: str, other: str, epsilon: float, radius: float, directions: Iterable[Tensor]
) -> Bound:
    """The largest change of L_e' found within N_e and the ball ‖δ‖ ≤ ρ.

    The search starts along both senses of each direction ``(n,)``; ε and ρ (in units of θ) are above 0.
    """
    base = losses.at_solution[own]

    def change(offset: Tensor) -> float:
        return abs(losses.loss(other, offset) - base)

    def allowed(start: Tensor, end: Tensor) -> bool:
        """Whether the segment stays in N_e, at the points where it is checked."""
        places = (start + (end - start) * (place / _CHECKS) for place in range(_CHECKS, 0, -1))
        return all(abs(losses.loss(own, place) - base) <= epsilon for place in places)

    def climb(direction: Tensor) -> Bound:
        """Move along a direction as far as allowed, and climb from there."""
        path = [torch.zeros_like(direction)]
        reaches = (radius * 0.5**halvings for halvings in range(_HALVINGS))
        if (reach := next((each for each in reaches if allowed(path[0], each * direction)), None)) is not None:
            path.append(reach * direction)
        value, length = change(path[-1]), _FIRST_STEP * radius
        for _ in range(_STEPS):
            uphill = _uphill(losses, own, other, path[-1])
            norm = float(uphill.norm())
            if not 0 < norm < math.inf:
                break
            for _ in range(_BACKTRACKS):
                end = path[-1] + uphill * (length / norm)
                end *= min(1.0, radius / float(end.norm()))  # back into the ball, which is convex
                if (reached := change(end)) > value and allowed(path[-1], end):
                    break
                length /= 2
            else:
                break
            path.append(end)
            value, length = reached, length * _LONGER
        return Bound(value, tuple(path))

    start = torch.zeros_like(losses.solution)
    found = [climb(sense * direction / direction.norm()) for direction in directions for sense in (1.0, -1.0)]
    return max([Bound(change(start), (start,)), *found], key=lambda each: each.value)


def _uphill(losses: EnvironmentLosses, own: str, other: str, place: Tensor) -> Tensor:
    """The direction in which |L_e' - L_e(θ*)| grows and L_e does not change, to first order."""
    uphill, leaving = losses.gradient(other, place), losses.gradient(own, place)
    if losses.loss(other, place) < losses.at_solution[own]:
        uphill = -uphill
    return uphill - leaving * (uphill @ leaving) / (leaving @ leaving).clamp(min=1e-30)
