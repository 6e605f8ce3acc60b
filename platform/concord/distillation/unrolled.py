"""Optimizers as functions: weights, gradients and a state give the next weights and the next state.

``torch.optim`` changes parameters in place, which cannot be differentiated. These functions compute the same numbers
out of place, so the derivative passes through the step and its moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from concord.errors import ArgumentError


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer.

    Attributes:
        steps: the number of steps taken.
        first: SGD's momentum or Adam's average of gradients, for each parameter; empty if not used.
        second: Adam's average of squared gradients, for each parameter; empty if not used.
    """

    steps: int = 0
    first: tuple[Tensor, ...] = ()
    second: tuple[Tensor, ...] = ()


Stepped = tuple[list[Tensor], OptimizerState]
"""The next weights and the next state."""


class Rule(Protocol):
    """The protocol of an optimizer as a function."""

    def start(self, weights: Sequence[Tensor]) -> OptimizerState:
        """The state before the first step."""

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], state: OptimizerState) -> Stepped:
        """One step; nothing is changed in place."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: m ← momentum · m + g, w ← w - lr · m.

    Args:
        lr: the learning rate.
        momentum: 0 keeps none.
        weight_decay: λ; λ w is added to g.

    Raises:
        InputError: a number is out of its range.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, momentum=self.momentum)

    def start(self, weights: Sequence[Tensor]) -> OptimizerState:
        """No momentum yet."""
        return OptimizerState(0, tuple(map(torch.zeros_like, weights)) if self.momentum else ())

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], state: OptimizerState) -> Stepped:
        """One step."""
        moved = _decayed(weights, gradients, self.weight_decay)
        if self.momentum:
            moved = [self.momentum * before + now for before, now in zip(state.first, moved, strict=True)]
        following = [weight - self.lr * each for weight, each in zip(weights, moved, strict=True)]
        return following, OptimizerState(state.steps + 1, tuple(moved) if self.momentum else ())


@dataclass(frozen=True)
class Adam:
    """Adam: m and v are averages of g and g², w ← w - lr · m̂ / (√v̂ + ε) with both corrected for their start at 0.

    Where v is 0 the square root has no derivative; it counts as 0 there.

    Args:
        lr: the learning rate.
        beta1: the decay β₁ of m.
        beta2: the decay β₂ of v.
        eps: ε.
        weight_decay: λ; λ w is added to g.

    Raises:
        InputError: a number is out of its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, beta1=self.beta1, beta2=self.beta2)

    def start(self, weights: Sequence[Tensor]) -> OptimizerState:
        """Averages of 0."""
        return OptimizerState(0, tuple(map(torch.zeros_like, weights)), tuple(map(torch.zeros_like, weights)))

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], state: OptimizerState) -> Stepped:
        """One step."""
        steps = state.steps + 1
        gradients = _decayed(weights, gradients, self.weight_decay)
        first = tuple(torch.lerp(m, g, 1 - self.beta1) for m, g in zip(state.first, gradients, strict=True))
        second = tuple(self.beta2 * v + (1 - self.beta2) * g * g for v, g in zip(state.second, gradients, strict=True))
        rate = self.lr / (1 - self.beta1**steps)
        correction = (1 - self.beta2**steps) ** 0.5
        following = [
            weight - rate * m / (_square_root(v) / correction + self.eps)
            for weight, m, v in zip(weights, first, second, strict=True)
        ]
        return following, OptimizerState(steps, first, second)


def as_rule(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> tuple[Rule, OptimizerState]:
    """This optimizer's next steps of these parameters as a function, and a copy of its state.

    Raises:
        InputError: it is neither Adam nor SGD, has an option that these functions lack, or has several
            parameter groups.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.SGD):
        raise ArgumentError("optimizer", kind.__name__, "its steps cannot be unrolled; give adam or sgd")
    known = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    groups = {id(known.get(id(each))): known.get(id(each)) for each in parameters}
    group = next(iter(groups.values()))
    if len(groups) != 1 or group is None:
        raise ArgumentError("optimizer", kind.__name__, "it has to have the student's parameters in one group")
    for option in ("nesterov", "dampening", "amsgrad", "maximize", "decoupled_weight_decay"):
        if group.get(option):
            raise ArgumentError("optimizer", kind.__name__, f"its steps with {option} cannot be unrolled")
    states: list[dict[str, Any]] = [optimizer.state.get(each, {}) for each in parameters]
    decay = float(group["weight_decay"])
    rule: Rule
    if kind is torch.optim.SGD:
        rule = SGD(float(group["lr"]), float(group["momentum"]), decay)
        first, second, steps = "momentum_buffer", "", 0
    else:
        beta1, beta2 = map(float, group["betas"])
        rule = Adam(float(group["lr"]), beta1, beta2, float(group["eps"]), decay)
        first, second, steps = "exp_avg", "exp_avg_sq", int(states[0].get("step", 0))
    if all(each.get(first) is None for each in states):
        return rule, rule.start(parameters)
    copies = [tuple(each[name].detach().clone() for each in states) if name else () for name in (first, second)]
    return rule, OptimizerState(steps, *copies)


def _decayed(weights: Sequence[Tensor], gradients: Sequence[Tensor], decay: float) -> list[Tensor]:
    if decay == 0:
        return list(gradients)
    return [gradient + decay * weight for weight, gradient in zip(weights, gradients, strict=True)]


def _square_root(values: Tensor) -> Tensor:
    """The square root, with a derivative of 0 at 0."""
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), 0.0)


def _check(lr: float, weight_decay: float, **decays: float) -> None:
    if not 0 < lr < float("inf"):
        raise ArgumentError("lr", lr, "must be a finite number above 0")
    if not 0 <= weight_decay < float("inf"):
        raise ArgumentError("weight_decay", weight_decay, "must be a finite number, not below 0")
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise ArgumentError(name, value, "must lie in [0, 1)")
