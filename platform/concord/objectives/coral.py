"""Correlation alignment: environments whose representations have the same mean and covariance."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from concord.gradients.risk import Batch
from concord.objectives.environment_vectors import EnvironmentVectors
from concord.objectives.representation import Represented
from concord.space import Entries, LogUniform


class CORAL(Represented, EnvironmentVectors):
    """The mean of the risks and λ times the distance of the representations' moments, over max(1, λ).

    The distance of two environments is mean (μ_a - μ_b)² + mean (C_a - C_b)², over components of the mean μ and the
    covariance C (over n - 1) of their examples' representations; D is its mean over pairs of environments. Sun and
    Saenko, Deep CORAL, 2016, eq. 1, whose 1/4 λ is ours; the means, and the pairs, are DomainBed's (Gulrajani and
    Lopez-Paz, In Search of Lost Domain Generalization, 2021). The weight is λ.
    """

    name: ClassVar[str] = "coral"
    default_weight: ClassVar[float | None] = 1.0
    display_name: ClassVar[str | None] = "CORAL"
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(0.1, 10.0)}

    def vectors(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Means and covariances, each over the root of its number of components."""
        risks, weights, features, _ = self.represented(model, batch, step)
        features = features.to(risks.dtype)
        means = features.mean(1, keepdim=True)
        centred = features - means
        width = features.shape[2]
        products: Tensor = _Products.apply(centred)  # type: ignore[no-untyped-call]
        covariances = products / (max(features.shape[1] - 1, 1) * width)
        return risks, weights, torch.cat([means.flatten(1) / width**0.5, covariances.flatten(1)], 1)

    def distance(self, vectors: Tensor) -> Tensor:
        """The mean over pairs of squared distances, which is twice the variance over d - 1."""
        return 2 * vectors.var(0).sum()


class _Products(torch.autograd.Function):
    """XᵀX of each environment's X; backward has one product of matrices, where PyTorch has one for each factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return rows.mT @ rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        rows: Tensor
        (rows,) = ctx.saved_tensors
        return rows @ (grads[0] + grads[0].mT)
