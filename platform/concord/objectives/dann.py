"""Domain-adversarial training: a representation from which the environment cannot be told."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Batch, autocast_to
from concord.objectives.objective import Penalized


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

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The network's outputs."""
        return self.model(*inputs, **named)

    @contextmanager
    def representations(self) -> Iterator[list[Tensor]]:
        """A list to which every forward pass adds its representation, while this lasts."""
        seen: list[Tensor] = []
        layer = self.model.get_submodule(self.layer)
        handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            yield seen
        finally:
            handle.remove()


class DANN(Penalized):
    """The mean over environments of risk and domain loss, the latter reversed for the representation.

    (1/d) Σ R_e(f) + L_e(domain classifier), where the gradient of the domain loss L_e (cross-entropy between told and
    true environment) is multiplied by -λ on its way into the representation: the domain classifier learns to tell the
    environments, the representation not to be told apart. Ganin et al., Domain-Adversarial Training of Neural
    Networks, 2016, section 4.2.

    The weight is λ; 0 during its warm-up.
    """

    default_weight: ClassVar[float | None] = 1.0

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Risk and domain loss, one sum an environment; the model is a :class:`DomainAdversarial`.

        Raises:
            InputError: it is not, or its representation does not have one row for each example.
        """
        if not isinstance(model, DomainAdversarial):
            raise ArgumentError("objective", "dann", "no domain classifier in the model; put it into DomainAdversarial")
        with model.representations() as seen:
            risks, weights = self.risks(model, batch, step)
        environments, examples = pytree.tree_leaves(batch)[0].shape[:2]
        rows = [each.reshape(len(each), -1) for each in seen]
        width = model.model.get_submodule(model.layer).in_features
        if sum(map(len, rows)) != environments * examples or any(each.shape[1] != width for each in rows):
            found = ", ".join(str(tuple(each.shape)) for each in seen) or "nothing"
            raise InputError(
                f"DANN: layer {model.layer} gets {found} for {environments} environments of {examples} examples; "
                f"expected a representation ({examples}, {width}) of each, once"
            )
        features = reverse_gradient(torch.cat(rows), self.weight.after_warmup(step))
        with autocast_to(features.device, self.autocast):
            told = model.domain_classifier(features)
        known = torch.tensor(own or range(environments), device=told.device).repeat_interleave(examples)
        losses = nn.functional.cross_entropy(told.to(risks.dtype), known, reduction="none")
        return risks + losses.view(environments, examples).mean(1), weights
