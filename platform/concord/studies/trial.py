"""A run of a group in its process: one evaluation after the other, and then the next run.

The process lives as long as the pool. It imports, reads the job and maps the shared data only once, so a new run costs
little more than its training.
"""

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
from concord.record import Evaluation
from concord.redaction import redact
from concord.runs.execute import RunTask, execute
from concord.source_file import reason
from concord.storage import apply_credentials
from concord.studies.criterion import Judge
from concord.studies.shared_data import SharedData, without
from concord.studies.stopping import PROGRESS, SCORE
from concord.training.checkpoint import RESUMED_SECONDS
from concord.training.job import JobFile
from concord.training.options import TrainConfig, parallel_of
from concord.training.process import tune_process
from concord.training.worker_data import WorkerData

_logger = logging.getLogger("concord.studies")


@dataclass(frozen=True)
class PoolSpec:
    """The common part of the runs of a pool.

    Attributes:
        task: with the base options, and the group's folder; the runs' folders are beside it.
        shared: the shared data; None if each run loads its own.
    """

    task: RunTask
    judge: Judge
    shared: SharedData | None
    threads: int


class TrialProcess(Trainable):
    """Ray Tune's side of a run: ``step`` trains up to the next evaluation, and gives the events of the run's record."""

    def setup(self, config: dict[str, Any], pool: PoolSpec) -> None:  # type: ignore[override]
        """Prepare the process, once."""
        self._pool = pool
        # At once: Ray's handler raises SystemExit, which would be taken for a job's own, and recorded as its failure.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        apply_credentials(pool.task.storage_credentials)
        self._prepared: WorkerData | None = None
        tune_process(pool.threads)
        here = ray.get_runtime_context()
        logs.inherit_context(pool.task.log_context, worker_id=here.get_worker_id(), node_id=here.get_node_id())
        self._begin(config)

    @functools.cached_property
    def _job(self) -> JobFile:
        return self._pool.task.job()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare for the next run in the same process."""
        self._steps.close()  # the run may have been stopped by a scheduler
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        """Ray Tune is done with this process."""
        self._steps.close()

    def _begin(self, asked: dict[str, Any]) -> None:
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._steps = self._training(asked)

    def _take(self, name: str, /, **fields: Any) -> None:
        """The sink: steps are too many to keep of each of a group's runs."""
        if name != "metrics" or RESUMED_SECONDS in fields["metrics"]:
            self._events.append((name, fields))

    def step(self) -> dict[str, Any]:
        """Train up to the next evaluation."""
        result: dict[str, Any]
        try:
            result = next(self._steps)
        except TrainingFailedError as error:
            result = _failed(error.reason)
        except (InputError, RunFailedError) as error:
            result = _failed(format_for_cli(error))
        except (Exception, SystemExit) as error:  # the job's own code
            result = _failed(reason(error, self._pool.task.path))
        events, self._events = self._events, []
        # Events as text: Ray Tune would keep statistics of every number in a result. It also marks a trial that a
        # scheduler stops as done.
        return {"stopped": None, "failure": None, **result, "ended": result["done"], "events": json.dumps(events)}

    def _training(self, asked: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The results of a run, of which the last is done."""
        judge, base = self._pool.judge, self._pool.task
        folder = dataclasses.replace(base.folder, place=base.folder.place.parent.parent / "runs" / asked["folder"])
        task = dataclasses.replace(base, options=base.options | asked["options"], folder=folder)
        config: Any = task.config(self._job)
        config.check()
        # The process of a trial is a Ray worker, so --address has no effect on where it trains.
        alone = parallel_of(config).workers == 1
        if not alone:
            assert base.scratch is not None
            task = dataclasses.replace(
                task, on_ray_train=True, scratch=base.scratch / f"{self.trial_id}-{time.monotonic_ns()}"
            )
        shared = self._pool.shared
        load = functools.partial(self._shared, config) if shared is not None and shared.fits(config) else None
        epochs, last = self._job.epochs(config), None
        for percent, score in asked["earlier"]:  # a scheduler judges a continued run by all its evaluations
            yield {PROGRESS: percent, SCORE: score, "done": False}
        evaluations = self._evaluations(task, config, asked["start"], load)
        for evaluation in evaluations:
            metrics = judge.metrics(evaluation.metrics)
            stopped = None
            if asked["stop_when"] and judge.stop_rule.holds(metrics):
                stopped = str(judge.stop_rule)
            done = stopped is not None or evaluation.ended_early or evaluation.epoch == epochs
            score = judge.score(evaluation.metrics)
            if done:
                if alone and (stopped is not None or score < asked["keep_above"]):
                    evaluations.close()  # before its last checkpoint, which nothing would read
                for _ in evaluations:  # to the end, where its workers exit on their own
                    if stopped is not None:
                        evaluations.close()
                if evaluation.ended_early and stopped is None:
                    stopped = f"held_out_spread < {config.schedule.stop_spread:g}"
            last = {PROGRESS: 100 * evaluation.epoch / epochs, SCORE: score, "stopped": stopped, "done": done}
            yield last
            if done:
                return
        if last is None and not any(name == "evaluated" for name, _ in self._events) and asked["start"] is None:
            raise TrainingFailedError(f"the loop of job {self._job.name} gave no evaluation")
        # The loop ended before its last epoch, or the run had trained to its end.
        yield {**(last or {SCORE: 0.0}), PROGRESS: 100.0, "done": True}

    def _evaluations(
        self, task: RunTask, config: Any, start: str | None, load: Callable[[], WorkerData] | None
    ) -> Generator[Evaluation, None, None]:
        """From a checkpoint on; from the beginning if there is none, or one that cannot be loaded."""
        loaded = False
        try:
            with contextlib.closing(execute(task, self._job, config, self._take, start, load)) as evaluations:
                for evaluation in evaluations:
                    loaded = True
                    yield evaluation
        except (InputError, RunFailedError, TrainingFailedError) as error:
            if loaded or start is None:
                raise
            _logger.warning("the run begins again: %s", format_for_cli(error))
            self._take("began", resumed=False)
            yield from execute(task, self._job, config, self._take, None, load)

    def _shared(self, config: TrainConfig) -> WorkerData:
        shared, left_out = self._pool.shared, config.data.leave_out
        assert shared is not None
        if self._prepared is None:
            self._prepared = shared.prepared()
        same = left_out == shared.left_out
        return self._prepared if same or left_out is None else without(self._prepared, left_out)


def _failed(why: str) -> dict[str, Any]:
    # At 0 % no scheduler compares its score.
    return {PROGRESS: 0.0, SCORE: 0.0, "failure": redact(why), "done": True}
