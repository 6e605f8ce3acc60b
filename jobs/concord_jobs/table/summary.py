"""The summary of a table: environments, columns and their relations with the target by environment, what to know."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from concord.analysis.columns.leaks import leak_warning, leaking_columns
from concord.analysis.columns.notes import notes
from concord.analysis.columns.relations import relations
from concord.analysis.columns.report import as_json, broken_lines, relation_cells
from concord.environments.table_rows import Table, fit_encoder
from concord.table import Table as ShownTable

_FOLDS, _DEPTH = 3, 5
_MOST_ROWS = 20_000  # for the decision tree
_MOST_LISTED = 12  # environments with a line each
_MOST_NAMED = 5  # environments that stand out, and classes
_TASKS = {
    "classification": "a classification",
    "regression": "a regression",
    "ordinal": "levels in an order",
    "count": "counts",
}


def table_summary(table: Table, left_out: Collection[str] = ()) -> dict[str, Any]:
    """Summarize a table as JSON.

    Args:
        table: the table.
        left_out: the columns that the user ignores.

    Returns:
        ``environments`` with rows, purpose, target (the share of each class, or mean and deviation), ``columns`` with
        kind, the fraction missing in each environment, the relation with the target
        (:class:`~concord.analysis.columns.report.ColumnReport`), ``identifies``: how often a decision tree tells the
        environment by this column alone (cross-validated), beside the share of the largest environment, ``largest``;
        ``gives_away``: the columns that alone say nearly all of the target; and ``notes``.
    """
    purpose = {name: purpose for purpose, names in table.by_purpose.items() for name in names}
    counts = table.environment.value_counts()
    fit_encoder(table.frame, table.kinds)  # refuses values of another kind than their column's
    environments = {
        name: {"purpose": purpose[name], "rows": int(counts[name]), "target": _targets(table, name)} for name in purpose
    }
    columns = {
        each["column"]: {
            "kind": table.kinds[each["column"]],
            "identifies": _identifies(table, each["column"], table.kinds[each["column"]]),
            **each,
        }
        for each in as_json(relations(table))
    }
    return {
        "rows": len(table.frame),
        "without_target": table.without_target,
        "task": table.task,
        "environments": environments,
        "largest": float(counts.max() / counts.sum()),
        "columns": columns,
        "gives_away": leaking_columns(table),
        "notes": list(notes(table, left_out)),
    }


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The summary as lines of text."""
    yield f"{summary['rows']} rows, {_TASKS[summary['task']]}"
    for warning in summary["warnings"]:
        yield f"warning: {warning}"
    environments = summary["environments"]
    yield from (_listed if len(environments) <= _MOST_LISTED else _quartiles)(environments)
    one_class = [name for name, each in environments.items() if len(each["target"]) == 1]
    if summary["task"] in ("classification", "ordinal") and one_class:
        yield f"warning: one class in {_named(one_class)}"
    yield from summary["notes"]
    columns = list(summary["columns"].values())
    rows = [_cells(each, summary["largest"]) for each in columns]
    if rows:  # there may be texts alone
        yield from ShownTable.plain(rows[0], [list(each.values()) for each in rows]).text().rstrip().splitlines()
    if leaks := leak_warning(summary["gives_away"]):
        yield f"warning: {leaks}"
    yield from broken_lines(columns, {name: each["purpose"] for name, each in environments.items()})


def _cells(column: Mapping[str, Any], largest: float) -> dict[str, str]:
    cells = relation_cells(column)
    tells = f"{column['identifies']:.0%}"
    return {
        "column": cells.pop("column"),
        "kind": column["kind"],
        **cells,
        f"tells where (by rows {largest:.0%})": tells,
    }


def _listed(environments: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, each in environments.items():
        shown = ", ".join(f"{value} {share:.3g}" for value, share in each["target"].items())
        yield f"environment {name} ({each['purpose']}): {each['rows']} rows; target {shown}"


def _quartiles(environments: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Quartiles of rows and of each part of the target, and the environments that stand out."""
    purposes = [each["purpose"] for each in environments.values()]
    counted = ", ".join(f"{purposes.count(purpose)} {purpose}" for purpose in dict.fromkeys(purposes))
    yield f"{len(environments)} environments: {counted}; least, quartiles and most:"
    rows = {name: float(each["rows"]) for name, each in environments.items()}
    parts = list(dict.fromkeys(part for each in environments.values() for part in each["target"]))[:_MOST_NAMED]
    found = {"rows": rows} | {
        f"target {part}": {name: each["target"].get(part, 0.0) for name, each in environments.items()} for part in parts
    }
    for what, values in found.items():
        numbers = np.array(list(values.values()))
        first, third = np.quantile(numbers, [0.25, 0.75])
        far = {name: max(first - value, value - third) for name, value in values.items()}
        unusual = sorted((name for name in far if far[name] > 1.5 * (third - first)), key=lambda name: -far[name])
        shown = " ".join(f"{number:.3g}" for number in np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1]))
        stands_out = f"; {_named([f'{name} {values[name]:.3g}' for name in unusual])} stand out" if unusual else ""
        yield f"  {what}: {shown}{stands_out}"


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _targets(table: Table, name: str) -> dict[str, float]:
    values = table.rows([name])[table.target]
    if table.classes is None:
        return {"mean": float(values.mean()), "deviation": float(values.std(ddof=0))}
    shares = values.value_counts(normalize=True)
    return {str(each): float(shares[each]) for each in table.classes if each in shares}


def _identifies(table: Table, column: str, kind: str) -> float:
    """How often a decision tree tells the environment by this column alone, cross-validated."""
    from sklearn.model_selection import cross_val_score  # takes a second
    from sklearn.tree import DecisionTreeClassifier

    rows = table.frame if len(table.frame) <= _MOST_ROWS else table.frame.sample(_MOST_ROWS, random_state=0)
    inputs = fit_encoder(rows, {column: kind}).encode(rows)
    places = table.environment[rows.index].to_numpy(dtype=str)
    names, counts = np.unique(places, return_counts=True)
    tree = DecisionTreeClassifier(max_depth=_DEPTH + math.ceil(math.log2(len(names))), random_state=0)
    folds = min(_FOLDS, int(counts.min()))
    if folds < 2:
        return float(tree.fit(inputs, places).score(inputs, places))
    return float(cross_val_score(tree, inputs, places, cv=folds).mean())
