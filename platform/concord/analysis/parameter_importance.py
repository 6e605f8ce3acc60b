"""The importance of each varied option for a study's score."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# With fewer trials importances are not reliable.
FEWEST_TRIALS = 16
_FOLDS, _TREES, _REPEATS = 4, 100, 5


def missing_for_importance(points: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> str | None:
    """The reason why :func:`parameter_importance` is not possible with these, in words; None if it is."""
    if len(points) < FEWEST_TRIALS:
        return f"it needs {FEWEST_TRIALS} finished trials, and there are {len(points)}"
    if np.ptp(np.asarray(scores, dtype=float)) == 0:
        return f"all {len(points)} finished trials have the same score; it needs trials that differ"
    if not any(points):
        return "no option was varied"
    return None


def parameter_importance(points: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> dict[str, float]:
    """Permutation importance (Breiman, 2001) in a random forest that predicts the score, out of fold.

    The fall of the forest's R² on unseen trials when one option's values are shuffled among them, at least 0.
    Conditional options count as absent where they do not apply. The most important option comes first. The result is
    empty if :func:`missing_for_importance` gives a reason.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.model_selection import KFold

    if missing_for_importance(points, scores) is not None:
        return {}
    target = np.asarray(scores, dtype=float)
    names = list(dict.fromkeys(name for point in points for name in point))
    columns = np.stack([_column([point.get(name) for point in points]) for name in names], 1)
    total = np.zeros(len(names))
    for seen, unseen in KFold(_FOLDS, shuffle=True, random_state=0).split(columns):
        forest = RandomForestRegressor(_TREES, random_state=0).fit(columns[seen], target[seen])
        found = permutation_importance(forest, columns[unseen], target[unseen], n_repeats=_REPEATS, random_state=0)
        total += np.nan_to_num(found.importances_mean)
    importance = np.maximum(total / _FOLDS, 0.0)
    return {names[index]: float(importance[index]) for index in np.argsort(-importance, kind="stable")}


def _column(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The ranks of values, which do not depend on the scale; -1 for absent."""
    numbers = (int, float)
    present = sorted(
        {value for value in values if value is not None},
        key=lambda value: ("" if isinstance(value, numbers) else str(type(value)), value),
    )
    ranks = {value: rank for rank, value in enumerate(present)}
    return np.array([ranks.get(value, -1) for value in values], dtype=float)
