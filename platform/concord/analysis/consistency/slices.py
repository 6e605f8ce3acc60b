"""Slices of the environments' losses through a solution: along a line, and over a plane.

A slice also has the arithmetic mean of the losses, the surface that pooled training descends, and the geometric
mean, which is low only where no environment's loss is high (AND-mask paper, Fig. 1 and 11).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.errors import InputError

_LEAST = 1e-12  # smaller losses are raised to this, so that they have a logarithm

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Slice:
    """Losses on a line or a plane.

    Attributes:
        names: the environments' names.
        places: the places along each direction, in units of θ, ``(points,)``.
        losses: ``(environments, points)`` on a line, ``(environments, points, points)`` on a plane, the second
            direction's places first.
    """

    names: tuple[str, ...]
    places: Array
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


def slice_along(losses: EnvironmentLosses, directions: Sequence[Tensor], places: Array) -> Slice:
    """Every environment's loss at θ* + Σ t · direction, for one or two directions ``(n,)``, made orthonormal.

    ``places`` are the t, ``(points,)``, in units of θ.
    """
    basis: list[Tensor] = []
    for direction in directions:
        rest = direction - sum(each * (each @ direction) for each in basis)
        if not float(rest.norm()) > 1e-6 * float(direction.norm()):
            raise InputError("slices: the two directions lie on one line; --parts without slices leaves them out")
        basis.append(rest / rest.norm())
    offsets = [
        sum((float(t) * each for t, each in zip(reversed(at), basis, strict=True)), torch.zeros_like(basis[0]))
        for at in itertools.product(places, repeat=len(basis))
    ]
    found = np.array([[losses.loss(name, offset) for offset in offsets] for name in losses.names])
    return Slice(losses.names, places, found.reshape(-1, *[len(places)] * len(basis)))
