"""Domain-adversarial training: a representation from which the environment cannot be told."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Batch, Loss, Risk, autocast_to
from concord.objectives.objective import Penalized
from concord.objectives.penalty_weight import PenaltyWeight


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def reverse_gradient(features: Tensor, strength: float = 1.0) -> Tensor:
    """The same features; the gradient that comes back through them is multiplied by -strength."""
    reversed_: Tensor = _Reversal.apply(features, strength)  # type: ignore[no-untyped-call]
    return reversed_


class DomainClassifier(nn.Sequential):
    """A network that tells the environment by a model's representation.

    Args:
        model: the network whose representation it gets.
        environments: the number of environments to tell apart.
        hidden_units: width of the two hidden layers.
        layer: name (in ``model.named_modules()``) of the linear layer whose input is the representation; None takes
            the last linear layer.

    Raises:
        InputError: the model has no linear layer of this name.
    """

    def __init__(self, model: nn.Module, environments: int, hidden_units: int = 256, layer: str | None = None) -> None:
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if layer is not None and layer not in linear:
            raise ArgumentError("representation", layer, f"no linear layer; there are {', '.join(linear) or 'none'}")
        if not linear:
            raise ArgumentError("objective", "dann", "the model has no linear layer whose input it could take")
        self.layer = layer if layer is not None else list(linear)[-1]
        self.width = linear[self.layer].in_features
        super().__init__(
            nn.Linear(self.width, hidden_units),
            nn.ReLU(),
            nn.Linear(hidden_units, hidden_units),
            nn.ReLU(),
            nn.Linear(hidden_units, environments),
        )

    @contextmanager
    def representations(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """A list to which every forward pass of the model adds its representation, while this lasts."""
        seen: list[Tensor] = []
        layer = model.get_submodule(self.layer)
        handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            yield seen
        finally:
            handle.remove()


class DANN(Penalized):
    """The mean over environments of risk and domain loss, the latter reversed for the representation.

    (1/d) Σ R_e(f) + L_e(domain classifier), where the gradient of the domain loss L_e (cross-entropy between told and
    true environment) is multiplied by -λ on its way into the representation: the domain classifier learns to tell the
    environments, the representation to hide them. Ganin et al., Domain-Adversarial Training of Neural
    Networks, 2016, section 4.2.

    Args:
        loss: the loss or the risk of one environment.
        weight: λ; 0 during its warm-up.
        autocast: what layers compute in.
        hidden_units, layer: of the :class:`DomainClassifier`, which :meth:`begin` makes.

    Attributes:
        module: the domain classifier.
    """

    default_weight: ClassVar[float | None] = 1.0

    def __init__(
        self,
        loss: Loss | Risk,
        weight: PenaltyWeight,
        autocast: torch.dtype | None = None,
        *,
        hidden_units: int = 256,
        layer: str | None = None,
    ) -> None:
        super().__init__(loss, weight, autocast)
        self._hidden_units, self._layer = hidden_units, layer

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:  # noqa: ARG002
        """Make the domain classifier, for the representation of this model."""
        self.module = DomainClassifier(model, environments, self._hidden_units, self._layer)

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Risk and domain loss, one sum an environment.

        Raises:
            InputError: :meth:`begin` was not called, or the representation has not one row for each example.
        """
        classifier = self.module
        if not isinstance(classifier, DomainClassifier):
            raise ArgumentError("objective", "dann", "it has no domain classifier yet; call begin with the model first")
        with classifier.representations(model) as seen:
            risks, weights = self.risks(model, batch, step)
        environments, examples = pytree.tree_leaves(batch)[0].shape[:2]
        rows = [each.reshape(len(each), -1) for each in seen]
        if sum(map(len, rows)) != environments * examples or any(each.shape[1] != classifier.width for each in rows):
            found = ", ".join(str(tuple(each.shape)) for each in seen) or "nothing"
            raise InputError(
                f"DANN: layer {classifier.layer} gets {found} for {environments} environments of {examples} examples; "
                f"expected a representation ({examples}, {classifier.width}) of each, once"
            )
        features = reverse_gradient(torch.cat(rows), self.weight.after_warmup(step))
        with autocast_to(features.device, self.autocast):
            told = classifier(features)
        known = torch.tensor(own or range(environments), device=told.device).repeat_interleave(examples)
        losses = nn.functional.cross_entropy(told.to(risks.dtype), known, reduction="none")
        return risks + losses.view(environments, examples).mean(1), weights
