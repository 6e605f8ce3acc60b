"""Domain-adversarial training: a representation from which the environment cannot be told."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concord.errors import ArgumentError
from concord.gradients.autocast import outputs_of
from concord.objectives.objective import Loss, Objective, by_environment
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


class DomainAdversarial(nn.Module):
    """A network beside a second one that tells the environment by the first one's representation.

    Args:
        model: the network; called as before, it gives its outputs.
        domains: number of environments.
        hidden_units: width of the domain classifier's two hidden layers.
        layer: name (in ``model.named_modules()``) of the linear layer whose input is the representation; None takes
            the last linear layer.

    Raises:
        InputError: there is no linear layer of this name.
    """

    def __init__(self, model: nn.Module, domains: int, hidden_units: int = 256, layer: str | None = None) -> None:
        super().__init__()
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if layer is not None and layer not in linear:
            raise ArgumentError("representation", layer, f"no linear layer; there are {', '.join(linear) or 'none'}")
        if not linear:
            raise ArgumentError("objective", "dann", "the model has no linear layer whose input it could take")
        self.model = model
        self.layer = layer if layer is not None else list(linear)[-1]
        self.domain_classifier = nn.Sequential(
            nn.Linear(linear[self.layer].in_features, hidden_units),
            nn.ReLU(),
            nn.Linear(hidden_units, hidden_units),
            nn.ReLU(),
            nn.Linear(hidden_units, domains),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's outputs."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def outputs_and_features(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The network's outputs, and its representation ``(batch, features)``."""
        seen: list[Tensor] = []
        layer = self.model.get_submodule(self.layer)
        handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            outputs = self.model(inputs)
        finally:
            handle.remove()
        return outputs, seen[0].flatten(1)


class DANN(Objective):
    """The mean over environments of risk and domain loss, the latter reversed for the representation.

    (1/d) Σ R_e(f) + L_e(domain classifier), where the gradient of the domain loss L_e (cross-entropy between told and
    true environment) is multiplied by -λ on its way into the representation: the domain classifier learns to tell the
    environments, the representation not to be told apart. Ganin et al., Domain-Adversarial Training of Neural
    Networks, 2016, section 4.2.

    Args:
        loss: the risk.
        weight: λ; 0 during its warm-up.
        autocast: what layers compute in.
    """

    def __init__(self, loss: Loss, weight: PenaltyWeight, autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, autocast)
        self.weight = weight

    def terms(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, step: int = 0, own: Sequence[int] | None = None
    ) -> Tensor:
        """Risk and domain loss, one sum an environment; the model is a :class:`DomainAdversarial`."""
        if not isinstance(model, DomainAdversarial):
            raise ArgumentError("objective", "dann", "no domain classifier in the model; put it into DomainAdversarial")
        strength = self.weight.weight if step >= self.weight.warmup else 0.0

        def forward(batch: Tensor) -> tuple[Tensor, Tensor]:
            told: list[Tensor] = []

            def both(batch: Tensor) -> Tensor:
                outputs, features = model.outputs_and_features(batch)
                told.append(model.domain_classifier(reverse_gradient(features, strength)))
                return outputs

            outputs = outputs_of(both, batch, self.autocast)
            return outputs, told[0].to(outputs.dtype)

        environments = list(own) if own is not None else range(len(inputs))
        everyone = zip(environments, targets, *by_environment(model, forward, inputs), strict=True)
        return torch.stack(
            [
                self.loss(outputs, target)
                + nn.functional.cross_entropy(told, torch.full_like(told[:, 0], index).long())
                for index, target, outputs, told in everyone
            ]
        )
