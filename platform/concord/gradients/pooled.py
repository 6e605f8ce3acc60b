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
from torch.nn.modules.conv import _ConvNd

from concord.aggregation.asynchronous import is_asynchronous
from concord.errors import InputError
from concord.gradients.backward_graph import is_reentrant, nodes_behind
from concord.gradients.capture import Capture, Pass
from concord.gradients.collected import Collected
from concord.gradients.environment_norms import EnvironmentNorms
from concord.gradients.group_gradients import StoredGradients
from concord.gradients.layer_gradients import Call, formula_of, is_unit
from concord.gradients.risk import (
    Batch,
    MeanRisk,
    Supervised,
    autocast_to,
    inputs_of,
    is_own,
    loss_by_group,
    with_outputs,
)
from concord.gradients.sums import Sums
from concord.weighted import Weighted


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
        kinds = {type(module) for module in risk.model.modules()}
        if not is_asynchronous(risk.device) and any(issubclass(kind, _BatchNorm) for kind in kinds):
            raise InputError("pooled: batch norm normalizes each environment by itself")
        for layer in self.layers:
            if is_unit(layer.module) or formula_of(layer.module) is None:
                raise InputError(f"pooled: module {layer.name} is no kind of layer that is known")
        self._model, self._sums, self._risk = risk.model, sums, risk
        self.norms = EnvironmentNorms(risk.model, self.layers)
        # Convolutions, too, find the environments' channels side by side in memory.
        self._alternates = is_asynchronous(risk.device) and any(
            issubclass(each, _BatchNorm | _ConvNd) for each in kinds
        )
        # What a risk is to get in place of a model's outputs passes through a model that does nothing.
        self._of_outputs = MeanRisk(nn.Identity(), risk.risk, None, risk.device)
        self._pass = Pass(0, 1)
        self._edges: list[GradientEdge] = []
        self._inputs: list[Tensor] = []  # of the layers
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
        self._pass, self._scale = Pass(environments * examples, environments, self._alternates), scale
        handles = self.attach(left_out=self.norms.handles)
        try:
            with autocast_to(self._risk.device, self._risk.autocast), self.norms.separated(environments, examples):
                outputs = self._model((inputs.transpose(0, 1) if self._alternates else inputs).flatten(0, 1))
        finally:
            edges, self._edges = self._edges, []
            inputs_of_layers, self._inputs = self._inputs, []
            for handle in handles:
                handle.remove()
        if not isinstance(outputs, Tensor) or len(outputs) != environments * examples:
            raise InputError("pooled: the model's output does not begin with the examples")
        outputs = outputs.float() if self._risk.autocast is not None else outputs
        if self._alternates:
            outputs = outputs.unflatten(0, (examples, environments)).transpose(0, 1)
        else:
            outputs = outputs.unflatten(0, (environments, examples))
        risks, weights = self._risks(with_outputs(batch, outputs), step)
        total = risks.sum() if scale is None else risks.sum() * scale
        self._require_layers_alone([total, *inputs_of_layers], edges)
        with torch.autocast(self._risk.device.type, enabled=False):
            self._backward(total, edges)
        for index in list(self._pass.arrived):  # of a parameter whose other use the loss did not depend on
            self._add(index)
        return risks.detach(), weights

    def _risks(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The risks and weights of the environments, from the model's outputs in place of the inputs."""
        risk = self._risk.risk
        own = isinstance(risk, Supervised) and is_own(risk.loss) and not isinstance(batch, Weighted)
        if isinstance(risk, Supervised) and own and is_asynchronous(self._risk.device):
            outputs, targets = batch
            self._risk.weighted = False
            environments, examples = outputs.shape[:2]
            weights = torch.full((environments,), float(examples), device=outputs.device)
            return loss_by_group(risk.loss, outputs, targets), weights
        risks, weights = vmap(lambda each: self._of_outputs(each, step))(batch)
        self._risk.weighted = self._of_outputs.weighted
        return risks, weights

    def _require_layers_alone(self, tensors: Sequence[Tensor], edges: Sequence[GradientEdge]) -> None:
        """Refuse a parameter that is also used outside of its layer, as by a penalty in the loss (InputError).

        ``tensors`` are the loss and the layers' inputs. Between them and the layers' outputs there is to be no
        parameter: backward ends at those outputs, so the gradient of such a use would be missing, however small.
        """
        names = {id(parameter): name for name, parameter in self._sums.parameters.items()}
        for node in nodes_behind(tensors, edges):
            if is_reentrant(node):
                raise InputError("pooled: layers under reentrant checkpointing are not captured")
            name = names.get(id(getattr(node, "variable", None)))  # of the node that adds to a parameter's gradient
            if name is not None:
                raise InputError(f"pooled: parameter {name} is also used outside of its layer")

    def _backward(self, total: Tensor, edges: Sequence[GradientEdge]) -> None:
        of_norms = list(self.norms.leaves())
        leaves = [leaf for _, by_name in of_norms for leaf in by_name.values()]
        places: list[Any] = [*edges, *leaves]  # PyTorch's types know lists of one kind
        found = torch.autograd.grad(total, places, allow_unused=True)
        rest = iter(found[len(edges) :])
        for layer, by_name in of_norms:
            for name in by_name:
                gradients = next(rest)
                if gradients is not None:
                    form = StoredGradients(self._unscaled(gradients).view(self._pass.groups, -1))
                    self._sums.add_form(layer.indices[name], form, self._pass.groups)

    def pass_of(self, arguments: Any, keywords: Any) -> Pass:
        """The pass of a layer's call."""
        return self._pass

    def waits(self, current: Pass, call: Call, sources: Sequence[Tensor]) -> None:
        """Note a call's outputs, at which backward will end."""
        self._edges += map(get_gradient_edge, sources)
        self._inputs += [each for each in call.arguments if isinstance(each, Tensor)]

    def arrived(self, current: Pass, call: Call, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of parameters of which all uses have arrived."""
        unscaled = [None if grad is None else self._unscaled(grad) for grad in grads]
        forms, general = call.gradients(
            unscaled,
            current.examples,
            current.groups,
            alternate=current.alternate,
            compiled=self._sums.aggregation.compile,
        )
        if general:
            raise InputError(f"pooled: module {call.layer.name} is called in a way that is not known")
        for index in current.take(call.layer, forms):
            self._add(index)

    def _unscaled(self, gradients: Tensor) -> Tensor:
        if self._scale is None:
            return gradients
        # A small number in float16 is 0 without its scale.
        return (gradients.float() if gradients.dtype == torch.float16 else gradients) / self._scale

    def _add(self, index: int) -> None:
        self._sums.add_form(index, self._pass.pop(index), self._pass.groups)
