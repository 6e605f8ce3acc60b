"""Your own table: rows of a file, in environments by a column."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import tyro

from concord.environments.text_defaults import TEXT_LENGTH, TEXT_MODEL
from concord.errors import ArgumentError, InputWarning
from concord.models.table_network_options import TableNetworkOptions
from concord.options import Detail, Learning, OptionGroup, Scoring, group
from concord.storage import check_address
from concord.training import EnvironmentEvaluation, Job, TrainConfig
from concord.training.baseline import TABLE_BASELINES, fit_table
from concord.training.job import Data
from concord.training.options import DataOptions

# With PyTorch and pandas, which take seconds: help and a wrong option do without.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from concord.environments.csv_file import CsvFormat
    from concord.environments.table import TableEnvironments
    from concord.environments.table_rows import Kind, Table


@dataclass(frozen=True, kw_only=True)
class TableData(DataOptions):
    """The table, and the data of a run."""

    # fmt: off
    data: Path | None = None
    """CSV or Parquet file, or a folder with one file for each environment."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        _given(self.data)


@dataclass(frozen=True, kw_only=True)
class TableOptions(OptionGroup):
    """The table's columns."""

    # fmt: off
    environment: str | None = None
    """Column that says where each row comes from; in a folder, by default the files' names."""
    target: str = ""
    """Column to predict."""
    test: tuple[str, ...] = ()
    """Environments to test on."""
    validation: tuple[str, ...] = ()
    """Environments that select models."""
    task: Literal["auto", "classification", "regression", "ordinal", "count"] = "auto"
    """Kind of the target; auto takes text and few whole numbers as classes, other targets as numbers. ordinal: levels
    in an order; count: whole numbers from 0 on, by the Poisson loss."""
    levels: Detail[tuple[str, ...]] = ()
    """Values of an ordinal target from the lowest to the highest, such as: low mid high; numbers need none."""
    cutoff: Scoring[float] = 0.5
    """Probability from which the second of two classes is predicted, for recall and specificity."""
    columns: tuple[str, ...] = ()
    """Kinds of columns that override the inferred ones, such as zip=category patient=ignore."""
    environment_bins: Detail[int | None] = None
    """Cut a numeric environment column at quantiles into this many environments."""
    environment_by: tuple[str, str] | None = None
    """In place of --environment, a unit of time (day, week, month, quarter, year) or a number of parts, and a column of
    dates, such as: week admitted."""
    test_last: Detail[int | None] = None
    """Test on the last environments in time, this many."""
    weight: Detail[str | None] = None
    """Column by which rows count, in the loss, in every measure and in the baselines; no input."""
    cluster_by: Detail[str | None] = None
    """Column that names what several rows belong to, such as patient; splits and intervals keep them together."""
    text: tuple[str, ...] = ()
    """Columns of text, of which an encoder of Hugging Face makes inputs; others are ignored."""
    text_model: Detail[str] = TEXT_MODEL
    """Encoder of texts: a folder with model.safetensors, or a name on the hub."""
    text_length: Detail[int] = TEXT_LENGTH
    """Largest number of tokens of a text; the rest is cut off."""
    train_encoder: Detail[bool] = False
    """Train the encoder of texts with the network; by default it is frozen, and each text is encoded once."""
    text_lr: Detail[Learning[float]] = 2e-5
    """Learning rate of an encoder that is trained."""
    separator: Detail[str] = ","
    """Separator of the columns of a CSV file."""
    encoding: Detail[str] = "utf-8"
    """Encoding of a CSV file."""
    decimal: Detail[str] = "."
    """Decimal point of the numbers of a CSV file."""
    thousands: Detail[str] = ""
    """Character between groups of three digits in the numbers of a CSV file."""
    missing: tuple[str, ...] = ()
    """Cells of a CSV file without a value, such as ? or -9, besides empty ones, NA and the like."""
    date_format: Detail[str] = ""
    """Format of the dates of a CSV file, such as %d/%m/%Y; ISO 8601 needs none."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        from concord.environments.table_rows import Kind

        self.require_at_least(1, "text_length")
        self.require("text_lr", self.text_lr > 0, "must be above 0")
        self.require("train_encoder", bool(self.text) or not self.train_encoder, "needs --text; give its columns")
        self.require("cutoff", 0 <= self.cutoff <= 1, "must be a probability, in [0, 1]")
        if not self.target:
            raise ArgumentError("target", None, "needed; give the column to predict")
        self.csv_format()
        for given in self.columns:
            kind, kinds = given.rpartition("=")[2], get_args(Kind)
            right = "=" in given and kind in kinds
            self.require("columns", right, f"expected NAME=KIND, with a kind of {', '.join(kinds)}; found {given}")

    def csv_format(self) -> "CsvFormat":
        """How a CSV file is written (ArgumentError if that cannot be meant)."""
        from concord.environments.csv_file import CsvFormat

        written = (self.separator, self.encoding, self.decimal, self.thousands, self.missing, self.date_format)
        return CsvFormat(*written)


@dataclass(frozen=True, kw_only=True)
class TableConfig(TrainConfig):
    """Rows of a table, in environments by one of its columns."""

    # fmt: off
    data: TableData = group(TableData)
    table: TableOptions = group(TableOptions)
    network_options: TableNetworkOptions = group(TableNetworkOptions, network="wide-and-deep", hidden_units=64)
    # fmt: on

    def implied(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a given option ends of the defaults: with epochs a run has exactly these passes over the largest
        environment; without rows that choose weights, or with another end of the run, it keeps the last ones.
        """
        implied = dict(super().implied(changes))
        if "epochs" in changes:
            implied |= {"epoch_steps": 0, "patience": 0}
        nothing_chooses = changes.get("held_out") == 0 and not changes.get("validation", self.table.validation)
        if nothing_chooses or changes.get("stop_spread") or changes.get("keep") == "last":
            implied |= {"patience": 0, "keep": "last"}
        return implied


@dataclass(frozen=True, kw_only=True)
class TableCheck(TableOptions):
    """Show how Concord reads a table; trains nothing."""

    # fmt: off
    # Its option is --check: ``check`` is the method of every group of options.
    checked: Annotated[Path | None, tyro.conf.arg(name="check")] = None
    """CSV or Parquet file to look at, or a folder with one file for each environment."""
    data: Path | None = None
    """The same as --check."""
    # fmt: on


def check(options: TableCheck, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Print environments, columns and their relations with the target by environment, and what to know of them."""
    from concord_jobs.table.summary import lines, table_summary

    data = _given(options.checked or options.data)
    check_address("data", data)
    options.check()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        table = _read(data, options)
    left_out = [given.removesuffix("=ignore") for given in options.columns if given.endswith("=ignore")]
    summary = table_summary(table, left_out)
    said = [str(each.message) for each in caught]
    summary["warnings"] = [each for each in said if each not in summary["notes"]]
    if options.environment_by is not None:
        unit, column = options.environment_by
        what = f"{unit} parts in time" if unit.isdecimal() else f"each {unit}"
        summary["notes"].insert(0, f"environments are {what} of {column}, which is no input")
    for line in lines(summary):
        info(line)
    return summary


def _given(data: Path | None) -> Path:
    if data is None:
        needed = "needed; give a CSV or Parquet file, or a folder with one file for each environment"
        raise ArgumentError("data", None, needed)
    return data


@functools.lru_cache(maxsize=1)
def _unchanged(data: Path, options: TableOptions, change: Hashable) -> "TableEnvironments":
    """The table of a file or folder that last changed so."""
    from concord.analysis.columns.leaks import leak_warning, leaking_columns
    from concord.environments.table import TableEnvironments

    del change
    table, model = _read(data, options), (options.text_model, options.text_length)
    if leaks := leak_warning(leaking_columns(table)):
        warnings.warn(leaks, InputWarning, stacklevel=2)
    return TableEnvironments.of(table, *model, train_encoder=options.train_encoder)


def _table(data: Path | None, options: TableOptions) -> "TableEnvironments":
    from concord.environments.data_files import last_change

    given = _given(data)
    return _unchanged(given, options, last_change(given))


def _read(data: Path, options: TableOptions) -> "Table":
    from concord.environments.table_rows import read_table_rows

    return read_table_rows(
        data,
        options.csv_format(),
        target=options.target,
        environment=options.environment,
        validation=options.validation,
        test=options.test,
        kinds=cast("dict[str, Kind]", dict(each.rsplit("=", 1) for each in options.columns)),
        task=None if options.task == "auto" else options.task,
        environment_bins=options.environment_bins,
        environment_by=options.environment_by,
        test_last=options.test_last,
        weight=options.weight,
        cluster_by=options.cluster_by,
        levels=options.levels,
        text=options.text,
    )


def environments(config: TableConfig) -> "TableEnvironments":
    """An environment for each value of the column; in each process read once, and again after a change."""
    return _table(config.data.data, config.table)


def model(config: TableConfig) -> "nn.Module":
    """A network for the table's number of columns."""
    data, fitted = environments(config), config.network_options.baseline is not None
    train = config.table.train_encoder
    config.require(
        "train_encoder", not (train and fitted), "baselines take a frozen one (--no-baselines leaves them out)"
    )
    mixed = train and config.objective.objective == "mixup"
    config.require("train_encoder", not mixed, "mixup cannot mix tokens; leave one of both out")
    return data.network(config.network_options.build(data.table, job.environments_of(config).train))


def parameter_groups(model: "nn.Module", config: TableConfig) -> "Sequence[Mapping[str, Any]] | None":
    """An encoder of texts that is trained has a learning rate of its own."""
    from concord.environments.text_model import TextNetwork

    if not isinstance(model, TextNetwork):
        return None
    encoder = [*model.encoder.parameters()]
    known = {id(each) for each in encoder}
    others = [each for each in model.parameters() if id(each) not in known]
    return [{"params": encoder, "lr": config.table.text_lr}, {"params": others}]


def evaluation(config: TableConfig) -> EnvironmentEvaluation:
    """The usual measures of classes, with accuracy to compare models; of levels, numbers and counts their errors."""
    from concord.environments.table import TableEnvironments
    from concord.training.measures import ordinal, usual_classification
    from concord.training.regression import count_errors, regression_errors

    table = environments(config).table
    classes = table.classes
    two = table.task == "classification" and table.outputs == 2
    config.require("cutoff", two or config.table.cutoff == 0.5, "the target does not have two classes; leave it out")
    if table.task == "ordinal":
        return ordinal(table.outputs)
    if classes is not None:
        return dataclasses.replace(usual_classification(len(classes), config.table.cutoff), compares=False)
    fitted = job.environments_of(config).fitted(config.data.held_out, config.run.seed)
    assert isinstance(fitted, TableEnvironments)
    assert fitted.target_scale is not None
    if table.task == "count":
        return count_errors(fitted.target_scale.mean)
    return regression_errors(fitted.target_scale.deviation)


def loss(outputs: "Tensor", targets: "Tensor") -> "Tensor":
    """Cross entropy of classes, squared error of standardized numbers, Poisson deviance of counts ``(rows, 1)``."""
    from torch.nn.functional import cross_entropy, mse_loss

    from concord.training.regression import poisson_deviance

    if targets.is_floating_point():
        return mse_loss(outputs, targets)
    if targets.ndim == 2:
        return poisson_deviance(outputs, targets).mean()
    return cross_entropy(outputs, targets)


job = Job(
    environments,
    model,
    loss,
    # At a constant rate training ends when the held-out rows no longer improve. An epoch has 50 steps, of a large table
    # one pass over its largest environment: a hundred of them are more than most tables take.
    config=TableConfig().with_options(
        batch_size=64,
        epochs=100,
        epoch_steps=50,
        evaluations=100,
        schedule="constant",
        keep="least-loss",
        patience=10,
        held_out_environments=0.2,
    ),
    evaluation=evaluation,
    data=Data(TableCheck, check, prints_result=True),
    parameter_groups=parameter_groups,
    fit=fit_table,
    baselines=TABLE_BASELINES,
    reproduces="no paper's result: for data of your own",
)
