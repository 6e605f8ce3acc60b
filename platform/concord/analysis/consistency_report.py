"""§2 of the AND-mask paper, computed anew: what is known of its figures and propositions beside what comes out."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from concord.analysis import consistency_figures as figures
from concord.analysis.consistency.loss_surfaces import (
    PATCHWORK_SOLUTION,
    SEPARATE_MINIMUM,
    SHARED_MINIMUM,
    crossed_ellipses,
    descended,
    diverging_curvatures,
    patchwork_losses,
    two_minima,
    two_minima_gradients,
)
from concord.analysis.consistency.quadratic import inconsistency_bound, quadratic_inconsistency
from concord.analysis.consistency.random_gradients import (
    decay_base,
    kept_probability,
    masked_norm_bound,
    masked_squared_norm,
    squared_norm,
)
from concord.analysis.consistency.simulations import Simulated, masked_descent, simulated_norms
from concord.analysis.consistency.spd_means import arithmetic_mean, karcher_mean
from concord.analysis.consistency.sublevel import grid_inconsistency
from concord.analysis.figures import save
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError

COMPONENTS, AGREEMENT, COUNTS = 3000, 0.8, (10, 20, 30, 40, 50, 100)
"""Of Fig. 4: n, t / d, and the numbers of environments d."""
ERRATA = {
    "proposition 3": "the printed constant 2 is too small: λ = (10, 1) has I = 10 ε, and 2 ε (det H₊ / det H_∧)² is "
    "6.05 ε. The proof gives 4, which holds for all symmetric positive definite pairs, and is tight",
    "proposition 2": "the last bound needs the factor d - t + 1: the printed d - t is 0 where all signs have to agree, "
    "t = d, and the norm is not",
    "appendix A.1": "the text's θ₂ = -50 does not fit as the caption's -45 does: A's loss is {wrong:.4f} in place of "
    "{right:.4f}",
    "Fig. 3 and 12": "5× and 25× are the determinants' ratios; areas, their square roots, are 2.35× and 5.05×",
}
"""What the paper prints that does not hold, by place."""


@dataclass(frozen=True, kw_only=True)
class ConsistencyReport:
    """The figures and propositions of §2 and appendix A of the AND-mask paper."""

    # fmt: off
    seed: int = 0
    """Seed of everything that is drawn at random."""
    draws: int = 200
    """Random gradients of each environment in Fig. 4."""
    problems: int = 20
    """Random problems on which proposition 1 is tried, and a tenth of the pairs of Hessians for proposition 3."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, figures and, without a tracking URI, for MLflow's store."""
    # fmt: on


@dataclass(frozen=True)
class Quantity:
    """A number, or several, beside what is known of it.

    Attributes:
        place: in the paper.
        name: what it is.
        source: who says what it is to be: the paper, or we, who derived it.
        relation: of what is found to what is known.
        known: its value, or its bound.
        found: what came out.
        tolerance: how far from the known value or beyond the bound it may be, absolutely.
        standard_error: of what was simulated.
    """

    place: str
    name: str
    source: Literal["paper", "derived"]
    relation: Literal["=", "≤", "≥"]
    known: ArrayLike
    found: ArrayLike
    tolerance: float
    standard_error: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether it is what it is to be."""
        off = np.asarray(self.found, dtype=np.float64) - np.asarray(self.known, dtype=np.float64)
        over = {"=": np.abs(off), "≤": off, "≥": -off}[self.relation]
        return bool((over <= self.tolerance).all())

    def as_json(self) -> dict[str, Any]:
        """A row of the report."""
        row = {
            "relation": self.relation,
            "known": np.asarray(self.known, dtype=np.float64).tolist(),
            "source": self.source,
            "found": (np.asarray(self.found, dtype=np.float64) + 0.0).tolist(),  # and no -0
            "agrees": self.agrees,
        }
        return row | ({} if self.standard_error is None else {"standard_error": self.standard_error})


def _derived(place: str, name: str, known: ArrayLike, found: ArrayLike, tolerance: float) -> Quantity:
    """A value that we derived."""
    return Quantity(place, name, "derived", "=", known, found, tolerance)


def report_consistency(options: ConsistencyReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Compute all of it, draw the figures, and keep the table as ``table.md``.

    Args:
        options: of the report.
        info: takes a line of progress.

    Raises:
        InputError: an option cannot be used.
    """
    for option, least in (("seed", 0), ("draws", 2), ("problems", 1)):
        if getattr(options, option) < least:
            raise InputError(f"--{option} {getattr(options, option)}: must be at least {least}")
    simulated = {
        count: simulated_norms(COMPONENTS, count, round(AGREEMENT * count), options.draws, options.seed)
        for count in COUNTS
    }
    info(f"random gradients: {options.draws} draws for each of {len(COUNTS)} numbers of environments")
    found = [
        *of_figures(),
        *of_descents(options.seed, options.problems),
        *of_random_gradients(simulated, options.draws),
        *of_pairs(options.seed, 10 * options.problems),
    ]
    info(f"figures and propositions: {sum(each.agrees for each in found)} of {len(found)} as known")
    folder = options.output / "reports" / "consistency"
    drawn = {name: str(save(draw, folder / f"{name}.png")) for name, draw in _figures(simulated).items()}
    (folder / "table.md").write_text(as_markdown(found), encoding="utf-8")
    table: dict[str, dict[str, Any]] = {}
    for each in found:
        table.setdefault(each.place, {})[each.name] = each.as_json()
    right, wrong = (
        patchwork_losses((PATCHWORK_SOLUTION[0], theta, *PATCHWORK_SOLUTION[2:]))[0] for theta in (-45.0, -50.0)
    )
    errata = {place: said.format(right=right, wrong=wrong) for place, said in ERRATA.items()}
    return {"table": table, "errata": errata, "figures": drawn}


def of_figures() -> Iterator[Quantity]:
    """What Fig. 1 to 3 and 10 to 12 show."""
    yield from _of_two_minima()
    yield from _of_ellipses()
    yield from _of_curvatures()
    yield from _of_patchwork()
    yield from _of_karcher_mean()


def _of_two_minima() -> Iterator[Quantity]:
    place, half = "Fig. 1, 2", figures.STARTS[0]
    gradients = np.concatenate(two_minima_gradients(half))
    yield _derived(place, "∇L of A, then B, at (½, ½)", [-1, 0, 0, -1], gradients, 1e-12)
    for name, known in {"average": SEPARATE_MINIMUM, "A": (1.0, 0.5), "B": (0.5, 1.0)}.items():
        end = descended(figures.DESCENTS[name], half)
        yield _derived(place, f"descent of {name} from (½, ½) ends at", known, end, 1e-6)
    ends = np.concatenate([descended(way, figures.STARTS[1]) for way in figures.DESCENTS.values()])
    said = "descents of average, A, B from (-1, -1.2) end at"
    yield _derived(place, said, [*SHARED_MINIMUM] * 3, ends, 1e-6)
    axis = np.linspace(-1.5, 1.5, 3001)
    grid = two_minima(*np.meshgrid(axis, axis, indexing="ij"))
    for name, at, inconsistency in (("(-½, -½)", SHARED_MINIMUM, 0.01), ("(1, 1)", SEPARATE_MINIMUM, 3.56)):
        row, column = (int(np.abs(axis - value).argmin()) for value in at)
        found = grid_inconsistency(grid, (row, column), 0.01)
        said = f"I^0.01 at {name}, on a grid of [-1.5, 1.5]²"
        yield _derived(place, said, inconsistency, found, 0.0015 * inconsistency)


def _of_ellipses() -> Iterator[Quantity]:
    for place, narrow, printed, ratio, areas, inconsistency in (
        ("Fig. 3", 0.05, 5, 5.5125, 2.3479, 20),
        ("Fig. 12", 0.01, 25, 25.5025, 5.05, 100),
    ):
        pair = crossed_ellipses(narrow)
        found = float(np.linalg.det(arithmetic_mean(pair)) / np.linalg.det(karcher_mean(pair)))
        yield Quantity(place, "det H₊ / det H_∧, as printed", "paper", "=", printed, found, 0.55)
        yield _derived(place, "det H₊ / det H_∧", ratio, found, 1e-4)
        yield _derived(place, "ratio of the ellipses' areas", areas, math.sqrt(found), 1e-4)
        yield _derived(place, "I / ε", inconsistency, quadratic_inconsistency(pair, 1.0), 1e-6)


def _of_curvatures() -> Iterator[Quantity]:
    at = np.array([0.6, 0.6])
    for spread, known in ((0.0, 1.0), (0.6, 0.8), (0.95, 0.3122)):
        pair = diverging_curvatures(spread)
        found = float(np.linalg.norm(karcher_mean(pair) @ at) / np.linalg.norm(arithmetic_mean(pair) @ at))
        yield _derived("Fig. 11", f"gradient of H_∧ over that of H₊, s = {spread:g}", known, found, 1e-4)


def _of_karcher_mean() -> Iterator[Quantity]:
    place, first, second = "A.2, Karcher mean", [[2.0, 1.0], [1.0, 2.0]], np.diag([1.0, 4.0])
    mean = karcher_mean([first, second])
    entries = [1.39317, 0.48610, 2.65609]
    yield _derived(place, "of [[2, 1], [1, 2]], diag(1, 4)", entries, mean[np.triu_indices(2)], 1e-5)
    yield _derived(place, "its determinant, √12", math.sqrt(12), float(np.linalg.det(mean)), 1e-6)
    yield _derived(place, "I / ε of the two", 2.86852, quadratic_inconsistency([first, second], 1.0), 1e-5)


def _of_patchwork() -> Iterator[Quantity]:
    place = "Fig. 10"
    a, b = patchwork_losses(PATCHWORK_SOLUTION)
    yield _derived(place, "losses of A, B at θ*", [0.003192, 0.003193], [a, b], 1e-6)
    for weight, known in ((-0.5, 1.0584), (0.0, 0.4667), (2.0, 0.4997)):
        other = patchwork_losses((*PATCHWORK_SOLUTION[:5], weight))[1]
        yield _derived(place, f"loss of B where θ₆ = {weight:g}", known, other, 1e-4)
    path = [patchwork_losses((*PATCHWORK_SOLUTION[:5], weight)) for weight in np.linspace(1, -0.5, 16)]
    change = max(abs(on_path - a) for on_path, _ in path)
    yield Quantity(place, "largest change of A's loss from θ₆ = 1 to -½", "derived", "≤", 1e-12, change, 0.0)
    yield Quantity(place, "so I^ε, for ε ≥ 1e-12", "derived", "≥", 1.055, abs(path[-1][1] - a), 0.0)


def of_random_gradients(simulated: Mapping[int, tuple[Simulated, Simulated]], draws: int) -> Iterator[Quantity]:
    """Fig. 4 and proposition 2: formulas, and the rule itself within four standard errors.

    Where few components are kept in all draws, their standard error is not known well: at least it is that of a count.
    """
    place = "Fig. 4"
    known = dict(zip(COUNTS, (99.96, 9.538, 1.1007, 0.1366, 0.0176, 8e-7), strict=True))
    for count, (plain, masked) in simulated.items():
        signs = round(AGREEMENT * count)
        exact = squared_norm(COMPONENTS, count)
        name = f"‖∇L‖², d = {count}, simulated"
        yield Quantity(place, name, "paper", "=", exact, plain.mean, 4 * plain.standard_error, plain.standard_error)
        exact = masked_squared_norm(COMPONENTS, count, signs)
        name = f"‖m ⊙ ∇L‖², d = {count}, exact"
        yield _derived(place, name, known[count], exact, 0.006 * known[count])
        name, error = f"‖m ⊙ ∇L‖², d = {count}, simulated", masked.standard_error
        if count >= 100:  # the paper's own dots end there
            yield Quantity(place, name, "paper", "=", 0, masked.mean, 0.0, error)
        else:
            kept = COMPONENTS * draws * kept_probability(count, signs)
            tolerance = 4 * max(error, exact / math.sqrt(kept))
            yield Quantity(place, name, "derived", "=", exact, masked.mean, tolerance, error)
    some = -math.expm1(COMPONENTS * math.log1p(-kept_probability(100, 80)))
    yield _derived(place, "chance that any component is kept, d = 100", 3.3e-6, some, 1e-7)
    place = "Proposition 2"
    yield _derived(place, "c, t = 0.8 d", 1.2126, decay_base(AGREEMENT), 1e-4)
    pairs = [(d, t) for d in range(1, 61) for t in range(d // 2 + 1, d + 1)]
    worst = max(masked_squared_norm(1, *pair) / masked_norm_bound(1, *pair) for pair in pairs)
    yield Quantity(place, "norm over 2 n (d - t + 1) / cᵈ, largest to d = 60", "derived", "≤", 1, worst, 1e-9)
    name, known_norm = "norm where the printed bound is 0, n = 1, t = d = 3", (1 + 4 / math.pi) / 12
    yield _derived(place, name, known_norm, masked_squared_norm(1, 3, 3), 1e-9)


def of_descents(seed: int, problems: int) -> Iterator[Quantity]:
    """Proposition 1, on random problems."""
    place = "Proposition 1"
    descents = [masked_descent(seed * problems + number) for number in range(problems)]
    said = "L(θᵢ) - η/2 ‖m ⊙ ∇L‖² - L(θᵢ₊₁)"
    yield Quantity(place, f"{said}, least", "paper", "≥", 0, min(each.surplus for each in descents), 1e-12)
    said = "least ‖m ⊙ ∇L‖² over 2 L(θ⁰) / (ηk)"
    yield Quantity(place, f"{said}, largest", "paper", "≤", 1, max(each.of_bound for each in descents), 1e-12)


def of_pairs(seed: int, pairs: int) -> Iterator[Quantity]:
    """Proposition 3, on random pairs of Hessians, and what contradicts the constant that is printed."""
    place = "Proposition 3"
    large, small = [[10.0]], [[1.0]]
    bound = inconsistency_bound(large, small, 1.0)
    yield _derived(place, "λ = (10, 1): I / ε", 10, quadratic_inconsistency([large, small], 1.0), 1e-9)
    yield Quantity(place, "its bound / ε with the printed 2", "paper", "=", 6.05, bound / 2, 1e-9)
    yield _derived(place, "its bound / ε with 4", 12.1, bound, 1e-9)
    of_bound = [_of_bound(np.random.default_rng([seed, number])) for number in range(pairs)]
    name = f"I over the bound with 4, largest of {len(of_bound)} random pairs"
    yield Quantity(place, name, "derived", "≤", 1, max(of_bound), 1e-9)
    tight = quadratic_inconsistency([[[1e8]], [[1.0]]], 1.0) / inconsistency_bound([[1e8]], [[1.0]], 1.0)
    yield _derived(place, "I over the bound with 4, λ = (1e8, 1)", 1, tight, 1e-6)


def _of_bound(draw: np.random.Generator) -> float:
    """I over its bound of two random matrices that share no axes."""
    size = int(draw.integers(1, 7))
    bases = [np.linalg.qr(draw.standard_normal((size, size)))[0] for _ in range(2)]
    first, second = ((basis * np.exp(draw.uniform(0, 7, size))) @ basis.T for basis in bases)
    return quadratic_inconsistency([first, second], 1.0) / inconsistency_bound(first, second, 1.0)


def as_markdown(quantities: Sequence[Quantity]) -> str:
    """The table of the documents."""
    lines = ["| | | known | by | found |", "|---|---|---|---|---|"]
    before = ""
    for each in quantities:
        relation = "" if each.relation == "=" else f"{each.relation} "
        error = "" if each.standard_error is None else f" ± {each.standard_error:.2g}"
        found = _shown(each.found) + error + ("" if each.agrees else ", differs")
        begun = each.place if each.place != before else ""
        lines.append(f"| {begun} | {each.name} | {relation}{_shown(each.known)} | {each.source} | {found} |")
        before = each.place
    return "\n".join(lines) + "\n"


def _shown(value: ArrayLike) -> str:
    numbers = np.atleast_1d(np.asarray(value, dtype=np.float64)).tolist()
    return ", ".join(f"{0.0 if abs(number) < 1e-13 else number:.6g}" for number in numbers)


def _figures(simulated: Mapping[int, tuple[Simulated, Simulated]]) -> dict[str, Any]:
    return {
        "fig-1": figures.landscapes_figure(),
        "fig-2": figures.directions_figure(),
        "fig-3": figures.ellipses_figure(0.05, "Fig. 3"),
        "fig-4": figures.norms_figure(simulated, COMPONENTS, AGREEMENT),
        "fig-10": figures.patchwork_figure(),
        "fig-11": figures.curvatures_figure(),
        "fig-12": figures.ellipses_figure(0.01, "Fig. 12"),
    }
