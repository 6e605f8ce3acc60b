"""The summary of a table: environments, columns and their relations with the target by environment, what to know."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

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
_GIVES_AWAY = 0.95  # of the errors of a constant, which a column alone avoids


def table_summary(table: Table, left_out: Collection[str] = ()) -> dict[str, Any]:
    """Summarize a table as JSON.

    Args:
        table: the table.
        left_out: the columns that the user ignores.

    Returns:
        ``environments`` with rows, purpose, target (the share of each class, or mean and deviation), ``columns`` with
        kind, the fraction missing in each environment, the relation with the target
        (:class:`~concord.analysis.columns.report.ColumnReport`), ``identifies``: how often a decision tree tells the
        environment by this column alone (cross-validated), beside the share of the largest environment, ``largest``,
        and ``predicts``: the part of a constant's errors that a tree on this column alone avoids; and ``notes``.
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
            **_alone(table, each["column"], table.kinds[each["column"]]),
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
    for each in columns:
        if each["predicts"] > _GIVES_AWAY:
            yield f"warning: column {each['column']} alone gives the target away; is it known when you predict?"
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


def _alone(table: Table, column: str, kind: str) -> dict[str, float]:
    """What decision trees tell by this column alone, cross-validated: the environment, and the target.

    ``identifies`` is how often the environment is right; ``predicts`` the part of the target's errors of a constant
    that the tree avoids.
    """
    from sklearn.model_selection import KFold, cross_val_score  # takes a second
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    rows = table.frame if len(table.frame) <= _MOST_ROWS else table.frame.sample(_MOST_ROWS, random_state=0)
    inputs = fit_encoder(rows, {column: kind}).encode(rows)
    places, targets = table.environment[rows.index].to_numpy(dtype=str), rows[table.target].to_numpy()
    names, counts = np.unique(places, return_counts=True)
    tree = DecisionTreeClassifier(max_depth=_DEPTH + math.ceil(math.log2(len(names))), random_state=0)
    folds = min(_FOLDS, int(counts.min()))
    if folds < 2:
        identifies = float(tree.fit(inputs, places).score(inputs, places))
    else:
        identifies = float(cross_val_score(tree, inputs, places, cv=folds).mean())
    shuffled, constant = KFold(min(_FOLDS, len(rows)), shuffle=True, random_state=0), 0.0
    own: Any = DecisionTreeRegressor(max_depth=_DEPTH, random_state=0)
    if table.classes is not None:
        own, targets = DecisionTreeClassifier(max_depth=_DEPTH, random_state=0), targets.astype(str)
        constant = float(np.unique(targets, return_counts=True)[1].max() / len(targets))
    score = float(cross_val_score(own, inputs, targets, cv=shuffled).mean())
    return {"identifies": identifies, "predicts": (score - constant) / (1 - constant) if constant < 1 else 0.0}
