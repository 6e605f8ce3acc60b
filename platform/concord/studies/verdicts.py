"""The verdict of a finished comparison, from its lines and the predictions of its rows."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord.analysis.method_names import method_name
from concord.analysis.uncertainty import Verdict, verdict
from concord.environments.parquet import read_table
from concord.studies.comparison_plan import FOLDS
from concord.studies.job_tables import LEAVE_ONE_OUT
from concord.studies.leave_one_out import CHOSEN, ORACLE, constants_of, known_of_environments
from concord.studies.results import ResultLine
from concord.table import Table
from concord.training.comparison import Folds
from concord.training.left_out import PREDICTIONS
from concord.training.row_estimates import row_estimates, values_agree

if TYPE_CHECKING:
    import pandas


def left_out_verdict(
    lines: Sequence[ResultLine], folds: Folds, predictions: "pandas.DataFrame | None", unfinished: str = ""
) -> Verdict | None:
    """The verdict over environments that were left out; None if no method has a value in each of them.

    Args:
        lines: of the table, a line for each method and seed.
        folds: the environments and the measure.
        predictions: of their rows; without them there are no intervals within environments.
        unfinished: which runs are missing, in words.
    """
    measure = folds.measure.removeprefix("worst_")  # in one environment the worst value is its own
    values: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        if line.configuration != CHOSEN and not line.configuration.endswith(ORACLE):
            of_method = values.setdefault(line.configuration, {})
            for name in folds.environments:
                of_method.setdefault(name, []).append(line.values.get(name, math.nan))
    estimates = {} if predictions is None else row_estimates(predictions, measure)
    estimates = {method: values_agree(each, values.get(method, {})) for method, each in estimates.items()}
    if not values:
        return None
    known = known_of_environments(lines)
    return verdict(
        values,
        measure,
        folds.mode,
        estimates=estimates,
        rows={name: each["rows"] for name, each in known.items() if "rows" in each},
        constants=constants_of(known, measure),
        unfinished=unfinished,
        label=method_name,
    )


def recorded_verdict(record: Mapping[str, Any], tables: Sequence[Table], folder: Path) -> Verdict | None:
    """The verdict of a comparison's folder, if environments were left out in turn."""
    asked, file = record.get("asked", {}).get(LEAVE_ONE_OUT, {}), folder / PREDICTIONS
    table = next((each for each in tables if each.name == LEAVE_ONE_OUT), None)
    if FOLDS not in asked or table is None:
        return None
    folds = Folds(tuple(asked[FOLDS]["environments"]), asked[FOLDS]["measure"], asked[FOLDS]["mode"])
    return left_out_verdict(table.runs, folds, read_table(file).to_pandas() if file.exists() else None)
