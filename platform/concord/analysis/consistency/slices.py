"""Slices of the environments' losses through a solution: along a line, and over a plane.

Beside each environment stand the arithmetic mean of all, the surface that pooled training descends, and the geometric
mean, which is low only where no environment's loss is high (AND-mask paper, Fig. 1 and 11).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.errors import ArgumentError

_LEAST = 1e-12  # a loss is taken for this much where it is less, so that it has a logarithm

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Slice:
    """Losses on a line or a plane.

    Attributes:
        names: of the environments.
        first: places along the first direction, in units of θ, ``(points,)``.
        second: those along the second one; None on a line.
        losses: ``(environments, points)`` on a line, ``(environments, points, points)`` with the second direction's
            places first on a plane.
    """

    names: tuple[str, ...]
    first: Array
    second: Array | None
    losses: Array

    @property
    def arithmetic(self) -> Array:
        """The mean of the losses."""
        mean: Array = self.losses.mean(0)
        return mean

    @property
    def geometric(self) -> Array:
        """The geometric mean of the losses."""
        mean: Array = np.exp(np.log(np.maximum(self.losses, _LEAST)).mean(0))
        return mean


def line(losses: EnvironmentLosses, direction: Tensor, places: Array) -> Slice:
    """Every environment's loss at θ* + t · direction.

    Args:
        losses: of the network.
        direction: ``(n,)``, not 0; taken as it is.
        places: the t, ``(points,)``.

    Raises:
        ArgumentError: the direction is 0, as between a solution and itself.
    """
    _check_direction(direction)
    found = [[losses.loss(name, float(t) * direction) for t in places] for name in losses.names]
    return Slice(losses.names, places, None, np.array(found))


def plane(losses: EnvironmentLosses, first: Tensor, second: Tensor, places: Array) -> Slice:
    """Every environment's loss at θ* + s · first + t · second, both made orthonormal.

    Args:
        losses: of the network.
        first, second: directions, ``(n,)``, neither 0 nor on one line.
        places: the s and the t, ``(points,)``, in units of θ.

    Raises:
        ArgumentError: the directions span no plane.
    """
    _check_direction(first)
    first = first / first.norm()
    rest = second - first * (first @ second)
    if not float(rest.norm()) > 1e-6 * float(second.norm()):
        raise ArgumentError("second", "a direction", "lies on one line with the first; two are needed for a plane")
    second = rest / rest.norm()
    found = [
        [[losses.loss(name, float(s) * first + float(t) * second) for s in places] for t in places]
        for name in losses.names
    ]
    return Slice(losses.names, places, places, np.array(found))


def _check_direction(direction: Tensor) -> None:
    if not float(torch.linalg.vector_norm(direction)) > 0:
        raise ArgumentError("direction", "0", "a slice needs two different solutions, or a direction that is not 0")
