"""Measures the consistency of a trained network, and the same numbers by chance alone.

The paper never computes I^ε of a network, and an exact computation is impossible: in directions in which one
environment's loss is flat, N_e is unbounded. So every number is restricted to a ball of radius ρ around θ*. The numbers
are the two bounds of a quadratic (:mod:`~concord.analysis.consistency.curvature`) and a lower bound on the true losses
(:mod:`~concord.analysis.consistency.certified`). Everything is also measured on pseudo-environments, random groups of
the same examples, which differ only by sampling.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from concord.aggregation import default_threshold
from concord.analysis.consistency.certified import certified_bound
from concord.analysis.consistency.curvature import diagonals, log_ratios, pair_ratio
from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.analysis.consistency.measurement import Consistency, Measurement, with_null
from concord.analysis.consistency.signs import sign_agreement
from concord.analysis.consistency.slices import slice_along
from concord.errors import ArgumentError
from concord.options import OptionGroup

Part = Literal["auto", "signs", "curvature", "bound", "slices", "columns"]
PARTS: tuple[Part, ...] = ("signs", "curvature", "bound", "slices")
"""The parts of consistency; ``columns`` is a table's (:mod:`concord.analysis.columns`)."""

_BATCHES, _PROBES = 4, 8  # of each environment for the signs; of the diagonal curvatures
_LINE_POINTS, _PLANE_POINTS = 41, 15


@dataclass(frozen=True, kw_only=True)
class Settings(OptionGroup):
    """The parts to measure, their precision, and the examples."""

    # fmt: off
    epsilon: tuple[float, ...] = (0.01, 0.1)
    """ε: largest change of the first environment's loss in a pair."""
    radius: float = 0.1
    """ρ: largest distance from the solution, as a fraction of the norm of all parameters."""
    parts: tuple[Part, ...] = ("auto",)
    """Parts to measure: agreement of signs; curvature, to second order; a bound on the true losses; slices; which
    columns of a table hold. auto is the columns of a table, else all others."""
    pairs: int = 16
    """Number of ordered pairs of environments, drawn by the seed if there are more."""
    examples: int = 256
    """Number of examples of each environment, drawn by the seed if there are more."""
    split: Literal["train", "held-out"] = "train"
    """Examples of the training environments: those that trained, or those held out."""
    environments: int = 0
    """Number of random groups of the pooled examples, for jobs without environments; 0 takes the job's environments."""
    seed: int = 0
    """Seed of examples, pairs, directions and pseudo-environments."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        positive = all(0 < each < math.inf for each in self.epsilon)
        self.require("epsilon", positive and len(self.epsilon) > 0, "give one number above 0, or several")
        self.require("radius", 0 < self.radius < math.inf, "must be a number above 0")
        self.require("parts", len(self.parts) > 0, f"give some of {', '.join(PARTS)}")
        self.require_at_least(1, "pairs", "examples")
        right = self.environments == 0 or self.environments >= 2
        self.require("environments", right, "must be at least 2, or 0 for the job's environments")


def measure(
    losses: EnvironmentLosses,
    settings: Settings,
    advance: Callable[[int, int], None] = lambda *_: None,
    through: Tensor | None = None,
) -> Consistency:
    """Measure a network's consistency, and beside each number the same on pseudo-environments.

    Args:
        losses: the network's losses.
        settings: the parts to measure, and their precision.
        advance: called after each piece of work with the number of finished pieces and of all.
        through: the offset of another solution, ``(n,)``, through which the slices pass.
    """
    d = len(losses.names)
    if "auto" in settings.parts:
        settings = replace(settings, parts=PARTS)
    if d < 2:
        raise ArgumentError("environments", d, "consistency compares two environments at least")
    if "curvature" in settings.parts:
        losses.loss_of_outputs()  # which refuses a risk
    parts = tuple(part for part in settings.parts if part not in ("slices", "columns"))
    null_settings = replace(settings, parts=parts)
    pieces = sum(_pieces(each, d) for each in (settings, null_settings))
    done = itertools.count(1)

    def one_done() -> None:
        advance(next(done), pieces)

    found = _measure(losses, settings, one_done, through)
    if not null_settings.parts:
        return found
    null = _measure(losses.pseudo_environments(settings.seed), null_settings, one_done)
    return replace(found, measurements=with_null(found.measurements, null.measurements))


def _pieces(settings: Settings, environments: int) -> int:
    """The number of pieces of work."""
    pairs = min(settings.pairs, environments * (environments - 1))
    each = len(settings.epsilon) * (("curvature" in settings.parts) + ("bound" in settings.parts))
    return pairs * each + len({"signs", "curvature", "slices"}.intersection(settings.parts))


def _measure(
    losses: EnvironmentLosses, settings: Settings, one_done: Callable[[], None], through: Tensor | None = None
) -> Consistency:
    names, parts, generator = losses.names, settings.parts, torch.Generator().manual_seed(settings.seed)

    def draw() -> Tensor:
        return torch.randn(losses.size, generator=generator).to(losses.solution)

    radius = settings.radius * float(losses.solution.double().norm())
    threshold = default_threshold("and-mask", len(names))
    batches = min(_BATCHES, *(losses.examples(name) for name in names))
    pairs, steepest = _pairs(losses, settings, radius, draw, one_done)
    found, line, plane = [*_largest(pairs, sorted(settings.epsilon))], None, None
    if "curvature" in parts:
        found += log_ratios(losses, diagonals(losses, _PROBES, settings.seed))
        one_done()
    if "signs" in parts:
        found += sign_agreement(losses, threshold, batches)
        one_done()
    if "slices" in parts:
        directions, least, most = [*steepest, draw(), draw()], -radius, radius
        if through is not None:  # as far again on both sides of the two solutions' distance, by half
            distance = float(through.double().norm())
            directions, least, most = [through, *directions], -0.5 * distance, 1.5 * distance
        line = slice_along(losses, directions[:1], np.linspace(least, most, _LINE_POINTS))
        plane = slice_along(losses, directions[:2], np.linspace(least, most, _PLANE_POINTS))
        one_done()
    for name in names:
        norm = float(losses.gradient(name).double().norm())
        found.append(Measurement("loss", losses.at_solution[name], environments=(name,)))
        found.append(Measurement("gradient_norm", norm, environments=(name,)))
    return Consistency(found + pairs, radius, len(names) * (len(names) - 1), threshold, batches, line, plane)


def _pairs(
    losses: EnvironmentLosses,
    settings: Settings,
    radius: float,
    draw: Callable[[], Tensor],
    one_done: Callable[[], None],
) -> tuple[list[Measurement], list[Tensor]]:
    """Measurements of the drawn pairs, and the directions of their ratios, the largest ratio first.

    ``ratio`` is μ of :func:`pair_ratio`; ``converged`` is 1 if μ converged for every ε, and 0 if it may be larger;
    ``bound`` is the largest change of L_e' found.
    """
    possible = list(itertools.permutations(losses.names, 2))
    drawn = np.random.default_rng(settings.seed).permutation(len(possible))[: settings.pairs]
    found: list[Measurement] = []
    steepest: list[tuple[float, Tensor]] = []
    for own, other in (possible[index] for index in sorted(drawn.tolist())):
        pair = own, other
        ratio, converged, bound = None, True, 0.0
        for epsilon in sorted(settings.epsilon):
            directions = [draw()]
            if "curvature" in settings.parts:
                ratio = pair_ratio(losses, own, other, epsilon, radius, None if ratio is None else ratio.direction)
                converged &= ratio.converged
                directions.insert(0, ratio.direction)
                found.append(Measurement("ratio", ratio.value, epsilon, environments=pair))
                one_done()
            if "bound" in settings.parts:
                # A path within a smaller ε is one within this.
                bound = max(bound, certified_bound(losses, own, other, epsilon, radius, directions).value)
                found.append(Measurement("bound", bound, epsilon, environments=pair))
                one_done()
        if ratio is not None:
            found.append(Measurement("converged", float(converged), environments=pair))
            steepest.append((ratio.value, ratio.direction))
    steepest.sort(key=lambda each: -each[0])
    return found, [direction for _, direction in steepest]


def _largest(pairs: Sequence[Measurement], epsilons: Sequence[float]) -> Iterator[Measurement]:
    """For each ε a lower bound of I^ε, and both bounds of the quadratic's: ε μ, and 2 ε μ or the ε of e = e'."""
    for epsilon in epsilons:
        at = [each for each in pairs if each.epsilon == epsilon]
        bounds, ratios = ([each.value for each in at if each.name == name] for name in ("bound", "ratio"))
        if bounds:
            yield Measurement("bound", max(bounds), epsilon)
        if ratios:
            yield Measurement("quadratic_low", epsilon * max(ratios), epsilon)
            yield Measurement("quadratic_high", max(2 * epsilon * max(ratios), epsilon), epsilon)
