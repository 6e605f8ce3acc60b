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
    """Number f of environments that may be arbitrarily wrong (krum); f + 3 environments are needed."""
    selected: int = 1
    """Number m of gradients that krum averages; above 1 the rule is multi-Krum."""

    def __post_init__(self) -> None:
        for name, least in (("byzantine", 0), ("selected", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(name, getattr(self, name), f"must be at least {least}")

    def check_environments(self, environments: int) -> None:
        """Refuse a number of environments at a step (ArgumentError)."""
        if environments < (least := self.byzantine + 3):
            needed = f"needs {least} environments at each step, and there are {environments}"
            raise ArgumentError("byzantine", self.byzantine, needed)
        if environments < self.selected:
            raise ArgumentError("selected", self.selected, f"there are {environments} environments at a step")

    def weights(self, gram: Tensor) -> Tensor:
        """1 / m for the selected ones, of equal scores the first, else 0."""
        count, squares = len(gram), gram.diagonal()
        self.check_environments(count)
        distances = (squares[:, None] + squares - 2 * gram).clamp(min=0).fill_diagonal_(0)
        scores = distances.sort(1).values[:, 1 : count - self.byzantine - 1].sum(1)
        weights = torch.zeros_like(scores)
        weights[scores.argsort(stable=True)[: self.selected]] = 1 / self.selected
        return weights
