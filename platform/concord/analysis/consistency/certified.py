"""A lower bound on a network's inconsistency, on its true losses: points of N_e that are looked for and checked.

From θ* the search goes out along a direction and climbs |L_e' - L_e(θ*)| within N_e: along the gradient of L_e' less
its part along that of L_e, which would leave N_e first. A step is taken only if L_e stays within ε of L_e(θ*) at its
end and at points between, so a path from θ* to it within N_e is known and the value there is a part of the maximum in
I^ε (but for what L_e does between the points).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from concord.analysis.consistency.curvature import check_radius
from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.analysis.consistency.quadratic import check_epsilon

_HALVINGS = 12  # of the first step along a direction
_BACKTRACKS = 5  # of a step of the climb
_FIRST_STEP, _LONGER = 0.1, 1.5  # of the radius, the first step's length; how much longer the next one is tried


@dataclass(frozen=True)
class Bound:
    """What was found for a pair of environments.

    Attributes:
        value: the largest |L_e'(θ) - L_e(θ*)|.
        path: offsets of the points that lead to it, from 0 on, ``(n,)`` each; L_e was checked between any two.
    """

    value: float
    path: tuple[Tensor, ...]


def certified_bound(
    losses: EnvironmentLosses,
    own: str,
    other: str,
    epsilon: float,
    radius: float,
    directions: Iterable[Tensor],
    steps: int = 8,
    checks: int = 3,
) -> Bound:
    """The largest change of L_e' that is found within N_e and the ball ‖δ‖ ≤ ρ.

    Args:
        losses: of the network.
        own, other: e and e'.
        epsilon: ε, above 0.
        radius: ρ, above 0, in units of θ.
        directions: to begin with, ``(n,)`` each; both senses of each are tried.
        steps: of the climb, from each.
        checks: points of each segment at which L_e is checked, its end among them; at least 1.

    Raises:
        ArgumentError: ε or ρ is not above 0.
    """
    check_epsilon(epsilon)
    check_radius(radius)
    search = _Search(losses, own, other, epsilon, radius, checks)
    best = Bound(search.change(None), (torch.zeros(losses.size, dtype=losses.dtype, device=losses.device),))
    for direction in directions:
        for sense in (1.0, -1.0):
            found = search.climb(sense * direction / direction.norm(), steps)
            best = max(best, found, key=lambda each: each.value)
    return best


class _Search:
    def __init__(
        self, losses: EnvironmentLosses, own: str, other: str, epsilon: float, radius: float, checks: int
    ) -> None:
        self.losses, self.own, self.other = losses, own, other
        self.epsilon, self.radius, self.checks = epsilon, radius, checks
        self.base = losses.at_solution[own]

    def change(self, offset: Tensor | None) -> float:
        """|L_e'(θ* + δ) - L_e(θ*)|."""
        return abs(self.losses.loss(self.other, offset) - self.base)

    def allowed(self, start: Tensor, end: Tensor) -> bool:
        """Whether the segment stays in N_e, at the points where it is checked."""
        places = (start + (end - start) * (place / self.checks) for place in range(self.checks, 0, -1))
        return all(abs(self.losses.loss(self.own, place) - self.base) <= self.epsilon for place in places)

    def climb(self, direction: Tensor, steps: int) -> Bound:
        """Out along a direction as far as is allowed, and from there uphill."""
        path = [torch.zeros_like(direction)]
        reach = next(
            (
                length
                for halvings in range(_HALVINGS)
                if self.allowed(path[0], (length := self.radius * 0.5**halvings) * direction)
            ),
            0.0,
        )
        if reach:
            path.append(reach * direction)
        value, length = self.change(path[-1]), _FIRST_STEP * self.radius
        for _ in range(steps):
            taken = self._step(path[-1], value, length)
            if taken is None:
                break
            place, value, length = taken
            path.append(place)
            length *= _LONGER
        return Bound(value, tuple(path))

    def _step(self, place: Tensor, value: float, length: float) -> tuple[Tensor, float, float] | None:
        """The next point, the value there and how long the step was; None if no step is allowed that climbs."""
        uphill = self.losses.gradient(self.other, place)
        if self.losses.loss(self.other, place) < self.base:
            uphill = -uphill
        leaving = self.losses.gradient(self.own, place)
        uphill = uphill - leaving * (uphill @ leaving) / (leaving @ leaving).clamp(min=1e-30)
        norm = float(uphill.norm())
        if not 0 < norm < math.inf:
            return None
        for _ in range(_BACKTRACKS):
            end = place + uphill * (length / norm)
            end *= min(1.0, self.radius / float(end.norm()))  # back into the ball, which holds all that is between
            reached = self.change(end)
            if reached > value and self.allowed(place, end):
                return end, reached, length
            length /= 2
        return None
