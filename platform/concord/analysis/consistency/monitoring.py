"""During a run: how gradients and curvatures of the environments agree, by layer, beside what chance alone gives."""

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
    """Agreement in sign and, where there is a loss, the log ratio of the means of curvatures; whole and by layer.

    Every process calls it with the batches of its training environments and a function that adds a tensor over all
    processes, which have ``environments`` together. The model's mode stays as it is.
    """
    training = model.training
    try:
        losses = EnvironmentLosses(model, risk, batches, check_finite=False)
        found = sign_agreement(losses, default_threshold("and-mask", environments), 1, add, environments)
        if getattr(risk, "of_outputs", False):
            found += log_ratios(losses, diagonals(losses, _PROBES, 0), add, environments)
    finally:
        model.train(training)
    kept = [each for each in found if each.name != "norm" and (each.whole or each.name in _BY_LAYER)]
    return {f"consistency/{each.metric}": each.value for each in kept}
