"""Spectral decoupling: small outputs, so that no feature starves the others of gradient."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.aggregation.rule import accumulation_dtype
from concord.errors import InputError
from concord.gradients.risk import Batch, Loss, MeanRisk, Risk, Supervised, as_risk, divisor, pair, weights_of
from concord.objectives.objective import Penalized, PenalizedRisk
from concord.objectives.penalty_weight import PenaltyWeight
from concord.space import Entries, LogUniform
from concord.weighted import Weighted


class SpectralDecoupling(Penalized):
    """The mean of the environments' risks and of their squared outputs, (1/d) Σ R_e + λ mean ŷ².

    Pezeshki et al., Gradient Starvation: A Learning Proclivity in Neural Networks, 2021, which has λ/2 and
    the sum over an example's outputs; the mean is DomainBed's. Environments are not compared, so one is enough,
    and any aggregator can combine the terms.

    Args:
        loss: the loss or the risk of one environment.
        weight: λ; 0 during its warm-up.
        autocast: the dtype in which layers compute.

    Attributes:
        risk: risk and squared outputs of one environment.
    """

    coupled: ClassVar[bool] = False
    averages = True
    compares: ClassVar[bool] = False
    default_weight: ClassVar[float | None] = 0.1
    display_name: ClassVar[str | None] = "spectral decoupling"
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(1e-5, 1e-1)}

    def __init__(self, loss: Loss | Risk, weight: PenaltyWeight, autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, weight, autocast)
        self.averages = self._supervised  # a risk's weight is not that of its outputs
        self.risk = _RiskAndOutputs(as_risk(self.risk, counts=True), weight)


class _RiskAndOutputs(PenalizedRisk):
    def __call__(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        squares: list[Tensor] = []

        def keep(_: nn.Module, __: Any, outputs: Any) -> None:
            leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
            floating = (leaf for leaf in leaves if leaf.is_floating_point() and leaf.ndim > 0)  # a scalar is a loss
            squares.extend(self._mean_square(leaf.to(accumulation_dtype([leaf.dtype])), batch) for leaf in floating)

        with model.register_forward_hook(keep):
            mean, weight = MeanRisk(model, self.risk, None, pytree.tree_leaves(batch)[0].device)(batch, step)
        if not squares:
            raise InputError("sd: the risk never calls the model itself, whose outputs its penalty squares")
        return (mean + self.weight.after_warmup(step) * torch.stack(squares).mean()) * weight, weight

    def _mean_square(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean over examples, each as it counts in the loss, so that pieces of a batch add up to it."""
        squares = outputs.square()
        if not isinstance(self.risk, Supervised):
            return squares.mean()
        weighted = isinstance(batch, Weighted)
        counts = weights_of(self.risk.loss, batch.targets if weighted else pair(batch)[1])
        if counts is None or outputs.shape[:1] + outputs.shape[2:] != counts.shape:  # no outputs of classes
            squares, counts = squares.reshape(len(squares), -1), squares.new_ones(len(squares))
        each = squares.mean(1)
        if weighted:
            counts = counts * batch.weights.reshape(-1, *[1] * (counts.ndim - 1))
        return (each * counts).sum() / divisor(counts.sum())
