"""How a cluster is divided among runs that train side by side."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
import torch

from concord.errors import InputError
from concord.studies.options import SharingOptions
from concord.training import RunConfig
from concord.training.options import parallel_of

Node = Mapping[str, float]


@dataclass(frozen=True)
class TrialResources:
    """What runs of a group train on.

    Attributes:
        concurrent: runs at a time.
        cpus, gpus: of a run's process.
    """

    concurrent: int
    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """Of a run's process."""
        return max(1, int(self.cpus))


def expected_nodes(config: RunConfig) -> list[Node]:
    """What the nodes of the cluster have that would be used; if Ray would be started here, this machine. None of a
    cluster that is not connected to."""
    if ray.is_initialized():
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if config.run.address or os.environ.get("RAY_ADDRESS"):
        return []
    return [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}]


def trial_resources(options: SharingOptions, config: RunConfig, nodes: Sequence[Node]) -> TrialResources:
    """Divide a cluster of these nodes among runs.

    Raises:
        InputError: it does not hold as many at a time as are asked for.
    """
    parallel = parallel_of(config)
    cores, gpus = [node.get("CPU", 0.0) for node in nodes], [node.get("GPU", 0.0) for node in nodes]
    if parallel.use_gpu and sum(gpus) == 0:
        raise InputError("--use-gpu: the Ray cluster has no GPU")
    if parallel.workers > 1:  # the run's process only looks on, while its workers train
        most = int((sum(gpus) if parallel.use_gpu else max(sum(cores), parallel.workers)) // parallel.workers)
        what = f"{parallel.workers} workers each"
    elif parallel.use_gpu:
        most = min(sum(_fitting(count, options.gpus_per_trial) for count in gpus), int(sum(cores)))
        what = f"{options.gpus_per_trial:g} GPUs each"
    else:
        most, what = int(sum(cores)), "a CPU each"
    concurrent = options.concurrent or max(most, 1)
    if concurrent > most:
        raise InputError(
            f"--concurrent {concurrent}: {concurrent} trials with {what} do not fit; the Ray cluster has "
            f"{sum(cores):g} CPUs and {sum(gpus):g} GPUs, enough for {most}"
        )
    if parallel.workers > 1:
        return TrialResources(concurrent, 0.0, 0.0)
    # A run's process fits on one node.
    share = max(1.0, min(sum(cores) // concurrent, max(cores, default=1.0)))
    while share > 1 and sum(count // share for count in cores) < concurrent:
        share -= 1
    return TrialResources(concurrent, share, options.gpus_per_trial if parallel.use_gpu else 0.0)


def _fitting(gpus: float, each: float) -> int:
    return int(gpus // each) if each >= 1 else int(gpus) * int(1 / each + 1e-9)
