"""A baseline that is fitted in an environment itself, by cross-validation: the most that could be had there.

It uses the environment's own labels, so it is an oracle beside models that have not seen the environment.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concord.training.baseline import Fit
from concord.training.evaluation import Values

ITSELF = "itself"
"""The split of these metrics, ``auc/itself/NAME``."""
LEAST_ROWS = 50  # of an environment, so that each fold has ten to predict
_FOLDS = 5


def cross_validated(
    build: Callable[[], nn.Module],
    fit: Fit,
    inputs: Tensor,
    targets: Tensor,
    seed: int,
    *,
    weights: Tensor | None = None,
    units: Values | None = None,
) -> Tensor | None:
    """The outputs for each row of models that are fitted to the other folds; five folds, of classes stratified.

    None with fewer than :data:`LEAST_ROWS` rows, one class, a class with fewer rows than folds, or fewer units.

    Args:
        build: makes a model that is not fitted.
        fit: sets its weights.
        inputs, targets: of the rows ``(rows, ...)``; counts are whole numbers ``(rows, 1)``.
        seed: of the folds.
        weights: of the rows ``(rows,)``, if they have some.
        units: what each row belongs to ``(rows,)``; a unit is in one fold.
    """
    from sklearn.model_selection import KFold, StratifiedGroupKFold, StratifiedKFold  # take half a second

    classes = not targets.is_floating_point() and targets.ndim == 1
    counts = targets.unique(return_counts=True)[1] if classes else None
    if len(targets) < LEAST_ROWS or (counts is not None and (len(counts) < 2 or int(counts.min()) < _FOLDS)):
        return None
    if units is not None and len(np.unique(units)) < _FOLDS:
        return None
    alone = StratifiedKFold if classes else KFold
    # Of numbers as well, as one class: scikit-learn's GroupKFold shuffles from 1.6 on.
    folds: Any = (alone if units is None else StratifiedGroupKFold)(_FOLDS, shuffle=True, random_state=seed)
    strata = targets.numpy() if classes else np.zeros(len(targets))
    examples = (inputs, targets) if weights is None else (inputs, targets, weights)
    found: list[Tensor] = []
    places: list[Tensor] = []
    for train, test in folds.split(inputs.numpy(), strata, units):
        model = build()
        fit(model, *(each[train] for each in examples))
        with torch.no_grad():
            found.append(model.eval()(inputs[test]))
        places.append(torch.from_numpy(test))
    return torch.cat(found)[torch.cat(places).argsort()]
