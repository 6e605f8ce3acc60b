"""A baseline that is fitted in an environment itself, by cross-validation: the most that could be had there.

It uses the environment's own labels, so it is an oracle beside models that have not seen the environment.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from concord.training.baseline import Fit

ITSELF = "itself"
"""The split of these metrics, ``auc/itself/NAME``."""
LEAST_ROWS = 50  # of an environment, so that each fold has ten to predict
_FOLDS = 5


def cross_validated(
    build: Callable[[], nn.Module], fit: Fit, inputs: Tensor, targets: Tensor, seed: int
) -> Tensor | None:
    """The outputs for each row of models that are fitted to the other folds; five folds, of classes stratified.

    None with fewer than :data:`LEAST_ROWS` rows, one class, or a class with fewer rows than folds.
    """
    from sklearn.model_selection import KFold, StratifiedKFold  # take half a second

    classes = not targets.is_floating_point()
    counts = targets.unique(return_counts=True)[1] if classes else None
    if len(targets) < LEAST_ROWS or (counts is not None and (len(counts) < 2 or int(counts.min()) < _FOLDS)):
        return None
    folds: Any = (StratifiedKFold if classes else KFold)(_FOLDS, shuffle=True, random_state=seed)
    found: list[Tensor] = []
    places: list[Tensor] = []
    for train, test in folds.split(inputs.numpy(), targets.numpy()):
        model = build()
        fit(model, inputs[train], targets[train])
        with torch.no_grad():
            found.append(model.eval()(inputs[test]))
        places.append(torch.from_numpy(test))
    return torch.cat(found)[torch.cat(places).argsort()]
