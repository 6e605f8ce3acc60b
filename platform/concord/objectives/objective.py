"""The number to minimize over environments: each environment's terms, combined."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError, InputError
from concord.gradients.buffer_means import BufferMeans
from concord.gradients.pieces import normalizes_over_the_batch
from concord.gradients.risk import (
    Batch,
    Calls,
    Loss,
    MeanRisk,
    Risk,
    Supervised,
    as_risk,
    autocast_to,
    inputs_of,
    take,
    with_outputs,
)
from concord.objectives.penalty_weight import PenaltyWeight
from concord.space import Choice, Entries

WARMUPS = Choice(0.0, 0.1, 0.3)
"""The warm-ups that ``compare methods`` searches."""


class Objective:
    """A number to minimize, from a model and a batch of each environment::

        objective = VREx(torch.nn.functional.cross_entropy, PenaltyWeight(10.0))
        for step, (inputs, targets) in enumerate(batches):  # (environments, batch, ...), (environments, batch)
            objective(model, inputs, targets, step).backward()

    It has two parts. :meth:`terms` computes the environments' terms, numbers with a graph: here, their risks.
    :meth:`combine` reduces all terms to one number: here, their mean. With several processes each computes the terms of
    its own environments and receives the values of the others.

    Args:
        loss: the loss or the risk of one environment, see :mod:`concord.gradients.risk`.
        autocast: the dtype in which ``torch.autocast`` computes layers; a loss gets float32. None disables autocast.

    An objective may train a network of its own beside the model, such as a classifier of environments: :meth:`begin`
    makes it and stores it as :attr:`module`. Such an objective must be coupled.

    Attributes:
        risk: the risk of one environment. If the objective is not coupled, a gradient source takes it in place of a
            loss, with any aggregator.
        coupled: whether there is one gradient for all environments, which no aggregator can replace.
        others: whether an environment's terms depend on the other environments' batches.
        by_example: whether an environment has terms for each example; then the batches of all processes need one shape.
        every: whether each step needs all environments of the run, since the objective keeps values of each.
        averages: whether an environment's risk is a mean over its examples, if the loss is; a batch can then be
            processed in pieces (``--accumulate``).
        compares: whether environments are compared, so that a run needs two or more.
        module: the objective's own network; checkpoints contain it, the registered model does not.
        optimizer: the optimizer of the module's parameters; None trains them with the run's optimizer.
        schedule: the schedule of this optimizer; None keeps its learning rate.
        alternates: whether the objective trains its module itself, in :meth:`prepare`; the terms' gradient is then the
            model's alone.
        takes_aggregator: whether the objective applies the run's aggregator itself, to its own gradients; it may then
            be coupled with an --aggregator other than the mean.
        default_weight: the default weight of the penalty; None if the objective has no penalty.
        compared_weight: the weight with which comparisons of methods begin where the published default, which is of
            image tasks, ruins a table (docs/table-results.md); None takes the default.
        display_name: the published name, for figures and tables; None for the name of the option.
        constants, option_names: see :mod:`concord.hyperparameters`.
        space: the domains in which ``compare methods`` searches the objective's options.
    """

    coupled: ClassVar[bool] = True
    others: ClassVar[bool] = False
    by_example: ClassVar[bool] = False
    every: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    alternates: ClassVar[bool] = False
    default_weight: ClassVar[float | None] = None
    compared_weight: ClassVar[float | None] = None
    display_name: ClassVar[str | None] = None
    constants: ClassVar[tuple[str, ...]] = ("loss", "autocast")
    option_names: ClassVar[Mapping[str, str]] = {"weight": "penalty_weight", "warmup": "penalty_warmup"}
    space: ClassVar[Entries] = {}
    averages: bool = False
    takes_aggregator: bool = False
    module: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None

    def __init__(self, loss: Loss | Risk, autocast: torch.dtype | None = None) -> None:
        self.risk = as_risk(loss)
        self.autocast = autocast
        self._supervised = isinstance(self.risk, Supervised)
        self._step = 0

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Make module, optimizer and schedule for this model. Called once, before any step.

        Args:
            model: the model to train.
            environments: the number of training environments, in all processes.
            steps: the number of steps of the run, for schedules.
        """

    def attach(
        self, batch_at: Callable[[int], Batch], optimizer: torch.optim.Optimizer, steps_per_pass: int | None = None
    ) -> None:
        """Receive the run's batches and optimizer. Called once, after :meth:`begin`.

        Args:
            batch_at: returns the batch of this process's environments at any step, also a later one.
            optimizer: the model's optimizer.
            steps_per_pass: the steps in which every example occurs exactly once, counted from step 0; None if passes
                do not end at a step.
        """

    def scale(self, step: int) -> float:
        """The factor by which the objective's value, a loss with penalties, is multiplied at this step.

        A coupled L1 or L2 penalty of the weights belongs to that loss, and gets the same factor.
        """
        del step
        return 1.0

    def prepare(self, model: nn.Module, step: int, own: Sequence[int], total: Callable[[Tensor], Tensor]) -> None:
        """Prepare the terms of a step, by training the module for instance. Called in every process.

        Args:
            model: the model to train.
            step: the step's number.
            own: the indices of this process's environments among all.
            total: returns the sum of a tensor over all processes, which must all call it equally often.
        """

    def metrics(self) -> Mapping[str, float]:
        """Further numbers of an epoch's steps, by name, which are reported as ``objective/NAME``.

        Called after each epoch in every process; the numbers must be the same in all.
        """
        return {}

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The concatenated terms of the environments, of equal number, and the environments' weights.

        Args:
            model: the model that the risk calls.
            batch: a tree of tensors ``(environments, batch, ...)``: of the requested environments, or of all
                with :attr:`others`.
            step: the step's number, for schedules.
            own: the indices of the requested environments among all; None takes all.

        Returns:
            The terms ``(terms,)`` and the environments' weights, ``(environments,)``, see
            :class:`~concord.gradients.EnvironmentStep`.
        """
        return self.risks(model, batch, step)

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """One number of all environments' terms."""
        return terms.mean()

    def losses(self, terms: Tensor) -> Tensor:
        """The losses ``(environments,)`` that a run reports, from terms ``(environments, terms)``."""
        return terms.mean(1)

    def __call__(self, model: nn.Module, batch: Batch, *more: Any, step: int | None = None) -> Tensor:
        """The objective of these batches, a scalar.

        Args:
            model: the model that the risk calls.
            batch: a tree of tensors ``(environments, batch, ...)``, of all environments.
            step: the step's number, for schedules; if None, the calls with gradients are counted from 0.
            more: ``objective(model, inputs, targets, step)`` is short for a pair.

        Raises:
            InputError: the batch is not such a tree or lacks environments of which the objective keeps values, or the
                risk is not a scalar.
        """
        batch, _, at = Calls(self._step).take(batch, more, step)
        self._step = at + torch.is_grad_enabled()
        return self.combine(self.terms(model, batch, at)[0], at)

    def risks(
        self, model: nn.Module, batch: Batch, step: int, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean risk of each environment, and its weight, both ``(environments,)``.

        With a loss there is one forward pass for all environments. If the model normalizes over the batch, or with a
        risk, there is one pass for each environment: its batch is normalized separately, and running statistics become
        the mean over the environments' own updates.

        Args:
            model: the model that the risk calls.
            batch: a tree of tensors ``(environments, batch, ...)``.
            step: the step's number.
            weights: parameters in place of the model's own.
        """
        first = pytree.tree_leaves(batch)[0]
        if self._supervised and not any(map(normalizes_over_the_batch, model.modules())):
            inputs = pytree.tree_map(lambda leaf: leaf.flatten(0, 1), inputs_of(batch))
            with autocast_to(first.device, self.autocast):
                outputs = model(inputs) if weights is None else functional_call(model, dict(weights), (inputs,))
            # The loss gets these outputs through a model that does nothing.
            batch = with_outputs(batch, pytree.tree_map(lambda leaf: leaf.unflatten(0, first.shape[:2]), outputs))
            model, weights = nn.Identity(), None
        risk = MeanRisk(model, self.risk, self.autocast, first.device)
        given = {f"model.{name}": value for name, value in (weights or {}).items()}
        before = dict(model.named_buffers()) if any(module.training for module in model.modules()) else {}
        buffers, results = BufferMeans(model), []
        for index in range(len(first)):
            # Backward needs the buffers of each pass, so they are not put back in their place.
            state = {f"model.{name}": buffer.detach().clone() for name, buffer in before.items()}
            replaced = given | state
            results.append(functional_call(risk, replaced, (take(batch, index), step)))
            buffers.add({name: replaced[f"model.{name}"].detach()[None] for name in before})
        for name, new in buffers.over(len(first)).items():
            before[name].copy_(new)
        means, counts = zip(*results, strict=True)
        return torch.stack(means), torch.stack(counts)


class Penalized(Objective):
    """An objective with the weight of a penalty.

    Args:
        loss: the loss or the risk of one environment.
        weight: the weight of the penalty.
        autocast: the dtype in which layers compute.
    """

    def __init__(self, loss: Loss | Risk, weight: PenaltyWeight, autocast: torch.dtype | None = None) -> None:
        super().__init__(loss, autocast)
        if not isinstance(weight, PenaltyWeight):
            raise ArgumentError("weight", weight, "must be a PenaltyWeight, such as PenaltyWeight(1.0)")
        self.weight = weight


class Rescaled(Penalized):
    """An objective with a penalty, divided by max(1, λ), so that a large weight does not make large gradients.

    Attributes:
        warms_up_at_one: whether the weight of the warm-up is min(1, λ); otherwise it is 0.
    """

    warms_up_at_one: ClassVar[bool] = True

    def scale(self, step: int) -> float:
        """1 / max(1, λ) at this step."""
        return self.weight.scale(step)


@dataclass(frozen=True)
class PenalizedRisk:
    """Risk plus penalty of one environment, as a risk that every gradient source accepts."""

    risk: Risk
    weight: PenaltyWeight

    @property
    def of_outputs(self) -> bool:
        """Whether it is a function of outputs and targets alone, see :class:`~concord.gradients.risk.Supervised`."""
        return getattr(self.risk, "of_outputs", False)


def require_all(environments: int, begun: int, name: str) -> None:
    """Refuse another number of environments than :meth:`Objective.begin` was called with (InputError)."""
    if environments != begun:
        raise InputError(
            f"batch: {environments} environments; {name} keeps values of each of {begun}, and needs all of them"
        )


def require_several(environments: int, name: str) -> None:
    """Refuse a single environment (ArgumentError)."""
    if environments < 2:
        raise ArgumentError("objective", name, "compares environments, but there is only one; give at least 2")
