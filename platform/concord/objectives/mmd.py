"""Maximum mean discrepancy: environments whose representations have the same distribution under a kernel."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from concord.gradients.risk import Batch
from concord.objectives.environment_vectors import EnvironmentVectors
from concord.objectives.representation import Represented

_GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


class MMD(Represented, EnvironmentVectors):
    """The mean of the risks and λ times the discrepancy of the representations, over max(1, λ).

    The discrepancy of two environments is mean k(x, x') + mean k(y, y') - 2 mean k(x, y) over the representations of
    their examples, k(x, y) = Σ exp(-γ ‖x - y‖²), γ = .001, .01, …, 1000; D is its mean over pairs of environments. Li
    et al., Domain Generalization with Adversarial Feature Learning, 2018; kernel and pairs are DomainBed's
    (Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, 2021). The weight is λ.
    """

    name: ClassVar[str] = "mmd"
    by_example: ClassVar[bool] = True
    default_weight: ClassVar[float | None] = 1.0

    def vectors(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The representations of all examples."""
        risks, weights, features, _ = self.represented(model, batch, step)
        self._width = features.shape[2]
        return risks, weights, features.flatten(1)

    def distance(self, vectors: Tensor) -> Tensor:
        """The mean discrepancy over pairs."""
        environments = len(vectors)
        examples = vectors.reshape(-1, self._width)
        squares = examples.square().sum(1)
        distances = (squares[:, None] + squares - 2 * examples @ examples.T).clamp_min(0)
        kernel = torch.stack([(-gamma * distances).exp() for gamma in _GAMMAS]).sum(0)
        each = len(examples) // environments
        means = kernel.view(environments, each, environments, each).mean((1, 3))
        pairs = means.diagonal()[:, None] + means.diagonal() - 2 * means
        return pairs.sum() / (environments * (environments - 1))
