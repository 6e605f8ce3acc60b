"""CSV files: no column moves, no number is lost and no text changes without a word."""

import bz2
import gzip
import lzma
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from concord.environments.csv_file import CsvFormat
from concord.environments.table import TableEnvironments, from_table
from concord.errors import ArgumentError, InputError

HEADER = "site,age,died"
ROWS = [f"{site},{20 + number}.5,{number % 2}" for site in ("east", "north", "south") for number in range(20)]


def text(header: str = HEADER, rows: list[str] = ROWS, end: str = "\n") -> str:
    return end.join([header, *rows]) + end


def write(folder: Path, content: str | bytes, name: str = "table.csv") -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def read(path: Any, **more: Any) -> TableEnvironments:
    return from_table(path, **{"environment": "site", "target": "died", **more})


def with_column(cells: list[str], name: str = "given", separator: str = ",") -> str:
    """The table with one more column of these cells, repeated."""
    rows = [separator.join([*row.split(","), cells[at % len(cells)]]) for at, row in enumerate(ROWS)]
    return text(separator.join([*HEADER.split(","), name]), rows)


def quiet(path: Path, **more: Any) -> TableEnvironments:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read(path, **more)


RAGGED: dict[str, tuple[str, str]] = {
    "every row ends with a comma": (text(rows=[f"{row}," for row in ROWS]), "data row 1 has 4 cells, and the header"),
    "only the first does": (text(rows=[f"{ROWS[0]},", *ROWS[1:]]), "data row 1 has 4 cells"),
    "only the last does": (text(rows=[*ROWS[:-1], f"{ROWS[-1]},"]), "data row 60 has 4 cells, .* has 3: south,39.5,1,"),
    "a row has one more cell": (text(rows=[ROWS[0], "east,1,2,0", *ROWS[1:]]), "data row 2 has 4 cells.*: east,1,2,0"),
    "a row has one cell less": (text(rows=[*ROWS, "west,60"]), "data row 61 has 2 cells, .* has 3: west,60;"),
    "the header has one cell less": (text("site,age"), "data row 1 has 3 cells, and the header has 2"),
    "a decimal comma without quotes": (text(rows=[*ROWS, "west,61,3,1"]), "data row 61 has 4 cells"),
    "a blank line with spaces": (text(rows=[ROWS[0], "   ", *ROWS[1:]]), "data row 2 has 1 cells"),
    "a quote is not closed": (text(rows=[*ROWS[:-1], '"east,1,0']), "data row 60 has 1 cells|a quote is never closed"),
    "the last column's quote is not closed": (text(rows=[ROWS[0], 'east,1,"0', *ROWS]), "a quote is never closed"),
}  # fmt: skip


@pytest.mark.parametrize("case", RAGGED)
def test_a_row_with_another_number_of_cells_is_refused_with_its_text(case: str, tmp_path: Path) -> None:
    content, message = RAGGED[case]
    with pytest.raises(ArgumentError, match=rf"^data={tmp_path}/table.csv: {message}") as refused:
        read(write(tmp_path, content))
    assert "\n" not in str(refused.value)


def test_a_row_between_spaces_with_another_number_of_cells_is_refused(tmp_path: Path) -> None:
    """An empty cell between spaces is none: the later ones would move."""
    for row, message in (
        ("east  1", "row 61 has 2 cells, .* has 3: east 1;"),
        ("east  1 0 0", "row 61 has 4 .* 3: east 1 0 0;"),
    ):
        path = write(tmp_path, text(rows=[*ROWS, row]).replace(",", " "))
        with pytest.raises(ArgumentError, match=message):
            read(path, separator=r"\s+")
    aligned = text().replace(",", "   ")
    assert read(write(tmp_path, aligned), separator=r"\s+").version == read(write(tmp_path, text(), "b.csv")).version


@pytest.mark.parametrize("separator", [",", "\t", " ", r"\s+"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_names_of_rows_under_a_header_without_them_are_called_so(separator: str, ending: str, tmp_path: Path) -> None:
    """R's write.table writes them unless told otherwise."""
    named = text('"site","age","died"', [f'"{at}",{row}' for at, row in enumerate(ROWS, 1)])
    content = named.replace(",", " " if separator == r"\s+" else separator).encode()
    path = write(tmp_path, gzip.compress(content) if ending else content, f"table.csv{ending}")
    advice = "if rows begin with names, as R writes them, write the table with row.names = FALSE; else give each row"
    with pytest.raises(ArgumentError, match=f"data row 1 has 4 cells, and the header has 3: .*; {advice}"):
        read(path, separator=separator)
    for other in (text(rows=[f"{row}," for row in ROWS]), text(rows=[*ROWS, "east,1,0,1"])):
        with pytest.raises(ArgumentError, match="cells of the header") as refused:
            read(write(tmp_path, other))
        assert "row.names" not in str(refused.value)


SAME = {
    "a byte order mark": text().encode("utf-8-sig"),
    "lines of Windows": text(end="\r\n"),
    "blank lines": text(end="\n\n"),
    "quotes": text('"site","age","died"', [",".join(f'"{cell}"' for cell in row.split(",")) for row in ROWS]),
    "no line break at the end": text().rstrip("\n"),
    "spaces around names and cells": text("site , age, died", [row.replace(",", " , ") for row in ROWS]),
    "an empty column without a name": text(f"{HEADER},", [f"{row}," for row in ROWS]),
    "an index without a name": text(f",{HEADER}", [f"{at},{row}" for at, row in enumerate(ROWS)]),
    "plus signs": text(rows=[row.replace(",2", ",+2").replace(",3", ",+3") for row in ROWS]),
}


@pytest.mark.parametrize("case", SAME)
def test_a_table_written_in_another_way_is_the_same(case: str, tmp_path: Path) -> None:
    expected = read(write(tmp_path, text(), "plain.csv")).fitted(0, 0)
    found = quiet(write(tmp_path, SAME[case])).fitted(0, 0)
    assert (found.version, found.train, found.encoder) == (expected.version, expected.train, expected.encoder)
    assert torch.equal(found["north"].inputs, expected["north"].inputs)


@pytest.mark.parametrize(
    ("header", "twice"),
    [
        ("site,died,died", "died"),
        ("site,died, died", "died"),
        ('site,"died ",died', "died"),
        ("site,site,died", "site"),
    ],
)
def test_two_columns_of_one_name_are_refused(header: str, twice: str, tmp_path: Path) -> None:
    """The second of two targets would be an input."""
    with pytest.raises(ArgumentError, match=f"table.csv: {twice} is the name of two columns; rename one"):
        read(write(tmp_path, text(header)))
    frame = pd.DataFrame([row.split(",") for row in ROWS], columns=header.replace('"', "").split(","))
    with pytest.raises(ArgumentError, match=f"^data={twice}: is the name of two columns; rename one"):
        read(frame)


def test_a_name_with_a_number_behind_is_a_column_of_its_own(tmp_path: Path) -> None:
    assert set(read(write(tmp_path, with_column(["1", "2"], "died.1"))).table.kinds) == {"age", "died.1"}


READ: dict[str, tuple[list[str], dict[str, Any], str, list[float | None]]] = {
    "decimal comma": (['"61,3"', '"7,25"', "8"], {"decimal": ","}, "numeric", [61.3, 7.25, 8]),
    "thousands": (['"1,234"', '"12,345,678"', "9"], {"thousands": ","}, "numeric", [1234, 12345678, 9]),
    "both": (['"1.234,5"', '"-7,25"', '"1.000"'], {"thousands": ".", "decimal": ","}, "numeric", [1234.5, -7.25, 1000]),
    "an apostrophe": (["1'234.5", "12", "0.5"], {"thousands": "'"}, "numeric", [1234.5, 12, 0.5]),
    "missing cells": (["1", "?", "<0.5"], {"missing": ["?", "<0.5"]}, "numeric", [1, None, None]),
    "a number that means missing": (["1", "-9", " 3"], {"missing": ["-9"]}, "numeric", [1, None, 3]),
    "exponents": (["1e5", "2.5E-3", ".5"], {}, "numeric", [1e5, 2.5e-3, 0.5]),
    "infinities": (["1.5", "-inf", "Infinity"], {}, "numeric", [1.5, -np.inf, np.inf]),
    "None beside numbers": (["None", "1", "2"], {}, "numeric", [None, 1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_numbers_are_read_as_the_options_say(case: str, tmp_path: Path) -> None:
    cells, options, kind, values = READ[case]
    content = with_column(cells).replace(".5,", ",") if "decimal" in options else with_column(cells)
    table = quiet(write(tmp_path, content), **options).table
    assert table.kinds["given"] == kind
    found = table.frame["given"].head(len(values)).to_numpy(float)
    np.testing.assert_array_equal(found, np.array(values, dtype=float))


def test_dates_of_a_format_are_dates(tmp_path: Path) -> None:
    path = write(tmp_path, with_column(["31/12/2024", "01/02/2024", ""]))
    table = quiet(path, date_format="%d/%m/%Y").table
    assert table.kinds["given"] == "date"
    assert table.frame["given"].head(2).dt.month.tolist() == [12, 2]


@pytest.mark.parametrize(("form", "cells"), [("%d%m%Y", ["01112024", "31122024"]), ("%y%m%d", ["041101", "241231"])])
def test_dates_of_digits_alone_are_dates_and_other_numbers_are_numbers(
    form: str, cells: list[str], tmp_path: Path
) -> None:
    table = quiet(write(tmp_path, with_column([*cells, ""])), date_format=form).table
    assert table.kinds["given"] == "date"
    assert table.frame["given"].head(2).dt.month.tolist() == [11, 12]
    for numbers in ([cells[0], "7"], [cells[0], "9" * len(cells[0])]):
        assert quiet(write(tmp_path, with_column(numbers)), date_format=form).table.kinds["given"] == "numeric"
    assert quiet(write(tmp_path, with_column(["2020", "2021"])), date_format="%Y").table.kinds["given"] == "numeric"


UNREAD = {
    "decimal comma": (['"61,3"', '"7,2"'], r"40 of 40 cells are no plain numbers, such as '61,3'; give --decimal or"),
    "thousands": (['"1,234"', "7"], r"20 of 40 cells are no plain numbers, such as '1,234'; give --decimal or --thous"),
    "a question mark": (["1", "2", "3", "?"], r"10 of 40 cells are no plain numbers, such as '\?'; give --missing '"),
    "mostly question marks": (["?", "?", "?", "3", "4"], r"24 of 40 cells are no plain numbers, such as '\?'"),
    "a limit": (["1", "0.7", "<0.5"], r"13 of 40 cells are no plain numbers, such as '<0.5'; give --missing"),
    "percents": (["12%", "7 %"], r"40 of 40 cells are no plain numbers, such as '12%'; write plain numbers"),
    "a currency": (["€ 12", "€ 7.50"], r"40 of 40 cells are no plain numbers, such as '€ 12'"),
    "a unit": (["12 kg", "7.5 kg"], r"40 of 40 cells are no plain numbers, such as '12 kg'"),
    "a currency's code": (["EUR 12", "EUR 7.50"], r"40 of 40 cells are no plain numbers, such as 'EUR 12'"),
    "the minus of accounts": (["(12)", "7.50"], r"20 of 40 cells are no plain numbers, such as '\(12\)'"),
    "digits in groups": (["1_000", "12 000"], r"40 of 40 cells are no plain numbers, such as '1_000'"),
    "times": (["14:30", "9:05 am"], r"40 of 40 cells are no dates of ISO 8601, such as '14:30'; give --date-format"),
    "a minus sign of print": (["−3", "4"], r"20 of 40 cells are no plain numbers, such as '−3'"),
    "dates of another form": (["31/12/2024", "01/02/2024"], r"40 of 40 cells are no dates of ISO 8601, such as '31/12"),
    "one date of another form": (["2024-12-31", "2024-12-30", "1.2.2024"], r"13 of 40 .* such as '1.2.2024'; give --d"),
    "a date that is none": (["2024-02-28", "2024-02-30"], r"20 of 40 cells are no dates .* such as '2024-02-30'"),
    "dates with names": (["31 Dec 2024", "1-Jan-24"], r"40 of 40 cells are no dates of ISO 8601"),
    "hexadecimals": (["0x1A", "12", "13"], r"14 of 40 cells are no plain numbers, such as '0x1A'"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_a_column_of_numbers_that_are_not_read_is_named(case: str, tmp_path: Path) -> None:
    cells, message = UNREAD[case]
    path = write(tmp_path, with_column(cells))
    with pytest.warns(UserWarning, match=f"^column given: {message}.*, or --columns given=category; it is a category"):
        assert read(path, test=["south"]).table.kinds["given"] == "category"
    assert quiet(path, test=["south"], kinds={"given": "category"}).table.kinds["given"] == "category"


@pytest.mark.parametrize("cells", [["a", "b", "3"], ["10-20", "20-30"], ["p1", "p2"], ["I", "II", "3rd"], ["x", ""]])
def test_a_column_of_text_is_a_category_without_a_word(cells: list[str], tmp_path: Path) -> None:
    assert quiet(write(tmp_path, with_column(cells))).table.kinds["given"] == "category"


def test_a_column_of_text_without_a_value_in_training_is_left_out_without_a_word(tmp_path: Path) -> None:
    cells = [""] * 40 + ["1,5"] * 20
    path = write(tmp_path, with_column([f'"{cell}"' for cell in cells]))
    assert "given" not in quiet(path, test=["south"]).table.kinds


def test_a_target_that_is_nearly_a_number_is_refused_or_named(tmp_path: Path) -> None:
    prices = [f'"{number},3"' for number in range(30)]
    path = write(tmp_path, with_column(prices))
    with pytest.raises(ArgumentError, match=r"given: 60 of 60 cells are no plain numbers, such as '0,3'; give --dec"):
        read(path, target="given")
    assert quiet(path, target="given", task="classification").table.outputs == 30
    with pytest.warns(
        UserWarning, match="target given: 20 of 60 cells are no plain numbers, such as '<5'; .* are classes"
    ):
        assert read(write(tmp_path, with_column(["7", "8", "<5"])), target="given").table.classes == ("7", "8", "<5")
    frame = pd.DataFrame({"site": list("ab") * 30, "age": [*range(30)] * 2, "given": map(str, range(60))})
    with pytest.raises(ArgumentError, match="given: has numbers as text; make them numbers, or give --task classif"):
        read(frame, target="given")
    few = frame.assign(given=["0", "1"] * 30)
    with warnings.catch_warnings(action="error"):
        assert read(few, target="given").table.classes == ("0", "1")
    whole = quiet(write(tmp_path, text("site;age;died", [row.replace(",", ";").replace(".", ",") for row in ROWS])),
                  separator=";", decimal=",", target="age").table  # fmt: skip
    assert whole.classes is None


def test_text_has_no_spaces_around_wherever_it_stands(tmp_path: Path) -> None:
    """In a file and in a frame: classes, levels, environments, names of columns and truths."""
    frame = pd.DataFrame(
        {
            " site": ["east", "east ", " north", "north"] * 15,
            "ward ": ["a", "a ", " b\t", "b"] * 15,
            "smokes": [" True", "true ", "False", "false"] * 15,
            "died": ["no", "no ", "yes", "\u00a0yes"] * 15,
        }
    )
    frame.to_csv(tmp_path / "table.csv", index=False)
    frame.to_parquet(tmp_path / "table.parquet")
    for data in (frame, tmp_path / "table.csv", tmp_path / "table.parquet", frame.astype(object)):
        found = quiet(data, test=[]).fitted(0, 0)
        assert (found.table.classes, found.train) == (("no", "yes"), ("east", "north"))
        assert found.table.kinds == {"ward": "category", "smokes": "boolean"}
        assert found.encoder is not None
        assert [each.levels for each in found.encoder.categories] == [("a", "b")]
        assert found.encoder.unknown(frame) == {}


def test_a_class_may_be_a_category_of_pandas_with_spaces() -> None:
    died = pd.Categorical(["no", "no ", "yes", "yes"] * 10)
    frame = pd.DataFrame({"site": list("ab") * 20, "age": range(40), "died": died})
    assert read(frame).table.classes == ("no", "yes")


LONG = [1234567890123456780, 1234567890123456781, 1234567890123456782]


@pytest.mark.parametrize("column", ["category", "target", "environment"])
def test_codes_of_many_digits_stay_apart_beside_an_empty_cell(column: str, tmp_path: Path) -> None:
    """float64, which pandas takes for whole numbers with a missing one, rounds them to one."""
    codes = [LONG[at % 3] for at in range(59)]
    path = write(tmp_path, with_column([*map(str, codes), ""]))
    pq = tmp_path / "table.parquet"
    table = pa.table(
        {
            "site": [row.split(",")[0] for row in ROWS],
            "age": [float(row.split(",")[1]) for row in ROWS],
            "died": [int(row[-1]) for row in ROWS],
            "given": pa.array([*codes, None], pa.int64()),
        }
    )
    pa.parquet.write_table(table, pq)
    for data in (path, pq):
        if column == "category":
            encoder = read(data, kinds={"given": "category"}).fitted(0, 0).encoder
            assert encoder is not None
            assert [each.levels for each in encoder.categories] == [tuple(map(str, LONG))]
        elif column == "target":
            with pytest.warns(UserWarning, match="1 of 60 rows have no given"):
                assert read(data, target="given").table.classes == tuple(LONG)
        else:
            with pytest.warns(UserWarning, match="1 of 60 rows have no given"):
                labelled = read(data, target="given").table.frame
            assert read(labelled, environment="given").train == tuple(map(str, LONG))


def test_decimals_of_many_digits_stay_apart_as_codes() -> None:
    """Databases export them so."""
    codes = [Decimal(LONG[at % 3]) for at in range(60)]
    frame = pd.DataFrame({"site": list("ab") * 30, "died": [0, 1] * 30, "given": codes})
    frame.loc[7, "given"] = None
    for data in (frame, frame.astype({"given": pd.ArrowDtype(pa.decimal128(20, 0))})):
        encoder = read(data, kinds={"given": "category"}).fitted(0, 0).encoder
        assert encoder is not None
        assert [each.levels for each in encoder.categories] == [tuple(map(str, LONG))]
        assert read(data).table.kinds["given"] == "numeric"


@pytest.mark.parametrize(
    ("cells", "levels"),
    [
        (["99999999999999999990", "99999999999999999991"], ("99999999999999999990", "99999999999999999991")),
        (["007", "7", "07"], ("007", "07", "7")),
        (["1e5", "100000", "10e4"], ("100000", "10e4", "1e5")),
        (["9007199254740993", "9007199254740992", ""], ("9007199254740992", "9007199254740993")),
        (["3", "3.0", "4"], ("3", "4")),
        (["-1234567890123456781", "-1234567890123456782", ""], ("-1234567890123456781", "-1234567890123456782")),
    ],
)
def test_the_codes_of_a_category_are_as_written(cells: list[str], levels: tuple[str, ...], tmp_path: Path) -> None:
    encoder = read(write(tmp_path, with_column(cells)), kinds={"given": "category"}).fitted(0, 0).encoder
    assert encoder is not None
    assert [each.levels for each in encoder.categories] == [levels]


def test_numbers_have_the_bits_of_pandas(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"site": list("ab") * 500, "whole": draw.integers(-(2**62), 2**62, 1000)})
    frame["float"] = draw.normal(size=1000) * 10.0 ** draw.integers(-300, 300, 1000)
    frame["gaps"] = draw.integers(0, 9, 1000) / 1.0
    frame.loc[draw.random(1000) < 0.2, "gaps"] = None
    frame["died"] = draw.integers(0, 2, 1000)
    frame.to_csv(tmp_path / "table.csv", index=False)
    found = read(tmp_path / "table.csv").table.frame
    expected = pd.read_csv(tmp_path / "table.csv", float_precision="round_trip").drop(columns="site")
    pd.testing.assert_frame_equal(found[expected.columns], expected, check_exact=True)


@pytest.mark.parametrize(
    ("ending", "compress"),
    [("gz", gzip.compress), ("GZ", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)],
)
def test_a_compressed_file_is_the_same(ending: str, compress: Any, tmp_path: Path) -> None:
    plain = read(write(tmp_path, text()))
    assert quiet(write(tmp_path, compress(text().encode()), f"table.csv.{ending}")).version == plain.version
    with pytest.raises(ArgumentError, match=r"table.csv.gz: is text, and"):
        read(write(tmp_path, b"no gzip", "table.csv.gz"))


def test_a_parquet_file_may_end_in_upper_case(tmp_path: Path) -> None:
    read(write(tmp_path, text())).table.frame.assign(site="a").to_parquet(tmp_path / "T.PARQUET")
    with pytest.raises(InputError, match="has one value, a; name a column with several"):
        read(tmp_path / "T.PARQUET")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decimal": ""}, "decimal=: must be one character"),
        ({"decimal": "5"}, "decimal=5: must be one character"),
        ({"thousands": ".", "decimal": "."}, "thousands=.: must be one character, and not the decimal ."),
        ({"thousands": "ab"}, "thousands=ab: must be one character"),
        ({"date_format": "%d/%q"}, "date_format=%d/%q: must have the parts of a date, such as %d/%m/%Y"),
        ({"date_format": "dd/mm/yyyy"}, "date_format=dd/mm/yyyy: must have the parts of a date, such as %d/%m/%Y"),
    ],
)
def test_a_format_that_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CsvFormat(**options)


@pytest.mark.filterwarnings("error")
def test_a_row_that_is_neither_text_nor_of_the_right_length_is_told_as_another_encoding(tmp_path: Path) -> None:
    path = write(tmp_path, text(rows=[*ROWS, "Zürich,1,2,3"]).encode("latin-1"))
    with pytest.raises(ArgumentError, match="is not utf-8; give --encoding, such as latin-1"):
        read(path)
    with pytest.raises(ArgumentError, match="data row 61 has 4 cells, and the header has 3: Zürich,1,2,3;"):
        read(path, encoding="latin-1")


@pytest.mark.parametrize("separator", [",", r"\s+"])
def test_errors_of_form_and_of_values_name_the_same_data_row(tmp_path: Path, separator: str) -> None:
    between = "," if separator == "," else "  "

    def line(*cells: object) -> str:
        return between.join(map(str, cells))

    rows = [line(site, at, at % 2) for site in ("east", "north") for at in range(10)]
    for row, options in ((line("east", 1, 0, 7), {}), (line("east", 1, -1), {"task": "count"})):
        path = write(tmp_path, text(line("site", "age", "died"), [*rows[:4], "", row, *rows[4:]]))  # a blank line
        with pytest.raises(ArgumentError, match=r": data row 5 has (4 cells, and the header has 3|-1)"):
            read(path, separator=separator, **options)


def test_in_a_folder_an_error_names_the_row_within_its_file(tmp_path: Path) -> None:
    for site in ("east", "north", "south"):
        rows = [f"{at},{at % 2}" for at in range(10)]
        write(
            tmp_path, text("age,died", [*rows[:3], "-1,-1" if site == "north" else rows[3], *rows[4:]]), f"{site}.csv"
        )
    with pytest.raises(ArgumentError, match=r"data row 4 of north\.csv has -1, and a count"):
        from_table(tmp_path, target="died", task="count")


def test_an_error_of_a_kind_names_no_position_among_the_rows_that_train(tmp_path: Path) -> None:
    path = write(tmp_path, with_column(["1", "2", "x y"]))
    with pytest.raises(InputError, match=r'column given: expected numbers \(Unable to parse string "x y"\)'):
        read(path, kinds={"given": "numeric"}).fitted(0.0, 0)
