"""What each column of a table says of the target, environment by environment: the AND-mask's question, of columns.

A column has terms, as a model sees it: its numbers, the parts of a date, a level, a missing value. A term's relation is
its rank correlation with the target inside one environment. Its sign is a vote if the 95 % interval excludes 0, so tiny
environments do not vote at random. A column breaks if,
by more than chance, its relation turns round in some environment, or fades to less than half.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import kolmogi
from scipy.stats import binom, norm

from concord.analysis.columns.leaks import ordered
from concord.environments.table_encoder import TableEncoder, as_numbers, as_texts

if TYPE_CHECKING:
    from concord.environments.table_rows import Table

Numbers = NDArray[np.float64]

LEVEL = 0.05  # of an interval of 95 %
_LEAST_ROWS, _LEAST_VARIED = 10, 5  # of an environment; of its rows without the most common value
_MOST_LEVELS = 20  # of a category, the most frequent ones
_CERTAIN = 0.9999  # Fisher's transformation of 1 is infinite


@dataclass(frozen=True)
class Votes:
    """Signs that agree, among those that are more than noise.

    Attributes:
        agree: the number of the more frequent sign.
        of: the number of environments that vote.
        sign: the more frequent sign; 0 without a majority.
    """

    agree: int
    of: int
    sign: int

    @staticmethod
    def count(signs: NDArray[Any]) -> "Votes":
        """The votes among signs of environments; 0 is none."""
        positive, negative = int((signs > 0).sum()), int((signs < 0).sum())
        return Votes(max(positive, negative), positive + negative, int(np.sign(positive - negative)))

    @property
    def chance(self) -> float:
        """The probability that fair coins agree so often, as :func:`concord.aggregation.chance_of` counts it."""
        return min(1.0, 2 * float(binom.cdf(self.of - self.agree, self.of, 0.5)))  # chance_of needs PyTorch


@dataclass(frozen=True)
class Term:
    """The relation of a part of a column with the target.

    Attributes:
        column: its name.
        part: empty for numbers, else a part of a date, ``missing`` or ``= LEVEL``.
        target: the class that the sign speaks for; empty if the target has an order.
        values: rank correlations ``(environments,)``; NaN in an environment with fewer than ten rows, or where fewer
            than five rows of column or target differ from the most common value.
        rows: their numbers of rows ``(environments,)``.
        voting: the places of the environments whose votes count, those of training.
    """

    column: str
    part: str
    target: str
    values: Numbers
    rows: NDArray[np.int64]
    voting: slice

    @property
    def label(self) -> str:
        """Column and part."""
        return f"{self.column} {self.part}".rstrip()

    def interval(self, level: float = LEVEL) -> tuple[Numbers, Numbers]:
        """The ends of each correlation's interval, by Fisher's transformation (Bonett and Wright's error)."""
        values = self.values.clip(-_CERTAIN, _CERTAIN)
        half = norm.isf(level / 2) * np.sqrt((1 + values**2 / 2) / np.maximum(self.rows - 3, 1))
        return np.tanh(np.arctanh(values) - half), np.tanh(np.arctanh(values) + half)

    @cached_property
    def signs(self) -> NDArray[Any]:
        """The sign in each environment; 0 where it may be noise."""
        low, high = self.interval()
        return (low > 0).astype(np.int8) - (high < 0)

    @cached_property
    def votes(self) -> Votes:
        """The votes of the training environments."""
        return Votes.count(self.signs[self.voting])

    @cached_property
    def strength(self) -> float:
        """The root mean square of the correlations, by rows."""
        known = ~np.isnan(self.values)
        return float(np.sqrt(np.average(self.values[known] ** 2, weights=self.rows[known])))

    def breaks(self, comparisons: int) -> tuple[float, float]:
        """By how much the relation points both ways, and by how much half of its largest value exceeds its least one.

        Above 0 it does so by more than chance: the intervals hold at once for this many comparisons (Bonferroni).
        """
        low, high = self.interval(LEVEL / comparisons)
        most, least = float(np.nanmax(low)), float(np.nanmin(high))
        return min(most, -least), max(most / 2 - max(least, 0.0), -least / 2 - max(-most, 0.0))


@dataclass(frozen=True)
class Columns:
    """A table's columns by environment.

    Attributes:
        environments: the names: training, validation, test.
        purposes: of the environments.
        terms: the terms of each column with a relation in some environment.
        missing: the part of the values that are missing ``(environments,)``, by column.
        drift: the largest distance between the distribution of an environment and that of all rows (Kolmogorov and
            Smirnov's; categories are in the order of their frequencies) ``(environments,)``, by column; 0 where it
            may be noise.
    """

    environments: tuple[str, ...]
    purposes: tuple[str, ...]
    terms: dict[str, list[Term]]
    missing: dict[str, Numbers]
    drift: dict[str, Numbers]

    @cached_property
    def shown(self) -> dict[str, Term]:
        """One term of each column: that which breaks most, or the strongest."""
        return {name: max(terms, key=self._order) for name, terms in self.terms.items() if terms}

    @cached_property
    def broken(self) -> list[Term]:
        """The shown terms that break, the worst first: those that turn round before those that fade."""
        found = sorted(self.shown.values(), key=self._order, reverse=True)
        return [term for term in found if max(self.breaks(term)) > 0]

    def breaks(self, term: Term) -> tuple[float, float]:
        """See :meth:`Term.breaks`: by more than chance among all correlations of the term's column."""
        return term.breaks(sum(int((~np.isnan(each.values)).sum()) for each in self.terms[term.column]))

    def _order(self, term: Term) -> tuple[float, float, float]:
        reversal, fading = self.breaks(term)
        return max(reversal, 0.0), max(fading, 0.0), term.strength


def relations(table: "Table") -> Columns:
    """The relations of a table's columns with its target, what is missing of them, and how they drift."""
    environments = tuple(name for names in table.by_purpose.values() for name in names)
    purposes = tuple(purpose for purpose, names in table.by_purpose.items() for _ in names)
    frame, count = table.frame, len(environments)
    places = pd.Categorical(table.environment, categories=list(environments)).codes.astype(np.int64)
    every, voting = np.bincount(places, minlength=count), slice(0, len(table.by_purpose["train"]))
    targets = {name: _ranked(values, places) for name, values in _targets(table).items()}
    terms: dict[str, list[Term]] = {name: [] for name in table.kinds}
    missing, drift = {}, {}
    for column, kind in table.kinds.items():
        values = ordered(frame[column], kind)
        gaps = np.isnan(values)
        missing[column] = np.bincount(places, gaps, count) / every
        drift[column] = _drift(values[~gaps], places[~gaps], count)
        for part, found in _parts(frame[column], kind, gaps, table.widest):
            there = ~np.isnan(found)
            own = places[there]
            ranks, rows = _ranked(found[there], own), np.bincount(own, minlength=count)
            by_target = {
                name: _correlations(ranks, target if there.all() else _ranked(target[there], own), own, rows)
                for name, target in targets.items()
            }
            strengths = {name: float(np.nansum(each**2 * rows)) for name, each in by_target.items()}
            target = max(strengths, key=strengths.__getitem__)
            if not np.isnan(by_target[target]).all():
                terms[column].append(Term(column, part, target, by_target[target], rows, voting))
    return Columns(environments, purposes, terms, missing, drift)


def _targets(table: "Table") -> dict[str, Numbers]:
    """The target as one number, or for each of several classes without an order whether a row is of it."""
    values, classes = table.frame[table.target], table.classes
    if classes is not None and table.task == "ordinal":
        return {"": pd.Categorical(values, categories=list(classes)).codes.astype(np.float64)}
    if classes is None or (len(classes) > 2 and all(isinstance(each, int | float) for each in classes)):
        return {"": values.to_numpy(dtype=np.float64)}
    spoken_for = classes[1:] if len(classes) == 2 else classes
    return {str(each): (values == each).to_numpy(dtype=np.float64) for each in spoken_for}


def _parts(column: pd.Series, kind: str, gaps: NDArray[Any], encoder: TableEncoder) -> Iterator[tuple[str, Numbers]]:
    """The terms of a column, as numbers of its rows."""
    if kind == "category":
        levels = next(each.levels for each in encoder.categories if each.name == column.name)
        found = as_texts(column)
        counts = found[found.isin(levels)].value_counts()
        for level in sorted(counts.index[:_MOST_LEVELS])[len(levels) == 2 :]:
            yield f"= {level}", (found == level).fillna(False).to_numpy(dtype=np.float64)
    else:
        for each in encoder.numeric:
            if each.name == column.name:
                yield each.part, as_numbers(column, kind, each.part)
    if gaps.any():
        yield "missing", gaps.astype(np.float64)


def _ranked(values: Numbers, places: NDArray[np.int64]) -> Numbers:
    """The mean ranks of values inside their environments, up to 2: 0 and 1, which are left, differ as much."""
    if np.isin(values, (0.0, 1.0)).all():
        return values
    grouped = pd.Series(values).groupby(places)
    return np.asarray(2 * grouped.rank() / grouped.transform("size"), dtype=np.float64)


def _correlations(x: Numbers, y: Numbers, places: NDArray[np.int64], rows: NDArray[np.int64]) -> Numbers:
    """Pearson's correlation in each environment; NaN where rows or variation are too few for an interval."""
    count, known = len(rows), np.maximum(rows, 1)

    def mean(values: Numbers) -> Numbers:
        return np.asarray(np.bincount(places, values, count) / known)

    x, y = x - mean(x)[places], y - mean(y)[places]
    varied = _LEAST_VARIED / np.maximum(rows, _LEAST_ROWS)
    least = varied * (1 - varied) - 1e-9  # the variance of 0 and 1 where this part of them is 1
    x_spread, y_spread = mean(x * x), mean(y * y)
    enough = (rows >= _LEAST_ROWS) & (np.minimum(x_spread, y_spread) >= least)
    found: Numbers = np.full(count, np.nan)
    found[enough] = mean(x * y)[enough] / np.sqrt(x_spread * y_spread)[enough]
    return found


def _drift(values: Numbers, places: NDArray[np.int64], count: int) -> Numbers:
    """Each environment's distance from all rows: the largest difference of the cumulated distributions."""
    found = np.zeros(count)
    ranks = pd.Series(values).rank
    up_to, below = ranks(method="max").to_numpy(), ranks(method="min").to_numpy() - 1
    order, ends = np.argsort(places, kind="stable"), np.bincount(places, minlength=count).cumsum()
    noise = kolmogi(LEVEL / count)
    for place, own in enumerate(np.split(order, ends[:-1])):
        if len(own):
            levels, counts = np.unique(up_to[own], return_counts=True)
            cumulated = counts.cumsum() / len(own)
            above = np.abs(cumulated - levels / len(values))
            before = np.abs(np.append(0, cumulated[:-1]) - np.unique(below[own]) / len(values))
            distance = float(max(above.max(), before.max()))
            found[place] = distance if distance > noise / np.sqrt(len(own)) else 0.0
    return found
