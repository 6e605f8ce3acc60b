"""Tables: environments by a column, an encoder fitted only to training rows, one line for invalid tables."""

import csv
import dataclasses
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.environments.csv_file import MISSING, CsvFormat
from concord.environments.table import TableEnvironments, from_table
from concord.environments.table_encoder import RARE, TableEncoder
from concord.environments.table_rows import inferred_kinds, read_table_rows
from concord.errors import ArgumentError, InputError

PLACES = ("east", "north", "south", "west")


def patients(rows: int = 60, seed: int = 0) -> pd.DataFrame:
    """Rows of four hospitals, a fifth of the values missing."""
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "hospital": np.repeat(PLACES, rows),
            "age": draw.normal(60, 10, 4 * rows),
            "smokes": draw.choice(["yes", "no"], 4 * rows),
            "admitted": pd.to_datetime("2026-01-01") + pd.to_timedelta(draw.integers(0, 300, 4 * rows), "D"),
            "chest pain": draw.choice(["typical", "atypical", "none"], 4 * rows),
            "died": draw.integers(0, 2, 4 * rows),
        }
    )
    for column in ("age", "smokes", "admitted", "chest pain"):
        frame.loc[draw.random(4 * rows) < 0.2, column] = None
    return frame


def environments(frame: Any, **more: Any) -> TableEnvironments:
    return from_table(frame, **{"environment": "hospital", "target": "died", "test": ["west"], **more})


def encoder(frame: pd.DataFrame, fraction: float = 0.1, seed: int = 0) -> TableEncoder:
    found = environments(frame).fitted(fraction, seed).encoder
    assert found is not None
    return found


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(["permuted", "doubled", "changed", "removed"]))
def test_rows_of_the_test_leave_the_encoder_as_it_is(seed: int, how: str) -> None:
    frame = patients(seed=seed % 7)
    test = frame[frame.hospital == "west"]
    others = frame[frame.hospital != "west"]
    other = {
        "permuted": test.sample(frac=1, random_state=seed),
        "doubled": pd.concat([test, test]),
        "changed": test.assign(age=1e6, **{"chest pain": "unheard of"}),
        "removed": test.head(1),
    }[how]
    assert encoder(pd.concat([others, other])) == encoder(frame)


def test_what_is_held_out_leaves_the_encoder_as_it_is() -> None:
    frame = patients()
    table = environments(frame).fitted(0.25, 3)
    frame["row"] = range(len(frame))
    kept = environments(frame).fitted(0.25, 3)
    held_out = {int(row) for pair in _split(kept) for row in pair}
    changed = frame.assign(age=frame.age.where(~frame.row.isin(held_out), 1e6)).drop(columns="row")
    assert environments(changed).fitted(0.25, 3).encoder == table.encoder
    assert environments(changed).fitted(0.25, 4).encoder != table.encoder


def _split(kept: TableEnvironments) -> list[list[float]]:
    """The numbers of the rows that are held out of each training environment."""
    assert kept.encoder is not None
    place = [each.name for each in kept.encoder.numeric].index("row")
    column = kept.encoder.numeric[place]
    split = kept.split(kept.train, 0.25, 3)
    held_out = [each.held_out for each in split if each.held_out is not None]
    return [(each.inputs[:, 2 * place] * column.scale + column.mean).round().tolist() for each in held_out]


def test_an_environment_that_is_left_out_leaves_the_encoder_as_it_is() -> None:
    frame = patients()
    changed = frame.assign(age=frame.age.where(frame.hospital != "south", -1e3))
    left_out = [environments(each).leaving_out("south").fitted(0.1, 0) for each in (frame, changed)]
    assert left_out[0].encoder == left_out[1].encoder
    assert left_out[0].validation == ("south",)
    assert encoder(frame) != encoder(changed)


def test_rows_become_numbers_as_documented() -> None:
    frame = pd.DataFrame({"age": [1.0, 3.0, None, 3.0] * RARE, "pain": ["a", "b", None, "b"] * RARE})
    fitted = TableEncoder.fit(frame, {"age": "numeric", "pain": "category"})
    rows = pd.DataFrame({"pain": ["b", "never seen", None], "age": [None, 3, 1]})
    age = fitted.numeric[0]
    assert (age.median, fitted.categories[0].levels) == (3.0, ("a", "b"))
    scaled = [(value - age.mean) / age.scale for value in (3, 3, 1)]
    expected = [[scaled[0], 1, 3], [scaled[1], 0, 1], [scaled[2], 0, 0]]
    np.testing.assert_allclose(fitted.encode(rows), np.array(expected, dtype=np.float32), rtol=1e-6)
    assert fitted.unknown(rows) == {"pain": ["never seen"]}
    assert TableEncoder.read(fitted.as_json()) == fitted


@given(st.floats(-1e6, 1e6), st.integers(2, 300), st.floats(-1e6, 1e6))
def test_a_column_with_one_value_in_training_says_nothing_elsewhere(value: float, rows: int, other: float) -> None:
    """The deviation of equal numbers is often a rounding error, and not 0."""
    fitted = TableEncoder.fit(pd.DataFrame({"dose": [value] * rows}), {"dose": "numeric"})
    assert (fitted.encode(pd.DataFrame({"dose": [value, other, None]}))[:, 0] == 0).all()


@given(st.floats(1e-100, 1e100), st.integers(2, 50))
def test_a_column_of_any_size_that_varies_is_scaled(size: float, rows: int) -> None:
    values = size * np.arange(1, rows + 1)
    fitted = TableEncoder.fit(pd.DataFrame({"charge": values}), {"charge": "numeric"})
    assert fitted.encode(pd.DataFrame({"charge": values}))[:, 0].std() == pytest.approx(1, rel=1e-3)


def test_a_number_too_large_for_a_deviation_is_refused_by_its_column() -> None:
    with pytest.raises(InputError, match=r"column age: 8.9e\+307 is too large to be scaled; correct or empty"):
        encoder(patients().fillna({"age": 8.9e307}))


def test_a_column_without_a_value_in_training_says_nothing_elsewhere() -> None:
    frame = patients().assign(cholesterol=lambda rows: np.where(rows.hospital == "south", 240.0, np.nan))
    left_out = environments(frame).leaving_out("south").fitted(0.1, 0)
    assert left_out.encoder is not None
    place = [each.name for each in left_out.encoder.numeric].index("cholesterol")
    assert (left_out["south"].inputs[:, 2 * place] == 0).all()


def test_a_missing_value_says_nothing_where_training_has_no_gaps_or_only_gaps() -> None:
    columns = {"whole": [1.0, 2.0, 3.0], "gaps": [1.0, None, 3.0], "empty": [None, None, None]}
    fitted = TableEncoder.fit(pd.DataFrame(columns, dtype=float), dict.fromkeys(columns, "numeric"))
    rows = pd.DataFrame({"whole": [None, 2.0], "gaps": [None, 2.0], "empty": [None, 2.0]})
    assert fitted.encode(rows)[:, 1::2].tolist() == [[0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("a", "b"),
    [([1.0, 2.0], [1.5, 2.0]), ([12.0, None, 14.0], [12, 14, "x9"]), ([1, 2], [1.0, 2.5]), ([1e3, 2.0], ["1000", 2])],
)
def test_a_level_has_one_code_whatever_the_other_rows_have(a: list[Any], b: list[Any]) -> None:
    """Files of environments are read alone: a missing value makes their whole numbers floats."""
    frames = [pd.DataFrame({"grade": each * RARE}) for each in (a, b)]
    fitted = TableEncoder.fit(pd.concat(frames, ignore_index=True), {"grade": "category"})
    codes: dict[str, set[float]] = {}
    for frame in frames:
        for rows in (frame, *(frame.iloc[[row]] for row in range(len(frame)))):
            for value, code in zip(rows.grade, fitted.encode(rows)[:, 0].tolist(), strict=True):
                level = "missing" if pd.isna(value) else str(value).removesuffix(".0")
                codes.setdefault(level, set()).add(code)
    assert all(len(found) == 1 for found in codes.values()), codes
    assert len(set(map(min, codes.values()))) == len(codes)
    assert 1.0 not in set().union(*codes.values())  # unknown


def test_dates_may_change_their_time_zone_and_texts_may_only_begin_like_dates() -> None:
    summer = ["2026-03-28T12:00:00+01:00", "2026-03-30T12:00:00+02:00"]
    frame = patients().assign(seen=lambda rows: np.resize(summer, len(rows)), note="2020-01-02 weekend")
    frame.loc[::2, "note"] = "2020-01-03 holiday"
    kinds = inferred_kinds(frame)
    assert (kinds["seen"], kinds["note"]) == ("date", "category")
    fitted = environments(frame).fitted(0.1, 0).encoder
    assert fitted is not None
    alone, both = (fitted.encode(frame.iloc[:rows])[0] for rows in (1, 2))
    assert np.array_equal(alone, both)


def test_the_version_is_of_what_is_predicted_from_what_and_where() -> None:
    frame = patients().assign(readmitted=lambda rows: rows.died).dropna(subset="smokes")
    named = frame.rename(columns={"age": "environment"})
    assert environments(named).version != environments(named.assign(environment=0.0)).version
    versions = [
        environments(frame, kinds=ignored, **more).version
        for ignored, more in (
            ({"readmitted": "ignore"}, {}),
            ({"died": "ignore"}, {"target": "readmitted"}),
            ({}, {}),
            ({"readmitted": "ignore", "smokes": "ignore"}, {}),
            ({"readmitted": "ignore"}, {"environment": "smokes", "test": []}),
        )
    ]
    assert len(set(versions)) == len(versions)
    assert environments(frame, kinds={"readmitted": "ignore"}, test=[]).version == versions[0]  # the same rows


def test_columns_may_have_numbers_as_names_but_no_name_twice() -> None:
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2))).assign(y=[0, 1] * 30, site=list("abc") * 20)
    found = from_table(frame, target="y", environment="site").fitted(0.1, 0)
    assert found["a"].inputs.shape == (20, 4)
    assert found.encoder is not None
    assert found.encoder.encode(frame).shape == (60, 4)
    named = frame.set_axis(range(4), axis=1)
    by_number = from_table(named, target=2, environment=3, kinds={1: "ignore"})  # type: ignore[arg-type, dict-item]
    assert list(by_number.table.kinds) == ["0"]
    with pytest.raises(ArgumentError, match=r"^data=y: is the name of two columns; rename one"):
        from_table(pd.concat([frame, frame[["y"]]], axis=1), target="y", environment="site")


def test_an_infinite_target_is_refused() -> None:
    frame = patients().assign(died=lambda rows: rows.died.astype(float))
    frame.loc[3, "died"] = np.inf
    with pytest.raises(ArgumentError, match="died: is infinite in data row 4; remove such rows"):
        environments(frame)


def test_values_of_another_kind_are_refused_when_they_are_read_and_a_list_may_be_ignored() -> None:
    frame = patients().assign(code=lambda rows: np.resize(["7", "8"], len(rows)), seen=[[1, 2]] * 240)
    frame.loc[frame.hospital == "west", "code"] = "x9"
    with pytest.raises(InputError, match=r"column code: expected numbers .*; give its kind, such as --columns"):
        environments(frame, test=[], kinds={"code": "numeric", "seen": "ignore"}).fitted(0.1, 0)
    table = environments(frame, kinds={"code": "numeric", "seen": "ignore"}).fitted(0.1, 0)
    with pytest.raises(InputError, match="environment west: column code: expected numbers"):
        table["west"]
    version = environments(frame, kinds={"seen": "ignore"}).version
    assert version == environments(frame.copy(), kinds={"seen": "ignore"}).version
    assert version != environments(frame.iloc[1:], kinds={"seen": "ignore"}).version


def test_levels_of_a_categorical_column_are_those_of_its_values_and_true_is_not_1() -> None:
    numbers, mixed = pd.Series([1.0, 2.0] * RARE), pd.Series([True, 1, "x"] * RARE, dtype=object)
    for column, levels in ((numbers.astype("category"), ("1", "2")), (mixed, ("1", "True", "x"))):
        fitted = TableEncoder.fit(pd.DataFrame({"grade": column}), {"grade": "category"})
        assert fitted.categories[0].levels == levels


def test_targets_of_several_kinds_are_refused() -> None:
    frame = patients().astype({"died": object})
    frame.loc[:3, "died"] = "?"
    with pytest.raises(ArgumentError, match="target=died: has values of several kinds, int and str"):
        environments(frame)


def test_training_rows_have_mean_0_and_deviation_1() -> None:
    table = environments(patients()).fitted(0.0, 0)
    rows = torch.cat([table[name].inputs for name in table.train])
    assert table.encoder is not None
    numbers = rows[:, : 2 * len(table.encoder.numeric) : 2]
    varied = numbers.std(0) > 0
    torch.testing.assert_close(numbers.mean(0), torch.zeros(numbers.shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(numbers[:, varied].std(0, correction=0), torch.ones(int(varied.sum())))


def test_kinds_are_inferred_and_can_be_given() -> None:
    frame = patients().assign(patient=[f"p{number}" for number in range(240)], code=[1, 2] * 120)
    assert inferred_kinds(frame.drop(columns=["hospital", "died"])) == {
        "age": "numeric", "smokes": "category", "admitted": "date", "chest pain": "category", "patient": "ignore",
        "code": "numeric",
    }  # fmt: skip
    kinds = environments(frame, kinds={"code": "category", "smokes": "boolean", "age": "ignore"}).table.kinds
    assert kinds == {"smokes": "boolean", "admitted": "date", "chest pain": "category", "code": "category"}


def test_files_folders_and_frames_give_the_same(tmp_path: Path) -> None:
    frame = patients()
    frame.to_csv(tmp_path / "all.csv", index=False)
    frame.to_parquet(tmp_path / "all.parquet")
    for place in PLACES:
        (tmp_path / "places").mkdir(exist_ok=True)
        frame[frame.hospital == place].drop(columns="hospital").to_csv(tmp_path / f"places/{place}.csv", index=False)
    of_frame = environments(frame).fitted(0.1, 0)["north"]
    for path in ("all.csv", "all.parquet"):
        of_file = environments(tmp_path / path).fitted(0.1, 0)["north"]
        assert torch.equal(of_file.inputs, of_frame.inputs)
        assert torch.equal(of_file.targets, of_frame.targets)
    of_folder = environments(tmp_path / "places", environment=None).fitted(0.1, 0)["north"]
    assert torch.equal(of_folder.inputs, of_frame.inputs)


def test_decimals_are_numbers_in_files_and_frames(tmp_path: Path) -> None:
    """Exports of databases have them; neither MLflow's example of a model nor a regression takes the objects."""
    price = [None if row % 7 == 0 else Decimal(row) / 4 for row in range(240)]
    frame = patients().assign(price=pd.Series(price, dtype=object), fee=lambda each: each.price.fillna(Decimal("1.5")))
    frame.to_parquet(tmp_path / "all.parquet")
    of_arrow = frame.astype(dict.fromkeys(["price", "fee"], pd.ArrowDtype(pa.decimal128(10, 2))))
    floats = frame.assign(price=frame.price.astype(float), fee=frame.fee.astype(float))
    expected = environments(floats).fitted(0.1, 0)
    assert expected.encoder is not None
    for data in (frame, tmp_path / "all.parquet", of_arrow):
        found = environments(data).fitted(0.1, 0)
        assert torch.equal(found["north"].inputs, expected["north"].inputs)
        json.dumps(found.raw.example[["price", "fee"]].to_dict())
        assert environments(data, target="fee").table.classes is None
    np.testing.assert_array_equal(expected.encoder.encode(of_arrow), expected.encoder.encode(floats))


def test_numbers_of_rows_are_no_column(tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "all.csv")  # with its index, in a column without a name
    kinds = environments(tmp_path / "all.csv").table.kinds
    assert kinds.keys() == set(patients()) - {"hospital", "died"}
    given = environments(tmp_path / "all.csv", kinds={"Unnamed: 0": "numeric"}).table.kinds
    assert given["Unnamed: 0"] == "numeric"


def test_a_level_that_pandas_takes_for_missing_is_one_and_a_missing_number_is_missing(tmp_path: Path) -> None:
    frame = patients().assign(pain=["None", "Mild", "Severe"] * 80, weight=["None", "70.5", "80", "90"] * 60)
    frame.to_csv(tmp_path / "all.csv", index=False)
    frame.to_parquet(tmp_path / "all.parquet")
    assert environments(tmp_path / "all.csv", target="pain").table.classes == ("Mild", "None", "Severe")
    assert environments(tmp_path / "all.parquet", target="pain").table.classes == ("Mild", "None", "Severe")
    found = environments(tmp_path / "all.csv")
    assert (found.table.kinds["weight"], found.table.frame["weight"].isna().sum()) == ("numeric", 60)
    frame.assign(pain=["", "Mild", "Severe"] * 80).to_csv(tmp_path / "all.csv", index=False)
    with pytest.warns(UserWarning, match="80 of 240 rows have no pain and are left out"):
        assert environments(tmp_path / "all.csv", target="pain").table.classes == ("Mild", "Severe")


def test_an_environment_that_is_named_and_has_no_target_in_any_row_is_refused() -> None:
    frame = patients().assign(died=lambda rows: rows.died.where(rows.hospital != "west"))
    for option in ("test", "validation"):
        expected = f"{option}=west: none of its rows has a died, so nothing can be measured there; leave it out"
        with pytest.warns(UserWarning, match="60 of 240 rows"), pytest.raises(ArgumentError, match=expected):
            environments(frame, **{"test": [], option: ["west"]})


def test_booleans_with_missing_cells_stay_booleans(tmp_path: Path) -> None:
    frame = patients().assign(smokes=[True, False, None, True] * 60, died=[True, False, False] * 80)
    frame.to_csv(tmp_path / "all.csv", index=False)
    assert environments(tmp_path / "all.csv").table.kinds["smokes"] == "boolean"
    frame.assign(died=[True, False, None] * 80).to_csv(tmp_path / "all.csv", index=False)
    with pytest.warns(UserWarning, match="80 of 240 rows have no died"):
        assert environments(tmp_path / "all.csv").table.classes == (False, True)


def test_codes_are_read_as_they_are_written(tmp_path: Path) -> None:
    codes = {"east": "007", "north": "7", "south": "70", "west": "700"}
    frame = patients().assign(hospital=lambda each: each.hospital.map(codes), zip=["01234", "1234", "90210"] * 80)
    frame.to_csv(tmp_path / "all.csv", index=False)
    found = environments(tmp_path / "all.csv", test=["007"], kinds={"zip": "category"}).fitted(0.1, 0)
    assert (found.train, found.test) == (("7", "70", "700"), ("007",))
    assert found.encoder is not None
    assert found.encoder.unknown(frame) == {}
    assert [each.levels for each in found.encoder.categories if each.name == "zip"] == [("01234", "1234", "90210")]


def test_spaces_around_a_level_are_no_part_of_it_in_training_and_prediction(tmp_path: Path) -> None:
    """A file with a space after the comma; new rows are read as the documents say."""
    frame = patients().assign(zip=[" 01234", " 1234", "90210 "] * 80, ward=[" a", "b", "a"] * 80)
    frame.to_csv(tmp_path / "all.csv", index=False)
    found = environments(tmp_path / "all.csv", kinds={"zip": "category"}).fitted(0.1, 0).encoder
    assert found is not None
    levels = {each.name: each.levels for each in found.categories}
    assert (levels["zip"], levels["ward"]) == (("01234", "1234", "90210"), ("a", "b"))
    assert found.unknown(pd.read_csv(tmp_path / "all.csv", dtype={"zip": str})) == {}


def test_text_of_digits_with_leading_zeros_is_a_category(tmp_path: Path) -> None:
    frame = patients().assign(zip=["01234", "1234", "90210"] * 80, count=["1", "20", "300"] * 80)
    frame.to_parquet(tmp_path / "all.parquet")
    for data in (frame, frame.astype({"zip": object}), tmp_path / "all.parquet"):
        kinds = environments(data).table.kinds
        assert (kinds["zip"], kinds["count"]) == ("category", "numeric")
    assert "row" not in environments(frame.assign(row=[f"{row:03}" for row in range(240)])).table.kinds


def test_an_empty_row_leaves_the_names_of_numbered_environments(tmp_path: Path) -> None:
    years = patients().assign(
        hospital=lambda each: each.hospital.map(dict(zip(PLACES, range(2011, 2015), strict=True)))
    )
    (tmp_path / "all.csv").write_text(years.to_csv(index=False) + ",,,,,\n")
    years.reindex(range(241)).to_parquet(tmp_path / "all.parquet")
    for path in ("all.csv", "all.parquet"):
        with pytest.warns(UserWarning, match="1 of 241 rows have no died"):
            assert environments(tmp_path / path, test=["2014"]).train == ("2011", "2012", "2013")
    halves = years.assign(hospital=years.hospital / 2)
    assert environments(halves, test=[]).train == ("1005.5", "1006.0", "1006.5", "1007.0")


def test_codes_without_zeros_have_the_levels_that_pandas_reads(tmp_path: Path) -> None:
    """Also where a missing cell makes them floats: a model is asked with what ``pandas.read_csv`` gives."""
    frame = patients().assign(ward=[1.0, 2.0, None] * 80)
    frame.to_csv(tmp_path / "all.csv", index=False)
    found = environments(tmp_path / "all.csv", kinds={"ward": "category"}).fitted(0.1, 0)
    assert found.encoder is not None
    assert found.encoder.unknown(pd.read_csv(tmp_path / "all.csv")) == {}


def test_an_environment_may_be_called_none_and_have_spaces_around(tmp_path: Path) -> None:
    frame = patients().assign(environment=lambda each: each.hospital.map({"east": "None", "north": "1 "}).fillna("2"))
    (tmp_path / "folder").mkdir()
    frame.drop(columns="hospital").to_csv(tmp_path / "folder" / "all.csv", index=False)
    assert environments(tmp_path / "folder", environment=None, test=[]).train == ("1", "2", "None")
    codes = patients().assign(hospital=lambda each: each.hospital.map({"east": "1", "north": "2 "}).fillna("3"))
    codes.to_csv(tmp_path / "codes.csv", index=False)
    assert environments(tmp_path / "codes.csv", test=["1"]).train == ("2", "3")


def test_the_cells_without_a_value_are_those_of_pandas_but_for_none() -> None:
    assert {*MISSING} == pd._libs.parsers.STR_NA_VALUES - {"None"}


def test_classes_that_are_no_whole_numbers_stay() -> None:
    frame = patients().assign(died=pd.Series([1.0, 1.3, 1.7, 2.0] * 60, dtype=object))
    assert environments(frame, task="classification").table.classes == (1.0, 1.3, 1.7, 2.0)


def test_a_column_of_a_categorical_type_is_a_category_of_whatever_values(tmp_path: Path) -> None:
    assert environments(patients().assign(ward=pd.Categorical([1, 2, 3, 4] * 60))).table.kinds["ward"] == "category"
    patients().assign(ward=pd.Categorical(list("1234") * 60)).to_parquet(tmp_path / "all.parquet")
    assert environments(tmp_path / "all.parquet").table.kinds["ward"] == "category"


def test_a_missing_target_leaves_the_classes_their_names() -> None:
    frame = patients()
    whole = environments(frame).fitted(0.1, 0)
    frame["died"] = frame["died"].astype(float)
    frame.loc[3, "died"] = None
    with pytest.warns(UserWarning, match="1 of 240 rows have no died"):
        found = environments(frame).fitted(0.1, 0)
    assert found.raw.outputs == whole.raw.outputs == ("0", "1")
    assert found["north"].targets.tolist() == whole["north"].targets.tolist()


@pytest.mark.parametrize("classes", [[0, 1], [False, True], ["no", "yes"]])
def test_a_category_may_be_a_target_and_an_environment_with_missing_cells(classes: list[Any]) -> None:
    codes = np.where(np.arange(240) == 3, -1, patients()["died"])
    frame = patients().assign(died=pd.Categorical.from_codes(codes, classes))
    with pytest.warns(UserWarning, match="1 of 240 rows have no died"):
        table = environments(frame).table
    assert table.classes == tuple(classes)
    assert table.frame["died"].tolist() == [classes[code] for code in codes if code >= 0]
    wards = pd.Categorical.from_codes(np.where(np.arange(240) == 3, -1, np.arange(240) // 60), [1, 2, 3, 4])
    with pytest.raises(InputError, match="environment=ward: 1 rows have none"):
        environments(patients().assign(ward=wards), environment="ward", test=["4"])


@pytest.mark.parametrize("backend", ["numpy_nullable", "pyarrow"])
def test_text_of_any_backend_of_pandas_is_text(backend: Any) -> None:
    frame = patients().assign(dose=["1,5", "2,5"] * 120, note="has a cough").convert_dtypes(dtype_backend=backend)
    with pytest.warns(UserWarning, match="column dose: 240 of 240 cells are no plain numbers"):
        table = read_table_rows(frame, CsvFormat(), target="died", environment="hospital", text=["note"])
    assert (table.kinds["dose"], table.text) == ("category", ("note",))


def test_data_of_another_kind_than_a_frame_or_path_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="data=Table: must be a file, a folder or a pandas frame, such as to_pandas"):
        environments(pa.Table.from_pandas(patients()))


def test_the_version_depends_on_the_order_of_rows_which_decides_what_is_held_out() -> None:
    frame = patients()
    assert environments(frame).version == environments(patients()).version
    assert environments(frame).version != environments(frame.sample(frac=1, random_state=1)).version


def test_a_target_of_numbers_is_a_regression_and_rows_without_it_are_out() -> None:
    frame = patients().assign(days=np.linspace(0, 9.7, 240))
    frame.loc[:9, "days"] = None
    table = environments(frame, target="days").table
    assert (table.classes, table.outputs, table.without_target, len(table.frame)) == (None, 1, 10, 230)
    assert environments(frame, target="smokes").table.classes == ("no", "yes")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such target": ({"target": "dead"}, "target=dead: no such column; there are hospital, age"),
    "no such environment column": ({"environment": "ward"}, "environment=ward: no such column"),
    "no environment column": ({"environment": None}, "environment=None: needed; a column of hospital, age"),
    "no such test environment": ({"test": ["mars"]}, "test=mars: there is no such environment; there are east"),
    "two purposes": ({"validation": ["west"], "test": ["west"]}, "validation=west: is also in --test west; an env"),
    "one name twice": ({"test": ["west", "west"]}, "west is named twice; name it once"),
    "rows without an environment": ({"environment": "age", "test": []}, "environment=age: .* rows have none"),
    "one environment": ({"environment": "one", "test": []}, "environment=one: has one value, 1; name a column with"),
    "one training environment": ({"test": ["east", "north", "south"]}, "two environments are needed .* are west"),
    "the same column twice": ({"target": "hospital"}, "target=hospital: is also the environment's column"),
    "text for a regression": ({"target": "smokes", "task": "regression"}, "target=smokes: has no numbers"),
    "infinite bins": ({"environment_bins": 3, "environment": "far"}, "=3: column far: data row 4 has inf; quanti"),
    "bins of one value": ({"environment_bins": 3, "environment": "one"}, "=3: column one has one value, 1"),
    "one bin": ({"environment_bins": 1}, "environment_bins=1: must be at least 2"),
    "an unknown kind": ({"kinds": {"age": "number"}}, "kinds=age=number: must be one of numeric, category, boolean"),
    "bins of text": ({"environment_bins": 3}, "environment_bins=3: column hospital has no numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as refused:
        environments(patients().assign(one=1, far=np.where(np.arange(240) == 3, np.inf, 1.0)), **options)
    assert "\n" not in str(refused.value)


def test_a_column_of_a_thousand_numbers_makes_environments_in_bins() -> None:
    frame = patients(300).assign(week=np.arange(1200) // 2, number=np.arange(1200))
    with pytest.raises(ArgumentError, match="week: has 600 different numbers; give --environment-bins, or another"):
        environments(frame, environment="week", test=[])
    with pytest.raises(ArgumentError, match=r"number: has another whole number in nearly .* rows; give another column"):
        environments(frame, environment="number", test=[])
    binned = environments(frame, environment="week", environment_bins=5, test=[])
    assert [len(binned.table.rows([name])) for name in binned.train] == [240] * 5


@given(st.integers(21, 90), st.integers(0, 60), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_an_input_that_names_the_rows_is_said_unless_its_kind_is_given(
    different: int, repeated: int, whole: bool, given_kind: bool
) -> None:
    number = 1000 + np.r_[np.arange(different), np.zeros(repeated, int)] + (0 if whole else 0.5)
    rows = len(number)
    frame = pd.DataFrame(
        {"number": number, "site": np.resize(["a", "b"], rows), "died": np.resize(["no", "no", "yes"], rows)}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_table(frame, target="died", environment="site", kinds={"number": "numeric"} if given_kind else {})
    line = (
        "column number has another whole number in nearly every row, so it may name the rows; --columns number=ignore"
    )
    names_rows = whole and different > 0.9 * rows
    said = [f"{line} leaves it out"] if names_rows and not given_kind else []
    assert [str(each.message) for each in caught] == said


def test_a_column_that_names_the_rows_makes_no_environments() -> None:
    frame = patients(300).assign(name=[f"p{row}" for row in range(1200)], ward=[f"w{row % 240}" for row in range(1200)])
    few = "fewer than two rows for an environment; give another column"
    with pytest.raises(ArgumentError, match=f"environment=name: has 1200 values in 1200 rows, {few}"):
        environments(frame, environment="name", test=[])
    assert len(environments(frame, environment="ward", test=[]).train) == 240


NO_CLASSES: dict[str, tuple[Callable[[int], Any], str]] = {
    "dates of ISO 8601": (lambda row: f"2025-{row % 12 + 1:02}-{row % 28 + 1:02}", "84 different dates in 900"),
    "moments": (lambda row: pd.Timestamp("2025-01-01") + pd.Timedelta(row % 30, "h"), "30 different dates"),
    "days of a database": (lambda row: date(2025, 1, row % 28 + 1), "28 different dates .* '2025-01-01'"),
    "identifiers": (lambda row: f"p{row}", "900 different values .* 'p0'"),
    "free text": (lambda row: f"{row * 2 // 3} " + "x" * 500, "600 different values in .* '0 x{38}', which"),
    "numbers of rows": (lambda row: row, "900 different values in 900 training rows"),
}


@pytest.mark.parametrize("case", NO_CLASSES)
@pytest.mark.parametrize("task", [None, "classification"])
def test_a_target_of_dates_or_of_a_value_a_row_is_no_target_of_classes(case: str, task: Any) -> None:
    value, message = NO_CLASSES[case]
    frame = patients(300).assign(given=[value(row) for row in range(1200)])
    if case == "numbers of rows" and task is None:
        assert environments(frame, target="given").table.classes is None
        return
    with pytest.raises(ArgumentError, match=f"target=given: has .*{message}.* are no classes; give a column of"):
        environments(frame, target="given", task=task, test=["west"])


@pytest.mark.parametrize(("rows", "classes"), [(125, 50), (10, 20), (15, 22), (300, 450)])
def test_a_target_of_many_honest_classes_is_taken(rows: int, classes: int) -> None:
    frame = patients(rows).assign(given=[f"kind {row % classes}" for row in range(4 * rows)])
    assert environments(frame, target="given", test=[]).table.outputs == classes
    dated = frame.assign(given=[f"2025-01-{row % 20 + 1:02}" for row in range(4 * rows)])
    assert environments(dated, target="given", test=[]).table.outputs == 20


def test_a_target_with_one_value_or_a_strange_one_is_refused() -> None:
    frame = patients()
    with pytest.raises(ArgumentError, match="died: has one value in all training environments, 1"):
        environments(frame.assign(died=1))
    with pytest.raises(ArgumentError, match="died: no training environment has its value 7"):
        environments(frame.assign(died=frame.died.where(frame.hospital != "west", 7)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"hospital;died\neast;1\n", "has one column; give --separator ';', which it seems to have"),
        (b'hospital;"a, b";died\neast;1;1\n', "has one column; give --separator ';', which it seems to have"),
        (b"hospital,died\nZ\xfcrich,1\n", "is not utf-8; give --encoding, such as latin-1"),
        ("hospital,died\neast,1\n".encode("utf-16"), "is not utf-8; give --encoding, such as utf-16"),
        (b"hospital,died\n", "has no rows"),
        (b"hospital\tdied\neast\t1\n", r"has one column; give --separator \$'\\t', which it seems to have"),
        (b"", "table.csv: is empty; give a CSV or Parquet file"),
        (b"\n\n", "table.csv: is empty"),
        (b"<!DOCTYPE html>\n<html>404, not found</html>", "table.csv: is a web page; give a CSV or Parquet file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "table.csv: is a pointer of Git LFS; git lfs pull"),
        (b"\x1f\x8b\x08\0", "table.csv: is compressed by gzip, so its name must end with .gz"),
        (b"\x93NUMPY\1\0v\0", "table.csv: is an array of numpy.save;"),
        (b"PAR1\x15\4\x15\2", "table.csv: is a Parquet file, whose name must end with .parquet"),
    ],
)
def test_files_of_another_kind_are_refused_in_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(text)
    with pytest.raises(ArgumentError, match=message) as refused:
        environments(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(ArgumentError, match="there is no such file"):
        environments(tmp_path / "other.csv")


def test_a_spreadsheet_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "table.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
    torch.save(torch.ones(2), tmp_path / "table.pt")
    np.savez(tmp_path / "table.npz", inputs=np.ones(2))
    with zipfile.ZipFile(tmp_path / "table.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("xl/workbook.xml", "<workbook/>")
    with zipfile.ZipFile(tmp_path / "table.ods", "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("content.xml", "<office:document-content/>")
    shutil.copy(tmp_path / "table.xlsx", tmp_path / "renamed.csv.zip")
    for name in ("table.xls", "table.xlsx", "table.ods", "renamed.csv.zip"):
        with pytest.raises(ArgumentError, match=f"{name}: is a spreadsheet; save it as CSV or Parquet"):
            environments(tmp_path / name)
    for ending in ("pt", "npz"):
        with pytest.raises(ArgumentError, match=rf"table.{ending}: is a ZIP archive, such as an .npz .*; give a CSV"):
            environments(tmp_path / f"table.{ending}")


@pytest.mark.parametrize("separator", ["ab", "", r"\t", "é"])
def test_a_separator_is_one_character_or_spaces(tmp_path: Path, separator: str) -> None:
    patients().to_csv(tmp_path / "table.csv", sep=" ", index=False, na_rep="NA", quoting=csv.QUOTE_NONNUMERIC)
    with pytest.raises(ArgumentError) as refused:
        environments(tmp_path / "table.csv", separator=separator)
    expected = r"must be one character (a tab is $'\t' in a shell), or \s+ for any number of spaces"
    assert str(refused.value) == f"separator={separator}: {expected}"
    assert environments(tmp_path / "table.csv", separator=r"\s+").train == ("east", "north", "south")


def test_a_row_of_another_kind_is_named_by_its_column() -> None:
    fitted = TableEncoder.fit(patients(), {"age": "numeric", "smokes": "boolean", "admitted": "date"})
    row = patients().head(2)
    for column, value, expected in (
        ("age", "old", "column age: expected numbers"),
        ("smokes", "perhaps", "column smokes: expected true and false"),
        ("admitted", "yesterday", "column admitted: expected dates"),
    ):
        with pytest.raises(ValueError, match=expected) as refused:
            fitted.encode(row.assign(**{column: value}))
        assert "\n" not in str(refused.value)
        assert "You might" not in str(refused.value)
    with pytest.raises(ValueError, match="column age is missing; the model needs age, smokes, admitted"):
        fitted.encode(row.drop(columns="age"))
    assert dataclasses.is_dataclass(fitted)


SEVERAL = {
    "list": pa.array([[1.0, 2.0]] * 240),
    "list of one length": pa.array([[1.0, 2.0]] * 240, pa.list_(pa.float64(), 2)),
    "struct": pa.array([{"low": 1}] * 240),
    "map": pa.array([[("low", 1)]] * 240, pa.map_(pa.string(), pa.int64())),
    "bytes": pa.array([b"\xff"] * 240),
}


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("use", ["input", "target", "environment"])
def test_a_column_with_several_values_or_bytes_in_a_cell_is_refused_or_left_out(
    tmp_path: Path, kind: str, use: str
) -> None:
    table = pa.Table.from_pandas(patients(), preserve_index=False).append_column("odd", SEVERAL[kind])
    pq.write_table(table, tmp_path / "odd.parquet")
    names = {} if use == "input" else {use: "odd"}
    with pytest.raises(
        ArgumentError, match=r"columns=odd: a cell has a value of type .*; make it text or numbers, or "
    ):
        environments(tmp_path / "odd.parquet", **names)
    if use == "input":
        assert "odd" not in environments(tmp_path / "odd.parquet", kinds={"odd": "ignore"}).table.kinds


def test_durations_are_numbers_in_files_frames_and_the_encoder(tmp_path: Path) -> None:
    stay = pd.to_timedelta(np.arange(240), "h")
    patients().assign(stay=stay).to_parquet(tmp_path / "stay.parquet")
    for data in (patients().assign(stay=stay), tmp_path / "stay.parquet"):
        found = environments(data)
        assert found.table.kinds["stay"] == "numeric"
        assert found.table.frame["stay"].tolist() == (3600.0 * np.arange(240)).tolist()
    fitted = encoder(patients().assign(stay=stay))
    rows = patients().assign(stay=stay)
    assert np.array_equal(fitted.encode(rows), fitted.encode(rows.assign(stay=3600.0 * np.arange(240))))


@pytest.mark.parametrize("index", [["hospital"], ["died"], ["hospital", "died"], ["age", "hospital"]])
def test_the_environment_and_the_target_may_be_the_index_of_a_frame(tmp_path: Path, index: list[str]) -> None:
    frame = patients().set_index(index)
    frame.to_parquet(tmp_path / "indexed.parquet")
    for data in (frame, tmp_path / "indexed.parquet"):
        found = environments(data)
        assert found.train == PLACES[:3]
        assert "hospital" not in found.table.kinds


def test_columns_of_several_levels_are_refused_in_one_line() -> None:
    frame = patients()
    deep = frame.set_axis(pd.MultiIndex.from_product([["all"], frame.columns]), axis=1)
    with pytest.raises(ArgumentError, match=r"is the name of a column in several levels; join them"):
        environments(deep)


def test_a_number_too_far_from_the_training_rows_is_named_with_its_column_and_row() -> None:
    frame = patients().assign(dose=np.linspace(0, 1, 240))
    frame.loc[5, "died"] = None
    frame.loc[200, "dose"] = 1e300
    with (
        pytest.warns(UserWarning, match="1 of 240 rows have no died"),
        pytest.raises(
            InputError, match=r"environment west: column dose: data row 201 has 1e\+300, too far from the training"
        ),
        np.errstate(over="ignore"),
    ):
        environments(frame).fitted(0.1, 0)["west"]
    frame = patients().assign(dose=np.where(np.arange(240) == 200, 1e300, np.linspace(0, 1, 240)))
    with (
        pytest.raises(InputError, match=r"environment west: column dose: data row 201 has 1e\+300"),
        np.errstate(over="ignore"),
    ):
        environments(frame, target="dose").fitted(0.1, 0)["west"]


def test_a_cluster_column_is_no_input_and_one_that_joins_no_rows_or_all_is_refused() -> None:
    frame = pd.DataFrame(
        {
            "site": list("aabbcc"),
            "patient": [1, 1, 2, 2, 3, 4],
            "row": range(6),
            "x": [0.1, 2, 1, 4, 3, 5],
            "y": [0, 1] * 3,
        }
    ).assign(same=1)
    found = from_table(frame, target="y", environment="site", validation=["c"], cluster_by="patient")
    assert "patient" not in found.table.kinds
    assert found.only_names().clusters["c"].tolist() == ["3", "4"]
    for column, problem in {
        "row": "each row has a value of its own, the same as without it; leave it out",
        "same": "all rows have one value; give a column with several, or none",
        "site": "is the column of another option, too; give another",
        "nope": "no such column",
    }.items():
        with pytest.raises(ArgumentError, match=f"{column}: {problem}"):
            from_table(frame, target="y", environment="site", cluster_by=column)
