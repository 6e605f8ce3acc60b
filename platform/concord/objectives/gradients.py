"""The gradient of an objective, in one process or over several: one backward pass, and a sum."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from concord.errors import InputError
from concord.gradients.layout import (
    Layout,
    match_strides,
    require_no_hooks_after_accumulation,
    require_unchanged,
    trainable,
)
from concord.gradients.nonfinite import NonFiniteGradientError
from concord.gradients.risk import Batch, as_called, pair
from concord.gradients.step import EnvironmentStep
from concord.gradients.step_clock import StepClock
from concord.objectives.objective import Objective


class ObjectiveGradients:
    """The gradient of an objective that couples environments, left in ``parameter.grad``.

    One call replaces ``objective(model, inputs, targets).backward()``. Where environments lie in several processes,
    each computes the terms of its own; all of them get to know the values of all terms, differentiate what is combined
    of them by their own, and the gradients are added. An objective whose terms need the other environments' batches
    gets those, and no more than those.

    Args:
        model: its parameters that require gradients get ``grad``.
        objective: what is minimized.
        names: the names of this process's environments.
        group: the other processes; None if this one has all environments.
        clock: is told what part of a step time goes to.

    Raises:
        InputError: the model has no parameter that requires a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        names: Sequence[str],
        group: dist.ProcessGroup | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self._clock = clock or StepClock()
        self.model = model
        self.objective = objective
        self.group = group
        self.names = list(names)
        self._trainable = trainable(model)
        self._parameters = list(self._trainable.values())
        if not self._parameters:
            raise InputError("model: none of its parameters requires a gradient")
        self._layout = Layout.of(self._trainable)
        everyone: list[list[str]] = [list(names)]
        self._rank = 0
        if group is not None:
            everyone = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everyone, list(names), group=group)
            self._rank = dist.get_rank(group)
        self._counts = [len(each) for each in everyone]
        first = sum(self._counts[: self._rank])
        self._own = range(first, first + self._counts[self._rank])

    def __call__(self, batch: Batch, *more: Any, step: int | None = None) -> EnvironmentStep:
        """Fill ``parameter.grad``.

        Args:
            batch: inputs and targets ``(environments, batch, ...)``, of this process's environments.
            more: ``gradients(inputs, targets, step)`` is short for ``gradients((inputs, targets), step)``.
            step: the step's number, for schedules and errors.

        Raises:
            NonFiniteGradientError: a term, or the gradient, is not finite; in every process.
            InputError: a parameter was frozen, unfrozen or exchanged since this was made, or has a hook that
                cannot run.
        """
        batch, step = as_called(batch, more, step)
        assert step is not None
        inputs, targets = pair(batch)
        require_unchanged(self.model, self._trainable)
        require_no_hooks_after_accumulation(self._trainable)
        if self.objective.others and self.group is not None:
            inputs, targets = self._everyones(inputs), self._everyones(targets)
        terms = self.objective.terms(self.model, inputs, targets, step, list(self._own))
        each = len(terms) // len(self._own)
        everyones = terms if self.group is None else self._with_others(terms, each)
        value = self.objective.combine(everyones, step)
        gradients = torch.autograd.grad(value, self._parameters, materialize_grads=True)
        flat = torch.cat([gradient.reshape(-1).to(self._layout.dtype) for gradient in gradients])
        if self.group is not None:
            before = self._clock.switch("exchange")
            dist.all_reduce(flat, group=self.group)
            self._clock.switch(before)
        if not bool(torch.isfinite(flat.sum())):
            self._refuse(everyones.detach(), each, step)
        for index, parameter in enumerate(self._parameters):
            parameter.grad = match_strides(self._layout.part(flat, index).to(parameter.dtype), parameter)
        kept = torch.ones(len(self._parameters), device=flat.device)
        weights = torch.full((len(self._own),), float(len(targets[0])), device=flat.device)
        return EnvironmentStep(terms.detach().unflatten(0, (-1, each)).mean(1), kept, (), weights, sum(self._counts))

    def _everyones(self, batches: Tensor) -> Tensor:
        """The batches of all environments, in the order of the processes."""
        before = self._clock.switch("exchange")
        shape = batches.shape[1:]
        parts = [batches.new_empty((count, *shape)) for count in self._counts]
        for rank, part in enumerate(parts):
            if rank == self._rank:
                part.copy_(batches)
            dist.broadcast(part, group=self.group, group_src=rank)
        self._clock.switch(before)
        return torch.cat(parts)

    def _with_others(self, terms: Tensor, each: int) -> Tensor:
        """All terms, those of this process with their graph."""
        most = max(self._counts) * each
        padded = torch.zeros(most, dtype=terms.dtype, device=terms.device)
        padded[: len(terms)] = terms.detach()
        parts = [torch.empty_like(padded) for _ in self._counts]
        before = self._clock.switch("exchange")
        dist.all_gather(parts, padded, group=self.group)
        self._clock.switch(before)
        known = [part[: count * each] for part, count in zip(parts, self._counts, strict=True)]
        known[self._rank] = terms
        return torch.cat(known)

    def _refuse(self, terms: Tensor, each: int, step: int) -> None:
        """Name the environments whose terms are not finite; all of them if only the gradient is not."""
        everyone: list[list[str]] = [self.names]
        if self.group is not None:
            everyone = [[] for _ in self._counts]
            dist.all_gather_object(everyone, self.names, group=self.group)
        names = [name for part in everyone for name in part]
        finite = torch.isfinite(terms.unflatten(0, (-1, each))).all(1).tolist()
        bad = [name for name, right in zip(names, finite, strict=True) if not right]
        raise NonFiniteGradientError(bad or names, step)
