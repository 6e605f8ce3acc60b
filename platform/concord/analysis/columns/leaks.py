"""Columns that alone say nearly all of the target, as a copy of it does, or what is known only after it.

A column's bins predict the target, learned on one half of the rows and measured on the other. That takes milliseconds,
so every command that trains on a table can afford it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from concord.environments.table_encoder import as_numbers, as_texts

if TYPE_CHECKING:
    from concord.environments.table_rows import Table

_GIVES_AWAY = 0.95  # of the errors of a constant, which a column alone avoids
_MOST_ROWS, _BINS = 10_000, 256
_MOST_NAMED = 5

Numbers = NDArray[np.float64]


def leak_warning(names: Sequence[str]) -> str | None:
    """A line about the columns that give the target away; None without one."""
    if len(names) > 1:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        shown = ", ".join(names[:_MOST_NAMED])
        return f"columns {shown}{more} each give the target away alone; are they known when you predict?"
    return f"column {names[0]} alone gives the target away; is it known when you predict?" if names else None


def leaking_columns(table: "Table") -> list[str]:
    """The columns that alone say nearly all of the target, in the order of the table."""
    order = np.random.default_rng(0).permutation(len(table.frame))[:_MOST_ROWS]
    rows = table.frame.iloc[order]
    values = rows[table.target]
    if table.classes is None:
        targets: NDArray[Any] = values.to_numpy(dtype=np.float64)
    else:
        targets = np.asarray(pd.Categorical(values, categories=list(table.classes)).codes, dtype=np.int64)
    found = []
    for name, kind in table.kinds.items():
        try:
            column = ordered(rows[name], kind)
        except ValueError:  # of another kind, which is refused where the encoder is fitted
            continue
        if _avoided(column, targets, kind != "category") > _GIVES_AWAY:
            found.append(name)
    return found


def ordered(column: pd.Series, kind: str) -> Numbers:
    """A column as numbers: a date as its time, levels from the most frequent on; NaN where missing."""
    if kind == "category":
        levels = as_texts(column)
        codes = pd.Categorical(levels, categories=levels.value_counts().index).codes
        return np.asarray(np.where(codes < 0, np.nan, codes))
    if kind == "date":
        since = pd.to_datetime(column, format="ISO8601", utc=True) - pd.Timestamp(0, tz="UTC")
        return np.asarray(since.dt.total_seconds(), dtype=np.float64)
    return np.asarray(as_numbers(column, kind, ""))


def _avoided(column: Numbers, targets: NDArray[Any], measures: bool) -> float:
    """The part of a constant's errors (of classes wrong ones, of numbers squared ones) that the column avoids.

    Where a column measures something, a bin without learned rows says what the nearest one in value says.
    """
    known = np.unique(column[~np.isnan(column)])
    if len(known) == 0:
        return 0.0
    edges = known[1:] if len(known) <= _BINS else np.unique(np.quantile(known, np.linspace(0, 1, _BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, column, side="right")
    bins[np.isnan(column)] = len(edges) + 1
    starts = np.append(known[0], edges) if measures else None
    half = len(targets) // 2
    wrong = constant = 0.0
    for learned, judged in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        before, after = _errors(bins, column, targets, learned, judged, len(edges) + 2, starts)
        constant, wrong = constant + before, wrong + after
    return 1 - wrong / constant if constant > 0 else 0.0


def _errors(
    bins: NDArray[np.int64],
    column: Numbers,
    targets: NDArray[Any],
    learned: slice,
    judged: slice,
    count: int,
    starts: Numbers | None,
) -> tuple[float, float]:
    """The errors in the judged rows of a constant, and of what the learned rows say of a bin."""
    right, rows = targets[judged], np.bincount(bins[learned], minlength=count)
    if len(right) == 0 or len(targets[learned]) == 0:
        return 0.0, 0.0
    places = bins[judged] if starts is None else _nearest(starts, rows[:-1] > 0)[bins[judged]]
    if targets.dtype == np.int64:
        classes = int(targets.max()) + 1
        counts = np.bincount(bins[learned] * classes + targets[learned], minlength=count * classes)
        usual = int(np.bincount(targets[learned]).argmax())
        said = np.where(rows > 0, counts.reshape(count, classes).argmax(1), usual)
        return float((right != usual).sum()), float((right != said[places]).sum())
    mean = float(targets[learned].mean())
    sums = np.bincount(bins[learned], targets[learned], count)
    means = np.where(rows > 0, sums / np.maximum(rows, 1), mean)
    after = float(((right - means[places]) ** 2).sum())
    if np.isfinite(column).all() and column[learned].std() > 0:  # a line also holds at the ends
        x, y = column - column[learned].mean(), targets - mean
        slope = float((x[learned] * y[learned]).sum() / (x[learned] ** 2).sum())
        after = min(after, float(((y - slope * x)[judged] ** 2).sum()))
    return float(((right - mean) ** 2).sum()), after


def _nearest(starts: Numbers, filled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each bin, by where it starts, the nearest one that is filled; a last bin, of missing values, is itself."""
    own, filled_ones = np.arange(len(filled) + 1), np.flatnonzero(filled)
    if len(filled_ones) > 0:
        after = np.searchsorted(starts[filled_ones], starts).clip(0, len(filled_ones) - 1)
        before = (after - 1).clip(0)
        left, right = filled_ones[before], filled_ones[after]
        own[:-1] = np.where(starts - starts[left] <= starts[right] - starts, left, right)
    return own
