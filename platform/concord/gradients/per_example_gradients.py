"""A gradient source for which every example of a batch is an environment."""

import contextlib
from dataclasses import dataclass, field
from typing import Any, Unpack, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.aggregation import Rule
from concord.aggregation.asynchronous import is_asynchronous
from concord.errors import ArgumentError, InputError
from concord.gradient_policies import ExampleGradient
from concord.gradients.backward_graph import gradients_of
from concord.gradients.group_gradients import MEMORY_LIMIT
from concord.gradients.layout import require_unchanged
from concord.gradients.nonfinite import collect_finite
from concord.gradients.per_example import PerExample
from concord.gradients.pieces import Pieces, joined
from concord.gradients.risk import (
    Batch,
    Calls,
    Loss,
    MeanRisk,
    Risk,
    Supervised,
    as_risk,
    check_weights,
    loss_by_group,
    pair,
    take,
    weighs_classes,
    weights_of,
)
from concord.gradients.step import AggregationOptions, EnvironmentStep
from concord.gradients.step_graph import NO_NUMBER, Recordable, StepGraph


class PerExampleGradients(Recordable):
    """Aggregate the gradients of single examples, and store the result in ``parameter.grad``.

    One call replaces ``loss.backward()``::

        gradients = PerExampleGradients(model, torch.nn.functional.cross_entropy, AndMask(threshold=0.2))
        for inputs, targets in batches:  # (environments, batch, ...), (environments, batch)
            step = gradients((inputs, targets))
            optimizer.step()

    The environments of the batch are pooled; an example's environment has no effect. Batch norm sees all examples of
    this process together, and updates its running statistics once a call. If the risk is a sum and its weight, an
    example's gradient is that of its part of the sum, times the number of examples over the weight, both of all
    processes: the mean of the examples' gradients is then the risk's gradient.

    Args:
        model: a model of inputs ``(examples, ...)``.
        loss: the loss or the risk of ``examples``; a risk calls the model once.
        rule: the rule.
        definition: see :data:`ExampleGradient`.
        group: the processes with the other examples; all must call equally often.
        memory_limit: bytes of per-example gradients that may exist at once.
        accumulate: process the batch in this number of pieces, see :mod:`~concord.gradients.pieces`; with the
            definition ``contribution``, and a loss or a risk that is a mean over the examples.
        graph: replay the step as a CUDA graph after the first ones, see :mod:`~concord.gradients.step_graph`.
        options: see :class:`~concord.gradients.step.Aggregation`; ``skip`` leaves examples out,
            also of batch norm's statistics.

    Raises:
        InputError: the model has no parameter that requires a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Risk,
        rule: Rule,
        *,
        definition: ExampleGradient = "contribution",
        group: dist.ProcessGroup | None = None,
        memory_limit: int = MEMORY_LIMIT,
        accumulate: int = 1,
        graph: bool = False,
        **options: Unpack[AggregationOptions],
    ) -> None:
        if definition not in get_args(ExampleGradient):
            raise ArgumentError("definition", definition, f"must be one of {', '.join(get_args(ExampleGradient))}")
        self.model = model
        self.definition = definition
        self._group = group
        # The mean times the number of examples: a GPU would scale every gradient by it in an operation of its own.
        self._scales = definition == "contribution" and is_asynchronous(next(model.parameters()).device)
        self._collected = PerExample(
            model, rule, reduction="sum" if self._scales else "mean", group=group, memory_limit=memory_limit, **options
        )
        if definition == "loss":
            self._collected.sums.collected = self._collected.sums.rule.statistics
        self.aggregation = self._collected.aggregation
        self._parameters = list(self._collected.sums.parameters.values())
        self._device = self._collected.sums.device
        self._graph = StepGraph(self._device) if graph else None
        risk = as_risk(loss)
        self._loss = risk.loss if isinstance(risk, Supervised) else None
        if definition == "loss" and self._loss is None:
            raise ArgumentError("definition", definition, "needs a loss(outputs, targets) in place of a risk")
        if definition == "loss" and accumulate > 1:
            raise ArgumentError("accumulate", accumulate, "needs the definition contribution; give 1")
        self._pieces = Pieces(model, accumulate)
        if definition == "loss" and self._loss is not None and weighs_classes(self._loss):
            raise ArgumentError(
                "definition", definition, "the loss of one example has no class weight; give contribution"
            )
        self._outputs: list[Any] = []  # of each piece
        self._per_weight: Tensor | None = None
        if self._loss is not None:
            risk = _Noting(self._loss, counts=accumulate > 1 or group is not None, seen=self._outputs)
        self._risk = MeanRisk(model, risk, self.aggregation.autocast, self._device)
        self._calls = Calls()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._collected.remove()

    def __call__(self, batch: Batch, *more: Any, step: int | None = None) -> EnvironmentStep:
        """Fill ``parameter.grad`` with the aggregated gradient of these examples.

        Args:
            batch: a tree of tensors ``(environments, batch, ...)``.
            step: the step's number, for the risk, errors, and rules that draw; counted from 0 if None.
            more: ``gradients(inputs, targets, step)`` is short for ``gradients((inputs, targets), step)``.

        Returns:
            The step, with a loss's mean of each environment, or a risk's mean over all environments. Examples that were
            left out are named ``example N``, in the order of environments and then of the batch.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``.
            InputError: the batch's leaves do not fit, there is one example in all processes together, or a layer
                has no per-example gradients.
        """
        batch, _, at = self._calls.take(batch, more, step)
        with torch.enable_grad():  # also where the caller has disabled it
            if self._graph is None:
                return self.ordinary(batch, at)
            require_unchanged(self.model, self._collected.sums.parameters)
            return self._graph(self, batch, at)

    def obstacle(self) -> str | None:
        """Why the step cannot be recorded, if that is known after a step."""
        if self._group is not None:
            return "the examples belong to several processes"
        return "the host reads the weights of the risks" if self._risk.weighted else super().obstacle()

    def recorded(self, batch: Batch) -> EnvironmentStep:
        """The step, without a look at its values."""
        with self.aggregation.recording():
            return self.ordinary(batch, NO_NUMBER)

    def ordinary(self, batch: Batch, at: int) -> EnvironmentStep:
        """The step of number ``at``, not by a graph."""
        environments, each = pytree.tree_leaves(batch)[0].shape[:2]
        examples = pytree.tree_map(lambda leaf: leaf.flatten(0, 1), batch)
        count = environments * each
        policy, buffers = self.aggregation.policy, list(self.model.buffers())
        before = [buffer.detach().clone() for buffer in buffers] if policy == "skip" else []
        self._collected.discard()
        self._per_weight = None

        summed: list[tuple[Tensor, Tensor]] = []

        @torch.no_grad()
        def part(left: Tensor | None) -> Batch:
            for buffer, value in zip(buffers, before, strict=False):
                buffer.copy_(value)
            return examples if left is None else take(examples, left)

        def collect(left: Tensor | None) -> None:
            summed.append(self._collect(part(left), at, environments if left is None else 1))

        def find(left: Tensor | None) -> Tensor:
            found = []
            for piece in self._pieces.of(part(left)):
                self._collected.hooks.expected = len(pytree.tree_leaves(piece)[0])
                with self._collected.hooks.watched(self._collected.hooks.expected) as finite:
                    self._risk(piece, at)[0].backward()
                found.append(finite)
            for parameter in self._parameters:
                parameter.grad = None
            part(left)
            return torch.cat(found)

        by_loss = self.definition == "loss"
        are_finite = self._collected.sums.are_finite if by_loss else self._collected.gradients_are_finite
        finite = collect_finite(count, policy, self._device, collect, are_finite, find)
        finished = self._collected.finish(finite, count, at, None if by_loss else self._collected.complete())
        for parameter in self._parameters:  # that the risk does not depend on
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        risks, weights = summed[0]
        return finished._replace(losses=risks, weights=weights)

    def _collect(self, batch: Batch, step: int, environments: int) -> tuple[Tensor, Tensor]:
        """Sum the statistics of these examples; return risks and weights, by environment if known."""
        for parameter in self._parameters:
            parameter.grad = None
        pieces = self._pieces.of(batch)
        divided = len(pieces) > 1 or self._group is not None
        if divided and self._loss is not None and self._per_weight is None:
            counts = weights_of(self._loss, pair(batch)[1])
            if counts is not None:
                self._note_weight(len(counts), counts.sum())
        parts = [self._collect_piece(piece, step) for piece in pieces]
        risks, weights = (torch.stack(each) for each in zip(*parts, strict=True))
        weight = weights[0] if len(weights) == 1 else weights.sum()
        outputs = list(self._outputs)
        self._outputs.clear()
        if self._loss is None or environments == 1:
            return (risks[0] if len(risks) == 1 else (risks * weights).sum() / weight)[None], weight[None]
        both = pytree.tree_map(lambda *leaves: joined(leaves), *outputs), pair(batch)[1]
        with torch.no_grad():
            return self._by_environment(self._loss, both, environments), (weight / environments).expand(environments)

    def _by_environment(self, loss: Loss, both: Batch, environments: int) -> Tensor:
        """The loss of each environment, ``(environments,)``."""
        stacked = pytree.tree_map(lambda leaf: leaf.unflatten(0, (environments, -1)), both)
        if is_asynchronous(self._device):
            with contextlib.suppress(Exception):  # vmap cannot take the loss
                return loss_by_group(loss, *stacked)
        return torch.stack([loss(*take(stacked, environment)) for environment in range(environments)])

    def _collect_piece(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Add the statistics of these examples; return the mean risk and its weight, scalars."""
        examples = len(pytree.tree_leaves(batch)[0])
        self._collected.hooks.expected = examples
        if self.definition == "loss":
            with self._collected.hooks.paused():
                risk, weight = self._risk(batch, step)
                self._collect_by_loss(self._outputs[0], pair(batch)[1])
        else:
            risk, weight = self._risk(batch, step)
            if self._risk.weighted:
                check_weights(weight)
            if self._risk.weighted and self._pieces.count > 1:
                raise InputError(
                    f"accumulate={self._pieces.count}: the risk gives a sum and its weight, and the examples of "
                    "a piece count by the weight of all; give 1, or a risk that is a mean over the examples"
                )
            if self._risk.weighted and self._group is not None and self._per_weight is None:
                self._note_weight(examples, weight)
            # The factor of this mean risk that gives it its weight among all pieces and processes.
            share = risk if self._per_weight is None else risk * (self._per_weight * weight / examples)
            share = share * examples if self._scales else share
            scale = self.aggregation.scale(self._device)
            (share if scale is None else share * scale).backward()
        return risk.detach(), weight

    def _note_weight(self, examples: int, weight: Tensor) -> None:
        """Keep the number of all examples per weight, once a step: leaving examples out does not change it."""
        sums = torch.stack([torch.full_like(weight, examples), weight])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        self._per_weight = sums[0] / sums[1]

    def _collect_by_loss(self, outputs: Any, targets: Any) -> None:
        assert self._loss is not None
        examples = len(pytree.tree_leaves(targets)[0])
        losses = [self._loss(*take((outputs, targets), slice(at, at + 1))) for at in range(examples)]
        for example, loss in enumerate(losses):
            gradients = gradients_of(loss, self._collected.sums.parameters, keeps_graph=True)
            for index, gradient in enumerate(gradients):
                self._collected.sums.add(index, gradient[None], accumulate=example > 0)


@dataclass(frozen=True)
class _Noting(Supervised):
    """A loss as a risk, which notes the model's outputs."""

    seen: list[Any] = field(default_factory=list)

    def value(self, outputs: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        self.seen.append(outputs)
        return super().value(outputs, batch)
