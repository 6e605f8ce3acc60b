"""Environments in one ordinary pass: their gradients from what goes into each layer and what comes back to its output.

Where a model treats examples separately, the batches of all environments can go through it as one, and backward need
only go to the layers' outputs: the gradients of a layer's parameters for each environment are products of the two (see
:mod:`~concord.gradients.example_layers`, here with the examples of an environment in place of an example's positions),
summed in blocks that stay in the cache. That is the arithmetic of a plain step, without ``vmap``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from concord.gradients.example_gradients import ExampleGradients, Recomputed, StoredGradients
from concord.gradients.example_layers import LAYERS, is_unit, symmetric_padding
from concord.gradients.risk import Batch, MeanRisk, autocast_to, pair
from concord.gradients.sums import Sums
from concord.gradients.supplied_convolution import convolution_gradients

_KNOWN = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
_MEMORY_LIMIT = 1 << 28  # bytes of gradients that may exist at once


class CannotPoolError(Exception):
    """One pass cannot give this model's gradients environment by environment."""


@dataclass
class _Use:
    """A layer's call: what went in, how often that had been written to by then, and where its output's gradient is."""

    module: nn.Module
    parameters: dict[str, int]
    inputs: Tensor
    version: int
    output: GradientEdge
    shape: torch.Size


@dataclass
class PooledPass:
    """Sums the statistics of environments by one pass through the model.

    Args:
        risk: of the model; it has to be a loss of outputs and targets.
        sums: where the statistics are added.

    Raises:
        CannotPoolError: the risk is no loss of outputs and targets, or a parameter belongs to no known kind of layer.
    """

    risk: MeanRisk
    sums: Sums
    _layers: list[tuple[nn.Module, dict[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not getattr(self.risk.risk, "of_outputs", False):
            raise CannotPoolError("its risk is no function of outputs and targets")
        if self.sums.gradient is None:
            raise CannotPoolError("its rule has no sum of gradients, which would tell whether they are finite")
        if any(isinstance(module, _BatchNorm) for module in self.risk.model.modules()):
            raise CannotPoolError("batch norm normalizes each environment by itself")
        # What a risk is to get in place of a model's outputs passes through a model that does nothing.
        self._of_outputs = MeanRisk(nn.Identity(), self.risk.risk, None, self.risk.device)
        indices = {id(parameter): index for index, parameter in enumerate(self.sums.parameters.values())}
        for module in self.risk.model.modules():
            own = {
                name: indices[id(parameter)]
                for name, parameter in module.named_parameters(recurse=False)
                if id(parameter) in indices
            }
            convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and symmetric_padding(module)
            if own and (is_unit(module) or not (type(module) in _KNOWN or convolution)):
                raise CannotPoolError(f"{type(module).__name__} is no kind of layer that is known here")
            if own:
                self._layers.append((module, own))

    def add(self, batch: Batch, environments: int, step: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the statistics of these environments to the sums; gives their risks and weights, ``(environments,)``.

        Args:
            batch: inputs and targets, ``(environments, examples, ...)``.
            environments: how many there are.
            step: for the risk.
            scale: what the risk is multiplied by before backward; None: by nothing.

        Raises:
            CannotPoolError: a layer was called more than once, or with something else than the examples.
        """
        inputs, targets = pair(batch)
        if not isinstance(inputs, Tensor):
            raise CannotPoolError("its inputs are no tensor")
        examples = inputs.shape[1]
        uses: list[_Use] = []
        handles = [module.register_forward_hook(self._noted(uses, own)) for module, own in self._layers]
        try:
            with autocast_to(self.risk.device, self.risk.autocast):
                outputs = self.risk.model(inputs.flatten(0, 1))
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(outputs, Tensor) or len(outputs) != environments * examples:
            raise CannotPoolError("its output does not begin with the examples")
        outputs = outputs.float() if self.risk.autocast is not None else outputs
        of_environments = outputs.unflatten(0, (environments, examples)), targets
        risks, weights = vmap(lambda pair: self._of_outputs(pair, step))(of_environments)
        total = risks.sum() if scale is None else risks.sum() * scale
        grads = torch.autograd.grad(total, [use.output for use in uses], allow_unused=True)
        with torch.no_grad(), torch.autocast(self.risk.device.type, enabled=False):
            for use, grad in zip(uses, grads, strict=True):
                if grad is not None:
                    self._add(use, grad if scale is None else grad / scale, environments)
        return risks.detach(), weights

    def _noted(self, uses: list[_Use], own: dict[str, int]) -> Any:
        def note(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if any(use.module is module for use in uses):
                raise CannotPoolError(f"{type(module).__name__} is called more than once")
            if len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not output.requires_grad:
                raise CannotPoolError(f"{type(module).__name__} is called with more than one tensor")
            first = arguments[0]
            uses.append(_Use(module, own, first.detach(), first._version, get_gradient_edge(output), output.shape))

        return note

    def _add(self, use: _Use, grad: Tensor, environments: int) -> None:
        if use.inputs._version != use.version:
            raise CannotPoolError("a layer's input was written to in place")
        if len(use.inputs) % environments or len(grad) != len(use.inputs):
            raise CannotPoolError("a layer is not applied to each example")
        inputs, grads = (each.unflatten(0, (environments, -1)) for each in (use.inputs, grad))
        forms = _convolution(use.module, inputs, grads) if isinstance(use.module, _ConvNd) else None
        forms = forms or LAYERS[type(use.module)](use.module, inputs, grads)
        if forms is None or not forms.keys() >= use.parameters.keys():
            raise CannotPoolError(f"{type(use.module).__name__} in this use is not known here")
        for name, index in use.parameters.items():
            part = self.sums.part(index)
            wanted = [(statistic, part[statistic.name]) for statistic in self.sums.rule.statistics]
            forms[name].add_to(wanted, _MEMORY_LIMIT)


def _convolution(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, ExampleGradients]:
    """The gradient of each environment as backward computes that of a batch."""

    def weights(part: slice) -> Tensor:
        return torch.stack([_weight_gradient(module, *each) for each in zip(inputs[part], grads[part], strict=True)])

    size = module.weight.numel() * grads.itemsize
    return {
        "weight": Recomputed(len(inputs), weights, size),
        "bias": StoredGradients(grads.flatten(3).sum((1, 3)) if grads.ndim > 3 else grads.sum(1)),
    }


def _weight_gradient(module: Any, inputs: Tensor, grad: Tensor) -> Tensor:
    given = grad.contiguous(), inputs.to(grad.dtype).contiguous(), module.weight.to(grad.dtype)
    gradient = convolution_gradients(module, *given, (False, True, False))[1]
    assert gradient is not None
    return gradient
