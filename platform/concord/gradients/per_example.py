"""Every example its own environment: the rule's sums over examples, from one forward and one backward pass.

During backward each layer contributes the sums its rule needs (:mod:`~concord.gradients.example_layers` says how, in
the forms of :mod:`~concord.gradients.example_gradients`); the sum of the gradients themselves is the ordinary one.
On a model of one's own, in a plain loop::

    examples = per_example(model, AndMask(threshold=0.2))
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        examples.aggregate()  # parameter.grad now holds the aggregated gradient
        optimizer.step()
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from concord.aggregation import GRADIENT, Aggregator
from concord.errors import ArgumentError, InputError
from concord.gradients.example_hooks import ExampleHooks, Reduction
from concord.gradients.exchange import Processes, SliceExchange
from concord.gradients.step import Aggregation, AggregationOptions, EnvironmentStep
from concord.gradients.sums import Sums

# Exchanges are kept for the latest numbers of examples; their buffers are as large as the model.
_KEPT_EXCHANGES = 2


class PerExample:
    """Sums of a rule's statistics over the examples of a model's batches, collected while backward runs.

    It registers hooks on the model; :meth:`remove` takes them off again (before the model is pickled, say). What the
    model computes stays as it is. Between backward and :meth:`aggregate`, ``parameter.grad`` holds the sum over
    examples. Several passes before :meth:`aggregate` (microbatches) are summed. PyTorch's layers contribute in the
    cheapest way there is for them, any other module the general way. Penalties belong into the same backward pass as
    the loss. ``zero_grad()`` before :meth:`aggregate` drops what the passes so far contributed.

    "The gradient of an example" is here what flows through that example's activations, its contribution to the
    batch's gradient. For models that treat examples separately that is the derivative of the example's loss. Under
    batch norm it also holds what the example's normalized activations get from other examples' losses; the
    derivative of one example's loss through the shared statistics needs a backward pass of its own for every
    example, see :class:`~concord.gradients.example_environments.PerExampleGradients`. Both sum to the batch's gradient.

    Args:
        model: the model. Its inputs and its layers have the examples in the first dimension. What all examples share,
            such as embeddings of positions, may have a 1 there, or come from ``nn.Embedding`` of a line of positions.
        rule: the rule.
        reduction: whether the loss is the mean or the sum over the examples of a pass. Do not divide the loss by
            the number of microbatches: the result is the rule's over all examples since the last :meth:`aggregate`.
        group: other processes of this group have other examples; the rule is applied to all of them together, and
            :meth:`aggregate` has to be called in all. The model is not to be wrapped in DDP, which would average.
        memory_limit: bytes of per-example gradients that may exist at once.
        options: see :class:`~concord.gradients.step.Aggregation`. A scaler is the one that scales the loss; then any
            statistic may be used; a scale given to :meth:`aggregate` afterwards needs the statistics' degree.

    Attributes:
        sums: of this process's examples; their ``gradient`` comes from ``parameter.grad`` in the end.
        examples: how many examples backward has reached since the last :meth:`aggregate`.

    Raises:
        InputError: the model has no parameter that requires a gradient, or is collected from already. Later: what a
            layer did has no per-example gradient; the error names the layer, and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Aggregator,
        *,
        reduction: Reduction = "mean",
        group: dist.ProcessGroup | None = None,
        memory_limit: int = 1 << 28,
        **options: Unpack[AggregationOptions],
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ArgumentError("reduction", reduction, "expected 'mean' or 'sum'")
        self.aggregation = Aggregation(rule, **options)
        if self.aggregation.environment_momentum > 0:
            beta = self.aggregation.environment_momentum
            raise ArgumentError("environment_momentum", beta, "examples are other ones at every step; give 0")
        self.group = group
        self.steps = 0
        self.sums = Sums(model, self.aggregation)
        self._hooks = ExampleHooks(model, self.sums, reduction, memory_limit)
        self._exchanges: dict[tuple[int, ...], SliceExchange] = {}

    @property
    def examples(self) -> int:
        """How many examples backward has reached since the last :meth:`aggregate`."""
        return self._hooks.examples

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._hooks.remove()

    def __enter__(self) -> "PerExample":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def paused(self) -> AbstractContextManager[None]:
        """Collect nothing meanwhile: for gradients that are no part of the training step."""
        return self._hooks.paused()

    def watched(self, examples: int) -> AbstractContextManager[Tensor]:
        """Collect nothing meanwhile but which of so many ``examples`` are finite: a bool tensor, filled by backward."""
        return self._hooks.watched(examples)

    def expect(self, examples: int) -> None:
        """Say how many examples the next passes have, which is otherwise what the model's inputs begin with."""
        self._hooks.expected = examples

    def discard(self) -> None:
        """Forget what was collected since the last :meth:`aggregate`, after an error in backward for one."""
        self._hooks.reset()

    @torch.no_grad()
    def aggregate(
        self,
        finite: Tensor | None = None,
        step: int | None = None,
        *,
        examples: int | None = None,
        scale: float | None = None,
    ) -> EnvironmentStep:
        """Apply the rule to the examples since the last call, and leave the result in ``parameter.grad``.

        Args:
            finite: ``(examples,)`` bool, which of the examples of this process are in the sums, if some were left
                out because their gradients were not finite; None looks at the sum of the gradients.
            step: the step's number, for errors; counted from 0 if None.
            examples: how many are in the sums, if they were put there by other means than the hooks.
            scale: what a ``GradScaler`` has multiplied the loss by (``scaler.get_scale()``), where it was not given as
                an option. The result is scaled alike and what is not finite is left to the scaler; call
                ``scaler.unscale_`` after this, not before.

        Returns:
            The step; its losses and weights are empty, since nobody here has seen them.

        Raises:
            InputError: there was no backward pass, or one of one example only; ``zero_grad()`` was not called; a
                layer's gradient is not the sum over its examples.
            NonFiniteGradientError: with ``nonfinite="raise"``.
        """
        step = self.steps if step is None else step
        self.steps = step + 1
        untouched = [parameter for parameter in self.sums.parameters.values() if parameter.grad is None]
        try:
            problem = None if examples is not None else self._problem()
            count = self.examples if examples is None else examples
            # With a group, a problem of one process is everybody's, so that none waits for it.
            counts = self._counts(-1 if problem else len(finite) if finite is not None else count)
            if problem or min(counts) < 0:
                raise problem or InputError("per-example gradients: another process of the group failed")
            if sum(counts) < 2:
                found = "one example alone; a rule needs at least 2" if sum(counts) else "no backward pass"
                raise InputError(f"per-example gradients since the last aggregate(): {found}")
            parameters = list(self.sums.parameters.values())
            flat = [self.sums.flat[each.name] for each in self.sums.rule.statistics if each == GRADIENT]
            for index, parameter in enumerate(parameters):
                if parameter.grad is not None and flat:
                    self.sums.layout.part(flat[0], index).copy_(parameter.grad)
            if self.sums.gradient is None:
                self.sums.seen = self._gradient_total()
            if finite is None:
                left = scale is not None or self.aggregation.policy == "propagate"
                finite = torch.full((count,), left or self.gradients_are_finite())
            if scale is not None:
                for statistic in self.sums.rule.statistics:
                    total = self.sums.flat[statistic.name]
                    total.copy_(statistic.unscaled(total, scale, count))
            exchange = self._exchange(counts) if self.group is not None else None
            rank = dist.get_rank(self.group) if self.group is not None else 0
            kept, skipped, in_all = self.sums.apply_rule(finite, _names(counts, rank), step, exchange)
        finally:
            self.discard()
        self.aggregation.scale_gradients(parameters)
        for parameter in parameters:
            if scale is not None and parameter.grad is not None:
                parameter.grad *= scale
        if self.group is None:
            for parameter in untouched:
                parameter.grad = None
        self._hooks.note_results()
        nothing = torch.empty(0, device=self.sums.device)
        return EnvironmentStep(nothing, kept, skipped, nothing, in_all)

    def gradients_are_finite(self) -> bool:
        """Whether the sums in ``parameter.grad`` are; a sum of finite gradients may overflow, too."""
        return bool(torch.isfinite(self._gradient_total()))

    def _gradient_total(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.sums.parameters.values()]
        sums = [gradient.sum(dtype=torch.float32) for gradient in gradients if gradient is not None]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=self.sums.device)

    def _problem(self) -> InputError | None:
        """What is wrong with what was collected."""
        try:
            self._hooks.settle()
        except InputError as error:
            return error
        return None

    def _counts(self, examples: int) -> tuple[int, ...]:
        if self.group is None:
            return (examples,)
        before = self.aggregation.clock.switch("exchange")
        counts = [torch.zeros(1, dtype=torch.int64, device=self.sums.device) for _ in range(self.group.size())]
        dist.all_gather(counts, torch.tensor([examples], device=self.sums.device), group=self.group)
        known = tuple(int(count) for count in counts)
        self.aggregation.clock.switch(before)
        return known

    def _exchange(self, counts: tuple[int, ...]) -> SliceExchange:
        assert self.group is not None
        if counts not in self._exchanges:
            if len(self._exchanges) == _KEPT_EXCHANGES:
                self._exchanges.pop(next(iter(self._exchanges)))
            names = tuple(tuple(_names(counts, rank)) for rank in range(len(counts)))
            self._exchanges[counts] = self.sums.exchange(Processes(self.group, names, dist.get_rank(self.group)))
        return self._exchanges[counts]


per_example = PerExample
"""Treat every example as an environment of its own; call ``aggregate()`` on the result after backward."""


def _names(counts: Sequence[int], rank: int) -> list[str]:
    where = f" of process {rank}" if len(counts) > 1 else ""
    return [f"example {index}{where}" for index in range(counts[rank])]
