"""Time as environment: periods of a column of dates, their order and their names."""

import itertools
import re
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.cli import main
from concord.environments.periods import UNITS, periods
from concord.environments.table import from_table
from concord.errors import ArgumentError, InputError
from concord.execution.preflight import preflight
from concord.training import load_job

DAYS = st.dates(date(1900, 1, 1), date(2199, 12, 31))
MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2199, 12, 31))


def visits(rows: int = 364) -> pd.DataFrame:
    """A row a day, in an order of its own, of which each week has as many ill."""
    days = pd.Timestamp("2013-01-01") + pd.to_timedelta(np.arange(rows) * 5 % rows, "D")
    return pd.DataFrame({"admitted": days, "age": np.arange(rows) % 50 + 20.5, "ill": np.arange(rows) % 2})


@settings(max_examples=50, deadline=None)
@given(st.lists(MOMENTS, min_size=2, max_size=30), st.sampled_from([*UNITS, "2", "5"]))
def test_names_sort_as_the_dates_do(moments: list[datetime], by: str) -> None:
    moments.sort()
    names = periods(pd.Series(moments, name="at"), by).tolist()
    assert names == sorted(names)


@settings(max_examples=50, deadline=None)
@given(DAYS)
def test_names_are_those_of_iso_8601(day: date) -> None:
    column = pd.Series([day.isoformat()], name="at")
    year, week, _ = day.isocalendar()
    named = {by: periods(column, by).item() for by in UNITS}
    assert named == {
        "day": day.isoformat(),
        "week": f"{year}-W{week:02}",
        "month": day.isoformat()[:7],
        "quarter": f"{day.year}-Q{(day.month + 2) // 3}",
        "year": str(day.year),
    }


def test_a_date_of_digits_may_be_a_number_without_its_first_zero() -> None:
    dates = pd.Series([1112024, 31122024], name="at")
    assert periods(dates, "month", "%d%m%Y").tolist() == ["2024-11", "2024-12"]


@settings(max_examples=50, deadline=None)
@given(st.lists(DAYS, min_size=1, max_size=40), st.integers(2, 8))
def test_parts_are_of_whole_days_between_their_names(days: list[date], parts: int) -> None:
    names = periods(pd.Series(pd.to_datetime(days), name="at"), str(parts))
    assert 1 <= names.nunique() <= parts
    ends = [name.split("..") for name in sorted(set(names))]
    assert all(first <= last for first, last in ends)
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(ends))
    assert all(name[:10] <= day.isoformat() <= name[12:] for name, day in zip(names, days, strict=True))


def test_parts_have_as_many_rows_each_and_dates_of_any_form_are_the_same() -> None:
    frame = visits()
    names = periods(frame.admitted, "4")
    assert names.value_counts().tolist() == [91] * 4
    written = {
        "": frame.admitted.dt.strftime("%Y-%m-%d"),
        "%d/%m/%Y": frame.admitted.dt.strftime("%d/%m/%Y"),
        "%Y%m%d": frame.admitted.dt.strftime("%Y%m%d").astype(int),
    }
    for form, column in written.items():
        assert periods(column, "4", form).tolist() == names.tolist()
    assert set(periods(frame.admitted.dt.year, "year")) == {"2013"}  # years as numbers
    zoned = pd.Series(["2013-01-01T00:30:00+01:00", "2013-01-01T00:30:00-01:00"])
    assert periods(zoned, "day").tolist() == ["2012-12-31", "2013-01-01"]


def test_weeks_of_a_column_are_environments_in_order_and_the_column_is_no_input(tmp_path: Path) -> None:
    frame = visits()
    frame.to_csv(tmp_path / "visits.csv", index=False)
    for data in (frame, tmp_path / "visits.csv"):
        found = from_table(
            data, environment_by=("week", "admitted"), target="ill", test_last=4, validation=["2013-W40"]
        )
        assert found.test == ("2013-W50", "2013-W51", "2013-W52", "2014-W01")
        assert found.train[:2] == ("2013-W01", "2013-W02")
        assert len(found.names) == 53
        assert list(found.table.kinds) == ["age"]
        assert sorted(frame.admitted[found.table.rows(["2013-W05"]).index].dt.day.tolist()) == [1, 2, 3, 28, 29, 30, 31]


def test_files_of_a_folder_are_one_table_in_time(tmp_path: Path) -> None:
    for name, rows in visits().groupby("age"):
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
    found = from_table(tmp_path, environment_by=("quarter", "admitted"), target="ill")
    assert found.train == ("2013-Q1", "2013-Q2", "2013-Q3", "2013-Q4")
    assert list(found.table.kinds) == ["age"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another unit": ({"environment_by": ("weak", "admitted")}, "=weak: the first word must be day, week, month"),
    "one part": ({"environment_by": (1, "admitted")}, "=1: the first word must be .* or a number of parts, at least 2"),
    "no such column": ({"environment_by": ("week", "at")}, r"environment_by=at: no such column; there are admitted"),
    "beside a column": ({"environment": "age"}, r"environment_by=\('month', 'admitted'\): replaces --environment"),
    "beside bins": ({"environment_bins": 3}, "replaces --environment-bins; leave that out"),
    "the target": ({"target": "admitted"}, "target=admitted: is also the environment's column"),
    "a missing date": ({"date": None}, "data row 8 has no date; fill it in or remove the row"),
    "no date": ({"date": "in May"}, "data row 8 has 'in May', which is not a date of ISO 8601; give --date-format"),
    "another form": ({"date": "5/1/2013"}, "data row 8 has '5/1/2013', which is not a date of ISO 8601"),
    "a period a row": ({"environment_by": ("day", "admitted")}, "gives 364 environments of 364 rows, fewer than two"),
    "one period": ({"environment_by": ("year", "admitted")}, "two environments are needed .* are 2013"),
    "the last of nothing": ({"test_last": 0}, "test_last=0: must be at least 1"),
    "the last and others": ({"test_last": 1, "test": ["2013-01"]}, "test_last=1: .* in place of --test"),
    "no last hospital": ({"environment_by": None, "environment": "age", "test_last": 1}, "with --environment-by"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_time_is_refused_in_one_line(case: str) -> None:
    options, message = REFUSED[case]
    frame = visits()
    if "date" in options:
        frame["admitted"] = frame.admitted.dt.strftime("%Y-%m-%d").astype(object)
        frame.loc[7, "admitted"] = options["date"]
    given = {"environment_by": ("month", "admitted"), "target": "ill", **options}
    given.pop("date", None)
    with pytest.raises(InputError, match=message) as refused:
        from_table(frame, **given)
    assert "\n" not in str(refused.value)


def test_dates_of_another_form_are_refused_by_their_row() -> None:
    with pytest.raises(ArgumentError, match=r"data row 2 has '2013-01-02', which is not a date like %d/%m/%Y"):
        periods(pd.Series(["01/02/2013", "2013-01-02"], name="at"), "day", "%d/%m/%Y")


def test_a_check_and_a_run_have_the_months(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = visits()
    frame.assign(admitted=frame.admitted.dt.strftime("%d.%m.%Y")).to_csv(tmp_path / "visits.csv", index=False)
    words = ["--environment-by", "month", "admitted", "--target", "ill", "--test-last", "2"]
    check = ["data", "table", "--check", str(tmp_path / "visits.csv"), *words]
    assert main([*check, "--date-format", "%d.%m.%Y"]) == 0
    lines = capsys.readouterr().err
    assert "environments are each month of admitted, which is no input\n" in lines
    assert re.search(r"^environment 2013-12 \(test\): 30 rows", lines, re.MULTILINE)
    job = load_job("table")
    months = {"environment_by": ("month", "admitted"), "date_format": "%d.%m.%Y", "test_last": 2}
    config = job.job.config.with_options(data=tmp_path / "visits.csv", target="ill", **months)
    assert preflight(job, config).environments.test == ("2013-11", "2013-12")
    assert main(check) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--environment-by month admitted: data row 1 has '01.01.2013', which is not a date of ISO 8601" in last
