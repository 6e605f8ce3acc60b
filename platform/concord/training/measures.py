"""Measures of whole environments that are no means over examples: the area under the ROC curve, F1, calibration, R².

A job names them as its evaluation; each is reported of every environment, over all of a split, and of the worst::

    job = Job(environments, model, cross_entropy, evaluation=classification("auc", "f1", "calibration_error"))

They are computed from the outputs of the loss, without a further pass of the model. Where a measure is not defined, as
the area with one class alone, the environment is left out of its mean and its worst.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concord.errors import ArgumentError, InputError
from concord.training.declared_measures import EnvironmentEvaluation, Mode
from concord.training.evaluation import Values, area_under_roc

_BINS = 15  # of confidences, as in Guo et al., "On calibration of modern neural networks"


@dataclass(frozen=True)
class _Predictions:
    """A model's predictions for one environment, ``(examples, classes)``; of several labels, a class is a label.

    Attributes:
        scores: the log-odds of each class.
        predicted, positive: whether a class is predicted, and whether it is right.
        several: whether an example may have several labels.
        weights: of the examples ``(examples,)``.
        weighted: whether some were given; else they are 1.
        at_cutoff: of two classes, the examples whose probability of the second reaches the cutoff; None without one.
    """

    scores: Values
    predicted: Values
    positive: Values
    several: bool
    weights: Values
    weighted: bool
    at_cutoff: Values | None = None

    @staticmethod
    def of(outputs: Tensor, targets: Tensor, weights: Tensor | None, cutoff: float | None = None) -> "_Predictions":
        """From logits ``(examples, classes)``, and classes ``(examples,)``, or labels of the logits' shape, 0 or 1."""
        outputs = outputs.nan_to_num().double()
        counted = np.ones(len(outputs)) if weights is None else weights.double().numpy()
        weighing: dict[str, Any] = {"weights": counted, "weighted": weights is not None}
        if targets.shape == outputs.shape:
            outputs, targets = outputs.view(len(outputs), -1), targets.view(len(outputs), -1)
            return _Predictions(
                outputs.numpy(), (outputs > 0).numpy(), (targets > 0.5).numpy(), several=True, **weighing
            )
        if targets.ndim != 1 or targets.is_floating_point() or outputs.ndim != 2 or outputs.shape[1] < 2:
            raise InputError(
                f"classification: outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}; expected outputs "
                "(examples, classes) and whole numbers (examples,), or labels of the outputs' shape"
            )
        count = outputs.shape[1]
        others = [outputs[:, [each for each in range(count) if each != one]].logsumexp(1) for one in range(count)]
        classes = torch.arange(count)
        predicted, positive = (outputs.argmax(1)[:, None] == classes), (targets[:, None] == classes)
        scores = outputs - torch.stack(others, 1)
        reached = None if cutoff is None else (scores[:, 1].sigmoid() >= cutoff).numpy()
        found = scores.numpy(), predicted.numpy(), positive.numpy()
        return _Predictions(*found, several=False, at_cutoff=reached, **weighing)

    @property
    def probabilities(self) -> Values:
        """Of each class, float64."""
        found: Values = torch.from_numpy(self.scores).sigmoid().numpy()
        return found

    def columns(self) -> Iterator[tuple[Values, Values]]:
        """Scores and truth of each class that some examples have; of two classes, of the second alone."""
        two = not self.several and self.positive.shape[1] == 2
        for scores, positive in list(zip(self.scores.T, self.positive.T, strict=True))[1 if two else 0 :]:
            if positive.any():
                yield scores, positive

    def mean(self, values: Values, examples: Values | slice = slice(None)) -> Values:
        """The mean over these examples, by their weights."""
        found: Values = np.average(values[examples], axis=0, weights=self.weights[examples])
        return found

    def count(self, examples: Values) -> Values:
        """The weight of the examples of each column ``(examples, classes)``."""
        found: Values = (examples * self.weights[:, None]).sum(0)
        return found

    def share(self, right: Values, examples: Values | slice = slice(None)) -> float | None:
        """The part of these examples that are right; None without one."""
        return float(self.mean(right, examples)) if len(right[examples]) else None


def _auc(given: _Predictions) -> float | None:
    areas = [area_under_roc(*pair, given.weights if given.weighted else None) for pair in given.columns()]
    known = [area for area in areas if area is not None]
    return sum(known) / len(known) if known else None


def _average_precision(given: _Predictions) -> float | None:
    found = [_precision_over_recall(*pair, given.weights) for pair in given.columns()]
    return sum(found) / len(found) if found else None


def _precision_over_recall(scores: Values, positive: Values, weights: Values) -> float:
    """The mean over the positive examples of the precision among those that score as high."""
    found = scores[positive]
    hits, reached = (_weight_above(*each, found) for each in ((found, weights[positive]), (scores, weights)))
    return float(np.average(hits / reached, weights=weights[positive]))


def _weight_above(scores: Values, weights: Values, at: Values) -> Values:
    """The weight of the scores that are not below each of these."""
    order = np.argsort(-scores, kind="stable")
    summed = np.append(0.0, np.cumsum(weights[order]))
    found: Values = summed[np.searchsorted(-scores[order], -at, "right")]
    return found


def _brier(given: _Predictions) -> float | None:
    """The mean squared error of the probability of the second of two classes, or of a label; of more their sum."""
    errors = np.square(given.probabilities - given.positive)
    if given.several:
        return float(np.average(errors, weights=np.broadcast_to(given.weights[:, None], errors.shape)))
    return float(given.mean(errors[:, 1] if errors.shape[1] == 2 else errors.sum(1)))


def _f1(given: _Predictions) -> float | None:
    occurs = given.count(given.positive) + given.count(given.predicted)
    return _mean_ratio(2 * given.count(given.positive & given.predicted), occurs)


def _recall(given: _Predictions) -> float | None:
    if given.at_cutoff is not None:
        return given.share(given.at_cutoff, given.positive[:, 1])
    return _mean_ratio(given.count(given.positive & given.predicted), given.count(given.positive))


def _specificity(given: _Predictions) -> float | None:
    if given.at_cutoff is not None:
        return given.share(~given.at_cutoff, ~given.positive[:, 1])
    return _mean_ratio(given.count(~given.positive & ~given.predicted), given.count(~given.positive))


def _mean_ratio(numerators: Values, denominators: Values) -> float | None:
    """The mean over the classes with a denominator."""
    known = denominators > 0
    return float((numerators[known] / denominators[known]).mean()) if known.any() else None


def _calibration_error(given: _Predictions) -> float | None:
    probabilities = given.probabilities
    if given.several:
        pairs = zip(probabilities.T, given.positive.T, strict=True)
        return float(np.mean([_expected_gap(*pair, given.weights) for pair in pairs]))
    return _expected_gap(probabilities[given.predicted], given.positive[given.predicted], given.weights)


def _expected_gap(confidence: Values, correct: Values, weights: Values) -> float:
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    return float(np.abs(np.bincount(bins, weights=weights * (confidence - correct))).sum() / weights.sum())


def _class_accuracy(given: _Predictions, place: int) -> float | None:
    right = given.predicted[:, place] == given.positive[:, place]
    return given.share(right, slice(None) if given.several else given.positive[:, place])


def _majority_share(given: _Predictions) -> float | None:
    """The accuracy of the best constant; of labels the mean over them."""
    shares = given.mean(given.positive)
    return float(np.maximum(shares, 1 - shares).mean() if given.several else shares.max())


_MEASURES: dict[str, tuple[Callable[[_Predictions], float | None], Mode | None]] = {
    "auc": (_auc, "max"),
    "average_precision": (_average_precision, "max"),
    "f1": (_f1, "max"),
    "recall": (_recall, "max"),
    "specificity": (_specificity, "max"),
    "brier": (_brier, "min"),
    "calibration_error": (_calibration_error, "min"),
    "majority_share": (_majority_share, None),
}
_TWO_CLASSES = ("auc", "average_precision", "brier", "calibration_error", "recall", "specificity", "majority_share")
_CLASSES = ("f1", "brier", "calibration_error", "majority_share")
_OF_LEVELS = ("brier", "calibration_error", "majority_share")


def classification(
    *measures: str, classes: Sequence[str] = (), cutoff: float | None = None, one_class: float | None = None
) -> EnvironmentEvaluation:
    """Measures of a classifier, or of several labels an example.

    Outputs are logits ``(examples, classes)``; targets are classes ``(examples,)``, or labels of 0 and 1
    ``(examples, labels)``, for which each logit is judged at 0.

    * ``auc``: the area under the ROC curve; of more than two classes the mean of each against the others.
    * ``average_precision``: the area under the curve of precision and recall, in the same way.
    * ``f1``: the mean over the classes of F1, of those that occur or are predicted.
    * ``recall``: the mean over the classes of the accuracy among their examples (balanced accuracy).
    * ``specificity``: in the same way, the share of the examples of other classes that are not predicted as the class.
    * ``brier``: the mean squared error of the probability of the second of two classes, or of each label; of more
      classes the sum over them.
    * ``calibration_error``: the expected difference of confidence and accuracy, in 15 bins of confidence.
    * ``majority_share``: the share of the largest class, the accuracy of the best constant; it selects nothing.

    Args:
        measures: some of these names.
        classes: names of all classes or labels, in their order, for ``accuracy_of_NAME`` of each: the accuracy among
            the examples of a class, or of a label among all examples.
        cutoff: of two classes, the probability from which the second is predicted; ``recall`` and ``specificity`` are
            then the second's at this cutoff.
        one_class: ``auc`` of an environment with one class, such as 0.5; None leaves the environment out.

    Raises:
        InputError: there is no such measure, nothing is asked for, or the cutoff is not in [0, 1].
    """
    if cutoff is not None and not 0 <= cutoff <= 1:
        raise ArgumentError("cutoff", cutoff, "must be a probability, in [0, 1]")
    for name in measures:
        if name not in _MEASURES:
            raise ArgumentError("measures", name, f"there is no such measure; give some of {', '.join(_MEASURES)}")
    modes: dict[str, Mode | None] = {name: _MEASURES[name][1] for name in measures}
    modes |= {f"accuracy_of_{name}": "max" for name in classes}
    if not modes:
        raise ArgumentError("measures", "none", f"give some of {', '.join(_MEASURES)}, or classes")
    function = functools.partial(_classification, measures, tuple(classes), cutoff, one_class)
    return EnvironmentEvaluation(function, modes, of_outputs=True, cutoff=cutoff)


def usual_classification(classes: int, cutoff: float, one_class: float | None = None) -> EnvironmentEvaluation:
    """The usual measures of this number of classes; recall and specificity of two at the cutoff."""
    if classes == 2:
        return classification(*_TWO_CLASSES, cutoff=cutoff, one_class=one_class)
    return classification(*_CLASSES)


def ordinal(levels: int) -> EnvironmentEvaluation:
    """Measures of a classifier of levels in an order, neighbours 1 apart; the most probable level is predicted.

    * ``mae``: the mean absolute error of the level, which compares models.
    * ``kappa``: Cohen's kappa with quadratic weights; not defined where truth and prediction are one level.
    * ``brier``, ``calibration_error`` and ``majority_share`` as of classes.
    """
    modes: dict[str, Mode | None] = {"mae": "min", "kappa": "max", **{name: _MEASURES[name][1] for name in _OF_LEVELS}}
    return EnvironmentEvaluation(functools.partial(_ordinal, levels), modes, of_outputs=True)


def _ordinal(levels: int, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, float | None]:
    given = _Predictions.of(outputs, targets, weights)
    truth, predicted = targets.numpy(), given.predicted.argmax(1)
    found = np.bincount(truth * levels + predicted, weights=given.weights, minlength=levels**2).reshape(levels, levels)
    distance = np.subtract.outer(np.arange(levels), np.arange(levels)) ** 2
    by_chance = np.outer(found.sum(1), found.sum(0)) / found.sum()
    chance = float((distance * by_chance).sum())
    return {
        "mae": float(given.mean(np.abs(truth - predicted))),
        "kappa": 1 - float((distance * found).sum()) / chance if chance > 0 else None,
        **{name: _MEASURES[name][0](given) for name in _OF_LEVELS},
    }


def _classification(
    measures: tuple[str, ...],
    classes: tuple[str, ...],
    cutoff: float | None,
    one_class: float | None,
    outputs: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
) -> dict[str, float | None]:
    given = _Predictions.of(outputs, targets, weights, cutoff)
    if cutoff is not None and (given.several or given.positive.shape[1] != 2):
        raise ArgumentError("cutoff", cutoff, f"is of two classes; the model has {given.positive.shape[1]} outputs")
    if classes and len(classes) != given.positive.shape[1]:
        raise ArgumentError("classes", ", ".join(classes), f"the model has {given.positive.shape[1]} outputs")
    found = {name: _MEASURES[name][0](given) for name in measures}
    if found.get("auc", 0.0) is None:
        found["auc"] = one_class
    return found | {f"accuracy_of_{name}": _class_accuracy(given, at) for at, name in enumerate(classes)}


def regression(*targets: str) -> EnvironmentEvaluation:
    """``mse``, ``mae`` and ``r2`` (R²) of a regression; of several targets ``mse_NAME``… of each.

    Args:
        targets: names of the targets, in the order of the outputs ``(examples, targets)``; none for one target.
    """
    ends = [f"_{name}" for name in targets] or [""]
    modes: dict[str, Mode | None] = {}
    for end in ends:
        modes |= {f"mse{end}": "min", f"mae{end}": "min", f"r2{end}": "max"}
    return EnvironmentEvaluation(functools.partial(_regression, tuple(ends)), modes, of_outputs=True)


def _regression(
    ends: tuple[str, ...], outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> dict[str, float | None]:
    outputs, targets = (each.double().view(len(each), -1) for each in (outputs, targets))
    if not outputs.shape == targets.shape == (len(targets), len(ends)):
        raise InputError(
            f"regression: outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}; expected {len(ends)} "
            "of each example, the number of names"
        )
    found: dict[str, float | None] = {}
    for end, output, target in zip(ends, outputs.T, targets.T, strict=True):
        found |= {f"{name}{end}": value for name, value in errors_of(output, target, weights).items()}
    return found


def errors_of(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, float | None]:
    """``mse``, ``mae`` and ``r2`` of a target, from float64 ``(examples,)``; R² is None for one value of the target."""
    errors, each = outputs - targets, torch.ones_like(targets) if weights is None else weights.double()
    spread = float(((targets - mean_of(targets, weights)).square() * each).sum())
    return {
        "mse": float(mean_of(errors.square(), weights)),
        "mae": float(mean_of(errors.abs(), weights)),
        "r2": 1 - float((errors.square() * each).sum()) / spread if spread > 0 else None,
    }


def mean_of(values: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of float64 ``(examples,)``, by weights if there are some."""
    return values.mean() if weights is None else (values * weights.double()).sum() / weights.double().sum()
