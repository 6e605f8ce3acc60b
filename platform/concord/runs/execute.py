"""Executes a run in this process or on Ray Train, and yields each evaluation.

One worker trains in the caller's process. Several workers, or an address, mean Ray Train.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Generator
from typing import Any

import torch

from concord.errors import InputError, RunFailedError
from concord.runs.failures import is_outage
from concord.runs.worker import RunSpec, Sink, evaluations_here, failure
from concord.training.context import ProcessContext
from concord.training.evaluation import Evaluation
from concord.training.job import JobFile
from concord.training.options import RunConfig, TrainConfig, parallel_of
from concord.training.worker_data import WorkerData


def needs_ray_train(config: RunConfig) -> bool:
    """Whether a run with these options trains on Ray Train, not in the command's process."""
    if not isinstance(config, TrainConfig):
        return False  # a loop of the job's own starts its own processes
    parallel = config.parallel
    return bool(
        parallel.workers > 1 or parallel.min_workers is not None or config.run.address or os.environ.get("RAY_ADDRESS")
    )


def only_process(config: RunConfig) -> ProcessContext:
    """The context of a single training process."""
    return ProcessContext(device=torch.device("cuda" if parallel_of(config).use_gpu else "cpu"))


def execute(
    spec: RunSpec,
    job: JobFile,
    config: RunConfig,
    sink: Sink,
    start: str | None,
    load: Callable[[], WorkerData] | None = None,
) -> Generator[Evaluation, None, None]:
    """Train a run, and yield each evaluation. Closing the iterator ends the training.

    After an outage, training continues from the last checkpoint, or starts again without one. A run that keeps no files
    yields only new evaluations then. ``start`` names the checkpoint to resume from; None starts a new run. ``load``
    returns data that this process has already.
    """
    if spec.on_ray_train:
        from concord.runs.ray_train import evaluations_on_ray

        evaluations = evaluations_on_ray(spec, config, sink, start)
    else:
        evaluations = _evaluations_in_this_process(spec, job, config, sink, start, load)
    latest = (-1, -1)
    with contextlib.closing(evaluations):
        for evaluation in evaluations:
            if spec.files is not None or (evaluation.epoch, evaluation.step) > latest:
                latest = (evaluation.epoch, evaluation.step)
                yield evaluation


def _evaluations_in_this_process(
    spec: RunSpec,
    job: JobFile,
    config: RunConfig,
    sink: Sink,
    start: str | None,
    load: Callable[[], WorkerData] | None,
) -> Generator[Evaluation, None, None]:
    process, max_failures = only_process(config), parallel_of(config).max_failures

    def keep_place(name: str, /, **fields: Any) -> None:
        nonlocal start
        sink(name, **fields)
        start = fields["name"] if name == "checkpoint" else start

    for failures in itertools.count():
        try:
            yield from evaluations_here(spec, job.job, config, process, keep_place, start, load)
            return
        except (Exception, SystemExit) as error:
            mended = isinstance(error, Exception) and is_outage(error)
            if mended and failures < max_failures:  # resume from the last checkpoint, as new workers would
                continue
            if isinstance(error, InputError | RunFailedError) and not mended:
                raise
            raise failure(error, spec.path) from error
