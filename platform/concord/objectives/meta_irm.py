"""Meta-learned invariant risk minimization: adapt to one environment, judge by the others."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError
from concord.gradients.layout import trainable
from concord.gradients.risk import Batch, Loss, Risk, take
from concord.objectives.objective import Penalized, require_several
from concord.objectives.own_graph import with_own_graph
from concord.objectives.penalty_weight import PenaltyWeight
from concord.space import Entries, LogUniform


class MetaIRM(Penalized):
    """The mean of meta-losses and λ times their standard deviation.

    For each environment i the weights take inner steps on its risk, θ'_i = θ - α ∇R_i(θ), and are judged by the
    others: the meta-losses are R_j(θ'_i), j ≠ i. The objective is (1/N) Σ R_j(θ'_i) + λ σ, with the derivatives of
    θ'_i through θ (Bae et al., Meta-Learned Invariant Risk Minimization, 2021, eq. 3 to 6 and algorithm 1, which has
    the sum of the N meta-losses in place of the mean: its λ is ours times N).

    Gaussian DropGrad (Tseng et al., Regularizing Meta-Learning via Gradient Dropout, 2020) of rate p multiplies each
    component of an inner gradient by a draw from N(1, p / (1 - p)). A first-order step treats θ'_i - θ as a constant.

    The second derivatives pass through the model. PyTorch's fused attention has none on a CPU: give a transformer
    plain attention (``attn_implementation="eager"``), or take ``first_order``.

    Args:
        loss: the loss or the risk of one environment.
        inner_lr: Learning rate α of the inner steps of meta-irm.
        inner_steps: Number of inner steps of meta-irm.
        weight: λ; 0 during its warm-up.
        drop_grad: Rate of Gaussian DropGrad in the inner steps of meta-irm, in [0, 1).
        outer: Number of other environments, drawn at each step, that judge the adapted weights of meta-irm; 0 takes
            all.
        first_order: Omit the second derivatives of meta-irm (an ablation of the paper).
        same_environment: Judge the adapted weights of meta-irm on their own environment (an ablation of the paper).
        autocast: the dtype in which layers compute.

    Raises:
        InputError: an option is out of its range.
    """

    others: ClassVar[bool] = True
    default_weight: ClassVar[float | None] = 0.0
    display_name: ClassVar[str | None] = "meta-IRM"
    option_names: ClassVar[Mapping[str, str]] = {"outer": "outer_environments"}
    space: ClassVar[Entries] = {"inner_lr": LogUniform(1e-3, 1.0)}

    def __init__(
        self,
        loss: Loss | Risk,
        inner_lr: float = 0.1,
        inner_steps: int = 1,
        weight: PenaltyWeight | None = None,
        drop_grad: float = 0.0,
        outer: int = 0,
        *,
        first_order: bool = False,
        same_environment: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(loss, weight or PenaltyWeight(0.0), autocast)
        if inner_lr <= 0:
            raise ArgumentError("inner_lr", inner_lr, "must be above 0")
        if inner_steps < 1:
            raise ArgumentError("inner_steps", inner_steps, "must be at least 1")
        if not 0 <= drop_grad < 1:
            raise ArgumentError("drop_grad", drop_grad, "must lie in [0, 1)")
        if outer < 0:
            raise ArgumentError("outer", outer, "must not be negative")
        self.inner_lr = inner_lr
        self.inner_steps = inner_steps
        self.drop_grad = drop_grad
        self.outer = outer
        self.first_order = first_order
        self.same_environment = same_environment

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The meta-losses R_j(θ'_i) of each environment i, in the order of j; i has the mean weight of its judges."""
        environments = len(pytree.tree_leaves(batch)[0])
        if not self.same_environment:
            require_several(environments, "meta-irm")
        terms, weights = [], []
        for index in own if own is not None else range(environments):
            judges = take(batch, self._judges(index, environments))
            losses, counts = self.risks(model, judges, step, self.adapted(model, take(batch, index), step))
            terms.append(losses)
            weights.append(counts.mean())
        return torch.cat(terms), torch.stack(weights)

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """Mean and standard deviation."""
        weight = self.weight.after_warmup(step)
        if weight == 0 or len(terms) == 1:
            return terms.mean()
        variance = terms.var(correction=0)
        # The root has no derivative at 0, where all meta-losses are equal and nothing is to be gained.
        spread = torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt() * (variance > 0)
        value: Tensor = terms.mean() + weight * spread
        return value

    @with_own_graph
    def adapted(self, model: nn.Module, batch: Batch, step: int = 0) -> dict[str, Tensor]:
        """The weights after the inner steps on one environment's batch ``(batch, ...)``, with their graph."""
        weights: dict[str, Tensor] = dict(trainable(model))
        alone = take(batch, None)  # (1, batch, ...)
        for _ in range(self.inner_steps):
            gradients = torch.autograd.grad(
                self.risks(model, alone, step, weights)[0],
                list(weights.values()),
                create_graph=not self.first_order,
                materialize_grads=True,
            )
            weights = {
                name: value - self.inner_lr * self._dropped(gradient)
                for (name, value), gradient in zip(weights.items(), gradients, strict=True)
            }
        return weights

    def _dropped(self, gradient: Tensor) -> Tensor:
        if self.drop_grad == 0:
            return gradient
        deviation: float = (self.drop_grad / (1 - self.drop_grad)) ** 0.5
        return gradient * (1 + deviation * torch.randn_like(gradient))

    def _judges(self, index: int, environments: int) -> list[int]:
        if self.same_environment:
            return [index]
        others = [other for other in range(environments) if other != index]
        if not 0 < self.outer < len(others):
            return others
        return [others[place] for place in torch.randperm(len(others))[: self.outer].sort().values.tolist()]
