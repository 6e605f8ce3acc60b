"""TO BE DELETED when objectives have `coupled` and `risk` themselves; `gradient_source` then takes an `Objective`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from concord.errors import InputError
from concord.gradients.risk import Batch, Risk, Supervised
from concord.objectives import Objective, Separable
from concord.training.config import TrainConfig
from concord.training.job import Job

EnvironmentObjective = Any
"""An `Objective` that has `coupled`, and `risk` where it does not."""


@dataclass(frozen=True)
class _Mean:
    risk: Risk
    coupled: bool = False


class _Coupled:
    coupled = True

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)


def environment_objective(
    job: Job[Any], config: TrainConfig, steps: int, autocast: torch.dtype | None = None
) -> EnvironmentObjective:
    """What a run of so many steps minimizes.

    Raises:
        InputError: an objective other than ERM, and the job has no loss.
    """
    if config.objective == "erm":
        return _Mean(job.batch_risk)
    if job.loss is None:
        raise InputError(f"--objective {config.objective}: needs a loss of outputs and targets; the job has a risk")
    objective = config.objective_of(job.loss, steps, autocast)
    if not isinstance(objective, Separable):
        return _Coupled(objective)
    term = objective.term

    def of_environment(model: nn.Module, batch: Batch, step: int) -> Tensor:
        return Supervised(lambda outputs, targets: term(outputs, targets, step))(model, batch, step)

    return _Mean(of_environment)
