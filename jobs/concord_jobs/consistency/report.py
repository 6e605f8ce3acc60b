"""§2 of the AND-mask paper, recomputed: known values of its figures and propositions beside the computed ones."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from concord.analysis.figures import save
from concord.defaults import DEFAULT_OUTPUT
from concord.options import OptionGroup
from concord_jobs.consistency import figures, surfaces
from concord_jobs.consistency import random_gradients as random
from concord_jobs.consistency.hessians import arithmetic_mean, geometric_mean, inconsistency, inconsistency_bound
from concord_jobs.consistency.random_gradients import kept_probability, masked_squared_norm

# Fig. 4: n, t / d, and the exact masked norm by the number of environments d.
COMPONENTS, AGREEMENT = 3000, 0.8
MASKED_NORMS = {10: 99.96, 20: 9.538, 30: 1.1007, 40: 0.1366, 50: 0.0176, 100: 8e-7}
ERRATA = {
    "proposition 3": "the printed constant 2 is too small: λ = (10, 1) has I = 10 ε, and 2 ε (det H₊ / det H_∧)² is "
    "6.05 ε. The proof gives 4, which holds for all symmetric positive definite pairs, and is tight",
    "proposition 2": "the last bound needs the factor d - t + 1: the printed d - t is 0 where all signs have to agree, "
    "t = d, and the norm is not",
    "appendix A.1": "the text's θ₂ = -50 does not fit as the caption's -45 does: A's loss is {wrong:.4f} in place of "
    "{right:.4f}",
    "Fig. 3 and 12": "5× and 25× are the determinants' ratios; areas, their square roots, are 2.35× and 5.05×",
}
"""Errors of the paper, by place."""


@dataclass(frozen=True, kw_only=True)
class ConsistencyReport(OptionGroup):
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
    """A number, or several, beside its known value or bound.

    ``place`` is in the paper. The tolerance is absolute. ``source`` is the origin of the known value: the paper, or our
    derivation.
    """

    place: str
    name: str
    known: ArrayLike
    found: ArrayLike
    tolerance: float
    relation: Literal["=", "≤", "≥"] = "="
    source: Literal["paper", "derived"] = "derived"
    standard_error: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether the found value is the known one, or within the bound."""
        off = np.asarray(self.found, dtype=np.float64) - np.asarray(self.known, dtype=np.float64)
        over = {"=": np.abs(off), "≤": off, "≥": -off}[self.relation]
        return bool((over <= self.tolerance).all())

    def as_json(self) -> dict[str, Any]:
        """A row of the report."""
        row = {
            "relation": self.relation,
            "known": np.asarray(self.known, dtype=np.float64).tolist(),
            "source": self.source,
            "found": (np.asarray(self.found, dtype=np.float64) + 0.0).tolist(),  # avoids -0
            "agrees": self.agrees,
        }
        return row | ({} if self.standard_error is None else {"standard_error": self.standard_error})


def report_consistency(options: ConsistencyReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Compute the report, draw its figures, and keep the table as ``table.md``."""
    for option, least in (("seed", 0), ("draws", 2), ("problems", 1)):
        options.require(option, getattr(options, option) >= least, f"must be at least {least}")
    simulated = {
        count: random.simulated_norms(COMPONENTS, count, round(AGREEMENT * count), options.draws, options.seed)
        for count in MASKED_NORMS
    }
    info(f"random gradients: {options.draws} draws for each of {len(simulated)} numbers of environments")
    found = [
        *_two_minima(),
        *_hessians(),
        *_patchwork(),
        *_karcher_mean(),
        *_descents(options.seed, options.problems),
        *_random_gradients(simulated, options.draws),
        *_pairs(options.seed, 10 * options.problems),
    ]
    info(f"figures and propositions: {sum(each.agrees for each in found)} of {len(found)} as known")
    drawn = {
        "fig-1": figures.landscapes_figure(),
        "fig-2": figures.directions_figure(),
        "fig-3": figures.ellipses_figure(0.05, "Fig. 3"),
        "fig-4": figures.norms_figure(simulated, COMPONENTS, AGREEMENT),
        "fig-10": figures.patchwork_figure(),
        "fig-11": figures.curvatures_figure(),
        "fig-12": figures.ellipses_figure(0.01, "Fig. 12"),
    }
    folder = options.output / "reports" / "consistency"
    paths = {name: str(save(figure, folder / f"{name}.png")) for name, figure in drawn.items()}
    (folder / "table.md").write_text(as_markdown(found), encoding="utf-8")
    table: dict[str, dict[str, Any]] = {}
    for each in found:
        table.setdefault(each.place, {})[each.name] = each.as_json()
    right, wrong = (_patchwork_with(1, theta)[0] for theta in (-45.0, -50.0))
    errata = {place: text.format(right=right, wrong=wrong) for place, text in ERRATA.items()}
    return {"table": table, "errata": errata, "figures": paths}


def as_markdown(quantities: Sequence[Quantity]) -> str:
    """The table of the documents."""
    lines = ["| | | known | by | found |", "|---|---|---|---|---|"]
    before = ""
    for each in quantities:
        relation = "" if each.relation == "=" else f"{each.relation} "
        error = "" if each.standard_error is None else f" ± {each.standard_error:.2g}"
        found = _shown(each.found) + error + ("" if each.agrees else ", differs")
        place = each.place if each.place != before else ""
        lines.append(f"| {place} | {each.name} | {relation}{_shown(each.known)} | {each.source} | {found} |")
        before = each.place
    return "\n".join(lines) + "\n"


def _shown(value: ArrayLike) -> str:
    numbers = np.atleast_1d(np.asarray(value, dtype=np.float64)).tolist()
    return ", ".join(f"{0.0 if abs(number) < 1e-13 else number:.6g}" for number in numbers)


def _two_minima() -> Iterator[Quantity]:
    place, (half, corner) = "Fig. 1, 2", figures.STARTS
    gradients = np.concatenate(surfaces.two_minima_gradients(half))
    yield Quantity(place, "∇L of A, then B, at (½, ½)", [-1, 0, 0, -1], gradients, 1e-12)
    shared, separate = surfaces.SHARED_MINIMUM, surfaces.SEPARATE_MINIMUM
    for name, known in {"average": separate, "A": (1.0, 0.5), "B": (0.5, 1.0)}.items():
        end = surfaces.descent_path(name, half)[-1]
        yield Quantity(place, f"descent of {name} from (½, ½) ends at", known, end, 1e-6)
    ends = np.concatenate([surfaces.descent_path(name, corner)[-1] for name in surfaces.DESCENTS])
    yield Quantity(place, "descents of average, A, B from (-1, -1.2) end at", [*shared] * 3, ends, 1e-6)
    axis = np.linspace(-1.5, 1.5, 3001)
    grid = surfaces.two_minima(*np.meshgrid(axis, axis, indexing="ij"))
    for at, minimum, largest in (("(-½, -½)", shared, 0.01), ("(1, 1)", separate, 3.56)):
        row, column = (int(np.abs(axis - value).argmin()) for value in minimum)
        found = surfaces.grid_inconsistency(grid, (row, column), 0.01)
        yield Quantity(place, f"I^0.01 at {at}, on a grid of [-1.5, 1.5]²", largest, found, 0.0015 * largest)


def _hessians() -> Iterator[Quantity]:
    for place, narrow, printed, ratio, areas, times in (
        ("Fig. 3", 0.05, 5, 5.5125, 2.3479, 20),
        ("Fig. 12", 0.01, 25, 25.5025, 5.05, 100),
    ):
        pair = surfaces.crossed_ellipses(narrow)
        found = float(np.linalg.det(arithmetic_mean(pair)) / np.linalg.det(geometric_mean(pair)))
        yield Quantity(place, "det H₊ / det H_∧, as printed", printed, found, 0.55, source="paper")
        yield Quantity(place, "det H₊ / det H_∧", ratio, found, 1e-4)
        yield Quantity(place, "ratio of the ellipses' areas", areas, math.sqrt(found), 1e-4)
        yield Quantity(place, "I / ε", times, inconsistency(pair), 1e-6)
    at = np.array([0.6, 0.6])
    for spread, known in ((0.0, 1.0), (0.6, 0.8), (0.95, 0.3122)):
        pair = surfaces.diverging_curvatures(spread)
        found = float(np.linalg.norm(geometric_mean(pair) @ at) / np.linalg.norm(arithmetic_mean(pair) @ at))
        yield Quantity("Fig. 11", f"gradient of H_∧ over that of H₊, s = {spread:g}", known, found, 1e-4)


def _patchwork_with(place: int, value: float) -> tuple[float, float]:
    """The losses of A and B at the solution of Fig. 10 with another value of one parameter."""
    solution = surfaces.PATCHWORK_SOLUTION
    return surfaces.patchwork_losses((*solution[:place], value, *solution[place + 1 :]))


def _patchwork() -> Iterator[Quantity]:
    place = "Fig. 10"
    a, b = surfaces.patchwork_losses(surfaces.PATCHWORK_SOLUTION)
    yield Quantity(place, "losses of A, B at θ*", [0.003192, 0.003193], [a, b], 1e-6)
    for weight, known in ((-0.5, 1.0584), (0.0, 0.4667), (2.0, 0.4997)):
        yield Quantity(place, f"loss of B where θ₆ = {weight:g}", known, _patchwork_with(5, weight)[1], 1e-4)
    path = [_patchwork_with(5, weight) for weight in np.linspace(1, -0.5, 16)]
    change = max(abs(on_path - a) for on_path, _ in path)
    yield Quantity(place, "largest change of A's loss from θ₆ = 1 to -½", 1e-12, change, 0.0, "≤")
    yield Quantity(place, "so I^ε, for ε ≥ 1e-12", 1.055, abs(path[-1][1] - a), 0.0, "≥")


def _karcher_mean() -> Iterator[Quantity]:
    place, pair = "A.2, Karcher mean", ([[2.0, 1.0], [1.0, 2.0]], np.diag([1.0, 4.0]))
    mean = geometric_mean(pair)
    entries = [1.39317, 0.48610, 2.65609]
    yield Quantity(place, "of [[2, 1], [1, 2]], diag(1, 4)", entries, mean[np.triu_indices(2)], 1e-5)
    yield Quantity(place, "its determinant, √12", math.sqrt(12), float(np.linalg.det(mean)), 1e-6)
    yield Quantity(place, "I / ε of the two", 2.86852, inconsistency(pair), 1e-5)


def _descents(seed: int, problems: int) -> Iterator[Quantity]:
    """Proposition 1, on random problems."""
    tried = [random.masked_descent(seed * problems + number) for number in range(problems)]
    surplus, of_bound = zip(*tried, strict=True)
    name = "L(θᵢ) - η/2 ‖m ⊙ ∇L‖² - L(θᵢ₊₁), least"
    yield Quantity("Proposition 1", name, 0, min(surplus), 1e-12, "≥", "paper")
    name = "least ‖m ⊙ ∇L‖² over 2 L(θ⁰) / (ηk), largest"
    yield Quantity("Proposition 1", name, 1, max(of_bound), 1e-12, "≤", "paper")


def _random_gradients(simulated: Mapping[int, Sequence[random.Simulated]], draws: int) -> Iterator[Quantity]:
    """Fig. 4 and proposition 2: formulas, and the rule itself within four standard errors.

    If few components are kept in all draws, their standard error is uncertain: it is at least that of a count.
    """
    place = "Fig. 4"
    for count, (plain, masked) in simulated.items():
        signs, error = round(AGREEMENT * count), plain.standard_error
        name = f"‖∇L‖², d = {count}, simulated"
        yield Quantity(place, name, COMPONENTS / count, plain.mean, 4 * error, "=", "paper", error)
        known, exact = MASKED_NORMS[count], masked_squared_norm(COMPONENTS, count, signs)
        yield Quantity(place, f"‖m ⊙ ∇L‖², d = {count}, exact", known, exact, 0.006 * known)
        name, error = f"‖m ⊙ ∇L‖², d = {count}, simulated", masked.standard_error
        if count >= 100:  # the paper's own dots end there
            yield Quantity(place, name, 0, masked.mean, 0.0, "=", "paper", error)
        else:
            kept = COMPONENTS * draws * kept_probability(count, signs)
            tolerance = 4 * max(error, exact / math.sqrt(kept))
            yield Quantity(place, name, exact, masked.mean, tolerance, standard_error=error)
    some = -math.expm1(COMPONENTS * math.log1p(-kept_probability(100, 80)))
    yield Quantity(place, "chance that any component is kept, d = 100", 3.3e-6, some, 1e-7)
    place = "Proposition 2"
    yield Quantity(place, "c, t = 0.8 d", 1.2126, random.decay_base(AGREEMENT), 1e-4)
    pairs = [(d, t) for d in range(1, 61) for t in range(d // 2 + 1, d + 1)]
    worst = max(masked_squared_norm(1, *pair) / random.masked_norm_bound(1, *pair) for pair in pairs)
    yield Quantity(place, "norm over 2 n (d - t + 1) / cᵈ, largest to d = 60", 1, worst, 1e-9, "≤")
    name, known = "norm where the printed bound is 0, n = 1, t = d = 3", (1 + 4 / math.pi) / 12
    yield Quantity(place, name, known, masked_squared_norm(1, 3, 3), 1e-9)


def _pairs(seed: int, pairs: int) -> Iterator[Quantity]:
    """Proposition 3, on random pairs of Hessians, and the counterexample to the printed constant."""
    place, pair = "Proposition 3", ([[10.0]], [[1.0]])
    bound = inconsistency_bound(pair)
    yield Quantity(place, "λ = (10, 1): I / ε", 10, inconsistency(pair), 1e-9)
    yield Quantity(place, "its bound / ε with the printed 2", 6.05, bound / 2, 1e-9, source="paper")
    yield Quantity(place, "its bound / ε with 4", 12.1, bound, 1e-9)
    drawn = (_random_pair(np.random.default_rng([seed, number])) for number in range(pairs))
    worst = max(inconsistency(each) / inconsistency_bound(each) for each in drawn)
    yield Quantity(place, f"I over the bound with 4, largest of {pairs} random pairs", 1, worst, 1e-9, "≤")
    tight = [[1e8]], [[1.0]]
    name = "I over the bound with 4, λ = (1e8, 1)"
    yield Quantity(place, name, 1, inconsistency(tight) / inconsistency_bound(tight), 1e-6)


def _random_pair(draw: np.random.Generator) -> list[ArrayLike]:
    """Two random matrices that share no axes."""
    size = int(draw.integers(1, 7))
    bases = [np.linalg.qr(draw.standard_normal((size, size)))[0] for _ in range(2)]
    return [(basis * np.exp(draw.uniform(0, 7, size))) @ basis.T for basis in bases]
