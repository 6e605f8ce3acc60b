"""Checks that the cluster has the CPUs and GPUs of a run or a study; requests missing ones from Ray's autoscaler."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from concord.errors import InputError
from concord.runs.session import LOCAL, cluster_address
from concord.training.options import RunConfig

# The default of --wait-for-resources. A cloud starts a node with a GPU in about ten minutes.
_WAIT_MINUTES = 30.0
_CHECK_EVERY_SECONDS = 1.0
Checked = TypeVar("Checked")


def require_resources(config: RunConfig, info: Callable[[str], None]) -> None:
    """Wait until the cluster has a run's resources (InputError in the end): Ray would wait silently for ever."""
    bundles = [{kind: 1.0} for kind, (needed, _) in _requests(config).items() for _ in range(math.ceil(needed))]
    wait_for_resources(lambda: check_resources(config), bundles, config, info)


def check_resources(config: RunConfig) -> None:
    """Refuse a run that needs more than the connected cluster has (InputError)."""
    import ray

    there = ray.cluster_resources()
    for kind, (needed, words) in _requests(config).items():
        if needed > there.get(kind, 0.0):
            raise InputError(f"{words}; the Ray cluster has {there.get(kind, 0.0):g}")


def check_gpus(config: RunConfig) -> None:
    """Refuse GPUs (InputError) that the Ray session lacks, or this machine if Ray would start here."""
    if config.gpu_request()[0] == 0:
        return
    import ray

    if not ray.is_initialized():
        if cluster_address(config)[0] == LOCAL:
            check_local_gpus(config)
    elif waiting_minutes(config) == 0:
        check_resources(config)


def check_local_gpus(config: RunConfig) -> None:
    """Refuse GPUs that this machine does not have (InputError)."""
    needed, words = config.gpu_request()
    if needed > (found := torch.cuda.device_count()):
        raise InputError(f"{words}; this machine has {found}")


def _requests(config: RunConfig) -> dict[str, tuple[float, str]]:
    return {"GPU": config.gpu_request(), "CPU": config.cpu_request()}


def wait_for_resources(
    check: Callable[[], Checked], bundles: Sequence[dict[str, float]], config: RunConfig, info: Callable[[str], None]
) -> Checked:
    """Ask the autoscaler for resources until the check passes, and return its result; the request ends with the wait.

    ``check`` raises InputError while the cluster lacks something; after ``--wait-for-resources`` it is raised here. The
    cluster must have all ``bundles`` at the same time, each on one node.
    """
    minutes = waiting_minutes(config)
    try:
        return check()
    except InputError as lacking:
        if minutes == 0:
            raise
        info(f"{lacking}; its autoscaler is asked for more, for up to {minutes:g} minutes (--wait-for-resources)")
    from ray.autoscaler.sdk import request_resources

    end = time.monotonic() + 60 * minutes
    try:
        while True:
            request_resources(bundles=list(bundles))  # again each time: another run's request replaces this one
            try:
                return check()
            except InputError as lacking:
                if time.monotonic() >= end:
                    raise InputError(f"{lacking}, after {minutes:g} minutes") from None
            time.sleep(_CHECK_EVERY_SECONDS)
    finally:
        # End the request, so that the cluster may shrink again. The run's processes keep their nodes.
        request_resources(bundles=[])


def waiting_minutes(config: RunConfig) -> float:
    """How long a run waits for resources; a Ray that is started on this machine never gets new ones."""
    if config.run.wait_for_resources is not None:
        return config.run.wait_for_resources
    return 0.0 if cluster_address(config)[0] == LOCAL else _WAIT_MINUTES
