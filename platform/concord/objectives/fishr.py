"""Fishr: environments with the same variance of the head's gradients."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from concord.errors import ArgumentError
from concord.gradients.risk import Batch, Loss, Risk, divisor
from concord.objectives.environment_state import EnvironmentState
from concord.objectives.environment_vectors import EnvironmentVectors
from concord.objectives.objective import WARMUPS, require_all
from concord.objectives.own_graph import with_own_graph
from concord.objectives.penalty_weight import PenaltyWeight
from concord.objectives.representation import Represented, head
from concord.space import Choice, Entries, LogUniform
from concord.weighted import Weighted


class Fishr(Represented, EnvironmentVectors):
    """The mean of the risks and λ times (1/d) Σ ‖v_e - v‖², over max(1, λ), with v the mean of the v_e.

    v_e is the variance, over the examples of environment e, by their weights if they have some, of the gradients of the
    head's weights and bias, one number for each component. Rame et al., Fishr: Invariant Gradient Variances for
    Out-of-Distribution Generalization, 2022, eq. 4. A moving average over steps, v̄_e ← γ v̄_e + (1 - γ) v_e, takes its
    place, divided by 1 - γ as in the authors' code, so that γ does not change the gradient's scale. Their λ has another
    scale: see docs/objectives.md.

    Args:
        loss: the loss or the risk of one environment, a mean of the examples' losses.
        weight: λ.
        autocast: the dtype in which layers compute.
        momentum: Decay γ of the moving average of fishr's variances over steps, in [0, 1); 0 takes each step's own
            variances.

    Attributes:
        module: the averages, which :meth:`begin` makes.

    Raises:
        InputError: γ is not in [0, 1).
    """

    name: ClassVar[str] = "fishr"
    every: ClassVar[bool] = True
    changes_head: ClassVar[bool] = True
    default_weight: ClassVar[float | None] = 1e3
    compared_weight: ClassVar[float | None] = 0.1
    display_name: ClassVar[str | None] = "Fishr"
    option_names: ClassVar[Mapping[str, str]] = {"momentum": "variance_momentum"}
    space: ClassVar[Entries] = {
        "penalty_weight": LogUniform(1e-2, 1e4),
        "penalty_warmup": WARMUPS,
        "variance_momentum": Choice(0.0, 0.95),
    }

    def __init__(
        self,
        loss: Loss | Risk,
        weight: PenaltyWeight,
        autocast: torch.dtype | None = None,
        *,
        layer: str | None = None,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(loss, weight, autocast, layer=layer)
        if not 0 <= momentum < 1:
            raise ArgumentError("variance_momentum", momentum, "must lie in [0, 1)")
        self.momentum = momentum

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Make the moving averages for this model's head."""
        _, layer = head(model, self.layer)
        self.module = EnvironmentState(model, (environments, sum(each.numel() for each in layer.parameters())), 0.0)

    @with_own_graph
    def vectors(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Variances of the gradients, from each example's input of the head and the risk's gradient by its output."""
        risks, weights, features, outputs = self.represented(model, batch, step)
        slopes = torch.autograd.grad(risks.sum(), outputs, create_graph=True)
        features = features.to(risks.dtype)
        deltas = torch.cat([each.flatten(1) for each in slopes]).to(risks.dtype).unflatten(0, features.shape[:2])
        counts: Tensor | int = features.shape[1]
        if isinstance(batch, Weighted):
            known = batch.weights.to(risks.dtype).unsqueeze(2)
            counts = known.sum(1, keepdim=True) / divisor(known)
        # An example's gradient is delta ⊗ feature, and delta for the bias; the risk's mean divides delta by counts.
        turned, squares = deltas.mT, (counts * deltas.square()).mT
        variances = [squares @ features.square() - (turned @ features).square()]
        if head(model, self.layer)[1].bias is not None:
            variances.append(squares.sum(2) - turned.sum(2).square())
        return risks, weights, torch.cat([each.flatten(1) for each in variances], 1)

    def distance(self, vectors: Tensor) -> Tensor:
        """The distance of the averages to their mean."""
        state = EnvironmentState.of(self.module, "fishr")
        require_all(len(vectors), len(state.kept), "fishr")
        averages = self.momentum * state.kept + (1 - self.momentum) * vectors
        state.keep(averages)
        scaled = averages / (1 - self.momentum)
        return (scaled - scaled.mean(0)).square().sum(1).mean()
