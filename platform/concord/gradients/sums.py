"""A model's statistics summed over this process's environments, and what the rule makes of them, alone or together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from concord.aggregation import Aggregator, Statistics, rescaling_factor
from concord.aggregation.rule import new_statistics
from concord.errors import InputError
from concord.gradients.exchange import SliceExchange
from concord.gradients.layout import Layout, match_strides, trainable
from concord.gradients.nonfinite import NonFinite, NonFiniteGradientError
from concord.gradients.step_clock import StepClock


class Sums:
    """Room for the sums of a rule's statistics over environments, for all trainable parameters of a model.

    Args:
        model: the model.
        rule: the rule.
        rescale: divide each parameter tensor's update by its kept fraction.
        nonfinite: what to do about environments whose gradient is not finite.
        clock: is told what part of a step time goes to.

    Attributes:
        parameters: the trainable ones, by name.
        layout: where each lies in ``flat``.
        flat: the statistics, each of all components.

    Raises:
        InputError: the model has no parameter that requires a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Aggregator,
        *,
        rescale: bool,
        nonfinite: NonFinite,
        clock: StepClock | None = None,
    ) -> None:
        self.parameters = trainable(model)
        if not self.parameters:
            raise InputError("model: none of its parameters requires a gradient")
        self.rule = rule
        self.rescale = rescale
        self.nonfinite = nonfinite
        self._clock = clock or StepClock()
        self.layout = Layout.of(self.parameters)
        self.device = next(iter(self.parameters.values())).device
        self.flat = new_statistics(rule, (self.layout.components,), self.layout.dtype, self.device)

    def part(self, index: int) -> Statistics:
        """The sums of parameter ``index``, views shaped as the parameter."""
        return {name: self.layout.part(flat, index) for name, flat in self.flat.items()}

    def zero(self) -> None:
        """Begin anew."""
        for flat in self.flat.values():
            flat.zero_()

    def exchange(self, environments: Sequence[Sequence[str]], group: dist.ProcessGroup) -> SliceExchange:
        """The exchange of such sums between processes that have these environments."""
        return SliceExchange(
            self.rule,
            [shape.numel() for shape in self.layout.shapes],
            self.layout.dtype,
            self.layout.dtype,
            self.device,
            group,
            environments,
            # One environment each: then its gradient is all that has to travel.
            mapped=any(len(local) != 1 for local in environments),
            rescale=self.rescale,
            nonfinite=self.nonfinite,
            clock=self._clock,
        )

    def finish(
        self, finite: Tensor, names: Sequence[str], step: int, exchange: SliceExchange | None = None
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Apply the rule and leave the result in ``parameter.grad``.

        Args:
            finite: ``(environments,)`` bool: which of this process's environments are in the sums; the gradients
                of the others were not finite.
            names: of this process's environments.
            step: the step's number, for errors.
            exchange: with the processes that have the other environments; None if there are none.

        Returns:
            The kept fraction of each parameter, float32, and the names of environments that were left out.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``.
        """
        before = self._clock.switch("optimizer")
        update, kept, skipped = (
            self._finished(finite, names, step) if exchange is None else self._exchanged(finite, step, exchange)
        )
        if any(update.untyped_storage().data_ptr() == sums.untyped_storage().data_ptr() for sums in self.flat.values()):
            update = update.clone()  # a rule may give back a sum as it is; the sums are zeroed for the next step
        for index, parameter in enumerate(self.parameters.values()):
            parameter.grad = match_strides(self.layout.part(update, index).to(parameter.dtype), parameter)
        self._clock.switch(before)
        return kept, skipped

    def _exchanged(self, finite: Tensor, step: int, exchange: SliceExchange) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        if not bool(finite.any()):
            self.zero()
        exchange.send(self.flat, torch.where(finite, 1.0, -1.0).to(self.device))
        update = torch.empty_like(self.flat["gradient"])
        exchange.finish(update)
        kept, skipped = exchange.receive(update, step)
        return update, kept, skipped

    def _finished(self, finite: Tensor, names: Sequence[str], step: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        skipped = tuple(names[index] for index in (~finite).nonzero().flatten().tolist())
        if skipped and self.nonfinite == "raise":
            raise NonFiniteGradientError(skipped, step)
        environments = int(finite.sum())
        if environments == 0:
            kept = torch.zeros(len(self.layout.names), device=self.device)
            return torch.zeros_like(self.flat["gradient"]), kept, skipped
        update, mask = self.rule.finish(self.flat, environments)
        sizes = [shape.numel() for shape in self.layout.shapes]
        kept = torch.stack([layer.mean(dtype=torch.float32) for layer in mask.split(sizes)])
        if self.rescale:
            factors = rescaling_factor(kept).to(update.dtype).unbind()
            for layer, factor in zip(update.split(sizes), factors, strict=True):
                layer.mul_(factor)
        return update, kept, skipped
