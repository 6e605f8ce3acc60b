"""The model and the objective of a run, as they are before its first step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from concord.errors import InputError
from concord.objectives import Objective, WeightedERM
from concord.training.job import Job
from concord.training.options import ResolvedTrainConfig, RunConfig


def build_model(job: Job[Any], config: RunConfig) -> nn.Module:
    """The job's model, its first weights drawn from the run's seed."""
    torch.manual_seed(config.run.seed)
    return job.model(config)


def initialize_objective(
    job: Job[Any], config: ResolvedTrainConfig, model: nn.Module, rows: Sequence[float], steps: int
) -> Objective:
    """The objective of the run, ready for its first step: the job's own, or the one of ``--objective``.

    ``rows`` are the numbers of examples of all training environments, or the sums of their weights. Call it after
    :func:`build_model`, whose random numbers it continues.
    """
    autocast = None if config.optimizer.precision == "float32" else getattr(torch, config.optimizer.precision)
    if job.objective is None and config.data.environment_weights == "rows":
        objective: Objective = WeightedERM(job.risk_of(config), rows, autocast)
    elif job.objective is None:
        objective = config.objective.build(job.risk_of(config), steps, autocast)
    else:
        objective = job.objective(config)
        if not isinstance(objective, Objective):
            raise InputError(f"job {job.name}: objective gave {type(objective).__name__}, expected an Objective")
        objective.autocast = autocast
        check_own_objective(config, objective)
    accumulate = config.aggregation.accumulate
    expected = f"the objective {type(objective).__name__} is no mean over the examples of a batch; give 1"
    config.require("accumulate", accumulate == 1 or objective.averages, expected)
    objective.begin(model, len(rows), steps)
    if objective.module is not None and not objective.coupled:
        raise InputError("objective: has a module of its own, which only a coupled one can have; set coupled = True")
    return objective


def check_own_objective(config: ResolvedTrainConfig, objective: Objective) -> None:
    """Refuse options that do not fit a job's own objective (InputError)."""
    config.require(
        "objective", config.objective.objective == "erm", "the job has an objective of its own; leave out this option"
    )
    trained = "the objective trains its module itself, whose loss is not scaled; give bfloat16"
    config.require("precision", not (objective.alternates and config.optimizer.precision == "float16"), trained)
    equal = config.data.environment_weights == "equal"
    config.require("environment_weights", equal, "the job has an objective of its own; give equal")
    if objective.alternates or objective.every:
        expected = "the job's objective needs the same environments at each step; give 0"
        config.require("environments_per_step", config.data.environments_per_step == 0, expected)
    if objective.coupled:
        coupled = "the job's objective couples the environments, so there is one gradient"
        right = config.aggregation.aggregator == "mean" or objective.takes_aggregator
        config.require("aggregator", right, f"{coupled}; give mean")
        config.require("steps_per_update", config.aggregation.steps_per_update == 1, f"{coupled}; give 1")
        config.require("environment_momentum", config.aggregation.environment_momentum == 0, f"{coupled}; give 0")
        config.require("nonfinite", config.aggregation.nonfinite != "skip", f"{coupled}; give raise")
        config.require("per_example", not config.aggregation.per_example, f"{coupled}; leave it out")
        config.require("compile", not config.optimizer.compile, f"{coupled}; leave it out")
