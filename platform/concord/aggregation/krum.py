"""Krum and multi-Krum (Blanchard, El Mhamdi, Guerraoui, Stainer: Machine learning with adversaries, NeurIPS 2017)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from concord.errors import ArgumentError


@dataclass(frozen=True)
class Krum:
    """The mean of the m gradients that lie closest to others.

    The score of a gradient is the sum of its squared distances ‖g_i - g_j‖² to its d - f - 2 nearest (section 4); the m
    smallest scores are taken. f of the d environments may send anything if 2f + 2 < d.
    """

    byzantine: int = 1
    """f, the environments that may be arbitrarily wrong; there must be f + 3 at least."""
    selected: int = 1
    """m, the gradients that are averaged; above 1 it is multi-Krum."""

    def __post_init__(self) -> None:
        for name, least in (("byzantine", 0), ("selected", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(name, getattr(self, name), f"must be at least {least}")

    @property
    def least(self) -> int:
        """The least number of environments."""
        return self.byzantine + 3

    def weights(self, gram: Tensor) -> Tensor:
        """1 / m for the selected ones, of equal scores the first, else 0."""
        count, squares = len(gram), gram.diagonal()
        if count < self.least:
            most = f"needs {self.least} environments at least, and there are {count}"
            raise ArgumentError("byzantine", self.byzantine, most)
        if count < self.selected:
            raise ArgumentError("selected", self.selected, f"there are only {count} environments")
        distances = (squares[:, None] + squares - 2 * gram).clamp(min=0).fill_diagonal_(0)
        scores = distances.sort(1).values[:, 1 : count - self.byzantine - 1].sum(1)
        weights = torch.zeros_like(scores)
        weights[scores.argsort(stable=True)[: self.selected]] = 1 / self.selected
        return weights
