"""A process's collection of its environments' gradients before the rule is applied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from concord.errors import InputError
from concord.gradients.exchange import Processes, SliceExchange
from concord.gradients.group_gradients import GroupGradients
from concord.gradients.layout import Layout, require_unwrapped, store_gradients, trainable
from concord.gradients.nonfinite import NonFiniteGradientError
from concord.gradients.step import Aggregation, EnvironmentStep


class Collected(ABC):
    """The trainable parameters of a model, and the collection of their gradients."""

    def __init__(self, model: nn.Module, aggregation: Aggregation) -> None:
        require_unwrapped(model)
        self.parameters = trainable(model)
        if not self.parameters:
            raise InputError("model: none of its parameters requires a gradient")
        self.aggregation = aggregation
        self.layout = Layout.of(self.parameters)
        self.device = next(iter(self.parameters.values())).device

    @abstractmethod
    def add(self, index: int, gradients: Tensor, *, accumulate: bool) -> None:
        """Add environments' gradients of parameter ``index``, ``(environments, *shape)``, or replace the sum."""

    @abstractmethod
    def add_form(self, index: int, form: GroupGradients, groups: int) -> Tensor | None:
        """Add the gradients of parameter ``index``, with environments as groups."""

    @abstractmethod
    def values(self) -> Mapping[str, Sequence[Tensor]]:
        """The parts of each collected quantity, to compare two ways of collecting; no later step changes them."""

    @abstractmethod
    def are_finite(self) -> bool:
        """Whether all gradients and their sum are finite."""

    @abstractmethod
    def zero(self) -> None:
        """Empty the collection."""

    @abstractmethod
    def exchange(self, processes: Processes) -> SliceExchange:
        """The exchange of the collection between processes."""

    def apply_rule(
        self, finite: Tensor | None, names: Sequence[str], step: int, exchange: SliceExchange | None = None
    ) -> EnvironmentStep:
        """Apply the rule and store the result in ``parameter.grad``; the step's losses and weights are empty.

        Args:
            finite: ``(environments,)`` bool: whether each of this process's environments was collected; the gradients
                of the others were not finite. None: all were.
            names: the names of this process's environments.
            step: the step's number, for errors and for rules that draw.
            exchange: the exchange with the other environments' processes; None if there are none.
        """
        clock = self.aggregation.clock
        before = clock.switch("optimizer")
        if exchange is None:
            left_out = [] if finite is None else (~finite).nonzero().flatten().tolist()
            skipped = tuple(names[index] for index in left_out)
            if skipped and self.aggregation.policy == "raise":
                raise NonFiniteGradientError(skipped, step)
            environments = len(names) - len(skipped)
            update, kept, weights = self.apply_here(finite, environments, step)
        else:
            update, kept, weights, skipped = self.apply_together(exchange, finite, len(names), step)
            environments = exchange.processes.total - len(skipped)
        store_gradients(list(self.parameters.values()), self.layout, update)
        clock.switch(before)
        nothing = torch.empty(0, device=self.device)
        is_finite = torch.isfinite(update[:1]).all() if self.aggregation.notes_finite else None
        return EnvironmentStep(nothing, kept, skipped, nothing, environments, weights, is_finite)

    @abstractmethod
    def apply_here(self, finite: Tensor | None, environments: int, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The update, the kept fractions and the environments' weights, if this process has all environments.

        ``environments`` is the number of those that were collected.
        """

    @abstractmethod
    def apply_together(
        self, exchange: SliceExchange, finite: Tensor | None, environments: int, step: int
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[str, ...]]:
        """The same with other processes, and the names of the environments that were left out.

        ``environments`` is the number of all environments of this process.
        """

    def present(self, finite: Tensor | None, environments: int) -> Tensor:
        """1 for each environment that was collected, -1 for the others, float32."""
        if finite is None:
            return torch.ones(environments, device=self.device)
        return torch.where(finite, 1.0, -1.0).to(self.device)
