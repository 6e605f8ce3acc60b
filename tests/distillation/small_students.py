"""A small student with a teacher, and its training."""

from typing import Any

from recorded import without_time
from torch import nn
from torch.nn.functional import mse_loss

from concord.distillation import of_labels
from concord.training import Job, ProcessContext, TrainConfig, train
from concord.training.context import Silent

INPUTS, PRIVILEGED, UNITS = 4, 3, 5
BY_LABEL = of_labels(lambda outputs, labels: mse_loss(outputs.squeeze(1), labels))
CONFIG = TrainConfig().with_options(
    epochs=2, batch_size=8, held_out=0.0, lr=1e-2, evaluations=2, checkpoints=1, aggregator="mean"
)


def small_student(_: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))


def small_teacher() -> nn.Module:
    return nn.Sequential(nn.Linear(PRIVILEGED, 8), nn.Tanh(), nn.Linear(8, UNITS))


def metrics_of(
    given: Job[Any], config: TrainConfig = CONFIG, process: ProcessContext | None = None
) -> dict[str, float]:
    return without_time(train(given, config, process or ProcessContext(), Silent()).metrics)
