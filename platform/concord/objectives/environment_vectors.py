"""Objectives that compare a vector of each environment: its moments, variances or gradients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from concord.gradients.risk import Batch
from concord.objectives.objective import Rescaled, require_several


class EnvironmentVectors(Rescaled, ABC):
    """The mean risk and λ times a distance D of the environments' vectors, ((1/d) Σ R_e + λ D) / max(1, λ).

    An environment's terms are its risk and then its vector, so all processes have all vectors.
    """

    name: ClassVar[str]

    @abstractmethod
    def vectors(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Risks, weights as of :meth:`risks`, and vectors ``(environments, components)``."""

    @abstractmethod
    def distance(self, vectors: Tensor) -> Tensor:
        """D of the vectors ``(environments, components)`` of all environments."""

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The risk and the vector of each environment."""
        risks, weights, vectors = self.vectors(model, batch, step)
        terms = torch.cat([risks[:, None], vectors.to(risks.dtype)], 1)
        self._terms_each = terms.shape[1]
        return terms.flatten(), weights

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """The mean risk and the weighted distance."""
        each = terms.view(-1, self._terms_each)
        require_several(len(each), self.name)
        return (each[:, 0].mean() + self.weight.at(step) * self.distance(each[:, 1:])) * self.scale(step)

    def losses(self, terms: Tensor) -> Tensor:
        """The risks."""
        return terms[:, 0]
