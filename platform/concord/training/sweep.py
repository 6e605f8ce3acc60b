"""Many short runs of one job in few processes, without Ray: for figures that need dozens of them."""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import torch

import concord
from concord.options import option_values
from concord.redaction import without_secrets
from concord.storage import append_line, read_lines
from concord.training.job import Job, load_job
from concord.training.loop import ProcessContext, Silent, train
from concord.training.options import RUNTIME_OPTIONS, TrainConfig
from concord.training.process import tune_process

Key = TypeVar("Key", int, str, float)
Metrics = dict[str, float]


def sweep(
    job: Job[Any],
    configurations: Mapping[Key, Sequence[TrainConfig]],
    metric: str,
    record: Path,
    info: Callable[[str], None],
    place: ProcessContext | None = None,
) -> dict[Key, list[float]]:
    """Train every configuration and give the metric of each at its end, by key, in order; see :func:`histories`."""
    runs = histories(job, configurations, record, info, place, shown=metric)
    return {key: [run[-1][metric] for run in each] for key, each in runs.items()}


def histories(
    job: Job[Any],
    configurations: Mapping[Key, Sequence[TrainConfig]],
    record: Path,
    info: Callable[[str], None],
    place: ProcessContext | None = None,
    *,
    shown: str,
    file: str | None = None,
    processes: int = 1,
) -> dict[Key, list[list[Metrics]]]:
    """Train every configuration and give the metrics of all its evaluations, by key, in order.

    Finished runs are kept in ``record`` (a JSON line each) and not run again, so a sweep that was stopped goes on.

    Args:
        job: what to train.
        configurations: lists of them by a key, such as the method; one that stands twice runs once.
        record: the file.
        info: takes a line of progress.
        place: where to train; this process's CPU if None.
        shown: the metric that a line of progress tells.
        file: the job's file, needed for several processes.
        processes: how many train at a time, each with its share of the threads.

    Returns:
        The metrics of each evaluation of each run, with those of single environments, the last at its end.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    done = _read(record)
    wanted: dict[str, TrainConfig] = {}
    names: dict[str, Key] = {}
    identities: dict[Key, list[str]] = {}
    for key, configs in configurations.items():
        identities[key] = []
        for config in (config.resolved() for config in configs):
            config.check()
            identity = _identity(job, config)
            identities[key].append(identity)
            wanted[identity], names[identity] = config, names.get(identity, key)
    waiting = {identity: config for identity, config in wanted.items() if identity not in done}
    finished = len(wanted) - len(waiting)
    if finished:
        info(f"{finished} of {len(wanted)} are there already")
    for identity, history in _trained(job, waiting, place, file, processes):
        done[identity] = history
        append_line(record, {"configuration": identity, "history": history})
        finished += 1
        config = wanted[identity]
        value = history[-1][shown]
        run = f"{config.method}, {names[identity]}, seed {config.run.seed}"
        info(f"{finished} of {len(wanted)}: {run}: {shown} {value:.3f}")
    return {key: [done[identity] for identity in each] for key, each in identities.items()}


def _read(record: Path) -> dict[str, list[Metrics]]:
    return {entry["configuration"]: entry["history"] for entry, _ in read_lines(record)} if record.exists() else {}


def _identity(job: Job[Any], config: TrainConfig) -> str:
    science = without_secrets(
        {name: value for name, value in option_values(config).items() if name not in RUNTIME_OPTIONS}
    )
    data = job.environments(config).version
    science |= {"data": data} if data is not None else {}
    return json.dumps({"version": concord.__version__, **science}, default=str, sort_keys=True)


def _trained(
    job: Job[Any], configs: Mapping[str, TrainConfig], place: ProcessContext | None, file: str | None, processes: int
) -> Iterator[tuple[str, list[Metrics]]]:
    """The runs' evaluations, as they come."""
    processes = min(processes, len(configs))
    if processes <= 1 or file is None:
        tune_process()
        for identity, config in configs.items():
            yield identity, _history(job, config, place or ProcessContext())
        return
    threads = max(1, torch.get_num_threads() // processes)
    # Spawned, since PyTorch's threads do not survive a fork.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), tune_process, (threads,))
    try:
        runs = {pool.submit(_history_of_file, file, option_values(config)): name for name, config in configs.items()}
        for run in as_completed(runs):
            yield runs[run], run.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _history_of_file(file: str, options: Mapping[str, Any]) -> list[Metrics]:
    # The configuration's class is the job's own, so this process makes it from the file.
    job = load_job(file).job
    return _history(job, job.config.with_options(**options), ProcessContext())


def _history(job: Job[Any], config: TrainConfig, place: ProcessContext) -> list[Metrics]:
    return [evaluation.metrics for evaluation in train(job, config, place, Silent()).history]
