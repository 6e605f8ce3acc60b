"""A table with a column for the environment of each row, as it is read: no module here needs PyTorch."""

import functools
import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import pandas as pd
import pyarrow as pa

from concord.environments.csv_file import CsvFormat, exact, read_cells, typed
from concord.environments.data_files import COMPRESSIONS, SPREADSHEET, data_files, kind_by_content, missing, stem
from concord.environments.parquet import read_table
from concord.environments.periods import parts_of, periods
from concord.environments.purposes import purposes_of
from concord.environments.row_names import OF_ONE_FILE, RowNames
from concord.environments.table_encoder import TableEncoder, as_texts, plain, stripped
from concord.environments.unread_values import unread_values
from concord.errors import ArgumentError, InputError, InputWarning, first_line
from concord.storage import display_path, local

Kind = Literal["numeric", "category", "boolean", "date", "ignore"]
Task = Literal["classification", "regression", "ordinal", "count"]
_MOST_CLASSES = 20  # of a numeric target; more distinct numbers are a regression
_MOST_ENVIRONMENTS = 200  # of a numeric environment column, and of any other whose values name the rows
_NAMES_ROWS = 0.9  # a column of whole numbers with more different values a row may name the rows
_LEAST_VALUES = 20  # of a column whose numbers measure, count or name something
_LONGEST_EXAMPLE = 40  # letters of a value in an error
_IDENTIFIERS = 0.9  # a text column with more levels a row than this names the rows
_ENDINGS = (".csv", *(f".csv{each}" for each in COMPRESSIONS), ".parquet")
_TEXT_KINDS = {"category": "a category", "ignore": "left out"}
_ROW_NUMBERS = re.compile(r"Unnamed: \d+")  # pandas' name of a column without one, such as an index in a file


class TargetScale(NamedTuple):
    """A regression is trained on ``(target - mean) / deviation``, of the training rows.

    Counts stay as they are, and the model's output is the logarithm of their rate: ``log``.
    """

    mean: float
    deviation: float
    log: bool = False

    def in_units(self, outputs: Any) -> Any:
        """Outputs of a model, an array, in the target's units."""
        return np.exp(outputs) if self.log else self.mean + self.deviation * outputs


@dataclass(frozen=True)
class Table:
    """A table and the kinds of its columns.

    Attributes:
        frame: the rows that have a target, by their place among all.
        environment: the environment of each row.
        target: the name of the target's column.
        kinds: of the other columns, without ignored ones.
        classes: the target's values in order; None for a regression, and for counts.
        by_purpose: the names of the environments.
        without_target: the number of rows left out.
        weight: the name of the column of the rows' weights, all above 0; None if all rows count alike.
        task: what the target is.
        text: the columns of text that an encoder takes.
        between: the number of inputs of their vectors.
        cluster: the name of the column that says what each row belongs to, as text; None if each stands for itself.
        row_names: how errors name the rows.
    """

    frame: pd.DataFrame
    environment: pd.Series
    target: str
    kinds: Mapping[str, str]
    classes: tuple[Any, ...] | None
    by_purpose: Mapping[str, tuple[str, ...]]
    without_target: int
    weight: str | None = None
    cluster: str | None = None
    task: Task = "classification"
    text: tuple[str, ...] = ()
    between: int = 0
    row_names: RowNames = OF_ONE_FILE

    @functools.cached_property
    def version(self) -> str:
        """Text that differs when the rows do, or what is predicted, from what, in which environments."""
        more = [each for each in (self.weight, self.cluster, *self.text) if each is not None]
        used = pd.concat([self.frame[[self.target, *sorted(self.kinds), *more]], self.environment], axis=1)
        rows = hashlib.sha256(pd.util.hash_pandas_object(used, index=False).to_numpy().tobytes()).hexdigest()
        predicted: Any = self.classes or "standardized"
        if self.task in ("ordinal", "count"):
            predicted = (self.task, self.classes)
        what = repr((rows, self.target, sorted(self.kinds.items()), predicted))
        return hashlib.sha256(what.encode()).hexdigest()[:16]

    @property
    def outputs(self) -> int:
        """The outputs of a model: one for each class, or one number."""
        return 1 if self.classes is None else len(self.classes)

    @functools.cached_property
    def widest(self) -> TableEncoder:
        """An encoder of all rows of the training environments: no fitted one has more levels."""
        return replace(fit_encoder(self.rows(self.by_purpose["train"]), self.kinds), between=self.between)

    def rows(self, names: Collection[str]) -> pd.DataFrame:
        """The rows of these environments."""
        return self.frame[self.environment.isin(list(names))]

    def target_scale(self, rows: pd.DataFrame) -> TargetScale | None:
        """Mean and deviation of the numbers in these rows; None for classes."""
        if self.classes is not None:
            return None
        values, weights = rows[self.target].to_numpy(dtype=np.float64), self.weights(rows)
        if self.task == "count":
            return TargetScale(float(np.average(values, weights=weights)), 1.0, log=True)
        if weights is None:
            return TargetScale(float(values.mean()), float(values.std()) or 1.0)
        mean = float(np.average(values, weights=weights))
        return TargetScale(mean, float(np.sqrt(np.average((values - mean) ** 2, weights=weights))) or 1.0)

    def weights(self, rows: pd.DataFrame) -> "np.ndarray[Any, np.dtype[np.float64]] | None":
        """The weights of these rows, float64; None if all rows count alike."""
        return None if self.weight is None else rows[self.weight].to_numpy(dtype=np.float64)


def fit_encoder(rows: pd.DataFrame, kinds: Mapping[str, str]) -> TableEncoder:
    """The encoder of these rows (InputError if a column's values are not of its kind)."""
    try:
        return TableEncoder.fit(rows, kinds)
    except ValueError as error:
        advice = "give its kind, such as --columns NAME=category or from_table(…, kinds={'NAME': 'category'})"
        raise InputError(f"{error}; {advice}") from error


def read_table_rows(
    data: str | Path | pd.DataFrame,
    form: CsvFormat,
    *,
    target: str,
    environment: str | None = None,
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    kinds: Mapping[str, Kind] | None = None,
    task: Task | None = None,
    environment_bins: int | None = None,
    environment_by: tuple[str | int, str] | None = None,
    test_last: int | None = None,
    weight: str | None = None,
    cluster_by: str | None = None,
    levels: Sequence[str] = (),
    text: Sequence[str] = (),
) -> Table:
    """The rows of a table and what they are; the arguments are those of
    :func:`~concord.environments.table.from_table`, and the form of CSV files."""
    for name, kind in (kinds or {}).items():
        if kind not in get_args(Kind):
            raise ArgumentError("kinds", f"{name}={kind}", f"must be one of {', '.join(get_args(Kind))}")
    if environment_bins is not None and environment_bins < 2:
        raise ArgumentError("environment_bins", environment_bins, "must be at least 2")
    option, unit = "environment", None
    if environment_by is not None:
        option, unit = "environment_by", str(environment_by[0])
        parts_of(unit)
        for other, given in (("environment", environment), ("environment_bins", environment_bins)):
            if given is not None:
                raise ArgumentError(
                    "environment_by", environment_by, f"replaces --{other.replace('_', '-')}; leave that out"
                )
        environment = environment_by[1]
    if test_last is not None and (unit is None or test or test_last < 1):
        raise ArgumentError("test_last", test_last, "must be at least 1, with --environment-by and in place of --test")
    if isinstance(data, pd.DataFrame):
        if data.columns.nlevels > 1:
            raise ArgumentError("data", data.columns[0], "is the name of a column in several levels; join them to one")
        frame, row_names = _with_index(data, environment, target), OF_ONE_FILE
    elif not isinstance(data, str | Path):
        expected = "must be a file, a folder or a pandas frame, such as to_pandas() of another frame"
        raise ArgumentError("data", type(data).__name__, expected)
    else:
        texts = {str(name) for name, kind in (kinds or {}).items() if kind == "category"} - {target}
        if environment_bins is None and unit is None:
            texts.add(environment or "environment")
        if cluster_by is not None:
            texts.add(cluster_by)
        frame, environment, row_names = _read(Path(data), target, environment, form, texts, named=unit is None)
    target = str(target)  # a frame's columns may have numbers as names
    kinds = {str(name): kind for name, kind in (kinds or {}).items()}
    environment = None if environment is None else str(environment)
    if twice := _twice(frame.columns):
        raise ArgumentError("data", twice, "is the name of two columns; rename one")
    frame = plain(frame)
    if environment is None:
        raise ArgumentError("environment", None, f"needed; a column of {', '.join(map(str, frame.columns))}")
    named = {option: environment, "target": target}
    named |= {name: each for name, each in (("weight", weight), ("cluster_by", cluster_by)) if each is not None}
    text = tuple(dict.fromkeys(text))
    asked_for = [*named.items(), *(("text", each) for each in text), *(("columns", each) for each in kinds)]
    for asked, name in asked_for:
        if name not in frame.columns:
            raise ArgumentError(asked, name, f"no such column; there are {', '.join(map(str, frame.columns))}")
    if environment == target:
        raise ArgumentError("target", target, "is also the environment's column; give another")
    taken = [*named.values(), *text]
    for asked, name in asked_for[2 : len(taken)]:
        if taken.count(name) > 1:
            raise ArgumentError(asked, name, "is the column of another option, too; give another")
    left_out = {name for name, kind in kinds.items() if kind == "ignore"} - {*taken}
    _require_single_values(frame.drop(columns=list(left_out)))
    frame = frame.reset_index(drop=True)
    frame[target] = stripped(frame[target])
    labelled = frame[target].notna()
    rows = frame[labelled]
    if rows.empty:
        raise ArgumentError("target", target, "has no value in any row")
    if len(rows) < len(frame):
        warnings.warn(
            f"{len(frame) - len(rows)} of {len(frame)} rows have no {target} and are left out",
            InputWarning,
            stacklevel=3,
        )
    if unit is None:
        names = _environment_names(rows[environment], environment, environment_bins, row_names)
    else:
        names = periods(rows[environment], unit, form.date_format, row_names)
    if weight is not None:
        rows = _weighed(rows, names, weight, row_names)
        names = names[rows.index]
    if cluster_by is not None:
        rows = rows.assign(**{cluster_by: _clusters(rows[cluster_by], names, cluster_by, row_names)})
    every = sorted(set(names))
    lost = set(as_texts(frame.loc[~labelled, environment])) - {*every}
    _require_targets(lost, target, validation=validation, test=test)
    if len(every) == 1 and unit is None:
        raise ArgumentError(option, environment, f"has one value, {every[0]}; name a column with several")
    purposes = purposes_of(every, validation, every[-test_last:] if test_last else test, options=True)
    train = purposes["train"]
    if len(train) < 2:
        raise ArgumentError(
            option,
            environment,
            f"two environments are needed for training; those that are not for validation or test are "
            f"{', '.join(train) or 'none'}",
        )
    training = rows[names.isin(train)]
    rows = rows.drop(columns=environment)
    for name in text:
        _require_words(training[name], name)
    inferred = inferred_kinds(training.drop(columns=[*taken, *left_out]))
    chosen = {**inferred, **{name: kind for name, kind in kinds.items() if name not in taken}}
    for name, kind in inferred.items():
        may_hide = name not in kinds and kind in _TEXT_KINDS and _is_text(training[name])
        if may_hide and (unread := unread_values(training[name])):
            advice = f"or --columns {name}={kind}; it is {_TEXT_KINDS[kind]}"
            warnings.warn(f"column {name}: {unread}, {advice}", InputWarning, stacklevel=3)
        if name not in kinds and kind == "numeric" and (note := may_name_rows(name, rows[name])):
            warnings.warn(note, InputWarning, stacklevel=3)
    used = {name: kind for name, kind in chosen.items() if kind != "ignore"}
    if not (used or text):
        raise ArgumentError("target", target, "no column is left to predict it from")
    classes: tuple[Any, ...] | None = None
    if levels:
        if task not in (None, "ordinal"):
            raise ArgumentError("levels", levels, "give the order of an ordinal target; leave them out")
        task, rows, classes = "ordinal", *_of_levels(rows, target, tuple(levels), row_names)
    elif task == "count":
        _require_counts(rows, training, target, row_names)
    else:
        classes = _classes(rows, training, target, task, row_names)
        task = task or ("regression" if classes is None else "classification")
    about = (int((~labelled).sum()), weight, cluster_by, task, text)
    return Table(rows, names, target, used, classes, purposes, *about, row_names=row_names)


def inferred_kinds(frame: pd.DataFrame) -> dict[str, Kind]:
    """The kind of each column: numbers, booleans, dates (ISO 8601) or categories; what names rows is ignored."""
    named = {str(name): _kind(frame[name]) for name in frame.columns}
    return {name: "ignore" if _ROW_NUMBERS.fullmatch(name) else kind for name, kind in named.items()}


def _kind(column: pd.Series) -> Kind:
    known = column.dropna()
    if known.empty:
        return "ignore"
    if isinstance(column.dtype, pd.CategoricalDtype):
        return "category"
    if pd.api.types.is_bool_dtype(known):
        return "boolean"
    if pd.api.types.is_datetime64_any_dtype(known):
        return "date"
    if pd.api.types.is_numeric_dtype(known):
        return "numeric"
    texts = known.astype("string").str.strip()
    levels = pd.Series(texts.unique())
    if levels.str.lower().isin(["true", "false"]).all():
        return "boolean"
    if not _has_codes(levels) and pd.to_numeric(levels, errors="coerce").notna().all():
        return "numeric"
    if levels.str.match(r"\d{4}-\d{2}-\d{2}").all():
        dates = pd.to_datetime(levels, format="ISO8601", utc=True, errors="coerce")
        if dates.notna().all():
            return "date"
    return "ignore" if len(levels) > _IDENTIFIERS * len(texts) and len(texts) > _MOST_CLASSES else "category"


def may_name_rows(name: str, column: pd.Series) -> str | None:
    """What to know of a column of numbers with another whole one in nearly every row; None of any other column."""
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    finite = numbers[np.isfinite(numbers)]
    if (finite != finite.round()).any() or len(pd.unique(finite)) <= max(_LEAST_VALUES, _NAMES_ROWS * len(finite)):
        return None
    found = "has another whole number in nearly every row, so it may name the rows"
    return f"column {name} {found}; --columns {name}=ignore leaves it out"


def _is_text(column: pd.Series) -> bool:
    """Whether some values are text, and their type says no more."""
    if pd.api.types.is_object_dtype(column):
        return bool(column.map(type).eq(str).any())
    return column.dtype.type is str  # of pandas, or of Arrow


def _has_codes(texts: pd.Series) -> bool:
    """Whether some texts are digits that begin with a zero, such as postal codes, which are no numbers."""
    return bool(texts.astype("string").str.match(r"\s*0\d").any())


def _read(
    path: Path, target: str, environment: str | None, form: CsvFormat, texts: Collection[str], *, named: bool
) -> tuple[pd.DataFrame, str | None, RowNames]:
    """The rows of a file or folder, the name of the environment's column, which files stand for if ``named``, and the
    names of the rows.
    """
    column = environment or "environment"
    read = functools.partial(_file, form=form, texts=texts, target=target, environment=column)
    nothing = "no .csv or .parquet file in this folder"
    files = data_files(path, _ENDINGS, option="data", shown=display_path(path), place="NAME", nothing=nothing)
    if files is None:
        return read(path), environment, OF_ONE_FILE
    frames: list[pd.DataFrame] = []
    places: list[tuple[str, int]] = []
    for name in files:
        frame = read(path / name)
        places.append((name, sum(map(len, frames))))
        frames.append(frame if column in frame.columns or not named else frame.assign(**{column: stem(name)}))
    return pd.concat(frames, ignore_index=True), column, RowNames(tuple(places))


def _file(path: Path, *, form: CsvFormat, texts: Collection[str], target: str, environment: str) -> pd.DataFrame:
    """The rows of a file. In a CSV file numbers with leading zeros in the columns ``texts`` are texts, and None is a
    class of the target or the name of an environment.
    """
    shown = display_path(path)
    found = local(path)
    if not found.is_file():
        raise missing(path, "file")
    suffix = path.suffix.lower()
    if kind := kind_by_content(found, _ENDINGS):
        advice = "save it as CSV or Parquet" if kind == SPREADSHEET else "give a CSV or Parquet file"
        raise ArgumentError("data", shown, f"is {kind}; {advice}")
    try:
        cells = read_table(found) if suffix == ".parquet" else read_cells(found, shown, form)
    except InputError:
        raise
    except Exception as error:  # Arrow has its own errors
        raise ArgumentError("data", shown, f"cannot be read ({first_line(error)})") from error
    if twice := _twice(cells.column_names):
        raise ArgumentError("data", shown, f"{twice} is the name of two columns; rename one")
    if cells.num_rows == 0:
        raise ArgumentError("data", shown, "has no rows")
    if suffix == ".parquet":
        frame = _with_index(cast(pd.DataFrame, cells.to_pandas()), environment, target)
        whole = [each.name for each in cells.schema if pa.types.is_integer(each.type) and each.name in frame.columns]
        return frame.assign(**{name: exact(cells[name]).array for name in whole if cells[name].null_count})
    columns = dict(zip(cells.column_names, cells.columns, strict=True))
    del cells  # each column is freed when it is converted
    return pd.DataFrame(
        {
            name: typed(columns.pop(name), form, codes=name in texts, none=name in (target, environment))
            for name in list(columns)
        }
    )


def _require_single_values(frame: pd.DataFrame) -> None:
    """Refuse a column with bytes, or several values, in a cell (ArgumentError)."""
    for name, column in frame.items():
        for kind in column.dropna().map(type).unique() if column.dtype.kind == "O" else ():
            if kind is bytes or (issubclass(kind, Collection) and kind is not str):
                advice = (
                    f"make it text or numbers, or leave it out: --columns {name}=ignore, kinds={{{name!r}: 'ignore'}}"
                )
                raise ArgumentError("columns", name, f"a cell has a value of type {kind.__name__}; {advice}")


def _with_index(frame: pd.DataFrame, *names: str | None) -> pd.DataFrame:
    """The frame with these of its index's levels as columns."""
    found = [each for each in frame.index.names if each is not None and each in names and each not in frame.columns]
    return frame.reset_index(found) if found else frame


def _twice(names: Iterable[Any]) -> str | None:
    """The first name that two columns have, but for spaces around."""
    return next((name for name, count in Counter(str(each).strip() for each in names).items() if count > 1), None)


def _environment_names(column: pd.Series, name: str, bins: int | None, row_names: RowNames) -> pd.Series:
    column = stripped(column)
    if missing := int((column.isna() | column.eq("").fillna(False)).sum()):
        raise ArgumentError("environment", name, f"{missing} rows have none (an empty cell, NA); name or remove them")
    if bins is not None:
        if not pd.api.types.is_numeric_dtype(column):
            raise ArgumentError("environment_bins", bins, f"column {name} has no numbers")
        numbers = column.astype("float64")
        if infinite := np.isinf(numbers).to_numpy().nonzero()[0].tolist():
            row = f"{row_names(numbers.index[infinite[0]])} has {numbers.iloc[infinite[0]]}"
            raise ArgumentError("environment_bins", bins, f"column {name}: {row}; quantiles need finite numbers")
        if numbers.nunique() < 2:
            raise ArgumentError("environment_bins", bins, f"column {name} has one value, {column.iloc[0]}")
        return pd.qcut(numbers, bins, duplicates="drop").astype("string")
    count = column.nunique()
    if pd.api.types.is_numeric_dtype(column) and count > _MOST_ENVIRONMENTS:
        names_rows = "has another whole number in nearly every row, so it names the rows; give another column"
        numbers = f"has {count} different numbers; give --environment-bins, or another column"
        raise ArgumentError("environment", name, names_rows if may_name_rows(name, column) else numbers)
    if count > max(_MOST_ENVIRONMENTS, len(column) / 2):  # it names the rows
        rows = f"has {count} values in {len(column)} rows, fewer than two rows for an environment"
        raise ArgumentError("environment", name, f"{rows}; give another column")
    if pd.api.types.is_float_dtype(column) and column.map(float.is_integer).all():
        column = column.map(int)  # floating-point only because another row has none
    return column.astype("string")


def _require_targets(lost: Collection[str], target: str, **named: Iterable[str]) -> None:
    """Refuse environments that an option names and whose rows are left out, as none has a target (ArgumentError)."""
    for option, names in named.items():
        for name in names:
            if name in lost:
                found = f"none of its rows has a {target}, so nothing can be measured there"
                raise ArgumentError(option, name, f"{found}; leave it out, and predict its rows with the model")


def _weighed(rows: pd.DataFrame, names: pd.Series, weight: str, row_names: RowNames) -> pd.DataFrame:
    """The rows with a weight above 0, as float64 (ArgumentError for other weights, or an environment without one)."""
    given = rows[weight]
    weights = pd.to_numeric(given, errors="coerce").astype("float64")
    wrong = ~(weights <= float(np.finfo(np.float32).max)) | (weights < 0)
    for row in rows.index[wrong][:1]:
        found = "no weight" if pd.isna(given[row]) else f"{given[row]}"
        raise ArgumentError("weight", weight, f"{row_names(row)} has {found}; a weight is a number of at least 0")
    known = names[weights > 0]
    for name in sorted(set(names) - set(known)):
        raise ArgumentError("weight", weight, f"environment {name} has no row with a weight above 0")
    if len(known) < len(rows):
        what = f"{len(rows) - len(known)} of {len(rows)} rows have the weight 0 and are left out"
        warnings.warn(f"column {weight}: {what}", InputWarning, stacklevel=4)
    return rows.assign(**{weight: weights}).loc[known.index]


def _require_words(column: pd.Series, name: str) -> None:
    """Refuse a column of text that has none, or names the rows (ArgumentError)."""
    texts = as_texts(column).dropna()
    if texts.empty or not _is_text(column):
        found = "has numbers, dates or booleans" if len(texts) else "has no value in the training environments"
        raise ArgumentError("text", name, f"{found}, and no text; leave it out")
    if texts.is_unique and not texts.str.contains(r"\s").any():
        found = f"has another value in each of {len(texts)} rows, such as {texts.iloc[0]!r:.40}, without a space"
        raise ArgumentError("text", name, f"{found}, so it names them; leave it out")


def _clusters(column: pd.Series, names: pd.Series, name: str, row_names: RowNames) -> pd.Series:
    """What each row belongs to, as text (ArgumentError if a row has none, or no two rows share one)."""
    clusters = as_texts(column)
    for row in clusters.index[(clusters.isna() | clusters.eq("")).to_numpy(dtype=bool)][:1]:
        raise ArgumentError("cluster_by", name, f"{row_names(row)} has no value; fill it in or remove the row")
    if clusters.is_unique:
        raise ArgumentError("cluster_by", name, "each row has a value of its own, the same as without it; leave it out")
    if clusters.nunique() < 2:
        raise ArgumentError("cluster_by", name, "all rows have one value; give a column with several, or none")
    places = names.groupby(clusters).nunique()
    if several := places.index[places > 1].tolist():
        what = f"{len(several)} of its {len(places)} values stand in several environments, such as {several[0]}"
        warnings.warn(f"column {name}: {what}; a test there is not of new ones alone", InputWarning, stacklevel=4)
    return clusters


def _classes(
    frame: pd.DataFrame, training: pd.DataFrame, target: str, task: Task | None, row_names: RowNames
) -> tuple[Any, ...] | None:
    values = training[target]
    if pd.api.types.is_float_dtype(values) and (infinite := frame.index[np.isinf(frame[target])].tolist()):
        raise ArgumentError("target", target, f"is infinite in {row_names(infinite[0])}; remove such rows")
    numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    few = values.nunique() <= _MOST_CLASSES
    whole = not pd.api.types.is_float_dtype(values) or bool((values == values.round()).all())
    if task == "regression" or (task is None and numbers and not (few and whole)):
        if not numbers:
            raise ArgumentError("target", target, "has no numbers, which a regression needs")
        if values.nunique() < 2:
            raise ArgumentError("target", target, f"has one value in all training environments, {values.iloc[0]}")
        return None
    if task == "ordinal" and not (numbers and few):
        problem = "has texts" if not numbers else f"has {values.nunique()} values"
        raise ArgumentError("target", target, f"{problem}; give its --levels, from the lowest to the highest")
    if task is None and not few and _is_text(values) and _kind(values) == "numeric":
        raise ArgumentError("target", target, "has numbers as text; make them numbers, or give --task classification")
    if task is None and _is_text(values) and (unread := unread_values(values)):
        if not few:
            raise ArgumentError("target", target, f"{unread}, or --task classification")
        warnings.warn(
            f"target {target}: {unread}, or --task classification; its values are classes", InputWarning, stacklevel=4
        )
    _require_classes(values, target)
    try:
        found = values.unique().tolist()
        if all(each.is_integer() for each in found if isinstance(each, float)):
            # Whole numbers are floating-point ones where the target of another row is missing.
            found = [int(each) if isinstance(each, float) else each for each in found]
        classes = tuple(sorted(found))
    except TypeError:
        kinds = sorted({type(value).__name__ for value in values})
        raise ArgumentError("target", target, f"has values of several kinds, {' and '.join(kinds)}") from None
    if len(classes) < 2:
        raise ArgumentError("target", target, f"has one value in all training environments, {classes[0]}")
    if strange := sorted(set(frame[target].unique().tolist()) - set(classes), key=str):
        raise ArgumentError("target", target, f"no training environment has its value {strange[0]}")
    return classes


def _of_levels(
    rows: pd.DataFrame, target: str, levels: tuple[str, ...], row_names: RowNames
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows with the target as text, and the levels (ArgumentError if a row has another value)."""
    if len(set(levels)) < max(2, len(levels)):
        raise ArgumentError("levels", levels, "must be two or more different values, from the lowest to the highest")
    texts = as_texts(rows[target])
    for row in rows.index[(~texts.isin(levels)).to_numpy(dtype=bool)][:1]:
        found = f"{row_names(row)} has {texts[row]}, which is none of these values of {target}"
        raise ArgumentError("levels", levels, found)
    return rows.assign(**{target: texts.astype(object)}), levels


def _require_counts(rows: pd.DataFrame, training: pd.DataFrame, target: str, row_names: RowNames) -> None:
    """Refuse a target that does not count something (ArgumentError)."""
    if not pd.api.types.is_numeric_dtype(rows[target]) or pd.api.types.is_bool_dtype(rows[target]):
        raise ArgumentError("target", target, "has no numbers, which counts are")
    values = rows[target].astype("float64")
    for row in rows.index[~((values >= 0) & (values == values.round()) & np.isfinite(values))][:1]:
        found = f"{row_names(row)} has {values[row]:g}, and a count is a whole number from 0 on"
        raise ArgumentError("target", target, found)
    if training[target].nunique() < 2:
        found = f"has one value in all training environments, {training[target].iloc[0]}"
        raise ArgumentError("target", target, found)


def _require_classes(values: pd.Series, target: str) -> None:
    """Refuse dates, and values that fewer than two rows have, such as identifiers and free text (ArgumentError)."""
    count, rows, dates = values.nunique(), len(values), _kind(values) == "date"
    if count > (_MOST_CLASSES if dates else max(_MOST_CLASSES, rows / 2)):
        found = f"has {count} different {'dates' if dates else 'values'} in {rows} training rows"
        example = repr(str(values.iloc[0])[:_LONGEST_EXAMPLE])
        right = "give a column of classes, or of numbers for a regression"
        raise ArgumentError("target", target, f"{found}, such as {example}, which are no classes; {right}")
