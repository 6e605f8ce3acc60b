"""Which failures a restart of the workers repairs.

When a worker raises, its group ends, and a new group begins at the last checkpoint, ``--max-failures`` times. That
repairs an *outage*: another worker died, a node or the network is gone. It does not repair an error in a job or its
data, which new workers would repeat. So any other error is recorded, and ends the run.
"""

import sys
from collections.abc import Callable

import torch

Outage = Callable[[Exception], bool]
"""Whether an error is an outage."""

_OUTAGES: dict[str, Outage] = {}


def outage(kind: Outage) -> Outage:
    """Register a kind of outage; a decorator, for this file or a job's."""
    _OUTAGES[kind.__qualname__] = kind
    return kind


def is_outage(error: Exception) -> bool:
    """Whether this error is an outage."""
    return any(kind(error) for kind in _OUTAGES.values())


@outage
def lost_connection(error: Exception) -> bool:
    """Another process, or another machine, does not answer."""
    return isinstance(error, (ConnectionError, TimeoutError))


@outage
def lost_ray_worker(error: Exception) -> bool:
    """Ray reports the death of a worker that this one waited for."""
    ray = sys.modules.get("ray")  # if not imported, it raised nothing
    return ray is not None and isinstance(error, ray.exceptions.RayError)


@outage
def failed_collective(error: Exception) -> bool:
    """A collective of gloo or NCCL failed, since another worker is gone."""
    if isinstance(error, torch.distributed.DistError):
        return True
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
