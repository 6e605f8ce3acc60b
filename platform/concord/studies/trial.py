"""A trial in its process: the training loop in pieces, one evaluation after the other, and then the next trial.

The process lives as long as the study. It has imported everything, read the job and mapped the shared data once, so
a new trial costs its training and little else.
"""

import functools
import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.tune import Trainable

from concord import logs
from concord.aggregation.rule_file import RuleFile
from concord.errors import InputError, as_option
from concord.gradients import NonFiniteGradientError
from concord.redaction import redact
from concord.runs.ray_train import distributed_evaluations
from concord.source_file import reason
from concord.storage import Folder, apply_credentials, storage_credentials
from concord.studies.selection import Criterion, worst_environments
from concord.studies.shared_data import SharedData, without
from concord.studies.stopping import PROGRESS, SCORE, StopRule
from concord.training import Evaluation, ProcessContext, TrainConfig
from concord.training.evaluation import Mode, worst
from concord.training.job import CustomJob, JobFile, epochs_of, job_from_source
from concord.training.loop import Silent, WorkerData, prepare, training
from concord.training.process import tune_process


@dataclass(frozen=True)
class TrialSpecCommon:
    """What every trial of a study has in common.

    Attributes:
        path, source: the job's file.
        rule: the user's own that is trained with, if it is.
        options: the values of the configuration that trials start from.
        criterion: what they are judged by; None where nothing is chosen among them.
        modes: whether large or small is good, by measure; None where that is not known.
        stop_rule: when they end early.
        shared: the data; None where each trial loads its own.
        threads: of a trial.
        folder: for what a distributed trial leaves while it runs.
        detail: beginnings of the metrics of single environments that are reported all the same.
        log_context: how trials log.
        access: to the storages of the output and the data, see :func:`concord.storage.storage_credentials`.
    """

    path: str
    source: str = field(repr=False)
    rule: RuleFile | None
    options: dict[str, Any] = field(repr=False)
    criterion: Criterion | None
    modes: Mapping[str, Mode | None]
    stop_rule: StopRule
    shared: SharedData | None
    threads: int
    folder: Folder
    detail: tuple[str, ...] = ()
    log_context: logs.Context = field(default_factory=logs.context)
    storage_credentials: dict[str, str] = field(default_factory=storage_credentials, repr=False)


@dataclass(frozen=True)
class Report:
    """What a trial says after an evaluation.

    Attributes:
        epoch, step: done so far.
        percent: of the trial.
        metrics: without those of single environments and layers.
        last: whether the trial is at its end.
        stopped: what ended it early.
        failure: why it failed.
    """

    epoch: int
    step: int
    percent: float
    metrics: dict[str, float]
    last: bool = False
    stopped: str | None = None
    failure: str | None = None


class TrialProcess(Trainable):
    """Ray Tune's side of a trial: ``step`` gives the next report."""

    def setup(self, config: dict[str, Any], assignment: TrialSpecCommon) -> None:  # type: ignore[override]
        """Once in the life of the process."""
        self._assignment = assignment
        apply_credentials(assignment.storage_credentials)
        self._prepared: WorkerData | None = None
        tune_process(assignment.threads)
        here = ray.get_runtime_context()
        logs.inherit_context(assignment.log_context, worker_id=here.get_worker_id(), node_id=here.get_node_id())
        self._job: JobFile | None = None
        self._reports: Generator[Report, None, None] = self._training(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial, in the same process."""
        self._reports.close()  # of a trial that a scheduler stopped
        self._reports = self._training(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train up to the next evaluation."""
        report, criterion = self._next(), self._assignment.criterion
        # As text: Ray Tune would keep statistics of every number in a result.
        return {
            "report": json.dumps(vars(report)),
            PROGRESS: report.percent,
            SCORE: 0.0 if criterion is None else criterion.score(report.metrics),
            "done": report.last,
        }

    def cleanup(self) -> None:
        """Ray Tune is done with this process."""
        self._reports.close()

    def _next(self) -> Report:
        try:
            return next(self._reports)
        except (InputError, NonFiniteGradientError) as error:
            return _failed(as_option(error))
        except Exception as error:  # the job's own, or of the values that were tried: this trial's, not the study's
            return _failed(reason(error, self._assignment.path))

    def _training(self, task: dict[str, Any]) -> Generator[Report, None, None]:
        if self._job is None:
            self._job = job_from_source(self._assignment.path, self._assignment.source, self._assignment.rule)
        asked = self._job.job.config.with_options(**(self._assignment.options | task["options"]))
        asked.check()
        config = asked.resolved()
        rule = self._assignment.stop_rule
        epochs = epochs_of(self._job, config)
        parts: list[str | None] = ([None] if task["whole"] else []) + list(task["left_out"])
        metrics: dict[str, float] = {}
        folds: list[dict[str, float]] = []
        epoch = step = 0
        for number, left_out in enumerate(parts):
            for evaluation in self._evaluations(config, left_out):
                epoch, step = evaluation.epoch, evaluation.step
                if left_out is not None:
                    latest = evaluation.metrics
                    continue
                metrics = self._judged_by(evaluation)
                stopped = str(rule) if rule.holds(metrics) else None
                last = stopped is not None
                if len(parts) == 1 and not last:
                    last = evaluation.ended_early or epoch == epochs
                    stopped = f"held_out_spread < {config.schedule.stop_spread:g}" if evaluation.ended_early else None
                percent = 100 * epoch / epochs / len(parts)
                yield Report(epoch, step, percent, metrics, last, stopped)
                if last:
                    return
            if left_out is not None:
                folds.append({name: value for name, value in latest.items() if name.startswith("validation_")})
                last = number == len(parts) - 1
                if last:
                    metrics = metrics | _left_out(folds, self._assignment.modes)
                yield Report(epoch, step, 100 * (number + 1) / len(parts), metrics, last)

    def _judged_by(self, evaluation: Evaluation) -> dict[str, float]:
        """The metrics without those of single environments and layers, with the worst by what the study knows."""
        detail = self._assignment.detail
        metrics = {
            name: value for name, value in evaluation.metrics.items() if "/" not in name or name.startswith(detail)
        }
        for measure, mode in self._assignment.modes.items():
            if mode is not None and f"worst_train_{measure}" not in metrics:
                metrics |= worst_environments(evaluation.metrics, measure, mode)
        return metrics

    def _evaluations(self, config: Any, left_out: str | None) -> Iterator[Evaluation]:
        assert self._job is not None
        if isinstance(self._job.job, CustomJob):
            assert self._job.job.trials is not None
            yield from self._job.job.trials.evaluations(config)
            return
        if config.parallel.workers > 1:
            folder = self._assignment.folder / f"{self.trial_id}-{time.monotonic_ns()}"
            try:
                yield from distributed_evaluations(self._job, config, folder, left_out)
            finally:
                folder.delete()
            return
        device = torch.device("cuda" if config.parallel.use_gpu else "cpu")
        place = ProcessContext(device=device)
        load = functools.partial(self._data, config, place, left_out)
        yield from training(self._job.job, config, place, Silent(), load=load)

    def _data(self, config: TrainConfig, place: ProcessContext, left_out: str | None) -> WorkerData:
        assert self._job is not None
        shared = self._assignment.shared
        if shared is None or not shared.fits(config):
            return prepare(self._job.job, config, place, left_out)
        if self._prepared is None:
            self._prepared = shared.prepared()
        return self._prepared if left_out is None else without(self._prepared, left_out)


def _failed(why: str) -> Report:
    return Report(0, 0, 0.0, {}, last=True, failure=redact(why))  # at 0 % no scheduler compares its score


def _left_out(folds: list[dict[str, float]], modes: Mapping[str, Mode | None]) -> dict[str, float]:
    """The mean and, where it is known what is worse, the worst over the environments that were left out."""
    metrics: dict[str, float] = {}
    for name in folds[0]:
        measure = name.removeprefix("validation_")
        values = [fold[name] for fold in folds]
        metrics[f"left_out_{measure}"] = sum(values) / len(values)
        if (mode := modes.get(measure)) is not None:
            metrics[f"worst_left_out_{measure}"] = worst(values, mode)
    return metrics
