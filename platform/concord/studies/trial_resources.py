"""Divides the CPUs and GPUs of a cluster among trials."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
import torch

from concord.errors import InputError
from concord.runs.session import wait_for_resources, waiting_minutes
from concord.studies.study_options import SharingOptions
from concord.training import RunConfig
from concord.training.options import parallel_of

Node = Mapping[str, float]


@dataclass(frozen=True)
class TrialResources:
    """The resources of trials.

    Attributes:
        cpus, gpus: of a trial's process.
    """

    concurrent: int
    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """The number of threads of a trial's process."""
        return max(1, int(self.cpus))


def check_trial_resources(options: SharingOptions, config: RunConfig) -> None:
    """Refuse trials that do not fit (InputError), before Ray starts; not if they may wait for resources."""
    if waiting_minutes(config) == 0 and (nodes := _expected_nodes(config)):
        _divide(options, config, nodes)


def trial_resources(options: SharingOptions, config: RunConfig, info: Callable[[str], None]) -> TrialResources:
    """Divide the cluster among trials; wait until it holds ``--concurrent`` of them, by default one."""
    parallel = parallel_of(config)
    if parallel.workers > 1:
        trial = [{"GPU" if parallel.use_gpu else "CPU": 1.0}] * parallel.workers
    else:
        trial = [{"CPU": 1.0, **({"GPU": options.gpus_per_trial} if parallel.use_gpu else {})}]
    bundles = trial * max(1, options.concurrent)
    return wait_for_resources(lambda: _divide(options, config, _nodes()), bundles, config, info)


def _nodes() -> list[Node]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _expected_nodes(config: RunConfig) -> list[Node]:
    """The resources of the cluster's nodes, or this machine's if Ray would start here."""
    if ray.is_initialized():
        return _nodes()
    if config.run.address or os.environ.get("RAY_ADDRESS"):
        return []  # unknown until Ray is connected
    return [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}]


def _divide(options: SharingOptions, config: RunConfig, nodes: Sequence[Node]) -> TrialResources:
    """Divide these nodes among trials (InputError if they do not hold ``--concurrent`` of them)."""
    parallel = parallel_of(config)
    cores = [node.get("CPU", 0.0) for node in nodes]
    cpus, gpus = sum(cores), sum(node.get("GPU", 0.0) for node in nodes)
    if parallel.use_gpu and gpus == 0:
        raise InputError("--use-gpu: the Ray cluster has no GPU")
    if parallel.workers > 1:  # the trial's process only waits for its workers
        most = int((gpus if parallel.use_gpu else max(cpus, parallel.workers)) // parallel.workers)
        what = f"{parallel.workers} workers each"
    elif parallel.use_gpu:
        whole = options.gpus_per_trial
        most = sum(_fitting(node.get("GPU", 0.0), whole) for node in nodes)
        most, what = min(most, int(cpus)), f"{whole:g} GPUs each"
    else:
        most, what = int(cpus), "a CPU each"
    if options.concurrent > most or most == 0:
        asked = options.concurrent or 1
        raise InputError(
            f"--concurrent {asked}: {asked} trials with {what} do not fit; the Ray cluster has {cpus:g} CPUs and "
            f"{gpus:g} GPUs, enough for {most}"
        )
    concurrent = options.concurrent or most
    if parallel.workers > 1:
        return TrialResources(concurrent, 0.0, 0.0)
    # A trial's process fits on one node.
    share = max(1.0, min(cpus // concurrent, max(cores, default=1.0)))
    while share > 1 and sum(count // share for count in cores) < concurrent:
        share -= 1
    return TrialResources(concurrent, share, options.gpus_per_trial if parallel.use_gpu else 0.0)


def _fitting(gpus: float, each: float) -> int:
    return int(gpus // each) if each >= 1 else int(gpus) * int(1 / each + 1e-9)
