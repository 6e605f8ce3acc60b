"""A network's losses in each environment around its solution θ*, with their gradients and Gauss-Newton products.

Every measurement of a network's consistency uses these functions. The model is in evaluation mode, and its buffers do
not change. An environment's examples pass in pieces, whose means are added in float64, so memory does not grow with
their number.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError, InputError
from concord.gradients.layout import Layout
from concord.gradients.risk import Batch, Loss, MeanRisk, Risk, as_risk, pair

Add = Callable[[Tensor], Tensor]
"""Adds what each of several processes has found of its own environments."""

_MODEL = "model."  # what the names of parameters begin with in a MeanRisk


class EnvironmentLosses:
    """The losses L_e(θ* + δ) of a trained network in each environment, as functions of the offset δ.

    Args:
        model: the model at θ*, on the device of all computations. It is set to evaluation mode, and not changed
            otherwise. θ are the parameters that require gradients.
        loss: the loss or the risk, see :mod:`concord.gradients.risk`.
        environments: a batch of each environment, by name: a tree of tensors ``(examples, ...)``.
        examples_together: the number of examples that pass through the model at once.
        check_finite: whether to compute the losses at θ*, and to refuse them if they are not finite.

    Attributes:
        names: the environments' names.
        layout: the places of the parameters in θ, ``(n,)``.
        solution: θ*, ``(n,)``.
        at_solution: L_e(θ*) by the environment's name; empty without ``check_finite``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Risk,
        environments: Mapping[str, Batch],
        examples_together: int = 512,
        *,
        check_finite: bool = True,
    ) -> None:
        if not environments:
            raise ArgumentError("environments", 0, "there has to be at least one")
        # An exported model cannot change its mode; it was exported in evaluation mode.
        self.model = model if isinstance(model, torch.fx.GraphModule) else model.eval()
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if not trained:
            raise ArgumentError("model", type(model).__name__, "has no parameter that requires a gradient")
        self.risk = as_risk(loss)
        self.environments = dict(environments)
        self.names = tuple(environments)
        self.layout = Layout.of(trained)
        self._together = examples_together
        self._trained = [value.detach() for value in trained.values()]
        first = self._trained[0]
        self.device, self.dtype = first.device, first.dtype
        self._mean = MeanRisk(model, self.risk, None, self.device)
        self.solution = torch.cat([value.reshape(-1).to(self.dtype) for value in self._trained])
        self.at_solution = {name: self.loss(name) for name in self.names} if check_finite else {}
        for name, value in self.at_solution.items():
            if not math.isfinite(value):
                raise InputError(f"environment {name}: its loss at the solution is {value}; it has to be finite")

    @property
    def size(self) -> int:
        """The number of θ's components, n."""
        return self.layout.components

    def loss(self, name: str, offset: Tensor | None = None) -> float:
        """L_e(θ* + δ), δ of shape ``(n,)``; None is 0."""
        total = weight = 0.0
        with torch.no_grad():
            for chunk in self._chunks(name, slice(None)):
                mean, counts = functional_call(self._mean, self._parameters(offset), (chunk, 0))
                total += float(mean) * float(counts)
                weight += float(counts)
        return total / weight

    def gradient(self, name: str, offset: Tensor | None = None, examples: slice = slice(None)) -> Tensor:
        """∇L_e(θ* + δ), ``(n,)``, of all or some of the environment's examples."""
        sums, weight = torch.zeros(self.size, dtype=torch.float64, device=self.device), 0.0
        for chunk in self._chunks(name, examples):
            parameters = {key: value.detach().requires_grad_() for key, value in self._parameters(offset).items()}
            mean, counts = functional_call(self._mean, parameters, (chunk, 0))
            sums += self._flat(torch.autograd.grad(mean, list(parameters.values()), allow_unused=True)) * float(counts)
            weight += float(counts)
        return (sums / weight).to(self.dtype)

    def product(self, name: str, vector: Tensor) -> Tensor:
        """G_e v at θ*: the Gauss-Newton matrix Σ JᵀHJ of an environment's examples, times a vector ``(n,)``.

        J is the derivative of the outputs, H the second derivative of the loss by the outputs, so G is positive
        semidefinite if the loss is convex in the outputs. A forward pass gives Jv, a backward pass Jᵀ(HJv).

        Returns:
            ``(n,)``, of the vector's dtype; computed in the parameters'.
        """
        loss = self.loss_of_outputs()
        sums, weight = torch.zeros(self.size, dtype=torch.float64, device=self.device), 0
        tangents = self._split(vector.to(self.dtype))
        for chunk in self._chunks(name, slice(None)):
            inputs, targets = pair(chunk)
            # Twice forwards, since a graph that held the tangents too would be twice as large, and slower.
            with torch.no_grad(), forward_ad.dual_level():
                duals = map(forward_ad.make_dual, self._trained, tangents)
                outputs, moved = forward_ad.unpack_dual(self._outputs(duals, inputs))
                bent = second_derivative(loss, outputs, targets, torch.zeros_like(outputs) if moved is None else moved)
            leaves = [value.detach().requires_grad_() for value in self._trained]
            outputs = self._outputs(leaves, inputs)
            examples = len(targets)
            sums += self._flat(torch.autograd.grad(outputs, leaves, bent, allow_unused=True)) * examples
            weight += examples
        return (sums / weight).to(vector.dtype)

    def pseudo_environments(self, seed: int) -> "EnvironmentLosses":
        """The same examples, pooled and divided at random among as many environments of the same sizes.

        These environments differ only by sampling.
        """
        sizes = {name: self.examples(name) for name in self.names}
        dealt = deal_out(self.environments.values(), sizes, torch.Generator().manual_seed(seed))
        return EnvironmentLosses(self.model, self.risk, dealt, self._together)

    def examples(self, name: str) -> int:
        """The number of examples of an environment."""
        return len(pytree.tree_leaves(self.environments[name])[0])

    def by_layer(self, values: Tensor) -> dict[str, Tensor]:
        """Components ``(n,)`` by the parameters that they belong to, each ``(components,)``."""
        parts = {name: self.layout.part(values, index) for index, name in enumerate(self.layout.names)}
        return {name: part.reshape(-1) for name, part in parts.items()}

    def _outputs(self, parameters: Iterable[Tensor], inputs: Any) -> Tensor:
        outputs: Tensor = functional_call(self.model, dict(zip(self.layout.names, parameters, strict=True)), (inputs,))
        return outputs

    def loss_of_outputs(self) -> Loss:
        """The loss of outputs and targets, which curvature needs."""
        if not getattr(self.risk, "of_outputs", False):
            raise InputError("curvature: needs a loss of outputs and targets; this job has a risk(model, batch, step)")
        loss: Loss = self.risk.loss  # type: ignore[attr-defined]
        return loss

    def _chunks(self, name: str, examples: slice) -> Iterator[Batch]:
        if name not in self.environments:
            raise ArgumentError("environment", name, f"there is none of this name; there are {', '.join(self.names)}")
        batch = pytree.tree_map(lambda leaf: leaf[examples], self.environments[name])
        for start in range(0, len(pytree.tree_leaves(batch)[0]), self._together):
            piece = slice(start, start + self._together)
            yield pytree.tree_map(lambda leaf, piece=piece: leaf[piece].to(self.device), batch)

    def _parameters(self, offset: Tensor | None) -> dict[str, Tensor]:
        values = self._trained
        if offset is not None:
            parts = self._split(offset.to(self.device, self.dtype))
            values = [value + part for value, part in zip(values, parts, strict=True)]
        return {_MODEL + name: value for name, value in zip(self.layout.names, values, strict=True)}

    def _split(self, vector: Tensor) -> list[Tensor]:
        return [self.layout.part(vector, index) for index in range(len(self.layout.names))]

    def _flat(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        """One vector in float64, with zeros for a parameter without effect on the loss."""
        parts = [
            torch.zeros(shape.numel(), device=self.device) if part is None else part.reshape(-1)
            for part, shape in zip(gradients, self.layout.shapes, strict=True)
        ]
        return torch.cat([part.double() for part in parts])


def deal_out(environments: Iterable[Batch], sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Batch]:
    """Pool the examples of these environments and divide them at random among others of the same sizes, by name."""
    pooled = pytree.tree_map(lambda *leaves: torch.cat(leaves), *environments)
    places = torch.randperm(sum(sizes.values()), generator=generator).split(list(sizes.values()))
    return {
        name: pytree.tree_map(lambda leaf, own=own: leaf[own.to(leaf.device)], pooled)
        for name, own in zip(sizes, places, strict=True)
    }


def second_derivative(loss: Loss, outputs: Tensor, targets: Tensor, by: Tensor) -> Tensor:
    """H u, the second derivative of a batch's loss by its outputs times ``by``, both ``(examples, ...)``."""
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(outputs, targets), outputs, create_graph=True)
        if not slope.requires_grad:  # of a loss that is linear in the outputs
            return torch.zeros_like(outputs)
        (bent,) = torch.autograd.grad(slope, outputs, by, allow_unused=True)
    return torch.zeros_like(outputs) if bent is None else bent
