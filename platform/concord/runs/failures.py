"""Which failures of a worker new workers mend.

When a worker raises, its group ends, and a new group begins at the last checkpoint, ``--max-failures`` times. That
mends an *outage*: another worker died, a node or the network is gone. It does not mend a mistake in a job or its data,
which new workers would only make again. So an error that is no outage is written down, and the run ends with it.
"""

import sys
from collections.abc import Callable

import torch

Outage = Callable[[Exception], bool]
"""Whether an error is of a kind that new workers mend."""

_OUTAGES: dict[str, Outage] = {}


def outage(kind: Outage) -> Outage:
    """Add a kind of failure that new workers mend, as a decorator; in this file, or in a job's own."""
    _OUTAGES[kind.__qualname__] = kind
    return kind


def is_outage(error: Exception) -> bool:
    """Whether new workers mend what raised this error."""
    return any(kind(error) for kind in _OUTAGES.values())


@outage
def lost_connection(error: Exception) -> bool:
    """Another process, or another machine, does not answer."""
    return isinstance(error, (ConnectionError, TimeoutError))


@outage
def lost_ray_worker(error: Exception) -> bool:
    """Ray reports that a worker died for which this one waited."""
    ray = sys.modules.get("ray")  # where it was never imported, it raised nothing
    return ray is not None and isinstance(error, ray.exceptions.RayError)


@outage
def failed_collective(error: Exception) -> bool:
    """A collective of gloo or NCCL failed, since another worker is gone."""
    names = ("DistError", "DistBackendError")
    if isinstance(error, tuple(kind for name in names if (kind := getattr(torch.distributed, name, None)))):
        return True
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
