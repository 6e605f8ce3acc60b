"""Measures during a run how the environments' gradients and curvatures agree, by layer, beside chance."""

from collections.abc import Mapping

from torch import nn

from concord.aggregation import default_threshold
from concord.analysis.consistency.curvature import diagonals, log_ratios
from concord.analysis.consistency.environment_losses import Add, EnvironmentLosses
from concord.analysis.consistency.signs import sign_agreement
from concord.gradients.risk import Batch, Risk

EXAMPLES = 32  # of each environment
_PROBES = 2  # of the diagonal curvatures
_BY_LAYER = ("agreement", "log_ratio")


def consistency_metrics(
    model: nn.Module, risk: Risk, batches: Mapping[str, Batch], environments: int, add: Add
) -> dict[str, float]:
    """Sign agreement and, with a loss, the log ratio of mean curvatures, for the network and by layer.

    Every process calls it, with its training environments' batches and a function that adds a tensor over all
    processes. ``environments`` is the number of environments of all processes. The model's mode does not change.
    """
    training = model.training
    try:
        losses = EnvironmentLosses(model, risk, batches, check_finite=False)
        found = sign_agreement(losses, default_threshold("and-mask", environments), 1, add, environments)
        if getattr(risk, "of_outputs", False):
            found += log_ratios(losses, diagonals(losses, _PROBES, 0), add, environments)
    finally:
        model.train(training)
    reported = [each for each in found if each.name != "norm" and (each.whole or each.name in _BY_LAYER)]
    return {f"consistency/{each.metric}": each.value for each in reported}
