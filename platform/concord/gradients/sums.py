"""A model's statistics summed over this process's environments, and the rule's update."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from concord.aggregation import GRADIENT, Statistic, Statistics, sum_over_environments
from concord.aggregation.asynchronous import is_asynchronous
from concord.aggregation.families import of_sums
from concord.aggregation.rule import add_statistics, new_statistics
from concord.gradients.collected import Collected
from concord.gradients.exchange import Processes, SliceExchange, complete
from concord.gradients.finish import finish_whole, poison
from concord.gradients.group_gradients import MEMORY_LIMIT, GroupGradients, forms_no_gradients
from concord.gradients.packed import Packed
from concord.gradients.step import Aggregation


class Sums(Collected):
    """The sums of a rule's statistics over environments, for all trainable parameters of a model.

    Args:
        model: the model.
        aggregation: the rule and its options.

    Attributes:
        gradient: the name of the statistic that is the gradient itself; None if the rule has none.
        collected: the statistics that are added here; the callers may add others by themselves.
        seen: without such a statistic, a number that is finite if the gradients are; the callers update it.
    """

    def __init__(self, model: nn.Module, aggregation: Aggregation) -> None:
        super().__init__(model, aggregation)
        self.rule = of_sums(aggregation.rule, "a sum over examples")
        self._flat = new_statistics(self.rule, (self.layout.components,), self.layout.dtype, self.device)
        self.collected: Sequence[Statistic] = self.rule.statistics
        # On a GPU gradients wait for their neighbours, and the sums are not set to 0 if all are going to be replaced.
        self._packed = Packed(self.layout) if is_asynchronous(self.device) else None
        self._stale = False
        # Its sum tells whether gradients are finite.
        self.gradient = next((each.name for each in self.rule.statistics if each.of is GRADIENT.of), None)
        self.seen = torch.zeros((), device=self.device)

    @property
    def flat(self) -> Statistics:
        """The statistics, each of all components."""
        if self._packed is not None:
            self._add_packed(self._packed)
        return self._flat

    def part(self, index: int) -> Statistics:
        """The sums of parameter ``index``, views shaped as the parameter."""
        return {name: self.layout.part(flat, index) for name, flat in self.flat.items()}

    def add(self, index: int, gradients: Tensor, *, accumulate: bool) -> None:
        """Add environments' gradients of parameter ``index``, ``(environments, *shape)``, or replace the sums."""
        if self._packed is not None:
            if index == 0 and not accumulate:
                self.zero()
            self._pack(self._packed, index, gradients)
            return
        sum_over_environments(self.rule, gradients, self.part(index), accumulate=accumulate)
        if self.gradient is None:
            begun = accumulate or index > 0
            self.seen = (self.seen if begun else 0) + gradients.sum(dtype=torch.float32)

    def add_form(
        self,
        index: int,
        form: GroupGradients,
        groups: int,
        memory_limit: int = MEMORY_LIMIT,
        *,
        wants_total: bool = False,
    ) -> Tensor | None:
        """Add groups' gradients of parameter ``index``; return the sum of the gradients themselves if it is wanted."""
        packed, products = self._packed, forms_no_gradients(form, self.collected)
        if self.collected and packed is not None and packed.takes(index, groups, products=products):
            gradients = form.of_groups(slice(0, groups))
            self._pack(packed, index, gradients)
            return gradients.sum(0, dtype=self.layout.dtype) if wants_total else None
        wanted = [(each, self._view(each, index)) for each in self.collected]
        total = None
        if wants_total:
            total = torch.zeros(self.layout.shapes[index], dtype=self.layout.dtype, device=self.device)
            wanted.append((GRADIENT, total))
        if wanted:
            form.add_to(wanted, memory_limit)
        return total

    def take(self, statistic: Statistic) -> None:
        """Take the sum of a statistic from ``parameter.grad``, where there is one."""
        found = [(index, each.grad) for index, each in enumerate(self.parameters.values()) if each.grad is not None]
        if found:
            torch._foreach_copy_([self._view(statistic, index) for index, _ in found], [grad for _, grad in found])

    def _view(self, statistic: Statistic, index: int) -> Tensor:
        """The sum of a statistic of parameter ``index``, to which may be added."""
        self._renew()
        return self.layout.part(self._flat[statistic.name], index)

    def _pack(self, packed: Packed, index: int, gradients: Tensor) -> None:
        """Let gradients wait for their neighbours."""
        if not packed.has_room(index, len(gradients)):
            self._add_packed(packed)
        packed.add(index, gradients)

    def _add_packed(self, packed: Packed) -> None:
        """Add the gradients that wait."""
        if packed:
            indices, gradients = packed.pop()
            every = len(indices) == len(self.parameters)
            replaces, self._stale = self._stale and every, self._stale and not every
            if every:
                wanted = [(each, self._flat[each.name]) for each in self.collected]
                add_statistics(wanted, gradients, accumulate=not replaces)
            else:
                self._add_some(indices, gradients)
            if self.gradient is None:
                self.seen = self.seen + gradients.sum(dtype=torch.float32)
        self._renew()

    def _add_some(self, indices: Sequence[int], gradients: Tensor) -> None:
        """Add gradients of some parameters, side by side."""
        dtypes = {each.name: self._flat[each.name].dtype for each in self.collected}
        sums = [(each, gradients.new_empty(gradients.shape[1], dtype=dtypes[each.name])) for each in self.collected]
        add_statistics(sums, gradients, accumulate=False)
        for statistic, total in sums:
            views = [self._view(statistic, index).view(-1) for index in indices]
            torch._foreach_add_(views, total.split([each.numel() for each in views]))

    def _renew(self) -> None:
        """Set the sums to 0, if that was put off."""
        if self._stale:
            self._stale = False
            for flat in self._flat.values():
                flat.zero_()

    def values(self) -> Mapping[str, Sequence[Tensor]]:
        """The statistics, the gradient first and by parameter."""
        found = {name: [total.clone()] for name, total in self.flat.items()}
        if self.gradient is None:
            return found
        whole = found.pop(self.gradient)[0]
        return {self.gradient: [self.layout.part(whole, index) for index in range(len(self.parameters))], **found}

    def total(self) -> Tensor:
        """A scalar that is finite if all gradients and their sum are."""
        flat = self.flat
        return self.seen if self.gradient is None else flat[self.gradient].sum()

    def are_finite(self) -> bool:
        """Whether all gradients and their sum are finite."""
        return math.isfinite(float(self.total()))

    def zero(self) -> None:
        """Set the sums to 0."""
        self._stale = True
        if self._packed is None:
            self._renew()
            return
        self._packed.clear()
        if self.gradient is None:
            self.seen = torch.zeros_like(self.seen)

    def exchange(self, processes: Processes) -> SliceExchange:
        """The exchange of such sums between processes."""
        # With one environment in each process only its gradient is sent.
        sends_statistics = self.gradient is None or any(len(names) != 1 for names in processes.names)
        return SliceExchange(
            self.aggregation, self.layout.layers, self.layout.dtype, self.device, processes, sends_statistics
        )

    def apply_here(self, finite: Tensor | None, environments: int, step: int) -> tuple[Tensor, Tensor, None]:
        """Apply the rule to the sums of this process."""
        update, rescale = self._empty(), self.aggregation.rescale
        kept = finish_whole(self.rule, self.flat, update, self.layout.layers, environments, step, rescale=rescale)
        if self.aggregation.policy == "propagate":
            poison(update, self.total())
        return update, kept, None

    def apply_together(
        self, exchange: SliceExchange, finite: Tensor | None, environments: int, step: int
    ) -> tuple[Tensor, Tensor, None, tuple[str, ...]]:
        """Exchange the sums, or the gradient of the only environment, and apply the rule to a slice."""
        update = self._empty()
        if finite is not None and not bool(finite.any()):
            self.zero()
        present = self.present(finite, environments)
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
