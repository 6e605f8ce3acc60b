"""A run of a group in its process: one evaluation after the other, and then the next run.

The process lives as long as the pool. It imports, reads the job and maps the shared data only once, so a new run costs
little more than its training.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import ray
from ray.tune import Trainable

from concord import logs
from concord.errors import InputError, RunFailedError, TrainingFailedError, format_for_cli
from concord.redaction import redact
from concord.runs.execute import execute
from concord.runs.worker import RunSpec, ignore
from concord.source_file import reason
from concord.storage import Folder, apply_credentials
from concord.studies.criterion import Judge, left_out_metrics
from concord.studies.shared_data import SharedData, without
from concord.studies.stopping import PROGRESS, SCORE
from concord.studies.unfinished import RunCheckpoints
from concord.training import Evaluation
from concord.training.job import JobFile
from concord.training.metric_names import split_metric
from concord.training.options import parallel_of
from concord.training.process import tune_process
from concord.training.worker_data import WorkerData

_logger = logging.getLogger("concord.studies")
_LEFT_OUT = split_metric("validation", "")  # a left-out environment is the only validation environment


@dataclass(frozen=True)
class PoolSpec:
    """The common part of the runs of a pool.

    Attributes:
        run: the specification with the base options; its folder has one for the checkpoints of each run.
        shared: the shared data; None if each run loads its own.
    """

    run: RunSpec
    judge: Judge
    shared: SharedData | None
    threads: int


@dataclass(frozen=True)
class TrialReport:
    """A run's message after an evaluation.

    Attributes:
        metrics: without those of single environments and layers.
        stopped: the reason for an early end.
        seconds_before: of training before the checkpoint from which the run continues.
    """

    epoch: int
    step: int
    percent: float
    metrics: dict[str, float]
    last: bool = False
    stopped: str | None = None
    failure: str | None = None
    seconds_before: float = 0.0


class TrialProcess(Trainable):
    """Ray Tune's side of a run: ``step`` gives the next report."""

    def setup(self, config: dict[str, Any], pool: PoolSpec) -> None:  # type: ignore[override]
        """Prepare the process, once."""
        self._pool = pool
        # At once: Ray's handler raises SystemExit, which would be taken for a job's own, and recorded as its failure.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        apply_credentials(pool.run.storage_credentials)
        self._prepared: WorkerData | None = None
        tune_process(pool.threads)
        here = ray.get_runtime_context()
        logs.inherit_context(pool.run.log_context, worker_id=here.get_worker_id(), node_id=here.get_node_id())
        self._reports = self._training(config)

    @functools.cached_property
    def _job(self) -> JobFile:
        return self._pool.run.job()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare for the next run in the same process."""
        self._reports.close()  # the run may have been stopped by a scheduler
        self._reports = self._training(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train up to the next evaluation."""
        report, criterion = self._next(), self._pool.judge.criterion
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

    def _next(self) -> TrialReport:
        try:
            return next(self._reports)
        except TrainingFailedError as error:
            return _failed(error.reason)
        except (InputError, RunFailedError) as error:
            return _failed(format_for_cli(error))
        except (Exception, SystemExit) as error:  # the job's own code
            return _failed(reason(error, self._pool.run.path))

    def _training(self, task: dict[str, Any]) -> Generator[TrialReport, None, None]:
        """The reports of a run: with all environments if it is ``whole``, then with each of ``left_out`` left out."""
        judge = self._pool.judge
        spec = dataclasses.replace(self._pool.run, options=self._pool.run.options | task["options"])
        asked = self._job.job.config.with_options(**spec.options)
        asked.check()
        config = asked.resolve()
        assert spec.folder is not None
        checkpoints = spec.folder / task["folder"]
        spec = dataclasses.replace(spec, folder=None)
        whole, left_out = int(task["whole"]), task["left_out"]
        parts = whole + len(left_out)
        metrics: dict[str, float] = {}
        before = 0.0
        if whole:
            report = yield from self._whole(spec, config, parts, checkpoints)
            if report.last:
                return
            metrics, before = report.metrics, report.seconds_before
        folds: list[dict[str, float]] = []
        for number, environment in enumerate(left_out, whole + 1):
            ended = collections.deque(self._evaluations(spec, config, environment, None), maxlen=1)
            if not ended:
                raise self._no_evaluation()
            evaluation = ended.pop()
            folds.append({name: value for name, value in evaluation.metrics.items() if name.startswith(_LEFT_OUT)})
            if last := number == parts:
                metrics = metrics | left_out_metrics(folds, judge.modes)
            percent = 100 * number / parts
            yield TrialReport(evaluation.epoch, evaluation.step, percent, metrics, last, seconds_before=before)

    def _whole(
        self, spec: RunSpec, config: Any, parts: int, checkpoints: Folder
    ) -> Generator[TrialReport, None, TrialReport]:
        """Yield the reports with all environments, the first of ``parts``, and return the last one.

        A run that continues first repeats the reports that it gave before.
        """
        judge, epochs = self._pool.judge, self._job.epochs(config)
        alone = parallel_of(config).workers == 1
        kept = RunCheckpoints.read(checkpoints) if alone else None
        before = 0.0 if kept is None else kept.seconds_before
        report = None
        for fields in () if kept is None else kept.reports:
            report = dataclasses.replace(TrialReport(**fields), seconds_before=before)
            yield report
        evaluations = self._evaluations(spec, config, None, kept)
        for evaluation in evaluations:
            metrics = judge.metrics(evaluation)
            stopped = str(judge.stop_rule) if judge.stop_rule.holds(metrics) else None
            at_end = evaluation.ended_early or evaluation.epoch == epochs
            if at_end and stopped is None:
                if alone:
                    evaluations.close()  # before its last checkpoint, which nothing would read
                for _ in evaluations:  # to the end, where its workers exit on their own
                    pass
                if evaluation.ended_early and parts == 1:
                    stopped = f"held_out_spread < {config.schedule.stop_spread:g}"
            last = stopped is not None or (at_end and parts == 1)
            percent = 100 * evaluation.epoch / epochs / parts
            report = TrialReport(
                evaluation.epoch, evaluation.step, percent, metrics, last, stopped, seconds_before=before
            )
            if kept is not None:
                kept.reports.append(vars(report))
            yield report
            if last:
                return report
        if report is None:
            raise self._no_evaluation()
        if parts == 1:  # the loop ended before its last epoch
            report = dataclasses.replace(report, percent=100.0, last=True)
            yield report
        return report

    def _no_evaluation(self) -> TrainingFailedError:
        return TrainingFailedError(f"the loop of job {self._job.name} gave no evaluation")

    def _evaluations(
        self, spec: RunSpec, config: Any, left_out: str | None, kept: RunCheckpoints | None
    ) -> Generator[Evaluation, None, None]:
        shared = self._pool.shared
        shares = shared is not None and shared.fits(config, left_out)
        if left_out is not None:
            spec = dataclasses.replace(spec, options=spec.options | {"leave_out": left_out})
            config = config.with_options(leave_out=left_out)
        # The process of a trial is a Ray worker, so --address has no effect on where it trains.
        if parallel_of(config).workers > 1:
            assert spec.scratch is not None
            scratch = spec.scratch / f"{self.trial_id}-{time.monotonic_ns()}"
            spec = dataclasses.replace(spec, on_ray_train=True, scratch=scratch)
        load = functools.partial(self._shared, left_out) if shares else None
        if kept is None:
            return execute(spec, self._job, config, ignore, None, load)
        return self._kept_evaluations(dataclasses.replace(spec, folder=kept.folder), config, kept, load)

    def _kept_evaluations(
        self, spec: RunSpec, config: Any, kept: RunCheckpoints, load: Callable[[], WorkerData] | None
    ) -> Generator[Evaluation, None, None]:
        """From the last checkpoint; from the beginning if there is none, or none that these sources can load."""
        if kept.start is not None:
            loaded = False
            try:
                with contextlib.closing(execute(spec, self._job, config, kept, kept.start, load)) as evaluations:
                    for evaluation in evaluations:
                        loaded = True
                        yield evaluation
                return
            except (InputError, RunFailedError, TrainingFailedError) as error:
                if loaded:
                    raise
                _logger.warning("the run begins again: %s", format_for_cli(error))
        repeated = max((each["step"] for each in kept.reports), default=-1)
        with contextlib.closing(execute(spec, self._job, config, kept, None, load)) as evaluations:
            yield from (each for each in evaluations if each.step > repeated)

    def _shared(self, left_out: str | None) -> WorkerData:
        shared = self._pool.shared
        assert shared is not None
        if self._prepared is None:
            self._prepared = shared.prepared()
        return self._prepared if left_out is None else without(self._prepared, left_out)


def _failed(why: str) -> TrialReport:
    return TrialReport(0, 0, 0.0, {}, last=True, failure=redact(why))  # at 0 % no scheduler compares its score
