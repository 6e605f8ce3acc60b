"""Errors of a regression in the target's units, judged against a constant: the mean of the training target."""

import functools
from collections.abc import Sequence

from torch import Tensor

from concord.environments import Environments
from concord.record import Evaluation
from concord.training.declared_measures import EnvironmentEvaluation
from concord.training.measures import errors_of, mean_of
from concord.training.metric_names import split_metric


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


def no_better_than_constant(history: Sequence[Evaluation], environments: Environments) -> str | None:
    """A regression whose last squared error is not below that of the constant, and where."""
    end = history[-1].metrics
    inside = "held_out" if split_metric("held_out", "mse") in end else "train"
    places = {inside: f"{inside.replace('_', '-')} examples"}
    places |= {"validation": "validation environments"} if environments.validation else {}
    places |= {"ood": "the test (oracle: do not select by it)"} if environments.test else {}
    found = []
    for split, place in places.items():
        error, constant = (end.get(split_metric(split, name)) for name in ("mse", "constant_mse"))
        if error is not None and constant is not None and not error < constant:
            found.append(f"{place} {error:.4g}, the constant {constant:.4g}")
    if not found:
        return None
    return f"warning: no better than the mean of the training target: mse on {'; on '.join(found)}"
