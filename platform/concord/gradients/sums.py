"""A model's statistics summed over this process's environments, and the rule's update."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from concord.aggregation import GRADIENT, Statistics, sum_over_environments
from concord.aggregation.families import of_sums
from concord.aggregation.rule import new_statistics
from concord.gradients.collected import Collected
from concord.gradients.exchange import Processes, SliceExchange, complete
from concord.gradients.finish import finish_whole, poison
from concord.gradients.group_gradients import MEMORY_LIMIT, GroupGradients
from concord.gradients.step import Aggregation


class Sums(Collected):
    """The sums of a rule's statistics over environments, for all trainable parameters of a model.

    Args:
        model: the model.
        aggregation: the rule and its options.

    Attributes:
        flat: the statistics, each of all components.
        gradient: the name of the statistic that is the gradient itself; None if the rule has none.
        seen: without such a statistic, a number that is finite if the gradients are; the callers update it.
    """

    def __init__(self, model: nn.Module, aggregation: Aggregation) -> None:
        super().__init__(model, aggregation)
        self.rule = of_sums(aggregation.rule, "a sum over examples")
        self.flat = new_statistics(self.rule, (self.layout.components,), self.layout.dtype, self.device)
        # Its sum tells whether gradients are finite.
        self.gradient = next((each.name for each in self.rule.statistics if each.of is GRADIENT.of), None)
        self.seen = torch.zeros((), device=self.device)

    def part(self, index: int) -> Statistics:
        """The sums of parameter ``index``, views shaped as the parameter."""
        return {name: self.layout.part(flat, index) for name, flat in self.flat.items()}

    def add(self, index: int, gradients: Tensor, *, accumulate: bool) -> None:
        """Add environments' gradients of parameter ``index``, ``(environments, *shape)``, or replace the sums."""
        sum_over_environments(self.rule, gradients, self.part(index), accumulate=accumulate)
        if self.gradient is None:
            begun = accumulate or index > 0
            self.seen = (self.seen if begun else 0) + gradients.sum(dtype=torch.float32)

    def add_form(self, index: int, form: GroupGradients, groups: int) -> None:
        """Add groups' gradients of parameter ``index``."""
        part = self.part(index)
        form.add_to([(statistic, part[statistic.name]) for statistic in self.rule.statistics], MEMORY_LIMIT)

    def values(self) -> Mapping[str, Sequence[Tensor]]:
        """The statistics, the gradient first and by parameter."""
        found = {name: [total.clone()] for name, total in self.flat.items()}
        if self.gradient is None:
            return found
        whole = found.pop(self.gradient)[0]
        return {self.gradient: [self.layout.part(whole, index) for index in range(len(self.parameters))], **found}

    def total(self) -> Tensor:
        """A scalar that is finite if all gradients and their sum are."""
        return self.seen if self.gradient is None else self.flat[self.gradient].sum()

    def are_finite(self) -> bool:
        """Whether all gradients and their sum are finite."""
        return bool(torch.isfinite(self.total()))

    def zero(self) -> None:
        """Set the sums to 0."""
        for flat in self.flat.values():
            flat.zero_()

    def exchange(self, processes: Processes) -> SliceExchange:
        """The exchange of such sums between processes."""
        # With one environment in each process only its gradient is sent.
        sends_statistics = self.gradient is None or any(len(names) != 1 for names in processes.names)
        return SliceExchange(
            self.aggregation, self.layout.layers, self.layout.dtype, self.device, processes, sends_statistics
        )

    def apply_here(self, finite: Tensor, step: int) -> tuple[Tensor, Tensor, None]:
        """Apply the rule to the sums of this process."""
        update, rescale = self._empty(), self.aggregation.rescale
        layers, in_sums = self.layout.layers, int(finite.sum())
        kept = finish_whole(self.rule, self.flat, update, layers, in_sums, step, rescale=rescale)
        if self.aggregation.policy == "propagate":
            poison(update, self.total())
        return update, kept, None

    def apply_together(
        self, exchange: SliceExchange, finite: Tensor, step: int
    ) -> tuple[Tensor, Tensor, None, tuple[str, ...]]:
        """Exchange the sums, or the gradient of the only environment, and apply the rule to a slice."""
        update = self._empty()
        if not bool(finite.any()):
            self.zero()
        present = torch.where(finite, 1.0, -1.0).to(self.device)
        if self.aggregation.policy == "propagate":
            present = torch.where(torch.isfinite(self.total()), present, -1.0)
        sent = self.flat
        if not exchange.sends_statistics and self.gradient is not None:
            sent = {"gradient": self.flat[self.gradient]}
        exchange.send(sent, present)
        # Whose sums are to be added has to be known before; reading it makes the host wait.
        skip = self.aggregation.policy == "skip"
        exchange.apply_rule(update, step, exchange.processes.gathered(exchange.present) if skip else None)
        ((kept,), skipped) = complete([exchange], step)
        return update, kept, None, skipped

    def _empty(self) -> Tensor:
        return torch.empty(self.layout.components, dtype=self.layout.dtype, device=self.device)
