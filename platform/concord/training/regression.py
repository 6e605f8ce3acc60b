"""Errors of numbers and counts in the target's units, judged against a constant: the mean of the training target."""

import functools

import torch
from torch import Tensor

from concord.training.declared_measures import EnvironmentEvaluation
from concord.training.measures import errors_of, mean_of


def regression_errors(deviation: float) -> EnvironmentEvaluation:
    """Squared and absolute error in the target's units, the squared error of the constant, and R².

    The model and the targets are standardized: the constant is 0, and ``deviation`` is the target's.
    """
    modes = {"mse": "min", "mae": "min", "constant_mse": None, "r2": "max"}
    return EnvironmentEvaluation(functools.partial(_errors, deviation), modes, of_outputs=True)  # type: ignore[arg-type]


def _errors(
    deviation: float, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> dict[str, float | None]:
    outputs, targets = (deviation * each.double().flatten() for each in (outputs, targets))
    return {**errors_of(outputs, targets, weights), "constant_mse": float(mean_of(targets.square(), weights))}


def poisson_deviance(log_rates: Tensor, counts: Tensor) -> Tensor:
    """The deviance of each count from the Poisson distribution of a rate, 0 where they are equal."""
    counts = counts.to(log_rates.dtype)
    least: Tensor = torch.special.xlogy(counts, counts) - counts
    return 2 * (least - counts * log_rates + log_rates.exp())


def count_errors(mean: float) -> EnvironmentEvaluation:
    """The mean Poisson deviance of counts, and the errors of a regression; outputs are logarithms of rates.

    The constant is ``mean``, that of the training target.
    """
    modes = {"poisson_deviance": "min", "mae": "min", "mse": "min", "constant_mse": None, "r2": "max"}
    function = functools.partial(_count_errors, mean)
    return EnvironmentEvaluation(function, modes, of_outputs=True)  # type: ignore[arg-type]


def _count_errors(
    mean: float, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> dict[str, float | None]:
    outputs, targets = outputs.double().flatten(), targets.double().flatten()
    return {
        "poisson_deviance": float(mean_of(poisson_deviance(outputs, targets), weights)),
        **errors_of(outputs.exp(), targets, weights),
        "constant_mse": float(mean_of((targets - mean).square(), weights)),
    }
