"""The requirements for the champion among the versions of a job's model, and the environments that score them."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from concord.environments import Environments
from concord.training.job import Job
from concord.training.metric_names import environments_of
from concord.training.options import RunConfig, TrainConfig

_NAMED = 8  # more environments are counted


def required(job: Job[Any], config: RunConfig) -> Mapping[str, float]:
    """The least values of metrics with which a version of the job's model can be the champion."""
    return job.required(config) if job.required is not None else {}


def shortfall(job: Job[Any], config: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """Why a run cannot be the champion, in words: the requirement of the job that it misses; None if it can.

    A run with an environment left out is measured on that environment, so it is not compared with runs on all.
    """
    if isinstance(config, TrainConfig) and config.data.leave_out is not None:
        return f"{config.data.leave_out} was left out of its training; promote it by hand"
    for name, least in required(job, config).items():
        value = metrics.get(name, math.nan)
        if not value >= least:  # so that NaN falls short
            return f"{name} {value:g} is below {least:g}, which the job requires of a champion"
    return None


def scored_on(criterion: str, environments: Environments) -> str | None:
    """The environments in which a criterion is measured, as text that differs when they do; None if it has none.

    Scores in different environments cannot be compared: a test that takes the hardest hospital leaves easier ones.
    """
    names = sorted(environments_of(criterion, environments))
    if len(names) <= _NAMED:
        return ", ".join(names) or None
    return f"{len(names)} environments ({hashlib.sha256(repr(names).encode()).hexdigest()[:8]})"
