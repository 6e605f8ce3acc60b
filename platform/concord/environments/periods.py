"""Time as environment: the period of each row's date, by names that sort in time."""

import pandas as pd

from concord.environments.row_names import OF_ONE_FILE, RowNames
from concord.environments.table_encoder import as_texts
from concord.errors import ArgumentError

UNITS = ("day", "week", "month", "quarter", "year")
_NAMES = {"day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m", "year": "%Y"}
_MOST_WITHOUT_ROWS = 200  # periods that may have fewer than two rows on average


def parts_of(by: str) -> int | None:
    """The number of parts in the first word of ``--environment-by``; None for a unit (ArgumentError for another)."""
    if by in UNITS:
        return None
    if not by.isdecimal() or int(by) < 2:
        expected = f"the first word must be {', '.join(UNITS)}, or a number of parts, at least 2"
        raise ArgumentError("environment_by", by, expected)
    return int(by)


def periods(column: pd.Series, by: str, date_format: str = "", row_names: RowNames = OF_ONE_FILE) -> pd.Series:
    """The period of each date, as text: ``2013-02-05``, ``2013-W05`` (of ISO 8601), ``2013-02``, ``2013-Q1``, ``2013``.

    Args:
        column: dates, or texts or whole numbers that are dates; times with a zone count in UTC.
        by: day, week, month, quarter, year, or a number of parts of whole days with about as many rows each, which are
            called by their first and last day, ``2013-01-01..2013-04-30``.
        date_format: of texts and numbers; ISO 8601 needs none.
        row_names: of the rows, whose index has their places.

    Raises:
        ArgumentError: a row has no date, or one that cannot be read; or there are too many periods for the rows.
    """
    dates, parts = _dates(column, by, date_format, row_names), parts_of(by)
    if by == "quarter":
        names = dates.dt.strftime("%Y-Q") + dates.dt.quarter.astype(str)
    elif parts is None:
        names = dates.dt.strftime(_NAMES[by])
    else:
        days = dates.dt.floor("D")
        part = days.groupby(pd.qcut(days, parts, labels=False, duplicates="drop").fillna(0))
        names = part.transform("min").dt.strftime("%Y-%m-%d..") + part.transform("max").dt.strftime("%Y-%m-%d")
    if (count := names.nunique()) > max(_MOST_WITHOUT_ROWS, len(column) / 2):
        found = f"gives {count} environments of {len(column)} rows, fewer than two rows for each"
        raise ArgumentError("environment_by", (by, column.name), f"{found}; give longer periods")
    return names.astype("string")


def _dates(column: pd.Series, by: str, date_format: str, row_names: RowNames) -> pd.Series:
    given = column if pd.api.types.is_datetime64_any_dtype(column) else as_texts(column)
    if date_format and pd.api.types.is_numeric_dtype(column):  # numbers have lost the zero of 01022024
        given = given.str.zfill(len(pd.Timestamp(2024, 12, 31).strftime(date_format)))
    dates = pd.to_datetime(given, format=date_format or "ISO8601", utc=True, errors="coerce").dt.tz_localize(None)
    for row in dates.index[dates.isna()][:1]:
        value = given[row]
        if pd.isna(value) or value == "":
            problem = f"{row_names(row)} has no date; fill it in or remove the row"
        else:
            right = f"a date like {date_format}" if date_format else "a date of ISO 8601; give --date-format"
            problem = f"{row_names(row)} has {value!r}, which is not {right}"
        raise ArgumentError("environment_by", (by, column.name), problem)
    return dates
