"""What is minimized over environments: terms that environments give, and how they become one number."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from concord.errors import ArgumentError
from concord.gradients.autocast import outputs_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs ``(batch, ...)`` and targets ``(batch, ...)`` to a scalar, the mean over the batch."""


class Objective(ABC):
    """A number to minimize, from a model and a batch of each environment::

        objective = VREx(torch.nn.functional.cross_entropy, PenaltyWeight(10.0))
        for step, (inputs, targets) in enumerate(batches):  # (environments, batch, ...), (environments, batch)
            objective(model, inputs, targets, step).backward()

    It is put together of two parts. :meth:`terms` are what environments give, numbers with a graph; :meth:`combine`
    makes one number of all of them. Where environments lie in several processes, each computes its own terms, and only
    their values have to be known everywhere.

    Attributes:
        loss: the risk of a batch.
        autocast: the dtype that ``torch.autocast`` is to compute layers in; the loss gets float32. None: as they are.
        others: the terms of an environment depend on the batches of the other ones.
    """

    others: bool = False

    def __init__(self, loss: Loss, autocast: torch.dtype | None = None) -> None:
        self.loss = loss
        self.autocast = autocast

    @abstractmethod
    def terms(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, step: int = 0, own: Sequence[int] | None = None
    ) -> Tensor:
        """The terms of environments, as many for each, one environment's after the other's: ``(terms,)``.

        Args:
            model: gives outputs ``(batch, ...)``.
            inputs, targets: ``(environments, batch, ...)``: of the environments whose terms are wanted, or with
                :attr:`others` of all of them.
            step: the step's number, for schedules.
            own: which environments those are whose terms are wanted, counted among all; None: all.
        """

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:  # noqa: ARG002
        """One number of all environments' terms: here, their mean."""
        return terms.mean()

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, step: int = 0) -> Tensor:
        """The objective of these batches, a scalar; arguments as for :meth:`terms`, all environments."""
        return self.combine(self.terms(model, inputs, targets, step), step)


class ByEnvironment(Objective):
    """An objective with one term an environment, from its outputs and targets alone: its risk, if it is no other."""

    def term(self, outputs: Tensor, targets: Tensor, step: int = 0) -> Tensor:  # noqa: ARG002
        """The term of one environment, a scalar, from outputs ``(batch, ...)`` and targets ``(batch, ...)``."""
        return self.loss(outputs, targets)

    def terms(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        step: int = 0,
        own: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Tensor:
        """One term an environment."""
        outputs = environment_outputs(model, inputs, self.autocast)
        return torch.stack([self.term(*pair, step) for pair in zip(outputs, targets, strict=True)])


class Separable(ByEnvironment):
    """One that is the mean of its terms; then another aggregator can take the place of the gradients' average."""


def environment_outputs(
    model: nn.Module, inputs: Tensor, autocast: torch.dtype | None = None, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The outputs ``(environments, batch, ...)`` for inputs ``(environments, batch, ...)``.

    Args:
        model: the model.
        inputs: of the environments.
        autocast: the dtype that layers compute in; None: as they are.
        weights: parameters in place of the model's own.
    """

    def forward(batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch) if weights is None else functional_call(model, dict(weights), (batch,))
        return outputs

    return by_environment(model, lambda batch: (outputs_of(forward, batch, autocast),), inputs)[0]


def by_environment(
    model: nn.Module, forward: Callable[[Tensor], tuple[Tensor, ...]], inputs: Tensor
) -> tuple[Tensor, ...]:
    """What a forward pass gives, each ``(environments, batch, ...)``, for inputs ``(environments, batch, ...)``.

    One pass for all, unless the model normalizes over the batch: then one for each environment, whose batch is
    normalized by itself (and running statistics take in one environment after the other).
    """
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        return tuple(torch.stack(parts) for parts in zip(*map(forward, inputs), strict=True))
    shape = inputs.shape[:2]
    return tuple(part.reshape(*shape, *part.shape[1:]) for part in forward(inputs.flatten(0, 1)))


def require_several(terms: Tensor, name: str) -> None:
    """Refuse the terms of one environment alone (InputError)."""
    if len(terms) < 2:
        raise ArgumentError("objective", name, "compares environments, but there is only one; give at least 2")
