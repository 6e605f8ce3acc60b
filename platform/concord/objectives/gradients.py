"""The gradient of an objective, in one process or several: one backward pass, and a sum."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.aggregation import Mean
from concord.errors import ArgumentError, InputError
from concord.gradients.backward_graph import gradients_of
from concord.gradients.exchange import Processes
from concord.gradients.layout import (
    Layout,
    require_no_hooks_after_accumulation,
    require_unchanged,
    require_unwrapped,
    store_gradients,
    trainable,
)
from concord.gradients.nonfinite import NonFiniteGradientError, presence
from concord.gradients.risk import Batch, Calls, check_weights
from concord.gradients.step import Aggregation, AggregationOptions, EnvironmentStep
from concord.objectives.objective import Objective


class ObjectiveGradients:
    """A gradient source for objectives that couple environments; leaves the gradient in ``parameter.grad``.

    One call replaces ``objective(model, batch).backward()``. With several processes each computes the terms of its own
    environments, receives the values of all others, and differentiates the combined number with respect to its own
    terms; the gradients are added. If the terms need the other environments' batches, the processes send these batches,
    whose shapes must be the same in all processes.

    Args:
        model: its parameters that require gradients get ``grad``, and so do those of the objective's own module,
            unless the objective trains that itself (``alternates``).
        objective: the objective; call its ``begin`` before, if it makes a module.
        names: the names of this process's environments.
        group: the other processes, which begin with the same weights; None if this one has all environments.
        options: see :class:`~concord.gradients.Aggregation`. No environment can be skipped; ``rescale`` and
            ``environment_momentum`` have no effect; ``autocast`` is the objective's.

    Raises:
        InputError: the model has no parameter that requires a gradient, a process has no environment, or an option
            cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        names: Sequence[str],
        group: dist.ProcessGroup | None = None,
        **options: Unpack[AggregationOptions],
    ) -> None:
        if options.get("nonfinite") == "skip":
            raise ArgumentError("nonfinite", "skip", "an objective couples environments; give raise or propagate")
        if options.setdefault("autocast", objective.autocast) != objective.autocast:
            raise ArgumentError("autocast", options["autocast"], "an objective has its own; give it there")
        self.aggregation = Aggregation(Mean(), **options)
        require_unwrapped(model)
        self.model = model
        self.objective = objective
        self.names = list(names)
        modules = [model] if objective.module is None or objective.alternates else [model, objective.module]
        self._of_modules = [(module, trainable(module)) for module in modules]
        of_model = self._of_modules[0][1]
        if not of_model:
            raise InputError("model: none of its parameters requires a gradient")
        of_objective = self._of_modules[1][1] if len(modules) > 1 else {}
        named = of_model | {f"objective {name}": each for name, each in of_objective.items()}
        self._parameters = named
        self._layout = Layout.of(named)
        self._kept = len(of_model)
        self._calls = Calls()
        self._processes = None if group is None else Processes.of(names, group)
        first = 0 if self._processes is None else sum(map(len, self._processes.names[: self._processes.rank]))
        self._own = range(first, first + len(self.names))

    def __call__(self, batch: Batch, *more: Any, step: int | None = None) -> EnvironmentStep:
        """Fill ``parameter.grad``.

        Args:
            batch: a tree of tensors ``(environments, batch, ...)``, of this process's environments.
            step: the step's number, for schedules, the risk and errors; counted from 0 if None.
            more: ``gradients(inputs, targets, step)`` is short for ``gradients((inputs, targets), step)``.

        Returns:
            The step; ``losses`` are those of the objective, by default the means of each environment's terms.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``, in every process.
            InputError: the batch's leaves do not fit each other, the names, or earlier batches; the risk is no scalar
                or has no positive weight; a parameter was frozen, unfrozen or exchanged since this was made, or has a
                hook that cannot run.
        """
        batch, _, at = self._calls.take(batch, more, step, self.names)
        for module, parameters in self._of_modules:
            require_unchanged(module, parameters)
            require_no_hooks_after_accumulation(parameters)
        raises = self.aggregation.policy == "raise"
        if (self.objective.others or self.objective.by_example) and self._processes is not None:
            self._require_one_shape(pytree.tree_leaves(batch), self._processes)
        if self.objective.others:
            batch = pytree.tree_map(self._everyones, batch)
        self.objective.prepare(self.model, at, self._own, self._total)
        terms, weights = self.objective.terms(self.model, batch, at, self._own)
        if raises:  # under propagate the host does not wait for the device
            check_weights(weights)
        terms = terms.unflatten(0, (len(self._own), -1))
        known = self._everyones(terms.detach())
        everyones = torch.cat([known[: self._own.start], terms, known[self._own.stop :]])
        value = self.objective.combine(everyones.flatten(), at)
        scale = self.aggregation.scale(value.device)
        scaled = value if scale is None else value * scale
        gradients = gradients_of(scaled, self._parameters)
        flat = torch.cat([gradient.reshape(-1).to(self._layout.dtype) for gradient in gradients])
        flat = self._total(flat)
        if raises and float(presence(flat)) < 0:
            self._refuse(known, at)
        store_gradients(list(self._parameters.values()), self._layout, flat)
        kept = torch.ones(self._kept, device=flat.device)
        return EnvironmentStep(self.objective.losses(terms.detach()), kept, (), weights, len(everyones))

    def _total(self, own: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self._processes is not None:
            before = self.aggregation.clock.switch("exchange")
            dist.all_reduce(own, group=self._processes.group)
            self.aggregation.clock.switch(before)
        return own

    def _everyones(self, own: Tensor) -> Tensor:
        """The rows of all processes' environments, ``(all environments, ...)``, from this process's rows."""
        if self._processes is None:
            return own
        before = self.aggregation.clock.switch("exchange")
        padded = own.new_zeros(self._processes.most, *own.shape[1:])
        padded[: len(own)] = own
        # As bytes, since not every type travels.
        parts = self._processes.gathered(padded.view(-1).view(torch.uint8)).view(own.dtype).view(-1, *padded.shape)
        self.aggregation.clock.switch(before)
        return self._processes.by_environment(parts)

    def _require_one_shape(self, leaves: Sequence[Tensor], processes: Processes) -> None:
        """Refuse batches that differ in shape between processes (InputError), which could not be received."""
        shapes = torch.tensor([size for leaf in leaves for size in leaf.shape[1:]], device=leaves[0].device)
        everyones = processes.gathered(shapes).tolist()
        if any(each != everyones[0] for each in everyones):
            found = ", ".join(f"{each} in process {rank}" for rank, each in enumerate(everyones))
            raise InputError(
                f"batch: after the environments its leaves have the sizes {found}; this objective sends them, or what "
                "they give, to the other processes, so they must be the same (pad to one length)"
            )

    def _refuse(self, terms: Tensor, step: int) -> None:
        """Name the environments whose terms are not finite; all of them if only the gradient is not."""
        names = self.names if self._processes is None else [name for part in self._processes.names for name in part]
        finite = torch.isfinite(terms).all(1).tolist()
        raise NonFiniteGradientError(
            [name for name, right in zip(names, finite, strict=True) if not right] or names, step
        )
