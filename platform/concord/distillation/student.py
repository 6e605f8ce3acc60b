"""A student: a model, its risk and its teaching, as a function of weights."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from concord.distillation.teaching import Teaching
from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Batch, MeanRisk, Risk

Weights = Mapping[str, Tensor]
"""Parameters, and buffers, by their names in the model."""


class Student:
    """A model that learns from labels and from a teacher.

    Args:
        model: the model to train.
        risk: the risk of a batch, by its labels.
        teaching: the taught layers and the teaching loss.
        autocast: the dtype in which layers compute.

    Raises:
        InputError: the model has no layer of a taught name.
    """

    def __init__(self, model: nn.Module, risk: Risk, teaching: Teaching, autocast: torch.dtype | None = None) -> None:
        modules = dict(model.named_modules())
        for layer in teaching.layers:
            if layer not in modules:
                names = ", ".join(name for name in modules if name)
                raise ArgumentError("layers", layer, f"the model has no such layer; there are {names}")
        self.model, self.risk, self.teaching, self.autocast = model, risk, teaching, autocast
        self._taught = {layer: modules[layer] for layer in teaching.layers} or {"the model": model}

    def loss(self, batch: Batch, targets: Any, step: int = 0, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """The training loss (label loss and teaching loss), and the weight of the batch.

        Args:
            batch: a tree of tensors ``(examples, ...)``.
            targets: the teacher's targets for these examples.
            step: the step's number, for the risk.
            weights: values in place of the model's own; buffers among them are updated as the model's are.

        Raises:
            InputError: the targets do not fit the layers, or a layer does not run once a batch.
        """
        with self._activations() as seen:
            risk, count = self._risk(batch, step, weights)
        for layer, outputs in seen.items():
            if len(outputs) != 1 or not isinstance(outputs[0], Tensor):
                found = f"{len(outputs)} outputs" if len(outputs) != 1 else type(outputs[0]).__name__
                raise InputError(f"layer {layer}: gives {found} a batch; what is taught gives one tensor")
        return risk + self.teaching([outputs[0] for outputs in seen.values()], targets), count

    def label_loss(self, batch: Batch, step: int = 0, weights: Weights | None = None) -> Tensor:
        """The label loss alone, in evaluation mode."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            return self._risk(batch, step, weights)[0]
        finally:
            for module, training in modes:
                module.training = training

    def _risk(self, batch: Batch, step: int, weights: Weights | None) -> tuple[Tensor, Tensor]:
        risk = MeanRisk(self.model, self.risk, self.autocast, pytree.tree_leaves(batch)[0].device)
        risk.train(self.model.training)
        if weights is None:
            mean: Tensor
            mean, count = risk(batch, step)
        else:
            named = {f"model.{name}": value for name, value in weights.items()}
            mean, count = functional_call(risk, named, (batch, step))
        return mean, count

    @contextmanager
    def _activations(self) -> Iterator[dict[str, list[Any]]]:
        """Collect the outputs of each taught layer while the body runs."""
        seen: dict[str, list[Any]] = {layer: [] for layer in self._taught}

        def keep(layer: str, outputs: Any) -> None:
            seen[layer].append(outputs)

        with ExitStack() as hooks:
            for layer, module in self._taught.items():
                hook = module.register_forward_hook(lambda _, __, outputs, layer=layer: keep(layer, outputs))
                hooks.enter_context(hook)
            yield seen
