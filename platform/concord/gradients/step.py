"""The common part of gradient sources: options, call, result."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from concord.aggregation import Rule
from concord.aggregation.families import as_rule, masks
from concord.aggregation.weighting import name_of
from concord.errors import ArgumentError
from concord.gradients.environment_momentum import EnvironmentMomentum
from concord.gradients.nonfinite import NonFinite, check_nonfinite
from concord.gradients.step_clock import StepClock


class EnvironmentStep(NamedTuple):
    """The result of one step over environments, the aggregated gradient of which is in ``parameter.grad``.

    Attributes:
        losses: ``(local environments,)``, each environment's mean risk in this process; empty where the source never
            sees it.
        kept_fraction: ``(parameters,)``, the part of each parameter tensor's components that the rule let through,
            in the order of ``model.named_parameters()``; float32. Empty if the rule lets whole gradients through.
        skipped: names of environments that were left out, in any process, because their gradient was not finite.
        weights: ``(local environments,)``, what each of ``losses`` weighs in a mean over several parts of its
            environment: the number of examples of its batch, or the weight that the risk gave.
        environments: the number of environments, of all processes.
        environment_weights: ``(environments,)`` float64, what each environment of all processes, in the processes'
            order, weighs in the update, 0 if it was left out; None if the rule is no weighting.
    """

    losses: Tensor
    kept_fraction: Tensor
    skipped: tuple[str, ...]
    weights: Tensor
    environments: int
    environment_weights: Tensor | None = None


class GradientSource(Protocol):
    """A callable that leaves the aggregated gradient of a step in ``parameter.grad``."""

    def __call__(self, batch: Any, step: int) -> EnvironmentStep:
        """One step; leaves of ``batch`` begin with ``(environments, examples)``, those of this process."""


class AggregationOptions(TypedDict, total=False):
    """What all gradient sources take by keyword; see :class:`Aggregation`."""

    rescale: bool
    environment_momentum: float
    nonfinite: NonFinite | None
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    clock: StepClock


@dataclass(frozen=True)
class Aggregation:
    """How the gradients of a step become one, whichever way they are obtained.

    Args:
        rule: the rule, of any family.
        rescale: divide each parameter tensor's update by its kept fraction.
        environment_momentum: β of an average of each environment's gradients over its steps, which the rule sees in
            their place, see :mod:`~concord.gradients.environment_momentum`; in [0, 1), 0 keeps none.
        nonfinite: what to do about environments whose gradient is not finite, see :data:`NonFinite`; None is
            ``propagate`` with a scaler or under float16 autocast, and ``raise`` otherwise.
        autocast: the dtype in which ``torch.autocast`` computes layers; a loss gets float32. None disables autocast.
        scaler: multiplies the loss before backward. The rule sees gradients that are unscaled; what is left in
            ``parameter.grad`` is scaled again, for ``scaler.step(optimizer)``.
        clock: records how long each phase of a step takes.

    Raises:
        InputError: the rule's statistics lack a property that they claim, ``rescale`` came with a rule that drops no
            components, ``environment_momentum`` is out of its range, or ``nonfinite`` is unknown.
    """

    rule: Rule
    rescale: bool = False
    environment_momentum: float = 0.0
    nonfinite: NonFinite | None = None
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    clock: StepClock = field(default_factory=StepClock)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", as_rule(self.rule))
        if self.rescale and not masks(self.rule):
            raise ArgumentError("rescale", True, f"{name_of(self.rule)} drops no components; give False")
        check_nonfinite(self.nonfinite)
        if not 0 <= self.environment_momentum < 1:
            raise ArgumentError("environment_momentum", self.environment_momentum, "must lie in [0, 1)")

    def momentum(self, parameters: Mapping[str, Tensor]) -> EnvironmentMomentum | None:
        """The averages of environments' gradients, none yet; None if none are kept."""
        beta = self.environment_momentum
        return EnvironmentMomentum(beta, parameters) if beta > 0 else None

    @property
    def policy(self) -> NonFinite:
        """What to do about a gradient that is not finite, at this step.

        ``skip`` is ``propagate`` while a scaler's scale is above 1: it may be what makes gradients overflow, and would
        grow until nothing is left if the scaler never saw that.
        """
        scaled = self.scaler is not None and self.scaler.is_enabled()
        if self.nonfinite is None:
            return "propagate" if scaled or self.autocast == torch.float16 else "raise"
        if self.nonfinite == "skip" and self.scaler is not None and scaled and self.scaler.get_scale() > 1:
            return "propagate"
        return self.nonfinite

    def scale(self, device: torch.device) -> Tensor | None:
        """The factor of the loss, a scalar that the host does not read; None without a scaler."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale: Tensor = self.scaler.scale(torch.ones((), device=device))
        return scale

    def scale_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Leave gradients scaled, as ``scaler.step(optimizer)`` expects them."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scale = self.scale(gradients[0].device) if gradients else None
        if scale is not None:
            torch._foreach_mul_(gradients, scale)
