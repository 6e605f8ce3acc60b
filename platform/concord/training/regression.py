"""Errors of a regression in the target's units, judged against a constant: the mean of the training target."""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from concord.environments import Environment, Environments
from concord.record import Evaluation
from concord.training.declared_measures import EnvironmentEvaluation
from concord.training.metric_names import split_metric

_AT_ONCE = 65_536  # examples


def regression_errors(deviation: float) -> EnvironmentEvaluation:
    """The mean squared and mean absolute error in the target's units, and the squared error of the constant.

    The model and the targets are standardized: the constant is 0, and ``deviation`` is the target's.
    """
    modes = {"mse": "min", "mae": "min", "constant_mse": None}
    return EnvironmentEvaluation(functools.partial(_errors, deviation), modes)  # type: ignore[arg-type]


def _errors(deviation: float, model: nn.Module, environment: Environment) -> dict[str, float]:
    first = next(model.parameters(), None)
    parts = environment.inputs.split(_AT_ONCE)
    outputs = torch.cat([model(each if first is None else each.to(first.device)).cpu().double() for each in parts])
    targets = deviation * environment.targets.double()
    moved = deviation * outputs - targets
    return {
        "mse": float(moved.square().mean()),
        "mae": float(moved.abs().mean()),
        "constant_mse": float(targets.square().mean()),
    }


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
