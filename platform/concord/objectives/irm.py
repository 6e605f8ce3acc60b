"""Invariant risk minimization with the gradient penalty."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.utils import _pytree as pytree

from concord.aggregation.rule import accumulation_dtype
from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Batch, Loss, MeanRisk, Risk, Supervised, as_risk, inputs_of, take, with_outputs
from concord.objectives.objective import WARMUPS, PenalizedRisk, Rescaled
from concord.objectives.penalty_weight import PenaltyWeight
from concord.space import Entries, LogUniform

Estimator = Literal["squared", "halves"]
"""``squared``: the squared gradient of the whole batch, as in the published experiments; sampling noise makes it too
large on average.
``halves``: the product of the gradients of every other example, as in the paper's appendix D: right on average, and
below zero at times."""
Classifier = Literal["scalar", "vector"]
"""w of the penalty: ``scalar`` is one factor of all outputs, as of Arjovsky et al.; ``vector`` one of each output, as
in the published code of Choe et al. (An empirical study of invariant risk minimization, 2020) for several classes."""


class IRMv1(Rescaled):
    """The mean of the environments' risks and penalties, (1/d) Σ R_e(f) + λ D_e, over max(1, λ).

    D_e = ‖∇_w R_e(w·f)‖² at w = 1, the squared slope of the risk by a factor on all outputs (Arjovsky et al., Invariant
    Risk Minimization, 2019, eq. IRMv1), or by one of each output. The published experiments divide by λ if λ is above
    1.

    While a risk runs, the model's floating-point outputs are multiplied by w. The model must not compute its own loss,
    which would be scaled in place of the outputs. Outputs of a part of the model that the risk calls itself are not
    scaled.

    Args:
        loss: the loss or the risk of one environment.
        weight: λ.
        estimator: Estimate of irm's penalty: the squared gradient of a batch, or the product of the gradients of its
            halves.
        autocast: the dtype in which layers compute.
        classifier: Factor of irm's penalty: one of all outputs, or one of each output, as in published code for several
            classes.

    Attributes:
        risk: risk and penalty of one environment.

    Raises:
        InputError: a vector, and the outputs are no tensor ``(examples, outputs)`` or the risk is not of them alone.
    """

    coupled: ClassVar[bool] = False
    default_weight: ClassVar[float | None] = 1e4
    compared_weight: ClassVar[float | None] = 0.1
    display_name: ClassVar[str | None] = "IRMv1"
    option_names: ClassVar[Mapping[str, str]] = {"estimator": "penalty_estimator", "classifier": "irm_classifier"}
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(1e-2, 1e4), "penalty_warmup": WARMUPS}

    def __init__(
        self,
        loss: Loss | Risk,
        weight: PenaltyWeight,
        estimator: Estimator = "squared",
        autocast: torch.dtype | None = None,
        classifier: Classifier = "scalar",
    ) -> None:
        super().__init__(loss, weight, autocast)
        self.risk = _RiskAndPenalty(self.risk, weight, estimator, classifier)


def irm_penalty(
    loss: Loss, outputs: Tensor, targets: Tensor, estimator: Estimator = "squared", classifier: Classifier = "scalar"
) -> Tensor:
    """IRMv1's penalty of one environment, a scalar, from outputs ``(batch, ...)`` and targets ``(batch, ...)``."""
    return _parts(as_risk(loss), nn.Identity(), (outputs, targets), 0, estimator, classifier)[1]


@dataclass(frozen=True)
class _RiskAndPenalty(PenalizedRisk):
    estimator: Estimator
    classifier: Classifier

    def __call__(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        risk, penalty, examples = _parts(self.risk, model, batch, step, self.estimator, self.classifier)
        return (risk + self.weight.at(step) * penalty) * self.weight.scale(step) * examples, examples


def _parts(
    risk: Risk, model: nn.Module, batch: Batch, step: int, estimator: Estimator, classifier: Classifier
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean risk of one environment, its penalty, and its weight: three scalars."""
    if isinstance(risk, Supervised):
        # One forward pass, also for halves; what it gives passes through a model that does nothing.
        batch, model = with_outputs(batch, model(inputs_of(batch))), nn.Identity()
    if estimator == "halves" and len(pytree.tree_leaves(batch)[0]) < 2:
        raise ArgumentError("penalty_estimator", "halves", "needs at least 2 examples of each environment at a step")
    if estimator == "squared":
        slope, mean, weight = _slope(risk, model, batch, step, classifier)
        return mean, slope.square().sum(), weight
    (first, one, weight), (second, other, more) = (
        _slope(risk, model, take(batch, slice(at, None, 2)), step, classifier) for at in (0, 1)
    )
    penalty, total = (first * second).sum(), weight + more
    if isinstance(risk, Supervised):  # of a loss that ignores or weighs classes no mean of the halves
        mean, total = MeanRisk(model, risk, None, total.device)(batch, step)
        return mean, penalty, total
    return (one * weight + other * more) / total, penalty, total


def _slope(
    risk: Risk, model: nn.Module, batch: Batch, step: int, classifier: Classifier
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivative of the mean risk by a factor on the outputs, or by those of each ``(outputs,)``, at 1; the mean
    risk; and its weight."""
    # torch.autograd.grad takes a third of the time of torch.func.grad, but not within its transforms.
    graph = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    outputs = inputs_of(batch) if isinstance(risk, Supervised) else None  # in place of inputs, as the model is
    if isinstance(outputs, Tensor):
        # By the chain rule, which leaves the factor out: a third of the operations for a small network.
        at = outputs.to(accumulation_dtype([outputs.dtype]))

        def value(at: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            mean, weight = MeanRisk(model, risk, None, at.device)(with_outputs(batch, at), step)
            return mean, (mean, weight)
    elif classifier == "vector":
        raise ArgumentError("irm_classifier", "vector", "needs a loss of outputs and targets alone; give scalar")
    else:
        tensors = pytree.tree_leaves(batch)
        dtypes = (each.dtype for each in (*tensors, *model.parameters()) if each.is_floating_point())
        at = torch.ones((), dtype=accumulation_dtype(dtypes), device=tensors[0].device, requires_grad=graph)

        def value(at: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            with _scaled_outputs(model, at):
                mean, weight = MeanRisk(model, risk, None, at.device)(batch, step)
            return mean, (mean, weight)

    if graph and at.requires_grad:
        _, (mean, weight) = value(at)
        (gradient,) = torch.autograd.grad(mean, at, create_graph=True, materialize_grads=True)
    else:
        gradient, (mean, weight) = grad(value, has_aux=True)(at)
    if classifier == "scalar":
        return (gradient * at).sum(), mean, weight
    if at.ndim != 2:
        raise ArgumentError(
            "irm_classifier", "vector", f"needs outputs (examples, outputs), the model gives {tuple(at.shape)}"
        )
    return (gradient * at).sum(0), mean, weight


@contextmanager
def _scaled_outputs(model: nn.Module, factor: Tensor) -> Iterator[None]:
    """Multiply the model's outputs, a tensor or a tree of tensors, while the body runs."""
    calls = 0

    def multiply(_: nn.Module, __: Any, outputs: Any) -> Any:
        nonlocal calls
        calls += 1
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if own is not None or any(leaf.ndim == 0 for leaf in leaves):
            raise InputError(
                "IRMv1: the model gives a loss of its own, which its penalty would scale in place of the outputs; "
                "compute the loss in the risk, from the logits, and give the model no labels"
            )
        if not leaves:
            raise InputError(f"IRMv1: the model gives {type(outputs).__name__}, in which no tensor is found to scale")
        scaled = {id(leaf): leaf.to(accumulation_dtype([leaf.dtype])) * factor for leaf in leaves}
        return pytree.tree_map(lambda leaf: scaled.get(id(leaf), leaf), outputs)

    with model.register_forward_hook(multiply):
        yield
    if not calls:
        raise InputError("IRMv1: the risk never calls the model itself, whose outputs its penalty scales")
