"""Any CSV file is read as pandas does with explicit types, or a line names the row or column that is not."""

import csv
import io
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from concord.environments.csv_file import MISSING
from concord.environments.table import from_table
from concord.errors import ArgumentError

ROWS = st.integers(6, 30)
SEPARATORS = st.sampled_from([",", ";", "\t", "|"])
KINDS = st.sampled_from(["whole", "long", "float", "text", "truth", "iso", "date", "code"])
PADDING = st.sampled_from(["", "", "", " ", "  ", "\t"])
LETTERS = st.text(st.characters(categories=["L", "N", "P", "Zs"], include_characters="\n\",;'|"), max_size=6)


@dataclass
class Column:
    """A column as it is written and as it is meant.

    Attributes:
        cells: the texts in the file.
        values: their meaning; None where a cell has no value.
        special: whether numbers or dates need an option to be read.
    """

    name: str
    kind: str
    cells: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    special: bool = False


@dataclass
class File:
    """A file, its columns (site, target, others), the options that it needs, and what is wrong with its form."""

    content: bytes
    whole: bytes
    columns: list[Column]
    options: dict[str, Any]
    wrong: str
    given: bool
    separator: str


@st.composite
def columns(draw: Any, name: str, rows: int, decimal: str, thousands: str, marker: str) -> Column:
    column = Column(name, draw(KINDS))
    gaps, marked = draw(st.sampled_from([True, True, False])), draw(st.booleans())
    wholes = st.integers(2**53 + 1, 2**63 - 1) if column.kind == "long" else st.integers(-99_999, 99_999)
    floats = st.floats(allow_nan=False, allow_infinity=False)
    levels = draw(st.lists(LETTERS.map(lambda text: f"x{text}".strip()), min_size=1, max_size=4))
    for row in range(rows):
        match column.kind:
            case "whole" | "long":
                value: Any = draw(wholes)
                cell = f"{value:,}".replace(",", thousands)
                special = cell != str(value)
            case "float":
                value = draw(floats)
                cell = f"{value:,}" if thousands else repr(value)
                cell = cell.replace(",", "_").replace(".", decimal).replace("_", thousands)
                special = cell != repr(value)
            case "truth":
                value = draw(st.booleans())
                cell, special = draw(st.sampled_from([str(value), str(value).lower(), str(value).upper()])), False
            case "iso" | "date":
                value = draw(st.datetimes(pd.Timestamp(1980, 1, 1), pd.Timestamp(2030, 1, 1))).date()
                special = column.kind == "date"
                cell = value.strftime("%d/%m/%Y") if special else str(value)
            case "code":
                value = cell = f"0{draw(st.integers(1, 99))}"
                special = False
            case _:
                value = cell = draw(st.sampled_from(levels))
                special = False
        if row == 0:
            pass  # a column has a value
        elif gaps and draw(st.sampled_from([True, False, False])):
            value, cell, special = None, draw(st.sampled_from(["", "NA", "nan"])), False
        elif marked and column.kind in ("whole", "float") and draw(st.integers(0, 3)) == 0:
            value, cell, special = None, marker, True
        padding = "" if column.kind == "text" and "\n" in cell else draw(PADDING)
        column.cells.append(f"{padding}{cell}{padding}")
        column.values.append(value)
        column.special |= special
    return column


@st.composite
def files(draw: Any) -> File:
    rows, separator = draw(ROWS), draw(SEPARATORS)
    decimal = draw(st.sampled_from([".", ".", ","]))
    thousands = draw(st.sampled_from(["", "", "'", ","]))
    thousands = "" if thousands == decimal else thousands
    marker = draw(st.sampled_from(["?", "<0.5", "-", "n.d."]))
    places = [draw(st.sampled_from(["east", "north"])) for _ in range(rows - 2)] + ["east", "north"]
    answers = [draw(st.sampled_from(["no", "yes"])) for _ in range(rows - 2)] + ["no", "yes"]
    named = [Column("site", "text", [f"{each}{draw(PADDING)}" for each in places], places)]
    named.append(Column("died", "text", [f"{draw(PADDING)}{each}" for each in answers], answers))
    count = draw(st.integers(1, 3))
    named += [draw(columns(f"c{at}", rows, decimal, thousands, marker)) for at in range(count)]
    named.append(Column("one", "whole", ["1"] * rows, [1] * rows))
    named = draw(st.permutations(named))
    quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    end = draw(st.sampled_from(["\n", "\r\n", "\n\n"]))

    def lines(table: list[list[str]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=separator, quoting=quoting, lineterminator=end).writerows(table)
        return text.getvalue().encode(draw(st.just(encoding)))

    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig"]))
    table = [
        [column.name for column in named],
        *(list(row) for row in zip(*(each.cells for each in named), strict=True)),
    ]
    whole = lines(table)
    wrong = draw(st.sampled_from(["", "", "", "", "longer", "every", "first", "shorter", "twice", "trailing"]))
    at = draw(st.integers(1, rows))
    if wrong == "twice":
        table[0][draw(st.integers(0, len(named) - 2))] = f"{table[0][-1]} "
    for place, row in enumerate(table):
        if wrong == "trailing" or (wrong == "every" and place) or (wrong == "first" and place == 1):
            row.append("")
        elif wrong in ("longer", "shorter") and place == at:
            row[:] = [*row, "more"] if wrong == "longer" else row[:-1]
    options = {"decimal": decimal, "thousands": thousands, "missing": [marker], "date_format": "%d/%m/%Y"}
    return File(lines(table), whole, named, options, wrong, draw(st.booleans()), separator)


def check(file: File) -> None:
    """Raise if a column moves, a number is lost or a class is doubled without a word."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = Path(folder) / "table.csv"
        path.write_bytes(file.content)
        options = file.options if file.given else {}
        arguments = {"target": "died", "environment": "site", "separator": file.separator, **options}
        if file.wrong not in ("", "trailing"):
            with pytest.raises(ArgumentError, match=r"table.csv: (data row \d+ has|.* is the name of two columns)"):
                from_table(path, **arguments)
            return
        table = from_table(path, **arguments).table
    said = [str(each.message) for each in caught]
    assert table.classes == ("no", "yes")
    explicit = pd.read_csv(
        io.BytesIO(file.whole), sep=file.separator, dtype=str, keep_default_na=False, skipinitialspace=False
    )
    for column in file.columns:
        found = table.environment if column.name == "site" else table.frame[column.name]
        texts = explicit[column.name].str.strip()
        if column.special and not file.given:
            assert any(line.startswith(f"column {column.name}: ") for line in said), (column, said)
            assert found.dropna().tolist() == [each for each in texts if each not in MISSING]
            continue
        assert not any(line.startswith(f"column {column.name}: ") for line in said), (column, said)
        known = [value for value in column.values if value is not None]
        assert found.isna().tolist() == [value is None for value in column.values]
        match column.kind:
            case "whole" | "long" | "float":
                kind = float if column.kind == "float" else int
                assert [kind(each) for each in found.dropna()] == known
            case "code":
                assert [int(each) for each in found.dropna()] == [int(each) for each in known]
            case "truth":
                assert [bool(each) for each in found.dropna()] == known
            case "date" if file.given:
                assert pd.to_datetime(found.dropna()).dt.date.tolist() == known
            case "iso":
                assert [str(each)[:10] for each in found.dropna()] == list(map(str, known))
            case _:
                assert found.dropna().tolist() == known


claim = settings(deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)


@settings(claim, max_examples=100)
@given(files())
def test_a_csv_file_is_read_as_meant_or_a_line_says_what_is_not(file: File) -> None:
    check(file)


@pytest.mark.slow  # minutes
@settings(claim, max_examples=10_000)
@given(files())
def test_ten_thousand_csv_files_are_read_as_meant_or_a_line_says_what_is_not(file: File) -> None:
    check(file)
