"""Encodes rows of a table as numbers: fitted on training rows, and applied to any rows.

This module needs NumPy and pandas alone, and tokenizers for columns of text: a registered model carries the file, and
predicts where Concord is not installed.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

RARE = 10  # a level with fewer training rows shares the code of unknown ones
MISSING, OTHER, FIRST_LEVEL = 0, 1, 2  # codes of a category; the known levels follow
_ROUNDING = 10 * float(np.finfo(np.float64).eps)  # a relative deviation that equal numbers can have
_EXACT, _INT64 = 2**53, 2.0**63  # float64 has every whole number up to the first; int64 ends before the second
_DATE_PARTS = ("year", "month", "day", "dayofweek", "hour")


@dataclass(frozen=True)
class NumericColumn:
    """Numbers, booleans or a part of a date, as two inputs: the scaled value, and whether it is missing.

    Attributes:
        name: of the column.
        kind: ``numeric``, ``boolean`` or ``date``.
        part: of a date, such as ``month``.
        median: replaces a missing value.
        mean, scale: of the values, with missing ones replaced. A column with one value in the training rows, or none,
            has the scale 0: what other values mean was not learned, so its input is 0 in any row.
        gaps: whether some training rows lack a value and others have one. Without them the second input is 0 in any
            row: what a missing value means was not learned.
    """

    name: str
    kind: str
    part: str
    median: float
    mean: float
    scale: float
    gaps: bool


@dataclass(frozen=True)
class CategoryColumn:
    """A column of levels, as one input: 0 is missing, 1 is unknown or rare, the others follow.

    ``levels`` are those with at least ``RARE`` training rows, in order.
    """

    name: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class TextTokens:
    """Columns of text as tokens.

    Attributes:
        columns: their names.
        tokenizer: of the library tokenizers, as JSON.
        length: the largest number of tokens of a text; others are cut off.
    """

    columns: tuple[str, ...]
    tokenizer: str
    length: int

    @property
    def width(self) -> int:
        """The number of inputs."""
        return self.length * len(self.columns)

    def encode(self, frame: pd.DataFrame) -> NDArray[Any]:
        """The rows' tokens ``(rows, width)``; a missing text has none."""
        found = []
        for name in self.columns:
            texts = as_texts(frame[name])
            found.append(self.of_texts(texts.fillna("").tolist()))
            found[-1][texts.isna().to_numpy()] = -1
        return np.concatenate(found, axis=1)

    def of_texts(self, texts: Sequence[str]) -> NDArray[Any]:
        """The tokens of texts as float32 ``(texts, length)``, -1 after the last."""
        found = np.full((len(texts), self.length), -1, dtype=np.float32)
        for row, each in zip(found, _tokenizer(self.tokenizer, self.length).encode_batch(list(texts)), strict=True):
            row[: len(each.ids)] = each.ids
        return found


@functools.lru_cache(maxsize=4)
def _tokenizer(tokenizer: str, length: int) -> Any:
    from tokenizers import Tokenizer

    found = Tokenizer.from_str(tokenizer)
    found.enable_truncation(length)
    return found


@dataclass(frozen=True)
class TableEncoder:
    """Makes numbers of rows: two for each numeric column, then what texts become, then a code for each category.

    Attributes:
        numeric, categories: the columns.
        between: the number of inputs of texts, 0 unless there are tokens.
        tokens: of the columns of text.
    """

    numeric: tuple[NumericColumn, ...]
    categories: tuple[CategoryColumn, ...]
    between: int = 0
    tokens: TextTokens | None = None

    @staticmethod
    def fit(frame: pd.DataFrame, kinds: Mapping[str, str]) -> "TableEncoder":
        """The encoder of these training rows, whose columns are ``numeric``, ``category``, ``boolean`` or ``date``."""
        numeric, categories = [], []
        for name, kind in kinds.items():
            if kind == "category":
                counts = as_texts(frame[name]).value_counts()
                categories.append(CategoryColumn(name, tuple(sorted(counts.index[counts >= RARE]))))
                continue
            for part in _DATE_PARTS if kind == "date" else ("",):
                values = as_numbers(frame[name], kind, part)
                missing = np.isnan(values)
                known = values[~missing]
                median = float(np.median(known)) if len(known) else 0.0
                filled = np.where(missing, median, values)
                with np.errstate(over="ignore", invalid="ignore"):
                    scale = float(filled.std()) if len(filled) else 0.0
                mean = float(filled.mean()) if len(filled) else 0.0
                if not np.isfinite(scale):
                    largest = filled[np.abs(filled).argmax()]
                    raise ValueError(
                        f"column {name}: {largest:g} is too large to be scaled; correct or empty such cells"
                    )
                if scale <= _ROUNDING * abs(mean):
                    scale = 0.0
                gaps = 0 < len(known) < len(values)
                numeric.append(NumericColumn(name, kind, part, median, mean, scale, gaps))
        return TableEncoder(tuple(numeric), tuple(categories))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a table that it needs."""
        texts = () if self.tokens is None else self.tokens.columns
        own = (*(each.name for each in self.numeric), *(each.name for each in self.categories), *texts)
        return tuple(dict.fromkeys(own))

    @property
    def widths(self) -> tuple[int, list[int]]:
        """The number of inputs before the codes of categories, and the number of codes of each."""
        return 2 * len(self.numeric) + self.between, [FIRST_LEVEL + len(each.levels) for each in self.categories]

    def encode(self, frame: pd.DataFrame) -> NDArray[Any]:
        """The rows as float32 numbers ``(rows, 2 · numeric + between + categories)``."""
        frame = plain(frame)
        if lacking := [name for name in self.columns if name not in frame.columns]:
            raise ValueError(f"column {lacking[0]} is missing; the model needs {', '.join(self.columns)}")
        first, numbers = self.widths[0], 2 * len(self.numeric)
        found = np.zeros((len(frame), first + len(self.categories)), dtype=np.float32)
        if self.tokens is not None:
            found[:, numbers:first] = self.tokens.encode(frame)
        for place, column in enumerate(self.numeric):
            values = as_numbers(frame[column.name], column.kind, column.part)
            missing = np.isnan(values)
            moved = np.where(missing, column.median, values) - column.mean
            found[:, 2 * place] = moved / column.scale if column.scale else 0.0
            found[:, 2 * place + 1] = missing & column.gaps
        for place, category in enumerate(self.categories, first):
            texts = as_texts(frame[category.name])
            codes = pd.Categorical(texts, categories=list(category.levels)).codes.astype(np.float32) + FIRST_LEVEL
            codes[codes < FIRST_LEVEL] = OTHER
            codes[texts.isna().to_numpy()] = MISSING
            found[:, place] = codes
        return found

    def unknown(self, frame: pd.DataFrame) -> dict[str, list[str]]:
        """The levels in the rows without a code of their own, by column."""
        frame = plain(frame)
        found = {
            each.name: sorted(set(as_texts(frame[each.name]).dropna()) - set(each.levels)) for each in self.categories
        }
        return {name: levels for name, levels in found.items() if levels}

    def as_json(self) -> dict[str, Any]:
        """The encoder as JSON, for :meth:`read`."""
        return asdict(self)

    @staticmethod
    def read(value: Mapping[str, Any]) -> "TableEncoder":
        """Read the encoder from JSON."""
        tokens = value["tokens"]
        return TableEncoder(
            tuple(NumericColumn(**each) for each in value["numeric"]),
            tuple(CategoryColumn(each["name"], tuple(each["levels"])) for each in value["categories"]),
            value["between"],
            None if tokens is None else TextTokens(**{**tokens, "columns": tuple(tokens["columns"])}),
        )


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with stripped texts as names of its columns, and as float64 its decimals, which databases export, and
    its durations, in seconds.
    """
    frame = frame.rename(columns=lambda name: str(name).strip())
    numbers = {name: _plain_decimals(column.astype(object)) for name, column in frame.items() if _is_decimal(column)}
    seconds = {name: column.dt.total_seconds() for name, column in frame.items() if column.dtype.kind == "m"}
    return frame.assign(**numbers, **seconds)


def _plain_decimals(column: pd.Series) -> pd.Series:
    """Decimals as float64; codes of whole numbers that it would round as Int64."""
    numbers = pd.to_numeric(column)
    known = column.dropna()
    if (numbers.abs() > _EXACT).any() and numbers.abs().max() < _INT64 and (known % 1 == 0).all():
        whole = [None if pd.isna(value) else int(value) for value in column]
        return pd.Series(whole, column.index, dtype="Int64", name=column.name)
    return numbers


def _is_decimal(column: pd.Series) -> bool:
    objects = pd.api.types.is_object_dtype(column) and pd.api.types.infer_dtype(column, skipna=True) == "decimal"
    return objects or str(column.dtype).startswith("decimal")  # the second is Arrow's


def stripped(column: pd.Series) -> pd.Series:
    """The column with its texts without spaces around; numbers stay."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        kind = column.cat.categories.dtype
        column = column.astype("Int64" if kind.kind in "iu" and column.hasnans else kind)
    if pd.api.types.is_object_dtype(column):
        return column.map(lambda value: value.strip() if isinstance(value, str) else value)
    return column.str.strip() if pd.api.types.is_string_dtype(column) else column


def as_texts(column: pd.Series) -> pd.Series:
    """The levels as text without spaces around, the same for 3 and 3.0 whatever the other rows have.

    Missing stays missing.
    """
    kinds = pd.api.types
    if kinds.is_float_dtype(column) or kinds.is_object_dtype(column) or isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(object).map(_text, na_action="ignore")
    return column.astype("string").str.strip()


def _text(value: Any) -> str:
    return str(int(value) if isinstance(value, float | np.floating) and float(value).is_integer() else value)


def as_numbers(column: pd.Series, kind: str, part: str) -> NDArray[Any]:
    """The values as float64, NaN for missing ones (ValueError if they are of another kind)."""
    try:
        if kind == "date":
            dates = pd.to_datetime(column, format="ISO8601", utc=True)  # a column may have several time zones
            values = getattr(dates.dt, part)
        elif kind == "boolean" and not pd.api.types.is_numeric_dtype(column):
            values = column.astype("string").str.strip().str.lower().map(_BOOLEANS, na_action="ignore")
            if wrong := (values.isna() & column.notna()).to_numpy().nonzero()[0].tolist():
                raise ValueError(f"{column.iloc[wrong[0]]!r} is not a boolean")
        else:
            values = pd.to_numeric(column)
        found: NDArray[Any] = pd.Series(values).to_numpy(dtype=np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        line = str(error).split("\n")[0].removesuffix(". You might want to try:")  # what follows is of pandas
        line = re.sub(r" at position \d+$", "", line)  # among the rows that train, which no file numbers
        raise ValueError(f"column {column.name}: expected {_EXPECTED[kind]} ({line})") from None
    return np.where(np.isinf(found), np.nan, found)


_BOOLEANS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "t": 1.0, "f": 0.0, "y": 1.0, "n": 0.0}
_EXPECTED = {"numeric": "numbers", "boolean": "true and false", "date": "dates such as 2026-11-24"}
