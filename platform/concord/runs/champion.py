"""The criterion that compares versions of a job's model, and the requirements for the champion."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from concord.errors import RunFailedError
from concord.training.evaluation import EnvironmentEvaluation, Mode
from concord.training.job import Job
from concord.training.options import RunConfig


def criterion_of(job: Job[Any], metrics: Collection[str], reported: Mapping[str, Mode | None]) -> tuple[str, Mode]:
    """The metric that compares versions of the job's model, and its mode (RunFailedError if there is none)."""
    own = job.evaluation.modes if isinstance(job.evaluation, EnvironmentEvaluation) else ()
    usual = (*(f"validation_{name}" for name in own), "validation_accuracy", "validation_loss", "train_loss")
    modes = dict(reported)
    if job.criterion is not None:  # preflight has checked it
        usual, modes[job.criterion] = (job.criterion,), job.mode or modes.get(job.criterion)
    elif job.loop is not None:
        usual = tuple(job.loop.metrics)
    for criterion in usual:
        if criterion in metrics and (mode := modes.get(criterion)) is not None:
            return criterion, mode
    raise RunFailedError(f"the run reports none of {', '.join(usual)} with a mode; give Job(criterion=…, mode=…)")


def required(job: Job[Any], config: RunConfig) -> Mapping[str, float]:
    """The least values of metrics with which a version of the job's model can be the champion."""
    return job.required(config) if job.required is not None else {}


def shortfall(job: Job[Any], config: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """The job's requirement for a champion that these metrics miss, in words; None if they meet all."""
    for name, least in required(job, config).items():
        value = metrics.get(name, math.nan)
        if not value >= least:  # so that NaN falls short
            return f"{name} {value:g} is below {least:g}, which the job requires of a champion"
    return None
