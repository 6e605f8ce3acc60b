"""Your own table: a CSV or Parquet file with a column that says where each row comes from."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor, nn

from concord.environments.table import Kind, TableEnvironments, from_table
from concord.environments.table_summary import lines, table_summary
from concord.errors import ArgumentError, InputError
from concord.models.mlp_options import MLPOptions
from concord.models.table_network import TableNetwork
from concord.options import OptionGroup, option_values
from concord.training import Job, TrainConfig
from concord.training.job import Data

KINDS: tuple[Kind, ...] = ("numeric", "category", "boolean", "date", "ignore")


@dataclass(frozen=True, kw_only=True)
class TableOptions(OptionGroup):
    """Which table, and what its columns are."""

    # fmt: off
    data: Path | None = None
    """CSV or Parquet file, or a folder with a file an environment."""
    environment: str | None = None
    """Column that says where each row comes from; of a folder, the files' names."""
    target: str = ""
    """Column to predict."""
    test: tuple[str, ...] = ()
    """Environments to test on."""
    validation: tuple[str, ...] = ()
    """Environments to choose models by."""
    task: Literal["auto", "classification", "regression"] = "auto"
    """What to predict; auto: classes of text and of few whole numbers, else numbers."""
    numeric: tuple[str, ...] = ()
    """Columns of numbers, where the table does not show it."""
    category: tuple[str, ...] = ()
    """Columns of categories, such as codes that are numbers."""
    boolean: tuple[str, ...] = ()
    """Columns of true and false."""
    date: tuple[str, ...] = ()
    """Columns of dates, ISO 8601."""
    ignore: tuple[str, ...] = ()
    """Columns to leave out."""
    environment_bins: int | None = None
    """Cut a numeric environment column at quantiles into this many environments."""
    separator: str = ","
    """Between the columns of a CSV file."""
    encoding: str = "utf-8"
    """Of a CSV file."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        if self.data is None:
            raise ArgumentError("data", None, "needed; a CSV or Parquet file, or a folder with a file an environment")
        if not self.target:
            raise ArgumentError("target", None, "needed; the column to predict")
        self.require("environment_bins", (self.environment_bins or 2) >= 2, "must be at least 2")
        named = [name for kind in KINDS for name in getattr(self, kind)]
        for name in named:
            if named.count(name) > 1:
                raise InputError(f"column {name}: is given two kinds")


@dataclass(frozen=True, kw_only=True)
class TableConfig(TrainConfig):
    """Rows of a table, in environments by one of its columns."""

    # fmt: off
    table: TableOptions = field(default_factory=TableOptions)
    network: Literal["mlp", "linear"] = "mlp"
    """Network; linear is logistic or linear regression."""
    mlp: MLPOptions = field(default_factory=lambda: MLPOptions(hidden_units=64))
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class TableCheck(TableOptions):
    """Says what is understood of a table, and trains nothing."""

    # fmt: off
    checked: Annotated[Path | None, tyro.conf.arg(name="check")] = None
    """CSV or Parquet file, or a folder with a file an environment, to look at."""
    # fmt: on


def check(options: TableCheck, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Environments, kinds of columns, what is missing, and which columns give the environment away."""
    options = dataclasses.replace(options, data=options.checked or options.data)
    options.check()
    summary = table_summary(_table(options).table)
    for line in lines(summary):
        info(line)
    return summary


@functools.lru_cache(maxsize=1)
def _table(options: TableOptions) -> TableEnvironments:
    assert options.data is not None
    return from_table(
        options.data,
        target=options.target,
        environment=options.environment,
        validation=options.validation,
        test=options.test,
        kinds={name: kind for kind in KINDS for name in getattr(options, kind)},
        task=None if options.task == "auto" else options.task,
        environment_bins=options.environment_bins,
        separator=options.separator,
        encoding=options.encoding,
    )


def environments(config: TableConfig) -> TableEnvironments:
    """An environment for each value of the column, read once a process."""
    return _table(config.table)


def model(config: TableConfig) -> nn.Module:
    """A network as wide as the table's columns ask for."""
    table = _table(config.table).table
    layers = {} if config.network == "mlp" else {"hidden_layers": 0}
    return TableNetwork(*table.widest.widths, table.outputs, **option_values(config.mlp) | layers)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of classes, squared error of numbers."""
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs, targets)
    return nn.functional.cross_entropy(outputs, targets)


job = Job(
    environments,
    model,
    loss,
    config=TableConfig().with_options(batch_size=64, epochs=100),
    data=Data(TableCheck, check, tells=True),
)
