"""The representation of a model: the input of one of its linear layers, the head."""

import warnings
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError, InputError, InputWarning
from concord.gradients.risk import Batch, Loss, Risk
from concord.objectives.objective import Penalized
from concord.objectives.penalty_weight import PenaltyWeight


def head(model: nn.Module, layer: str | None = None) -> tuple[str, nn.Linear]:
    """The linear layer whose input is the representation, and its name; None takes the last one."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not linear:
        raise InputError("representation: the model has no linear layer whose input it could be")
    if layer is not None and layer not in linear:
        there = ", ".join(filter(None, linear)) or "none but the model itself"
        raise ArgumentError("representation", layer, f"no linear layer; there are {there}")
    name = layer if layer is not None else list(linear)[-1]
    return name, linear[name]


class Represented(Penalized):
    """An objective of the representation.

    Args:
        loss: the loss or the risk of one environment.
        weight: the weight of the penalty.
        autocast: the dtype in which layers compute.
        layer: Name of the linear layer whose input is the representation (coral, mmd, dann), or whose gradients are
            compared (fishr); by default the last linear layer.

    Attributes:
        changes_head: whether the penalty changes the head, too. A penalty that does not has no effect if no parameter
            changes the representation; a warning says so.
    """

    changes_head: ClassVar[bool] = False
    option_names: ClassVar[Mapping[str, str]] = {"layer": "representation"}

    def __init__(
        self, loss: Loss | Risk, weight: PenaltyWeight, autocast: torch.dtype | None = None, *, layer: str | None = None
    ) -> None:
        super().__init__(loss, weight, autocast)
        self.layer = layer

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Refuse a layer that the model does not have (InputError)."""
        head(model, self.layer)

    def represented(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Risks and weights of :meth:`risks`, the representations ``(environments, examples, width)``, and the head's
        outputs of each forward pass.
        """
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def keep(_: nn.Module, arguments: tuple[Tensor, ...], result: Tensor) -> None:
            inputs.append(arguments[0])
            outputs.append(result)

        name, layer = head(model, self.layer)
        with layer.register_forward_hook(keep):
            risks, weights = self.risks(model, batch, step)
        environments, examples = pytree.tree_leaves(batch)[0].shape[:2]
        rows = [each.reshape(len(each), -1) for each in inputs]
        if sum(map(len, rows)) != environments * examples or any(row.shape[1] != layer.in_features for row in rows):
            found = ", ".join(str(tuple(each.shape)) for each in inputs) or "nothing"
            raise InputError(
                f"representation: layer {name} gets {found} for {environments} environments of {examples} examples; "
                f"expected a representation ({examples}, {layer.in_features}) of each, once"
            )
        features = rows[0] if len(rows) == 1 else torch.cat(rows)
        if risks.requires_grad and not features.requires_grad and not self.changes_head:
            shown = f"layer {name}" if name else "the model"
            warnings.warn(
                f"the penalty changes nothing: no parameter changes the input of {shown}, which is the representation",
                InputWarning,
                stacklevel=2,
            )
        return risks, weights, features.unflatten(0, (environments, examples)), outputs
