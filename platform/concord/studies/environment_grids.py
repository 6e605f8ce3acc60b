"""The tables of environments that were left out in turn, for a page: environments × methods."""

import statistics
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from concord.analysis.intervals import Estimate, Scale, scale_of
from concord.analysis.method_names import method_name
from concord.analysis.uncertainty import Verdict
from concord.studies.leave_one_out import (
    BEST,
    CHOSEN,
    CONSTANT,
    MAJORITY,
    ORACLE,
    ROWS,
    constants_of,
    known_of_environments,
)
from concord.studies.page import Cell, Folded, Grid, Mark, Part, cells_of
from concord.table import Column, Row, Table
from concord.training.comparison import Folds
from concord.training.row_estimates import row_estimates

if TYPE_CHECKING:
    import pandas  # takes a third of a second

# Measures in the words of somebody who does not train models.
_MEANINGS = {
    "accuracy": "the share of rows that are predicted right",
    "auc": "the probability that a row of a class ranks above one of the others",
    "average_precision": "the mean precision over all cutoffs",
    "brier": "the mean squared error of the probability",
    "calibration_error": "the distance of probabilities from the shares that come true",
    "f1": "the mean of precision and recall",
    "mae": "the mean absolute error",
    "mse": "the mean squared error",
    "r2": "the part of the variance that is predicted",
    "recall": "the share of a class that is found",
    "specificity": "the share of the others that is left alone",
}


class EnvironmentGrids:
    """A table of environments left out in turn: environments × methods, beside what is known of each environment.

    With a verdict the recommended method's 95 % intervals stand beside its values.
    """

    def __init__(self, table: Table, methods: Collection[str], folds: Folds, verdict: Verdict | None) -> None:
        self.table, self.folds, self.means = table, folds, _means(table)
        self.methods = [row for row in table.rows if row.name in methods]
        self.known = known_of_environments(table.runs)
        self.constants = constants_of(self.known, folds.measure)
        kinds = [kind.strip(" ()") for kind in (ROWS, MAJORITY, CONSTANT)]
        self.about = [kind for kind in kinds if any(kind in each for each in self.known.values())]
        self.shown = [*self.methods, *(row for row in table.rows if row.name == CHOSEN)]
        self.own = [column for column in table.columns if column.heading in folds.environments]
        over = [column for column in table.columns if column not in self.own]
        self.over = [column for column in over if not column.heading.endswith(ORACLE)]
        self.recommended = "" if verdict is None else verdict.recommended
        self.intervals: dict[tuple[str, str], str] = {}  # by method and heading
        if verdict is not None:
            means = [(each.method, f"mean {folds.measure}", each.interval) for each in verdict.methods]
            own = [(each.method, each.environment, each.interval) for each in verdict.environments]
            for method, heading, interval in [*means, *own]:
                if interval is not None:
                    self.intervals[method, heading] = f"{interval.low:.3f} to {interval.high:.3f}"

    def parts(self) -> tuple[list[Part], list[Part]]:
        """Each environment in a row, of many those that stand out; and what is folded."""
        seeds = max(len(row.runs) for row in self.shown)
        means = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
        better = "larger" if self.folds.mode == "max" else "smaller"
        meaning = f", {_MEANINGS[self.folds.measure]}" if self.folds.measure in _MEANINGS else ""
        caption = f"{self.folds.measure}{meaning}; {better} is better; {means}; bold: the best method."
        header = ["environment", *self.about, *(row.label for row in self.shown)]
        if self.intervals:
            header.append(f"{method_name(self.recommended)}, 95 % interval")
        rows = [self._line(column) for column in self.own]
        if any(cell.mark == "below" for row in rows for cell in row):
            caption += " ▼: worse than a constant, which needs no model."
        footer = [self._line(column) for column in self.over]
        every = Grid(caption, header, rows, footer)
        folded = [*self._every_interval(), *self._in_hindsight()]
        if not any(column.aside for column in self.own):
            return [every], folded
        far = [row for row, column in zip(rows, self.own, strict=True) if not column.aside]
        caption = f"Of {len(rows)} environments those that stand out, and all together. {caption}"
        return [Grid(caption, header, far, footer)], [Folded(f"All {len(rows)} environments", [every]), *folded]

    def _mark(self, row: Row, column: Column) -> Mark:
        """Whether a value is worse than a constant, or the best of the methods."""
        sign, constant = 1 if self.folds.mode == "max" else -1, self.constants.get(column.heading)
        value = self.means[row.name].get(column.heading)
        if value is None:
            return ""
        if constant is not None and sign * value < sign * constant:
            return "below"
        values = [self.means[each.name].get(column.heading) for each in self.methods]
        known = [sign * each for each in values if each is not None]
        return "best" if len(known) == len(values) and sign * value >= max(known) else ""

    def _line(self, column: Column) -> list[Cell]:
        known = self.known.get(column.heading, {})
        about = [_known(kind, known[kind]) if kind in known else "" for kind in self.about]
        line = cells_of([column.title, *about])
        for row in self.shown:
            line.append(Cell(column.text(self._numbers(row, column), len(row.runs)), self._mark(row, column)))
        if self.intervals:
            line.append(Cell(self.intervals.get((self.recommended, column.heading), "")))
        return line

    def _numbers(self, row: Row, column: Column) -> Any:
        return row.cells[self.table.columns.index(column)]

    def _every_interval(self) -> list[Part]:
        """The intervals of all methods."""
        rows = [
            cells_of([column.title, *(self.intervals.get((row.name, column.heading), "–") for row in self.methods)])
            for column in [*self.own, *self.over]
            if any((row.name, column.heading) in self.intervals for row in self.methods)
        ]
        caption = "95 % intervals: in an environment over its rows or clusters, of the mean over the environments."
        grid = Grid(caption, ["environment", *(row.label for row in self.methods)], rows)
        return [Folded("Intervals of all methods", [grid])] if rows else []

    def _in_hindsight(self) -> list[Part]:
        """The mean and the worst as each environment itself would have chosen (oracle)."""
        rows, lines = [*self.methods, *(row for row in self.table.rows if row.name == BEST)], []
        for column in self.table.columns:
            if column.heading.endswith(ORACLE) and column not in self.own:
                plain = next(each for each in self.table.columns if each.heading == column.heading.removesuffix(ORACLE))
                cells = [self._numbers(row, plain if row.name == BEST else column) for row in rows]
                texts = [column.text(cell, len(row.runs)) for row, cell in zip(rows, cells, strict=True)]
                lines.append(cells_of([plain.title, *texts]))
        caption = (
            "Not a result: evaluation and method as the environment left out would have chosen them itself. The "
            "distance to the table above is the price of not knowing it."
        )
        grids = [Grid(caption, ["", *(row.label for row in rows)], lines)] if lines else []
        if others := [row for row in self.table.rows if row not in rows and row.name != CHOSEN]:
            lines = [
                cells_of([column.title, *(column.text(self._numbers(row, column)) for row in others)])
                for column in self.own
                if any(self._numbers(row, column) for row in others)
            ]
            caption = "Not a result either: what the environment's own rows give, the most that could be had there."
            grids.append(Grid(caption, ["environment", *(row.label for row in others)], lines))
        return [Folded("In hindsight (oracle)", grids)] if grids else []


def other_measures(predictions: "pandas.DataFrame | None", folds: Folds, verdict: Verdict | None) -> list[Part]:
    """The recommended method by the other measures, with intervals over rows or clusters; from kept predictions."""
    if predictions is None or verdict is None:
        return []
    own, found = predictions[predictions.method == verdict.recommended], {}
    for measure in (each for each in _MEANINGS if each != verdict.measure):
        of_environments = row_estimates(own, measure).get(verdict.recommended, {})
        if of_environments:
            found[measure] = of_environments
    rows = []
    for name in folds.environments:
        texts = [_with_interval(of.get(name), scale_of(measure)) for measure, of in found.items()]
        rows.append(cells_of([name, *texts]))
    if not found:
        return []
    meanings = "; ".join(f"{measure}: {_MEANINGS[measure]}" for measure in found)
    caption = f"Over the rows of each environment, with 95 % intervals. {meanings[:1].upper()}{meanings[1:]}."
    return [Folded(f"Other measures of {method_name(verdict.recommended)}", [Grid(caption, ["", *found], rows)])]


def _with_interval(estimate: Estimate | None, scale: Scale) -> str:
    if estimate is None:
        return "–"
    interval = estimate.interval(scale)
    ends = "" if interval is None else f" ({interval.low:.3f} to {interval.high:.3f})"
    return f"{estimate.value:.3f}{ends}"


def _known(kind: str, value: float) -> str:
    """Rows, a share or an error."""
    return f"{value:,.0f}" if kind == "rows" else f"{value:.3f}" if value < 10 else f"{value:,.4g}"


def _means(table: Table) -> dict[str, dict[str, float]]:
    """The means over seeds, by row and heading."""
    return {
        row.name: {
            column.heading: statistics.fmean(cell)
            for column, cell in zip(table.columns, row.cells, strict=True)
            if cell
        }
        for row in table.rows
    }
