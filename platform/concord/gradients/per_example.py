"""Every example is an environment: the rule's sums over examples, from one forward and one backward pass.

During backward each layer adds its examples' statistics to the rule's sums (by the formulas of
:mod:`~concord.gradients.layer_gradients`, in the forms of :mod:`~concord.gradients.group_gradients`); the sum of the
gradients is the ordinary gradient. On a model of your own, in a plain loop::

    examples = per_example(model, AndMask(threshold=0.2))
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        examples.aggregate()  # parameter.grad now holds the aggregated gradient
        optimizer.step()

The same in one call, which can be a CUDA graph: ``examples.backward(compute, inputs, targets)``, where
``compute(inputs, targets)`` is the loss.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from concord.aggregation import GRADIENT, Rule
from concord.aggregation.asynchronous import is_asynchronous
from concord.errors import ArgumentError, InputError
from concord.gradients.example_hooks import ExampleHooks, Reduction
from concord.gradients.exchange import Processes, SliceExchange
from concord.gradients.group_gradients import MEMORY_LIMIT
from concord.gradients.layout import require_unchanged
from concord.gradients.risk import Batch
from concord.gradients.step import Aggregation, AggregationOptions, EnvironmentStep
from concord.gradients.step_graph import NO_NUMBER, Recordable, StepGraph
from concord.gradients.sums import Sums


class PerExample:
    """Sums of a rule's statistics over the examples of a model's batches, collected while backward runs.

    It registers hooks on the model; :meth:`remove` removes them, for example before the model is pickled. The model's
    outputs do not change. Between backward and :meth:`aggregate`, ``parameter.grad`` holds the sum over
    examples. Several passes before :meth:`aggregate` (microbatches) are summed. PyTorch's layers have
    fast formulas; any other module is computed the general way. Penalties belong to the same backward pass as the loss.
    ``zero_grad()`` before :meth:`aggregate` drops the contributions of the passes so far.

    "The gradient of an example" is here the gradient through that example's activations, its contribution to the
    batch's gradient. For models that treat examples separately it is the derivative of the example's loss. Under batch
    norm it also includes the effect of the example's normalized activations on other examples' losses; the derivative
    of one example's loss through the shared statistics needs a backward pass for every example, see
    :class:`~concord.gradients.PerExampleGradients`. Both sum to the batch's gradient.

    Args:
        model: the model. Its inputs and its layers have the examples in the first dimension. What all examples share,
            such as embeddings of positions, may have a 1 there, or come from ``nn.Embedding`` of a line of positions.
        rule: the rule, which needs sums alone.
        reduction: whether the loss is the mean or the sum over the examples of a pass. Do not divide the loss by
            the number of microbatches: the result is the rule's over all examples since the last :meth:`aggregate`.
        group: other processes of this group have other examples; the rule is applied to all of them together, and
            :meth:`aggregate` has to be called in all. The model is not to be wrapped in DDP, which would average.
        memory_limit: bytes of per-example gradients that may exist at once.
        graph: replay :meth:`backward` as a CUDA graph after the first calls, see
            :mod:`~concord.gradients.step_graph`; a step that cannot be captured is computed the ordinary way, and a
            line says why.
        options: see :class:`~concord.gradients.step.Aggregation`. A scaler is the one that scales the loss; then any
            statistic may be used; a scale given to :meth:`aggregate` afterwards needs the statistics' degree.

    Attributes:
        sums: of this process's examples; their ``gradient`` comes from ``parameter.grad`` in the end.
        examples: the number of examples that backward has reached since the last :meth:`aggregate`.

    Raises:
        InputError: the model has no parameter that requires a gradient, or is collected from already. Later: what a
            layer did has no per-example gradient; the error names the layer, and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        *,
        reduction: Reduction = "mean",
        group: dist.ProcessGroup | None = None,
        memory_limit: int = MEMORY_LIMIT,
        graph: bool = False,
        **options: Unpack[AggregationOptions],
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ArgumentError("reduction", reduction, "expected 'mean' or 'sum'")
        self.aggregation = Aggregation(rule, **options)
        if self.aggregation.environment_momentum > 0:
            beta = self.aggregation.environment_momentum
            raise ArgumentError(
                "environment_momentum", beta, "each step has other examples, which have no earlier gradients; give 0"
            )
        self.model = model
        self.group = group
        self.steps = 0
        self.sums = Sums(model, self.aggregation)
        self.sums.collected = [each for each in self.sums.collected if each != GRADIENT]
        self.hooks = ExampleHooks(model, self.sums, reduction, memory_limit)
        self._exchange: SliceExchange | None = None
        self._graph = StepGraph(self.sums.device) if graph else None

    @property
    def examples(self) -> int:
        """The number of examples that backward has reached since the last :meth:`aggregate`."""
        return self.hooks.examples

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self.hooks.remove()

    def __enter__(self) -> "PerExample":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def discard(self) -> None:
        """Empty the sums since the last :meth:`aggregate`, for example after an error in backward."""
        self.hooks.reset()

    def backward(self, compute: Callable[..., Tensor], *batch: Batch, step: int | None = None) -> EnvironmentStep:
        """One step of one pass, in place of ``zero_grad()``, ``loss.backward()`` and :meth:`aggregate`.

        Args:
            compute: returns the loss of a batch, ``compute(*batch)``; with a graph the same function at each call, of
                which the last one is replayed with the batch's new values.
            batch: trees of tensors.
            step: the step's number, for errors; counted from 0 if None.

        Returns:
            The step, with the loss as its only one; its weights are empty.

        Raises:
            InputError, NonFiniteGradientError: as :meth:`aggregate` does.
        """
        at = self.steps if step is None else step
        of_loss = _Backward(self, compute)
        if self._graph is None:
            return of_loss.ordinary(batch, at)
        require_unchanged(self.model, self.sums.parameters)
        found = self._graph(of_loss, batch, at)
        self.steps = at + 1
        self.hooks.note_results()
        return found

    @torch.no_grad()
    def aggregate(self, step: int | None = None, *, scale: float | None = None) -> EnvironmentStep:
        """Apply the rule to the examples since the last call, and store the result in ``parameter.grad``.

        Args:
            step: the step's number, for errors; counted from 0 if None.
            scale: a ``GradScaler``'s factor of the loss (``scaler.get_scale()``), if the scaler was not given as an
                option. The result is scaled by it, and gradients that are not finite are left to the scaler; call
                ``scaler.unscale_`` after this, not before.

        Returns:
            The step; its losses and weights are empty, since they are unknown here.

        Raises:
            InputError: there was no backward pass, or one of one example only; ``zero_grad()`` was not called; a
                layer's gradient is not the sum over its examples.
            NonFiniteGradientError: with ``nonfinite="raise"``.
        """
        parameters = list(self.sums.parameters.values())
        untouched = [parameter for parameter in parameters if parameter.grad is None]
        problem = self.complete(scale)
        left_in = scale is not None or self.aggregation.policy == "propagate"
        finite = None
        if not (left_in or self.gradients_are_finite()):
            finite = torch.zeros(self.examples, dtype=torch.bool, device="cpu")
        finished = self.finish(finite, self.examples, step, problem)
        if scale is not None:
            torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], scale)
        if self.group is None:
            for parameter in untouched:
                parameter.grad = None
        self.hooks.note_results()
        return finished

    @torch.no_grad()
    def complete(self, scale: float | None = None) -> InputError | None:
        """Complete the sums by backward's ``parameter.grad``; return the problem with them, if there is one."""
        try:
            self.hooks.settle()
        except InputError as error:
            return error
        if GRADIENT in self.sums.rule.statistics:
            self.sums.take(GRADIENT)
        if self.sums.gradient is None:
            self.sums.seen = self._gradient_total()
        if scale is not None:
            for statistic in self.sums.rule.statistics:
                total = self.sums.flat[statistic.name]
                total.copy_(statistic.unscaled(total, scale, self.examples))
        return None

    @torch.no_grad()
    def finish(
        self, finite: Tensor | None, examples: int, step: int | None, problem: InputError | None = None
    ) -> EnvironmentStep:
        """Apply the rule to the sums, and empty them.

        Args:
            finite: ``(examples,)`` bool, whether each of this process's examples is in the sums; None: all are.
            examples: the number of this process's examples.
            step: the step's number, for errors; counted from 0 if None.
            problem: the reason why there are no sums; every process of the group then raises an error, and none waits.
        """
        step = self.steps if step is None else step
        if step is not NO_NUMBER:
            self.steps = step + 1
        try:
            counts = self._counts(-1 if problem else examples)
            if problem or min(counts) < 0:
                raise problem or InputError("per-example gradients: another process of the group failed")
            if sum(counts) < 2:
                found = "one example alone; a rule needs at least 2" if sum(counts) else "no backward pass"
                raise InputError(f"per-example gradients since the last aggregate(): {found}")
            if self.group is not None and (self._exchange is None or self._exchange.processes.counts != counts):
                everyones = tuple(tuple(_names(counts, rank)) for rank in range(len(counts)))
                self._exchange = self.sums.exchange(Processes(self.group, everyones, dist.get_rank(self.group)))
            names = _names(counts, self._exchange.processes.rank if self._exchange is not None else 0)
            applied = self.sums.apply_rule(finite, names, step, self._exchange)
        finally:
            self.discard()
        self.aggregation.scale_gradients(self.sums.parameters.values())
        return applied

    def gradients_are_finite(self) -> bool:
        """Whether the sums in ``parameter.grad`` are finite; a sum of finite gradients may overflow."""
        return math.isfinite(float(self._gradient_total()))

    def _gradient_total(self) -> Tensor:
        found = [each.grad for each in self.sums.parameters.values()]
        gradients = [each for each in found if each is not None and each.numel() > 0]
        if not gradients:
            return torch.zeros((), device=self.sums.device)
        if is_asynchronous(self.sums.device):
            return torch.stack(torch._foreach_norm(gradients, torch.inf)).sum()
        return torch.stack([gradient.sum(dtype=torch.float32) for gradient in gradients]).sum()

    def _counts(self, examples: int) -> tuple[int, ...]:
        """The numbers of examples of all processes."""
        if self.group is None:
            return (examples,)
        before = self.aggregation.clock.switch("exchange")
        counts = [torch.zeros(1, dtype=torch.int64, device=self.sums.device) for _ in range(self.group.size())]
        dist.all_gather(counts, torch.tensor([examples], device=self.sums.device), group=self.group)
        known = tuple(int(count) for count in counts)
        self.aggregation.clock.switch(before)
        return known


class _Backward(Recordable):
    """The step of :meth:`PerExample.backward`."""

    def __init__(self, examples: PerExample, compute: Callable[..., Tensor]) -> None:
        self.model, self.aggregation = examples.model, examples.aggregation
        self._examples, self._compute = examples, compute

    def obstacle(self) -> str | None:
        """Why the step cannot be recorded, if that is known."""
        return "the examples belong to several processes" if self._examples.group is not None else super().obstacle()

    def ordinary(self, batch: Batch, at: int) -> EnvironmentStep:
        """The step of number ``at``."""
        for parameter in self.trained():
            parameter.grad = None
        loss = self._compute(*batch)
        scale = self.aggregation.scale(loss.device)
        (loss if scale is None else loss * scale).backward()
        return self._examples.aggregate(at)._replace(losses=loss.detach()[None])

    def recorded(self, batch: Batch) -> EnvironmentStep:
        """The step, without a look at its values."""
        with self.aggregation.recording():
            return self.ordinary(batch, NO_NUMBER)

    def constants(self) -> Hashable:
        """The loss, and the modes of the modules."""
        return self._compute, super().constants()


per_example = PerExample
"""Treat every example as an environment of its own; call ``aggregate()`` on the result after backward."""


def _names(counts: Sequence[int], rank: int) -> list[str]:
    where = f" of process {rank}" if len(counts) > 1 else ""
    return [f"example {index}{where}" for index in range(counts[rank])]
