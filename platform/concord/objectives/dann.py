"""Domain-adversarial training: a representation that does not reveal the environment."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from concord.errors import ArgumentError
from concord.gradients.risk import Batch, Loss, Risk, autocast_to
from concord.objectives.objective import require_all
from concord.objectives.penalty_weight import PenaltyWeight
from concord.objectives.representation import Represented, head
from concord.space import Entries, LogUniform


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def reverse_gradient(features: Tensor, strength: float = 1.0) -> Tensor:
    """The identity, whose backward pass multiplies the gradient by -strength."""
    reversed_: Tensor = _Reversal.apply(features, strength)  # type: ignore[no-untyped-call]
    return reversed_


class DomainClassifier(nn.Sequential):
    """A network that classifies the environment from a model's representation.

    Args:
        model: the network whose representation it classifies.
        environments: the number of environments.
        hidden_units: width of the two hidden layers.
        layer: name of the linear layer whose input is the representation; None takes the last linear layer.

    Raises:
        InputError: the model has no linear layer of this name.
    """

    def __init__(self, model: nn.Module, environments: int, hidden_units: int = 256, layer: str | None = None) -> None:
        super().__init__(
            nn.Linear(head(model, layer)[1].in_features, hidden_units),
            nn.ReLU(),
            nn.Linear(hidden_units, hidden_units),
            nn.ReLU(),
            nn.Linear(hidden_units, environments),
        )
        self.environments = environments


class DANN(Represented):
    """The mean over environments of risk and domain loss, the latter reversed for the representation.

    (1/d) Σ R_e(f) + L_e(domain classifier), where the gradient of the domain loss L_e (cross-entropy between predicted
    and true environment) is multiplied by -λ before it reaches the representation: the domain classifier learns to tell
    the environments apart, the representation to hide them. Ganin et al., Domain-Adversarial Training of Neural
    Networks, 2016, section 4.2.

    Args:
        loss: the loss or the risk of one environment.
        weight: λ; 0 during its warm-up.
        autocast: the dtype in which layers compute.
        hidden_units: Width of the two hidden layers of dann's domain classifier.

    Attributes:
        module: the domain classifier, which :meth:`begin` makes.
    """

    every: ClassVar[bool] = True
    default_weight: ClassVar[float | None] = 1.0
    display_name: ClassVar[str | None] = "DANN"
    option_names: ClassVar[Mapping[str, str]] = {"hidden_units": "domain_units"}
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(0.01, 10.0)}

    def __init__(
        self,
        loss: Loss | Risk,
        weight: PenaltyWeight,
        autocast: torch.dtype | None = None,
        *,
        hidden_units: int = 256,
        layer: str | None = None,
    ) -> None:
        super().__init__(loss, weight, autocast, layer=layer)
        self._hidden_units = hidden_units

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Make the domain classifier, for the representation of this model."""
        first = head(model, self.layer)[1].weight
        made = DomainClassifier(model, environments, self._hidden_units, self.layer)
        self.module = made.to(first.device, first.dtype)

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Risk plus domain loss of each environment.

        Raises:
            InputError: :meth:`begin` was not called, or the number of the representation's rows is not that of the
                examples.
        """
        classifier = self.module
        if not isinstance(classifier, DomainClassifier):
            raise ArgumentError("objective", "dann", "it has no domain classifier yet; call begin with the model first")
        risks, weights, features, _ = self.represented(model, batch, step)
        environments, examples = features.shape[:2]
        if own is None:
            require_all(environments, classifier.environments, "dann")
        features = reverse_gradient(features.flatten(0, 1), self.weight.after_warmup(step))
        with autocast_to(features.device, self.autocast):
            told = classifier(features)
        known = torch.tensor(own or range(environments), device=told.device).repeat_interleave(examples)
        losses = nn.functional.cross_entropy(told.to(risks.dtype), known, reduction="none")
        return risks + losses.view(environments, examples).mean(1), weights
