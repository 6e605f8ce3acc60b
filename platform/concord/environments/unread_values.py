"""Finds columns of text that look like numbers or dates, which would be lost in a category without a word."""

import pandas as pd

# Such as 61,3  1,234.5  <0.5  12%  € 30  EUR 30  (1,234)  5 kg
_LIKE_NUMBER = (
    r"(?:[A-Z]{3} )?[(<>~≤≥≈=±+−$€£-]*\s*[\d.,]*\d[\d.,_'’\s]*(?:[eE][+-]?\d+)?\)?\s*%?(?: [A-Za-zµ°/%]{1,6})?"
)
# Such as 31/12/2024  31-Dec-24  31 December 2024  14:30
_LIKE_DATE = (
    r"\d{1,4}[./-](?:\d{1,2}|[A-Za-z]{3,9})[./-]\d{1,4}(?:[ T].*)?|\d{1,2} [A-Za-z]{3,9} \d{4}"
    r"|\d{1,2}:\d{2}(?::\d{2})?(?: ?[AaPp][Mm])?"
)
_MOST_NAMED = 3  # values without a number
_MOST = 0.5  # from this part of the levels or of the cells on


def unread_values(column: pd.Series) -> str | None:
    """How many cells of a column of text are no plain numbers or dates, an example, and what may read them.

    None where most cells do not, where all are missing, and for codes such as 01234.
    """
    counts = column.dropna().astype("string").str.strip().value_counts()
    levels = counts.index.to_series()
    if levels.empty or levels.str.fullmatch(r"0\d+").any():
        return None
    plain = pd.to_numeric(levels, errors="coerce").notna()
    dates = levels.str.fullmatch(_LIKE_DATE)
    for like, known, what in (
        (dates, _is_iso_date(levels), "dates of ISO 8601"),
        (~dates & (plain | levels.str.fullmatch(_LIKE_NUMBER)), plain, "plain numbers"),
    ):
        looks_like = like.mean() >= _MOST or counts[like].sum() >= _MOST * counts.sum()
        if len(unread := counts[~known]) and looks_like:
            example = unread.index[0]
            found = f"{unread.sum()} of {counts.sum()} cells are no {what}, such as {example!r}"
            if like is dates:
                return f"{found}; give --date-format (of a CSV file)"
            if "," in example:
                return f"{found}; give --decimal or --thousands (of a CSV file)"
            few = unread.sum() < _MOST * counts.sum()
            values = " ".join(map(repr, unread.index[:_MOST_NAMED]))
            return f"{found}; " + (f"give --missing {values} (of a CSV file)" if few else "write plain numbers")
    return None


def _is_iso_date(levels: pd.Series) -> pd.Series:
    dates = pd.to_datetime(levels, format="ISO8601", utc=True, errors="coerce")
    return dates.notna() & levels.str.match(r"\d{4}-\d{2}-\d{2}")
