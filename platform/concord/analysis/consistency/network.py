"""Consistency of a trained network: every part of it that can be computed or bounded, and the same by chance alone.

The paper never computes I^ε of a network. It cannot be had exactly: directions in which one environment's loss is flat
make N_e unbounded, so a ball of radius ρ around θ* stands beside every number, and what is given are a quadratic's two
ends (:mod:`~concord.analysis.consistency.curvature`) and a lower bound on the true losses
(:mod:`~concord.analysis.consistency.certified`). Whatever is measured is measured again on pseudo-environments, dealt
out at random from the same examples: what these differ by is sampling, not a mechanism.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from concord.aggregation.agreement import check_threshold
from concord.analysis.consistency.certified import certified_bound
from concord.analysis.consistency.curvature import (
    Ratio,
    check_radius,
    diagonals,
    log_ratios,
    mean_log_ratio,
    pair_ratio,
)
from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.analysis.consistency.quadratic import check_epsilon
from concord.analysis.consistency.signs import SignAgreement, sign_agreement
from concord.analysis.consistency.slices import Slice, line, plane
from concord.errors import ArgumentError

Part = Literal["signs", "curvature", "bound", "slices"]
PARTS: tuple[Part, ...] = ("signs", "curvature", "bound", "slices")

_LINE_POINTS, _PLANE_POINTS = 41, 15


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, and how closely.

    Attributes:
        epsilon: every ε, above 0; they are put in order.
        radius: ρ over ‖θ*‖, above 0.
        pairs: how many ordered pairs of environments are measured, drawn by the seed if there are more.
        parts: what is measured.
        threshold: τ of the kept fraction.
        batches: of each environment for the signs.
        probes: of the diagonal curvatures.
        seed: of all that is drawn.

    Raises:
        ArgumentError: one of them is out of its range.
    """

    epsilon: tuple[float, ...] = (0.01, 0.1)
    radius: float = 0.1
    pairs: int = 16
    parts: tuple[Part, ...] = PARTS
    threshold: float = 0.8
    batches: int = 4
    probes: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.epsilon:
            raise ArgumentError("epsilon", None, "give one number above 0, or several")
        for each in self.epsilon:
            check_epsilon(each)
        object.__setattr__(self, "epsilon", tuple(sorted(self.epsilon)))
        check_radius(self.radius)
        check_threshold(self.threshold)
        if self.pairs < 1:
            raise ArgumentError("pairs", self.pairs, "must be at least 1")
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise ArgumentError("parts", self.parts, f"give some of {', '.join(PARTS)}")


@dataclass(frozen=True)
class PairConsistency:
    """What a change that environment e does not see may do to environment e'.

    Attributes:
        own, other: e and e'.
        ratios: μ for each ε; empty if curvature was not asked for.
        converged: whether all of them are found; where not, they may be larger.
        bounds: the largest change of L_e' that was found, for each ε; empty if it was not asked for.
    """

    own: str
    other: str
    ratios: tuple[float, ...] = ()
    converged: bool = True
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class NetworkConsistency:
    """What was found of a network, on its environments or on pseudo-environments.

    Attributes:
        settings: of the measurement.
        radius: ρ, in units of θ.
        losses: L_e(θ*) by environment.
        gradient_norms: ‖∇L_e(θ*)‖ by environment; where they are not 0, I^ε does not vanish with ε.
        pairs: the pairs that were measured, of ``possible_pairs``.
        possible_pairs: d (d - 1).
        log_ratios: by layer, see :func:`~concord.analysis.consistency.curvature.log_ratios`.
        log_ratio: the same of all components together.
        signs: the agreement in sign.
        line, plane: slices along the directions of the largest ratios, or random ones without curvature.
    """

    settings: Settings
    radius: float
    losses: dict[str, float]
    gradient_norms: dict[str, float]
    pairs: tuple[PairConsistency, ...]
    possible_pairs: int
    log_ratios: dict[str, float] = field(default_factory=dict)
    log_ratio: float | None = None
    signs: SignAgreement | None = None
    line: Slice | None = None
    plane: Slice | None = None

    @property
    def quadratic(self) -> list[tuple[float, float]]:
        """For each ε, between what the quadratic's I^ε lies: ε μ, and 2 ε μ or the ε that an environment itself has."""
        largest = [max(pair.ratios[place] for pair in self.pairs) for place in range(len(self.pairs[0].ratios))]
        return [
            (epsilon * ratio, max(2 * epsilon * ratio, epsilon))
            for epsilon, ratio in zip(self.settings.epsilon, largest, strict=False)
        ]

    @property
    def bound(self) -> list[float]:
        """For each ε, what the network's I^ε is at least."""
        return [max(pair.bounds[place] for pair in self.pairs) for place in range(len(self.pairs[0].bounds))]


def pieces(settings: Settings, environments: int) -> int:
    """How many pieces of work :func:`measure` has."""
    pairs = min(settings.pairs, environments * (environments - 1))
    each = len(settings.epsilon) * (("curvature" in settings.parts) + ("bound" in settings.parts))
    return pairs * each + len({"signs", "curvature", "slices"}.intersection(settings.parts))


def measure(
    losses: EnvironmentLosses,
    settings: Settings,
    advance: Callable[[], None] = lambda: None,
    through: Tensor | None = None,
) -> NetworkConsistency:
    """Measure a network's consistency.

    Args:
        losses: of the network.
        settings: what is measured.
        advance: called after each of its :func:`pieces`.
        through: the offset of another solution, ``(n,)``, which the slices are to lead through.

    Raises:
        ArgumentError: there are fewer than two environments.
        InputError: curvature is asked for, and the job's risk has none.
    """
    parts, names = set(settings.parts), losses.names
    if len(names) < 2:
        raise ArgumentError("environments", len(names), "consistency compares two environments at least")
    if "curvature" in parts:
        losses.loss_of_outputs()  # which refuses a risk
    radius = settings.radius * float(losses.solution.double().norm())
    directions = _Directions(losses, settings.seed)
    pairs, steepest = _pairs(losses, settings, radius, directions, advance)
    signs, ratios, ratio, along, over = None, dict[str, float](), None, None, None
    if "signs" in parts:
        fewest = min(losses.examples(name) for name in names)
        signs = sign_agreement(losses, settings.threshold, min(settings.batches, fewest))
        advance()
    if "curvature" in parts:
        ratios = log_ratios(losses, diagonals(losses, settings.probes, settings.seed))
        ratio = mean_log_ratio(losses, ratios)
        advance()
    if "slices" in parts:
        first, second = [*steepest, directions.draw(), directions.draw()][:2]
        along, over = _slices(losses, radius, first, second) if through is None else _through(losses, through, first)
        advance()
    return NetworkConsistency(
        settings=settings,
        radius=radius,
        losses=dict(losses.at_solution),
        gradient_norms={name: float(losses.gradient(name).double().norm()) for name in names},
        pairs=pairs,
        possible_pairs=len(names) * (len(names) - 1),
        log_ratios=ratios,
        log_ratio=ratio,
        signs=signs,
        line=along,
        plane=over,
    )


class _Directions:
    """Random directions, by a seed."""

    def __init__(self, losses: EnvironmentLosses, seed: int) -> None:
        self._like, self._generator = losses.solution, torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        return torch.randn(len(self._like), generator=self._generator).to(self._like)


def _pairs(
    losses: EnvironmentLosses, settings: Settings, radius: float, random: _Directions, advance: Callable[[], None]
) -> tuple[tuple[PairConsistency, ...], list[Tensor]]:
    """The pairs that are drawn, and the directions of their ratios of curvatures, the largest first."""
    possible = list(itertools.permutations(losses.names, 2))
    drawn = np.random.default_rng(settings.seed).permutation(len(possible))[: settings.pairs]
    pairs: list[PairConsistency] = []
    steepest: list[tuple[float, Tensor]] = []
    for own, other in (possible[index] for index in sorted(drawn.tolist())):
        ratios: list[Ratio] = []
        bounds: list[float] = []
        for epsilon in settings.epsilon:
            directions = [random.draw()]
            if "curvature" in settings.parts:
                start = ratios[-1].direction if ratios else None
                ratios.append(pair_ratio(losses, own, other, epsilon, radius, start))
                directions.insert(0, ratios[-1].direction)
                advance()
            if "bound" in settings.parts:
                found = certified_bound(losses, own, other, epsilon, radius, directions).value
                bounds.append(max([found, *bounds[-1:]]))  # a path within a smaller ε is one within this
                advance()
        if ratios:
            steepest.append((ratios[-1].value, ratios[-1].direction))
        values, converged = tuple(ratio.value for ratio in ratios), all(ratio.converged for ratio in ratios)
        pairs.append(PairConsistency(own, other, values, converged, tuple(bounds)))
    steepest.sort(key=lambda found: -found[0])
    return tuple(pairs), [direction for _, direction in steepest]


def _slices(losses: EnvironmentLosses, reach: float, first: Tensor, second: Tensor) -> tuple[Slice, Slice]:
    """Along the first direction, and over the plane of both, as far as is said on each side."""
    along = line(losses, first / first.norm(), np.linspace(-reach, reach, _LINE_POINTS))
    return along, plane(losses, first, second, np.linspace(-reach, reach, _PLANE_POINTS))


def _through(losses: EnvironmentLosses, other: Tensor, second: Tensor) -> tuple[Slice, Slice]:
    """To another solution and half as far on both sides, along the line and over the plane with a second direction."""
    distance = float(other.double().norm())
    least, most = -0.5 * distance, 1.5 * distance
    along = line(losses, other / other.norm(), np.linspace(least, most, _LINE_POINTS))
    return along, plane(losses, other, second, np.linspace(least, most, _PLANE_POINTS))
