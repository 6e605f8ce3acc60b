"""The requirements for the champion among the versions of a job's model."""

import math
from collections.abc import Mapping
from typing import Any

from concord.training.job import Job
from concord.training.options import RunConfig


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
