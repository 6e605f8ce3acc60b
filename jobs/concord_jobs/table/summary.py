"""The summary of a table: environments, kinds of columns, missing values, columns that reveal the environment."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from concord.environments.table_rows import Table, fit_encoder

_FOLDS, _DEPTH = 3, 5
_MOST_ROWS = 20_000  # for the decision tree


def table_summary(table: Table) -> dict[str, Any]:
    """Summarize a table as JSON.

    Returns:
        ``environments`` with rows, purpose, target (the share of each class, or mean and deviation), ``columns`` with
        kind, the fraction missing in each environment, and ``identifies``: how often a decision tree tells the
        environment by this column alone (cross-validated), beside the share of the largest environment, ``largest``.
    """
    purpose = {name: purpose for purpose, names in table.by_purpose.items() for name in names}
    counts = table.environment.value_counts()
    environments = {
        name: {"purpose": purpose[name], "rows": int(counts[name]), "target": _targets(table, name)} for name in purpose
    }
    columns = {
        name: {"kind": kind, "missing": _missing(table, name), "identifies": _identifies(table, name, kind)}
        for name, kind in table.kinds.items()
    }
    return {
        "rows": len(table.frame),
        "without_target": table.without_target,
        "task": "regression" if table.classes is None else "classification",
        "environments": environments,
        "largest": float(counts.max() / counts.sum()),
        "columns": columns,
    }


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The summary as lines of text."""
    left_out = f"; {summary['without_target']} rows without a target are left out" if summary["without_target"] else ""
    yield f"{summary['rows']} rows, a {summary['task']}{left_out}"
    for warning in summary["warnings"]:
        yield f"warning: {warning}"
    for name, each in summary["environments"].items():
        shown = ", ".join(f"{value} {share:.3g}" for value, share in each["target"].items())
        yield f"environment {name} ({each['purpose']}): {each['rows']} rows; target {shown}"
        if summary["task"] == "classification" and len(each["target"]) == 1:
            yield f"warning: environment {name} has one class"
    for name, each in summary["columns"].items():
        missing = ", ".join(f"{place} {part:.0%}" for place, part in each["missing"].items() if part > 0)
        yield f"column {name}: {each['kind']}" + (f"; missing: {missing}" if missing else "")
    yield f"how often a column alone tells the environment (the largest has {summary['largest']:.0%} of the rows):"
    for name, each in sorted(summary["columns"].items(), key=lambda item: -item[1]["identifies"]):
        yield f"  {name} {each['identifies']:.0%}"


def _targets(table: Table, name: str) -> dict[str, float]:
    values = table.rows([name])[table.target]
    if table.classes is None:
        return {"mean": float(values.mean()), "deviation": float(values.std(ddof=0))}
    return {str(value): float(share) for value, share in values.value_counts(normalize=True).sort_index().items()}


def _missing(table: Table, column: str) -> dict[str, float]:
    values = table.frame[column]
    parts = (values.isna() | values.isin([np.inf, -np.inf])).groupby(table.environment).mean()
    return {str(name): float(part) for name, part in parts.items()}


def _identifies(table: Table, column: str, kind: str) -> float:
    from sklearn.model_selection import cross_val_score  # takes a second
    from sklearn.tree import DecisionTreeClassifier

    rows = table.frame if len(table.frame) <= _MOST_ROWS else table.frame.sample(_MOST_ROWS, random_state=0)
    inputs = fit_encoder(rows, {column: kind}).encode(rows)
    tree = DecisionTreeClassifier(max_depth=_DEPTH, random_state=0)
    places = table.environment[rows.index].to_numpy(dtype=str)
    folds = min(_FOLDS, int(np.unique(places, return_counts=True)[1].min()))
    if folds < 2:
        return float(tree.fit(inputs, places).score(inputs, places))
    return float(cross_val_score(tree, inputs, places, cv=folds).mean())
