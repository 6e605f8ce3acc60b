"""What a process collects of its environments' gradients before the rule is applied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from concord.errors import InputError
from concord.gradients.exchange import Processes, SliceExchange
from concord.gradients.group_gradients import GroupGradients
from concord.gradients.layout import Layout, trainable
from concord.gradients.step import Aggregation


class Applied(NamedTuple):
    """What became of a rule.

    Attributes:
        kept: the kept fraction of each parameter, float32; empty if the rule lets whole gradients through.
        skipped: the names of environments that were left out, in any process.
        environments: the number of environments that were not, in all processes.
        weights: of the environments of all processes; None if the rule is no weighting.
    """

    kept: Tensor
    skipped: tuple[str, ...]
    environments: int
    weights: Tensor | None = None


class Collected(ABC):
    """The trainable parameters of a model, and what is collected of their gradients.

    Args:
        model: the model.
        aggregation: the rule, and how it is applied.

    Attributes:
        parameters: the trainable ones, by name.
        layout: where each lies among all components.

    Raises:
        InputError: the model has no parameter that requires a gradient.
    """

    def __init__(self, model: nn.Module, aggregation: Aggregation) -> None:
        self.parameters = trainable(model)
        if not self.parameters:
            raise InputError("model: none of its parameters requires a gradient")
        self.aggregation = aggregation
        self.layout = Layout.of(self.parameters)
        self.device = next(iter(self.parameters.values())).device

    @abstractmethod
    def add(self, index: int, gradients: Tensor, *, accumulate: bool) -> None:
        """Add environments' gradients of parameter ``index``, ``(environments, *shape)``, or begin anew with them."""

    @abstractmethod
    def add_form(self, index: int, form: GroupGradients, groups: int) -> None:
        """Add the gradients of parameter ``index`` of groups, which are environments."""

    @abstractmethod
    def values(self) -> Mapping[str, Tensor]:
        """What was collected, to compare two ways of collecting it."""

    @abstractmethod
    def are_finite(self) -> bool:
        """Whether all gradients, and their sum, are."""

    @abstractmethod
    def zero(self) -> None:
        """Begin anew."""

    @abstractmethod
    def exchange(self, processes: Processes) -> SliceExchange:
        """The exchange of what was collected between processes."""

    @abstractmethod
    def apply_rule(
        self, finite: Tensor, names: Sequence[str], step: int, exchange: SliceExchange | None = None
    ) -> Applied:
        """Apply the rule and leave the result in ``parameter.grad``.

        Args:
            finite: ``(environments,)`` bool: which of this process's environments were collected; the gradients of
                the others were not finite.
            names: of this process's environments.
            step: the step's number, for errors and for rules that draw.
            exchange: with the processes that have the other environments; None if there are none.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``.
            InputError: the rule gives weights, or an update, of another shape, or weights that are not finite.
        """
