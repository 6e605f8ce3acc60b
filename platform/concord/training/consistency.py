"""During a run: how gradients and curvatures of the environments agree, by layer, beside what chance alone gives."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from concord.aggregation import default_threshold
from concord.analysis.consistency.curvature import diagonals, log_ratios, mean_log_ratio
from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.analysis.consistency.signs import sign_agreement
from concord.environments import Environment
from concord.gradients.risk import Risk

_EXAMPLES, _PROBES = 32, 2  # of each environment, its first ones; for the diagonals of the curvatures


def consistency_metrics(
    model: nn.Module, risk: Risk, own: Sequence[Environment], environments: int, world_size: int
) -> dict[str, float]:
    """Agreement in sign and, where there is a loss, the log ratio of the means of curvatures; whole and by layer.

    Called in every process of the default group; the model's mode stays as it is.

    Args:
        model: as it is now, on its device.
        risk: of a batch.
        own: this process's training environments.
        environments: how many all processes have.
        world_size: the number of processes.
    """

    def add(values: Tensor) -> Tensor:
        if world_size > 1:
            dist.all_reduce(values)
        return values

    training = model.training
    try:
        batches = {each.name: each.take(slice(0, _EXAMPLES)) for each in own}
        losses = EnvironmentLosses(model, risk, batches, check_finite=False)
        threshold = default_threshold("and-mask", environments)
        signs = sign_agreement(losses, threshold, 1, add, environments)
        metrics = {
            "consistency/agreement": signs.whole.agreement,
            "consistency/kept_fraction": signs.whole.kept,
            "consistency/chance_agreement": signs.chance_agreement,
            "consistency/chance_fraction": signs.chance_kept,
        }
        metrics |= {f"consistency/agreement/{name}": layer.agreement for name, layer in signs.layers.items()}
        if getattr(risk, "of_outputs", False):
            ratios = log_ratios(losses, diagonals(losses, _PROBES, 0), add, environments)
            metrics["consistency/log_ratio"] = mean_log_ratio(losses, ratios)
            metrics |= {f"consistency/log_ratio/{name}": ratio for name, ratio in ratios.items()}
    finally:
        model.train(training)
    return metrics
