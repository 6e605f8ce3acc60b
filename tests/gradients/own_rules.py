"""Rules unknown to Concord; a table of known statistics' names would treat each of them wrongly."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from concord.aggregation import GRADIENT, SIGN, Aggregator, Statistic, Statistics, Update, aggregate


def _agreeing(value: Tensor, votes: Tensor, environments: int, threshold: float = 0.6) -> Update:
    kept = (votes.abs() >= threshold * environments).to(value.dtype)
    return Update(value * kept, kept)


@dataclass(frozen=True)
class DeadZone:
    """The average where signs agree; small gradients count as 0. Its statistic named sign is not the sign."""

    width: float = 0.02

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return GRADIENT, Statistic("sign", lambda g: g.sign() * (g.abs() > self.width), whole=1)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return _agreeing(sums["gradient"] / environments, sums["sign"], environments, 0.5)


@dataclass(frozen=True)
class Clipped:
    """The average of clipped gradients. Its statistic named gradient is not the gradient."""

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("gradient", lambda g: g.clamp(-0.01, 0.03)),)

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = sums["gradient"] / environments
        return Update(value, torch.ones_like(value))


@dataclass(frozen=True)
class MajorityVote:
    """signSGD's majority vote (Bernstein et al., 2018): the gradient is not among its statistics."""

    statistics: ClassVar[tuple[Statistic, ...]] = (SIGN,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["sign"].sign(), (sums["sign"] != 0).to(sums["sign"].dtype))


@dataclass(frozen=True)
class HalfSigns:
    """A sign that is not a whole number, beside the gradient."""

    statistics: ClassVar[tuple[Statistic, ...]] = (
        GRADIENT,
        Statistic("sign", lambda g: g.sign() * (0.5 + 0.5 * (g.abs() > 0.02)), degree=None),
    )

    def finish(self, sums: Statistics, environments: int) -> Update:
        return _agreeing(sums["gradient"] / environments, sums["sign"], environments, 0.4)


@dataclass(frozen=True)
class GradDrop:
    """Keep one sign of each component, drawn by its purity (Chen et al., Just Pick a Sign, 2020, algorithm 1)."""

    seed: int = 3
    draws: ClassVar[tuple[str, ...]] = ("uniform",)
    statistics: ClassVar[tuple[Statistic, ...]] = (
        Statistic("positive", lambda g: g.clamp(min=0), degree=1),
        Statistic("negative", lambda g: g.clamp(max=0), degree=1),
    )

    def finish(self, sums: Statistics, environments: int) -> Update:
        total = sums["positive"] - sums["negative"]
        purity = torch.where(total > 0, sums["positive"] / total, 0.5)
        value = torch.where(purity > sums["uniform"], sums["positive"], sums["negative"]) / environments
        return Update(value, (value != 0).to(value.dtype))


OWN_RULES: dict[str, Aggregator] = {
    "dead-zone": DeadZone(),
    "clipped": Clipped(),
    "majority-vote": MajorityVote(),
    "half-signs": HalfSigns(),
    "grad-drop": GradDrop(),
}


@dataclass(frozen=True)
class Reference:
    """The result of a float64 loop over environments: the update and the kept fraction of each parameter."""

    updates: list[Tensor]
    kept: list[Tensor]


class Averages:
    """Averages of each environment's gradients over its steps: m ← β m + (1 - β) g, m / (1 - βᵗ).

    Called with gradients ``(environments, components)``; environments with gradients that are not finite are left out.
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.sums: dict[int, tuple[Tensor, int]] = {}

    def __call__(self, rows: Tensor) -> Tensor:
        for number, row in enumerate(rows):
            total, steps = self.sums.get(number, (torch.zeros_like(row), 0))
            if bool(row.isfinite().all()):
                self.sums[number] = self.beta * total + (1 - self.beta) * row, steps + 1
        finite = [number for number, row in enumerate(rows) if bool(row.isfinite().all())]
        return torch.stack([total / (1 - self.beta**steps) for total, steps in map(self.sums.get, finite)])  # type: ignore[misc]


def looped(
    model: nn.Module,
    loss: object,
    rule: Aggregator,
    batches: Sequence[tuple[Tensor, Tensor]],
    step: int = 0,
    seen: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Reference:
    """One backward pass for each environment, all parameters' gradients in one vector, and the rule's formula.

    ``seen`` maps the gradients to the input of the rule.
    """
    model = copy.deepcopy(model).double()
    parameters = list(model.parameters())
    rows = []
    for inputs, targets in batches:
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        targets = targets.double() if targets.is_floating_point() else targets
        gradients = torch.autograd.grad(loss(model(inputs), targets), parameters)  # type: ignore[operator]
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    value, kept = aggregate(rule, seen(torch.stack(rows)), step)
    sizes = [parameter.numel() for parameter in parameters]
    updates = [part.view(p.shape) for part, p in zip(value.split(sizes), parameters, strict=True)]
    return Reference(updates, [part.mean() for part in kept.split(sizes)])


def assert_gradients(model: nn.Module, expected: Iterable[Tensor], **tolerance: float) -> None:
    """The gradients of the model's parameters are these."""
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected), **tolerance)
