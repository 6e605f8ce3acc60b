"""Reads a CSV file as text, then turns each column whose cells all are numbers, booleans or dates into these.

Arrow reads the cells. It refuses a row with more or fewer cells than the header, which pandas takes for an index or
fills up. A column is converted as a whole or stays text, so no cell is lost and no code is rounded.
"""

import codecs
import contextlib
import io
import itertools
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from fsspec.compression import compr
from fsspec.utils import infer_compression

from concord.environments.row_names import OF_ONE_FILE
from concord.errors import ArgumentError, InputError, first_line

# Cells without a value: pandas' own but for "None", which may be a class (None, Mild, Severe).
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "n/a", "nan", "null",
)  # fmt: skip
_NONE = "None"
_TRUE, _FALSE = ("True", "TRUE", "true"), ("False", "FALSE", "false")
SPACES = r"\s+"
_CODE = r"^0\d|^\d+[eE]\d+$"  # digits that begin with a zero, and codes such as 1e5
_EXACT = 2**53  # float64 has every whole number up to it
_SHORTEST_DATE = 6  # digits
_LONG_ROW = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")  # in an error of pandas
_BLOCK = 8 << 20  # bytes that Arrow parses at once; a row must fit


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV file writes its cells.

    Attributes:
        separator: one character between two cells, or ``\\s+`` for any number of spaces.
        encoding: of the text.
        decimal: the decimal point of numbers.
        thousands: the character between groups of three digits; empty if there is none.
        missing: texts of cells without a value, besides the usual ones.
        date_format: of dates, such as ``%d/%m/%Y``; ISO 8601 needs none.

    Raises:
        ArgumentError: a value is of another form.
    """

    separator: str = ","
    encoding: str = "utf-8"
    decimal: str = "."
    thousands: str = ""
    missing: tuple[str, ...] = ()
    date_format: str = ""

    def __post_init__(self) -> None:
        if len(self.separator.encode()) != 1 and self.separator != SPACES:
            expected = r"must be one character (a tab is $'\t' in a shell), or \s+ for any number of spaces"
            raise ArgumentError("separator", self.separator, expected)
        if len(self.decimal) != 1 or self.decimal.isalnum():
            raise ArgumentError("decimal", self.decimal, "must be one character, such as , or .")
        if len(self.thousands) > 1 or self.thousands.isalnum() or self.thousands == self.decimal:
            raise ArgumentError(
                "thousands", self.thousands, f"must be one character, and not the decimal {self.decimal}"
            )
        try:
            valid = "%" in self.date_format or not self.date_format
            pd.to_datetime(pd.Timestamp(2024, 12, 31).strftime(self.date_format), format=self.date_format)
        except ValueError:
            valid = False
        if not valid:
            raise ArgumentError("date_format", self.date_format, "must have the parts of a date, such as %d/%m/%Y")


def read_cells(path: Path, shown: str, form: CsvFormat) -> pa.Table:
    """The cells of a CSV file as text, compressed if its name ends so; columns without a name are called as by pandas.

    Raises:
        ArgumentError: the file cannot be read, or a row has more or fewer cells than the header.
    """
    rows: list[Any] = []

    def refuse(row: Any) -> str:
        rows.append(row)
        return "error"

    try:
        if form.separator == SPACES:
            return _between_spaces(path, shown, form)
        try:
            cells = _arrow_cells(path, form)
        except pa.ArrowInvalid:
            with _opened(path) as file:  # Arrow cannot give a row that is no text
                deque(codecs.iterdecode(iter(lambda: file.read(_BLOCK), b""), form.encoding), maxlen=0)
            cells = _arrow_cells(path, form, refuse)
    except InputError:
        raise
    except Exception as error:  # pandas and Arrow have their own errors
        if _is_encoding_error(path, form, error):
            usual = "utf-16" if _begins_as_utf16(path) else "latin-1"
            raise ArgumentError("data", shown, f"is not {form.encoding}; give --encoding, such as {usual}") from error
        if rows:
            one = rows[0].expected_columns == 1 or (rows[0].number, rows[0].actual_columns) == (2, 1)
            _require_separator(shown, rows[0].text if one else "")
            place = rows[0].number - 2  # Arrow counts from 1, and the header
            raise _ragged(shown, place, rows[0].text, rows[0].actual_columns, rows[0].expected_columns) from None
        raise ArgumentError("data", shown, f"cannot be read ({first_line(error)})") from error
    if cells.num_columns == 1:
        _require_separator(shown, cells.column_names[0])
    _require_closed_quotes(path, shown, cells)
    names = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(cells.column_names)]
    return cells.rename_columns(names)


def _arrow_cells(path: Path, form: CsvFormat, refuse: Any = None) -> pa.Table:
    # Without threads a refused row has its number.
    read = pyarrow.csv.ReadOptions(encoding=form.encoding, block_size=_BLOCK, use_threads=refuse is None)

    def parse(handler: Any) -> pyarrow.csv.ParseOptions:
        return pyarrow.csv.ParseOptions(delimiter=form.separator, newlines_in_values=True, invalid_row_handler=handler)

    with _opened(path) as file, pyarrow.csv.open_csv(file, read, parse(refuse and (lambda _: "skip"))) as head:
        names = head.schema.names
    texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    with _opened(path) as file:
        return pyarrow.csv.read_csv(file, read, parse(refuse), texts)


def _between_spaces(path: Path, shown: str, form: CsvFormat) -> pa.Table:
    """The cells of a file whose columns are between spaces."""
    try:
        frame = pd.read_csv(path, sep=SPACES, encoding=form.encoding, header=None, dtype=str, keep_default_na=False)
    except pd.errors.ParserError as error:
        if long := _LONG_ROW.search(str(error)):
            expected, number, found = map(int, long.groups())
            with _opened(path) as file, io.TextIOWrapper(file, form.encoding) as lines:
                rows = [cells for line in itertools.islice(lines, number) if (cells := line.split())]
            raise _ragged(shown, len(rows) - 2, " ".join(rows[-1]), found, expected) from None
        raise
    last = frame.iloc[:, -1]
    if short := ((last == "") | last.isna()).to_numpy().nonzero()[0].tolist():
        row = [cell for cell in frame.iloc[short[0]] if isinstance(cell, str) and cell]
        raise _ragged(shown, short[0] - 1, " ".join(row), len(row), len(frame.columns))
    header, *_ = frame.values.tolist()
    columns = [pa.chunked_array([pa.array(frame[each].iloc[1:], pa.string())]) for each in frame]
    return pa.Table.from_arrays(columns, names=header)


def _ragged(shown: str, place: int, text: str, found: int, expected: int) -> ArgumentError:
    line = text.strip("\r\n").replace("\n", "\\n")
    short = line if len(line) <= 60 else f"{line[:60]}…"
    problem = f"{OF_ONE_FILE(place)} has {found} cells, and the header has {expected}: {short}"
    right = "give each row the cells of the header"
    if place == 0 and found == expected + 1 and not line.endswith((",", ";", "\t", "|", " ")):
        right = "if rows begin with names, as R writes them, write the table with row.names = FALSE; else " + right
    return ArgumentError("data", shown, f"{problem}; {right}")


def _require_separator(shown: str, line: str) -> None:
    if other := next((each for each in ";\t|" if each in line), None):
        quoted = r"$'\t'" if other == "\t" else f"'{other}'"
        raise ArgumentError("data", shown, f"has one column; give --separator {quoted}, which it seems to have")


def _require_closed_quotes(path: Path, shown: str, cells: pa.Table) -> None:
    """Refuse a quote that is never closed: its cell has all later rows of the file."""
    if cells.num_rows and "\n" in (last := cells.column(cells.num_columns - 1)[-1].as_py()):
        with _opened(path) as file:
            file.seek(-min(8, file.seek(0, 2)), 2)
            closed = file.read().rstrip(b"\0\r\n").endswith(b'"')
        if not closed:
            raise ArgumentError("data", shown, f"a quote is never closed, before {last[:40]!r}; close or remove it")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The content of a file, decompressed by the end of its name."""
    kind = infer_compression(path.name)
    with contextlib.ExitStack() as closing:
        file: Any = closing.enter_context(pa.OSFile(str(path)) if kind is None else path.open("rb"))
        yield file if kind is None else closing.enter_context(compr[kind](file, mode="rb"))


def _is_encoding_error(path: Path, form: CsvFormat, error: Exception) -> bool:
    utf8 = codecs.lookup(form.encoding).name == "utf-8" if not isinstance(error, LookupError) else False
    return isinstance(error, UnicodeDecodeError) or (utf8 and ("UTF8" in str(error) or _begins_as_utf16(path)))


def _begins_as_utf16(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def typed(cells: pa.ChunkedArray, form: CsvFormat, *, codes: bool, none: bool) -> pd.Series:
    """A column of text as numbers, booleans, dates or stripped text; empty and missing cells have no value.

    Args:
        cells: the text.
        form: how it is written.
        codes: whether digits with leading zeros, and such as 1e5, are text; it is no column of booleans or dates.
        none: whether a cell None is a value: of any column of codes, else of a column of text alone.
    """
    cells = pc.utf8_trim_whitespace(cells)
    cells = pc.if_else(pc.is_in(cells, pa.array([*MISSING, *form.missing])), None, cells)
    given = cells if codes and none else pc.if_else(pc.equal(cells, _NONE), None, cells)
    if not codes and (dates := _dates(given, form, digits=True)) is not None:
        return dates
    kept = codes and pc.any(pc.match_substring_regex(given, _CODE)).as_py()
    numbers = None if kept else _numbers(given, form)
    if numbers is not None:
        return numbers
    if not codes:
        if pc.all(pc.is_in(given.drop_null(), pa.array([*_TRUE, *_FALSE]))).as_py():
            return pc.if_else(pc.is_null(given), None, pc.is_in(given, pa.array(_TRUE))).to_pandas()
        if (dates := _dates(given, form, digits=False)) is not None:
            return dates
    return (cells if none else given).to_pandas()


def _dates(cells: pa.ChunkedArray, form: CsvFormat, *, digits: bool) -> pd.Series | None:
    """The dates of a format that writes digits alone, or of another; None if there are none, or a cell is no date."""
    written = pd.Timestamp(2024, 12, 31).strftime(form.date_format)
    if not written or written.isdecimal() != digits or cells.null_count == len(cells):
        return None
    # A year alone, and fewer digits than are written, are numbers.
    lengths = pc.utf8_length(cells)
    if digits and (len(written) < _SHORTEST_DATE or not pc.all(pc.equal(lengths, len(written))).as_py()):
        return None
    dates = pd.to_datetime(cells.to_pandas(), format=form.date_format, errors="coerce")
    return dates if dates.count() == len(cells) - cells.null_count else None


def _numbers(cells: pa.ChunkedArray, form: CsvFormat) -> pd.Series | None:
    """The numbers; None if a cell is none, or if float64 would round whole numbers that int64 lacks."""
    if form.thousands:
        mark, point = (f"[{each}]" for each in (form.thousands, form.decimal))
        grouped = pc.match_substring_regex(cells, rf"^[+-]?\d{{1,3}}({mark}\d{{3}})+({point}\d*)?$")
        cells = pc.if_else(grouped, pc.replace_substring(cells, form.thousands, ""), cells)
    if form.decimal != ".":
        if pc.any(pc.match_substring(cells, ".")).as_py():
            return None
        cells = pc.replace_substring(cells, form.decimal, ".")
    try:
        whole = pc.cast(cells, pa.int64())
        hexadecimal = pc.any(pc.match_substring(cells, "x", ignore_case=True)).as_py()  # Arrow reads 0x1A as 26
        return None if hexadecimal else exact(whole)
    except pa.ArrowInvalid:
        pass
    try:
        numbers = pc.cast(cells, pa.float64())
    except pa.ArrowInvalid:
        return None
    large = pc.any(pc.greater(pc.abs(numbers), float(_EXACT))).as_py()
    if large and pc.all(pc.match_substring_regex(cells, r"^[+-]?\d+$")).as_py():
        return None
    return numbers.to_pandas()


def exact(numbers: pa.ChunkedArray) -> pd.Series:
    """Whole numbers as pandas has them: in float64 beside missing ones, unless it would round them."""
    ends = pc.min_max(numbers).as_py()
    rounded = numbers.null_count and max(map(abs, (each or 0 for each in ends.values()))) > _EXACT
    nullable = {pa.int64(): pd.Int64Dtype(), pa.uint64(): pd.UInt64Dtype()}
    return numbers.to_pandas(types_mapper=nullable.get) if rounded else numbers.to_pandas()
