"""The common part of gradient sources: options, call, result."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from concord.aggregation import Rule
from concord.aggregation.families import as_rule, masks
from concord.aggregation.weighting import name_of
from concord.errors import ArgumentError
from concord.gradient_policies import NonFinite
from concord.gradients.compiled import compiled_rule
from concord.gradients.environment_momentum import EnvironmentMomentum
from concord.gradients.nonfinite import check_nonfinite
from concord.gradients.step_clock import StepClock


class EnvironmentStep(NamedTuple):
    """The result of one step over environments; the aggregated gradient is in ``parameter.grad``.

    Attributes:
        losses: ``(local environments,)``, each environment's mean risk in this process; empty if the source does not
            compute it.
        kept_fraction: ``(parameters,)``, the fraction of each parameter tensor's components that the rule kept,
            in the order of the trained ones of ``model.named_parameters()``; float32. Empty if the rule drops no
            components.
        skipped: the names of the environments of all processes whose gradient was not finite, and was left out.
        weights: ``(local environments,)``, the weight of each of ``losses`` in a mean over several batches of its
            environment: the batch's number of examples, or the risk's weight.
        environments: the number of environments of all processes.
        environment_weights: ``(environments,)`` float64, the weight in the update of each environment of all processes,
            in the processes' order, 0 if it was left out; None if the rule is no weighting.
        finite: a bool scalar on the device, whether the update is finite, in a step that was recorded as a graph; None
            otherwise.
    """

    losses: Tensor
    kept_fraction: Tensor
    skipped: tuple[str, ...]
    weights: Tensor
    environments: int
    environment_weights: Tensor | None = None
    finite: Tensor | None = None


class GradientSource(Protocol):
    """A callable that stores the aggregated gradient of a step in ``parameter.grad``."""

    def __call__(self, batch: Any, step: int) -> EnvironmentStep:
        """One step; leaves of ``batch`` begin with ``(environments, examples)``, those of this process."""


class AggregationOptions(TypedDict, total=False):
    """The keyword arguments of all gradient sources; see :class:`Aggregation`."""

    rescale: bool
    environment_momentum: float
    nonfinite: NonFinite | None
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    clock: StepClock
    compile: bool


@dataclass(frozen=True)
class Aggregation:
    """The aggregation of a step's gradients, for any gradient source.

    Args:
        rule: the rule, of any family.
        rescale: divide each parameter tensor's update by its kept fraction.
        environment_momentum: β of a moving average of each environment's gradients over steps, which replaces the
            gradients, see :mod:`~concord.gradients.environment_momentum`; in [0, 1), 0 disables.
        nonfinite: the policy for environments whose gradient is not finite, see :data:`NonFinite`; None is
            ``propagate`` with a scaler or under float16 autocast, and ``raise`` otherwise.
        autocast: the dtype in which ``torch.autocast`` computes layers; a loss gets float32. None disables autocast.
        scaler: multiplies the loss before backward. The rule sees unscaled gradients; ``parameter.grad`` is
            scaled again, for ``scaler.step(optimizer)``.
        clock: records the time of each phase of a step.
        compile: compile the rule, see :mod:`~concord.gradients.compiled`: a weighting has nothing to compile.

    Attributes:
        notes_finite: whether steps have :attr:`EnvironmentStep.finite`.

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
    compile: bool = False
    notes_finite: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        rule = as_rule(self.rule)
        object.__setattr__(self, "rule", compiled_rule(rule) if self.compile else rule)
        if self.rescale and not masks(self.rule):
            raise ArgumentError("rescale", True, f"{name_of(self.rule)} drops no components; give False")
        check_nonfinite(self.nonfinite)
        if not 0 <= self.environment_momentum < 1:
            raise ArgumentError("environment_momentum", self.environment_momentum, "must lie in [0, 1)")

    def momentum(self, parameters: Mapping[str, Tensor]) -> EnvironmentMomentum | None:
        """The empty averages of the environments' gradients; None without ``environment_momentum``."""
        beta = self.environment_momentum
        return EnvironmentMomentum(beta, parameters) if beta > 0 else None

    @property
    def policy(self) -> NonFinite:
        """The policy for gradients that are not finite, at this step.

        ``skip`` becomes ``propagate`` while a scaler's scale is above 1: the scale itself may make gradients overflow,
        and would grow further if the scaler never saw the overflow.
        """
        scaled = self.scaler is not None and self.scaler.is_enabled()
        if self.nonfinite is None:
            return "propagate" if scaled or self.autocast == torch.float16 else "raise"
        if self.nonfinite == "skip" and self.scaler is not None and scaled and self.scaler.get_scale() > 1:
            return "propagate"
        return self.nonfinite

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Let what is not finite reach the update while the body runs, and note whether it did in the step."""
        before = self.nonfinite, self.notes_finite
        try:
            self._set("propagate", True)
            yield
        finally:
            self._set(*before)

    def _set(self, nonfinite: NonFinite | None, notes_finite: bool) -> None:
        object.__setattr__(self, "nonfinite", nonfinite)
        object.__setattr__(self, "notes_finite", notes_finite)

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
