"""Measures of whole environments that are no means over examples: the area under the ROC curve, F1, calibration, R².

A job names them as its evaluation; each is reported of every environment, over all of a split, and of the worst::

    job = Job(environments, model, cross_entropy, evaluation=classification("auc", "f1", "calibration_error"))

Where a measure is not defined, as the area with one class alone, the environment is left out of its mean and its worst.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concord.environments import Environment
from concord.errors import ArgumentError, InputError
from concord.training.declared_measures import EnvironmentEvaluation, Mode

_AT_ONCE = 256  # examples
_BINS = 15  # of confidences, as in Guo et al., "On calibration of modern neural networks"

Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Predictions:
    """A model's predictions for one environment, ``(examples, classes)``; of several labels, a class is a label.

    Attributes:
        scores: the log-odds of each class.
        predicted, positive: whether a class is predicted, and whether it is right.
        several: whether an example may have several labels.
    """

    scores: Values
    predicted: Values
    positive: Values
    several: bool

    @staticmethod
    def of(outputs: Tensor, targets: Tensor) -> "_Predictions":
        """From logits ``(examples, classes)``, and classes ``(examples,)``, or labels of the logits' shape, 0 or 1."""
        outputs = outputs.nan_to_num()
        if targets.shape == outputs.shape:
            outputs, targets = outputs.view(len(outputs), -1), targets.view(len(outputs), -1)
            return _Predictions(outputs.numpy(), (outputs > 0).numpy(), (targets > 0.5).numpy(), several=True)
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
        return _Predictions(scores.numpy(), predicted.numpy(), positive.numpy(), several=False)

    def columns(self) -> Iterator[tuple[Values, Values]]:
        """Scores and truth of each class that some examples have; of two classes, of the second alone."""
        two = not self.several and self.positive.shape[1] == 2
        for scores, positive in list(zip(self.scores.T, self.positive.T, strict=True))[1 if two else 0 :]:
            if positive.any():
                yield scores, positive


def _auc(given: _Predictions) -> float | None:
    from sklearn.metrics import roc_auc_score

    areas = [float(roc_auc_score(positive, scores)) for scores, positive in given.columns() if not positive.all()]
    return sum(areas) / len(areas) if areas else None


def _average_precision(given: _Predictions) -> float | None:
    from sklearn.metrics import average_precision_score

    found = [float(average_precision_score(positive, scores)) for scores, positive in given.columns()]
    return sum(found) / len(found) if found else None


def _f1(given: _Predictions) -> float | None:
    occurs = given.positive.sum(0) + given.predicted.sum(0)
    return _mean_ratio(2 * (given.positive & given.predicted).sum(0), occurs)


def _recall(given: _Predictions) -> float | None:
    return _mean_ratio((given.positive & given.predicted).sum(0), given.positive.sum(0))


def _mean_ratio(numerators: Values, denominators: Values) -> float | None:
    """The mean over the classes with a denominator."""
    known = denominators > 0
    return float((numerators[known] / denominators[known]).mean()) if known.any() else None


def _calibration_error(given: _Predictions) -> float | None:
    probabilities = torch.from_numpy(given.scores).double().sigmoid().numpy()
    if given.several:
        pairs = zip(probabilities.T, given.positive.T, strict=True)
        return float(np.mean([_expected_gap(*pair) for pair in pairs]))
    return _expected_gap(probabilities[given.predicted], given.positive[given.predicted])


def _expected_gap(confidence: Values, correct: Values) -> float:
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    return float(np.abs(np.bincount(bins, weights=confidence - correct)).sum() / len(confidence))


def _class_accuracy(given: _Predictions, place: int) -> float | None:
    right = given.predicted[:, place] == given.positive[:, place]
    right = right if given.several else right[given.positive[:, place]]
    return float(right.mean()) if len(right) else None


_MEASURES: dict[str, tuple[Callable[[_Predictions], float | None], Mode]] = {
    "auc": (_auc, "max"),
    "average_precision": (_average_precision, "max"),
    "f1": (_f1, "max"),
    "recall": (_recall, "max"),
    "calibration_error": (_calibration_error, "min"),
}


def classification(*measures: str, classes: Sequence[str] = ()) -> EnvironmentEvaluation:
    """Measures of a classifier, or of several labels an example.

    Outputs are logits ``(examples, classes)``; targets are classes ``(examples,)``, or labels of 0 and 1
    ``(examples, labels)``, for which each logit is judged at 0.

    * ``auc``: the area under the ROC curve; of more than two classes the mean of each against the others.
    * ``average_precision``: the area under the curve of precision and recall, in the same way.
    * ``f1``: the mean over the classes of F1, of those that occur or are predicted.
    * ``recall``: the mean over the classes of the accuracy among their examples (balanced accuracy).
    * ``calibration_error``: the expected difference of confidence and accuracy, in 15 bins of confidence.

    Args:
        measures: some of these names.
        classes: names of all classes or labels, in their order, for ``accuracy_of_NAME`` of each: the accuracy among
            the examples of a class, or of a label among all examples.

    Raises:
        InputError: there is no such measure, or nothing is asked for.
    """
    for name in measures:
        if name not in _MEASURES:
            raise ArgumentError("measures", name, f"there is no such measure; give some of {', '.join(_MEASURES)}")
    modes: dict[str, Mode | None] = {name: _MEASURES[name][1] for name in measures}
    modes |= {f"accuracy_of_{name}": "max" for name in classes}
    if not modes:
        raise ArgumentError("measures", "none", f"give some of {', '.join(_MEASURES)}, or classes")
    return EnvironmentEvaluation(functools.partial(_classification, measures, tuple(classes)), modes)


def _classification(
    measures: tuple[str, ...], classes: tuple[str, ...], model: nn.Module, environment: Environment
) -> dict[str, float | None]:
    given = _Predictions.of(*_outputs_and_targets(model, environment))
    if classes and len(classes) != given.positive.shape[1]:
        raise ArgumentError("classes", ", ".join(classes), f"the model has {given.positive.shape[1]} outputs")
    found = {name: _MEASURES[name][0](given) for name in measures}
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
    return EnvironmentEvaluation(functools.partial(_regression, tuple(ends)), modes)


def _regression(ends: tuple[str, ...], model: nn.Module, environment: Environment) -> dict[str, float | None]:
    outputs, targets = (each.double().view(len(each), -1) for each in _outputs_and_targets(model, environment))
    if not outputs.shape == targets.shape == (len(targets), len(ends)):
        raise InputError(
            f"regression: outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}; expected {len(ends)} "
            "of each example, the number of names"
        )
    found: dict[str, float | None] = {}
    for end, output, target in zip(ends, outputs.T, targets.T, strict=True):
        errors, spread = output - target, float((target - target.mean()).square().sum())
        found |= {f"mse{end}": float(errors.square().mean()), f"mae{end}": float(errors.abs().mean())}
        found[f"r2{end}"] = 1 - float(errors.square().sum()) / spread if spread > 0 else None
    return found


def _outputs_and_targets(model: nn.Module, environment: Environment) -> tuple[Tensor, Tensor]:
    """The model's outputs and the targets, on the CPU."""
    first = next(model.parameters(), None)
    found = []
    for start in range(0, len(environment), _AT_ONCE):
        inputs, targets = environment.pairs(slice(start, start + _AT_ONCE))
        outputs = model(inputs if first is None else inputs.to(first.device))
        found.append((outputs.float().cpu(), targets.cpu()))
    outputs, targets = (torch.cat(each) for each in zip(*found, strict=True))
    return outputs, targets
