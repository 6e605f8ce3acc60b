"""The gradients of environments by one ordinary pass: from each layer's input and its output's gradient.

If a model treats examples separately, the batches of all environments go through it as one batch, and backward only
needs to reach the layers' outputs: the gradients of a layer's parameters for each environment are products of the
layer's input and its output's gradient (see :mod:`~concord.gradients.layer_gradients`), summed in blocks that fit the
cache. This costs the arithmetic of a plain step, without ``vmap``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from concord.errors import InputError
from concord.gradients.capture import Capture, Pass
from concord.gradients.collected import Collected
from concord.gradients.layer_gradients import Call, formula_of, is_unit
from concord.gradients.risk import Batch, MeanRisk, autocast_to, inputs_of, with_outputs
from concord.gradients.sums import Sums


class PooledPass(Capture[Pass]):
    """Collects the gradients of environments, or their sums, by one pass through the model.

    The risk must be a loss of outputs and targets; every parameter must belong to a known kind of layer.
    """

    def __init__(self, risk: MeanRisk, sums: Collected) -> None:
        super().__init__(risk.model, sums.parameters)
        if not getattr(risk.risk, "of_outputs", False):
            raise InputError("pooled: the risk is no function of outputs and targets")
        if isinstance(sums, Sums) and sums.gradient is None:
            raise InputError("pooled: the rule has no sum of gradients, which would tell whether they are finite")
        if any(isinstance(module, _BatchNorm) for module in risk.model.modules()):
            raise InputError("pooled: batch norm normalizes each environment by itself")
        for layer in self.layers:
            if is_unit(layer.module) or formula_of(layer.module) is None:
                raise InputError(f"pooled: module {layer.name} is no kind of layer that is known")
        self._model, self._sums, self._risk = risk.model, sums, risk
        # What a risk is to get in place of a model's outputs passes through a model that does nothing.
        self._of_outputs = MeanRisk(nn.Identity(), risk.risk, None, risk.device)
        self._pass = Pass(0, 1)
        self._edges: list[GradientEdge] = []
        self._scale: Tensor | None = None

    def add(self, batch: Batch, environments: int, step: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the gradients of these environments; return their risks and weights, ``(environments,)``.

        The batch is inputs and targets, ``(environments, examples, ...)``; the risk is multiplied by ``scale`` before
        backward.
        """
        inputs = inputs_of(batch)
        if not isinstance(inputs, Tensor):
            raise InputError("pooled: the inputs are no tensor")
        examples = inputs.shape[1]
        self._pass, self._scale = Pass(environments * examples, environments), scale
        handles = self.attach()
        try:
            with autocast_to(self._risk.device, self._risk.autocast):
                outputs = self._model(inputs.flatten(0, 1))
        finally:
            edges, self._edges = self._edges, []
            for handle in handles:
                handle.remove()
        if not isinstance(outputs, Tensor) or len(outputs) != environments * examples:
            raise InputError("pooled: the model's output does not begin with the examples")
        outputs = outputs.float() if self._risk.autocast is not None else outputs
        of_environments = with_outputs(batch, outputs.unflatten(0, (environments, examples)))
        risks, weights = vmap(lambda each: self._of_outputs(each, step))(of_environments)
        total = risks.sum() if scale is None else risks.sum() * scale
        with torch.autocast(self._risk.device.type, enabled=False):
            torch.autograd.grad(total, edges, allow_unused=True)
        for index in list(self._pass.arrived):  # of a parameter whose other use the loss did not depend on
            self._add(index)
        return risks.detach(), weights

    def pass_of(self, arguments: Any, keywords: Any) -> Pass:
        """The pass of a layer's call."""
        return self._pass

    def waits(self, current: Pass, call: Call, sources: Sequence[Tensor]) -> None:
        """Note a call's outputs, at which backward will end."""
        self._edges += map(get_gradient_edge, sources)

    def arrived(self, current: Pass, call: Call, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of parameters of which all uses have arrived."""
        scale = self._scale
        unscaled = [grad if grad is None or scale is None else grad / scale for grad in grads]
        forms, general = call.gradients(unscaled, current.examples, current.groups)
        if general:
            raise InputError(f"pooled: module {call.layer.name} is called in a way that is not known")
        for index in current.take(call.layer, forms):
            self._add(index)

    def _add(self, index: int) -> None:
        self._sums.add_form(index, self._pass.pop(index), self._pass.groups)
