"""CAGrad (Liu, Liu, Jin, Stone, Liu: Conflict-averse gradient descent, NeurIPS 2021, arXiv 2110.14048)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concord.aggregation.nonnegative import minimum_norm
from concord.errors import ArgumentError
from concord.space import Entries, Uniform

_STATIONARY = 1e-4  # ‖g_w‖ / ‖J‖ from which on g_w has a direction, as in TorchJD


@dataclass(frozen=True)
class CAGrad:
    """The direction within c‖g_0‖ of the mean gradient g_0 that is best for the environment it serves least.

    It is g_0 + c‖g_0‖ g_w / ‖g_w‖, where g_w = Σ w_e g_e minimizes ⟨g_w, g_0⟩ + c‖g_0‖‖g_w‖ over w ≥ 0, Σ w_e = 1
    (equation 4, algorithm 1). Where g_w is 0, the update is 0. With c = 0 it is the mean; from 1 on it may oppose the
    mean.
    """

    conflict_radius: float = 0.4
    """c of cagrad: largest distance of the update from the mean gradient, as a fraction of the mean's norm."""
    space: ClassVar[Entries] = {"conflict_radius": Uniform(0.0, 1.0)}

    def __post_init__(self) -> None:
        if not self.conflict_radius >= 0:
            raise ArgumentError("conflict_radius", self.conflict_radius, "must be at least 0")

    def weights(self, gram: Tensor) -> Tensor:
        """1 / d and the part of g_w.

        Where r = ‖g_w‖ / (c‖g_0‖), g_w + r g_0 is the point of least norm in the convex hull of all g_e + r g_0.
        """
        from scipy.optimize import brentq  # here, since every worker imports this module and few need SciPy

        with_mean, of_mean = gram.mean(1), gram.mean().clamp(min=0)
        mean, reach = torch.full_like(with_mean, 1 / len(gram)), self.conflict_radius * float(of_mean.sqrt())
        if reach == 0:
            return mean

        def worst(ratio: float) -> Tensor:
            cross = ratio * with_mean
            return minimum_norm(gram + cross[:, None] + cross + ratio**2 * of_mean)

        def excess(ratio: float) -> float:
            weights = worst(ratio)
            return float((weights @ gram @ weights).clamp(min=0).sqrt()) / (reach * ratio) - 1

        least = _STATIONARY * float(gram.trace().sqrt()) / reach
        most = 1.001 * float(gram.diagonal().max().sqrt()) / reach
        if excess(least) <= 0:
            return torch.zeros_like(mean)
        ratio = float(brentq(excess, least, most, rtol=1e-12))
        return mean + worst(ratio) / ratio
