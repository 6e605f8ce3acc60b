"""Inter-environment gradient alignment: environments whose gradients are the same."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from concord.errors import InputError
from concord.gradients.layout import trainable
from concord.gradients.risk import Batch
from concord.objectives.environment_vectors import EnvironmentVectors
from concord.objectives.own_graph import with_own_graph
from concord.space import Entries, LogUniform

_COPIES = 4  # copies of all environments' gradients: themselves, joined, their differences, the differences' gradient
_LIMIT = 2 * 2**30


class IGA(EnvironmentVectors):
    """The mean of the risks and λ times the variance of their gradients, (1/d) Σ ‖∇R_e - ∇R‖², over max(1, λ).

    Koyama and Yamaguchi, When is Invariance Useful in an Out-of-Distribution Generalization Problem?, 2020: the
    trace of the gradients' variance over environments. The weight is λ. Second derivatives pass through the whole
    model, and the gradients of all environments are kept, so the objective is for small networks.
    """

    name: ClassVar[str] = "iga"
    default_weight: ClassVar[float | None] = 1e3
    compared_weight: ClassVar[float | None] = 0.1
    display_name: ClassVar[str | None] = "IGA"
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(1e-2, 1e4)}

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Refuse a model that is too large (InputError)."""
        parameters = list(trainable(model).values())
        components = sum(each.numel() for each in parameters)
        needed = _COPIES * environments * sum(each.numel() * each.element_size() for each in parameters)
        if needed > _LIMIT:
            raise InputError(
                f"iga: keeps the gradients of {environments} environments, {components:,} numbers each, in {_COPIES} "
                f"copies: an estimated {needed / 2**30:.1f} GiB, above {_LIMIT / 2**30:g} GiB; fishr takes the head's"
            )

    @with_own_graph
    def vectors(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the risks."""
        risks, weights = self.risks(model, batch, step)
        parameters = list(trainable(model).values())
        self.begin(model, len(risks), 0)
        each = [torch.autograd.grad(risk, parameters, create_graph=True, materialize_grads=True) for risk in risks]
        return risks, weights, torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])

    def distance(self, vectors: Tensor) -> Tensor:
        """The variance over environments, summed over components."""
        return (vectors - vectors.mean(0)).square().sum(1).mean()
