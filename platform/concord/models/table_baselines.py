"""Baselines for encoded rows of a table, fitted by scikit-learn: ridge or logistic regression, and boosted trees.

A fitted baseline is a module of PyTorch whose tensors are its weights or trees, so that it is kept, exported, served
and evaluated as a network is. No pickle of scikit-learn is written or read.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concord.models.table_network import TableNetwork

_DEPTH = 8  # of a tree at most: a prediction takes a step for each level
_ABSENT = -20.0  # the logit of a class that no training row has
_ROWS_FOR_THREADS = 50_000
_ITERATIONS = 1000  # of logistic regression at most


def one_hot(rows: Tensor, numeric: int, levels: Sequence[int]) -> Tensor:
    """The numbers of encoded rows, then a column for each code of each category; ``(rows, inputs)``."""
    codes = rows[:, numeric:].long()
    columns = [(codes[:, place, None] == torch.arange(count, device=rows.device)) for place, count in enumerate(levels)]
    return torch.cat([rows[:, :numeric], *(each.to(rows.dtype) for each in columns)], 1)


def fit_linear(
    network: TableNetwork, inputs: Tensor, targets: Tensor, penalty: float, weights_of_rows: Tensor | None = None
) -> None:
    """Set the weights of a linear network to those of ridge regression, or of logistic regression with its penalty, or
    of Poisson regression for counts ``(rows, 1)``.

    They minimize the sum of the rows' losses, each times the row's weight if it has one, and half the penalty times the
    sum of squared weights.
    """
    from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

    levels, linear = network.levels, network.rest
    assert isinstance(linear, nn.Linear)
    columns, values = one_hot(inputs, network.numeric, levels).double().numpy(), targets.numpy()
    rows = None if weights_of_rows is None else weights_of_rows.double().numpy()
    if targets.is_floating_point():
        ridge = Ridge(alpha=penalty / 2).fit(
            columns, values[:, 0], sample_weight=rows
        )  # scikit-learn's loss is not halved
        weights, offsets = ridge.coef_.reshape(1, -1), np.array([ridge.intercept_])
    elif targets.ndim == 2:
        total = len(values) if rows is None else float(rows.sum())
        # scikit-learn's loss is the mean of half the deviance.
        poisson = PoissonRegressor(alpha=penalty / (2 * total), solver="newton-cholesky", max_iter=_ITERATIONS)
        poisson.fit(columns, values[:, 0], sample_weight=rows)
        weights, offsets = poisson.coef_.reshape(1, -1), np.array([poisson.intercept_])
    else:
        outputs = linear.out_features
        present = np.unique(values)
        weights, offsets = np.zeros((outputs, columns.shape[1])), np.full(outputs, _ABSENT)
        offsets[present] = 0.0
        if len(present) > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it has not converged after many steps
                found = LogisticRegression(C=1 / penalty, max_iter=_ITERATIONS).fit(columns, values, sample_weight=rows)
            chosen = present[1:] if len(present) == 2 else present  # of two classes the second's log-odds
            weights[chosen], offsets[chosen] = found.coef_, found.intercept_
    parts = np.split(weights, network.numeric + np.cumsum([0, *levels]), axis=1)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(parts[0]))
        linear.bias.copy_(torch.from_numpy(offsets))
        for table, part in zip(network.embeddings.parameters(), parts[1:], strict=False):
            table.copy_(torch.from_numpy(part.T))


class BoostedTrees(nn.Module):
    """Trees of histogram gradient boosting on the inputs of a table's encoder.

    Args:
        numeric: the number of numeric inputs, which come first.
        levels: the number of codes of each category; each code is an input of its own.
        outputs: the number of classes, or 1.
        trees: the number of trees, of more than two classes for each.
        leaves: the largest number of leaves of a tree.

    Input ``(batch, numeric + categories)``, output ``(batch, outputs)``: logits, of two classes 0 and the log-odds of
    the second; or a number, of counts its logarithm. Before :meth:`fit` the output is 0.
    """

    features: Tensor
    thresholds: Tensor
    below: Tensor

    def __init__(self, numeric: int, levels: Sequence[int], outputs: int, trees: int, leaves: int) -> None:
        super().__init__()
        self.numeric, self.levels, self.outputs = numeric, tuple(levels), outputs
        self.trees, self.leaves, self.depth = trees, leaves, min(leaves - 1, _DEPTH)
        scores, nodes = 1 if outputs <= 2 else outputs, 2 * leaves - 1
        shape = (trees * scores, nodes)
        self.register_buffer("features", torch.zeros(shape, dtype=torch.long))
        self.register_buffer("thresholds", torch.zeros(shape, dtype=torch.float64))
        # Left and right; a leaf is its own.
        self.register_buffer("below", torch.arange(nodes).repeat(2, trees * scores, 1))
        self.values = nn.Parameter(torch.zeros(shape))
        self.offsets = nn.Parameter(torch.zeros(scores))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits, or a number."""
        columns = one_hot(rows, self.numeric, self.levels).double()
        trees, nodes = self.features.shape
        first = torch.arange(trees, device=rows.device) * nodes
        features, thresholds = self.features.flatten(), self.thresholds.flatten()
        left, right = self.below[0].flatten(), self.below[1].flatten()
        at = torch.zeros_like(rows[:, :1], dtype=torch.long).expand(-1, trees)
        for _ in range(self.depth):
            place = first + at
            smaller = columns.gather(1, features[place]) <= thresholds[place]
            at = torch.where(smaller, left[place], right[place])
        values = self.values.flatten()[first + at]
        scores = values.unflatten(1, (self.trees, -1)).sum(1) + self.offsets
        return nn.functional.pad(scores, (1, 0)) if self.outputs == 2 else scores

    def fit(self, inputs: Tensor, targets: Tensor, rate: float, seed: int, weights: Tensor | None = None) -> None:
        """Set the trees to those of scikit-learn on these rows, by their weights if they have some."""
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits

        numbers = targets.is_floating_point() or targets.ndim == 2
        columns, values = one_hot(inputs, self.numeric, self.levels).numpy(), targets.numpy().reshape(len(targets))
        kind = HistGradientBoostingRegressor if numbers else HistGradientBoostingClassifier
        present = np.unique(values)
        offsets = torch.zeros_like(self.offsets)
        if not numbers:
            absent = [each for each in range(self.outputs) if each not in present]
            if self.outputs > 2:
                offsets[absent] = _ABSENT
            elif absent:
                offsets[0] = _ABSENT if absent == [1] else -_ABSENT
        with torch.no_grad():
            self.offsets.copy_(offsets)
        if not numbers and len(present) == 1:
            return
        sizes = {"max_iter": self.trees, "max_leaf_nodes": self.leaves, "max_depth": self.depth}
        loss = {"loss": "poisson"} if numbers and not targets.is_floating_point() else {}  # counts
        found = kind(learning_rate=rate, **sizes, **loss, random_state=seed, early_stopping=False)
        counted = None if weights is None else weights.double().numpy()
        # On a busy machine threads that wait for one another take a hundred times longer than few rows need.
        with threadpool_limits(1 if len(columns) < _ROWS_FOR_THREADS else torch.get_num_threads()):
            found.fit(columns, values, sample_weight=counted)
        self._take(found, present if not numbers and self.outputs > 2 else np.zeros(1, dtype=int))

    def _take(self, fitted: Any, scores: np.ndarray[Any, Any]) -> None:
        """Take scikit-learn's trees; ``scores`` are the places of its scores among all."""
        count = len(self.offsets)
        with torch.no_grad():
            base = torch.from_numpy(np.asarray(fitted._baseline_prediction, dtype=np.float64).reshape(-1))
            if len(base) < len(scores):  # of two classes that are present of more, the second's log-odds
                scores = scores[1:]
            self.offsets[scores] = base.to(self.offsets.dtype)
            for iteration, each in enumerate(fitted._predictors):
                for score, tree in zip(scores, each, strict=True):
                    place, nodes = iteration * count + int(score), tree.nodes
                    own = np.arange(len(nodes))
                    leaf = nodes["is_leaf"].astype(bool)
                    known = slice(0, len(nodes))
                    self.features[place, known] = torch.from_numpy(nodes["feature_idx"].astype(np.int64))
                    self.thresholds[place, known] = torch.from_numpy(nodes["num_threshold"].copy())
                    for side, name in enumerate(("left", "right")):
                        next_nodes = np.where(leaf, own, nodes[name])
                        self.below[side, place, known] = torch.from_numpy(next_nodes.astype(np.int64))
                    self.values[place, known] = torch.from_numpy(np.where(leaf, nodes["value"], 0.0)).float()
