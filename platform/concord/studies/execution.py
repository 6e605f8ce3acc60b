"""Tasks on Ray Tune: as many at a time as there is room for, in processes that go from one to the next."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray import tune
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, Stopper, TuneConfig
from ray.tune.search import Searcher

from concord.options import option_values
from concord.runs.termination import signal_handler
from concord.storage import Folder
from concord.studies.journal import TrialResult, TrialSpec
from concord.studies.resources import Room
from concord.studies.stopping import SCHEDULER
from concord.studies.trial import Report, TrialProcess, TrialSpecCommon
from concord.training import RunConfig as Options

_DIED = "its process died (killed, or out of memory) and so did those that took its place"


class Source(Protocol):
    """Where tasks come from, and who hears of them. Called from one thread."""

    def next(self) -> tuple[TrialSpec, dict[str, Any]] | None:
        """The next task with the options that make it; None when there are no more."""

    def evaluated(self, task: TrialSpec, epoch: int, percent: float, metrics: dict[str, float]) -> None:
        """The task goes on."""

    def ended(self, task: TrialSpec, ended: TrialResult) -> None:
        """The task is over."""


class Interruption:
    """Why running tasks are to be given up: Ctrl-C, the time is over, or what was found out cannot be kept."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds if seconds > 0 else None
        self.stopped_by_user = False
        self.problem: Exception | None = None

    @property
    def out_of_time(self) -> bool:
        """Whether the time is over."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def __bool__(self) -> bool:
        return self.stopped_by_user or self.out_of_time or self.problem is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The first Ctrl-C in the body is noted, the second is raised."""
        before = signal.getsignal(signal.SIGINT)

        def note(*_: Any) -> None:
            self.stopped_by_user = True
            signal.signal(signal.SIGINT, before)

        with signal_handler(signal.SIGINT, note):
            yield


def execute(
    source: Source,
    assignment: TrialSpecCommon,
    where: Room,
    scheduler: Any,
    interruption: Interruption,
    folder: Folder,
    max_failures: int,
) -> None:
    """Run all tasks of the source; returns when there are no more, or when interrupted. Raises what the source does.

    Args:
        source: gives tasks and hears how they end.
        assignment: what they have in common.
        where: the room for them.
        scheduler: of Ray Tune.
        interruption: what is running then is given up, and has not ended.
        folder: for Ray Tune's own files; removed at the end.
        max_failures: how often a task begins again whose process died.
    """
    os.environ.update(_RAY_TUNE)
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    searcher = _Tasks(source, interruption, max_failures)
    storage = f"tune-{os.getpid()}-{time.time_ns()}"
    resources = tune.PlacementGroupFactory(
        # Ray Tune asks for something; a process that only looks on must take no CPU, or its workers find too few.
        [{"CPU": where.cpus, **({"GPU": where.gpus} if where.gpus else {})}] if where.cpus else [{"memory": 1}]
    )
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(TrialProcess, assignment=assignment), resources),
        tune_config=TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=-1,
            max_concurrent_trials=where.concurrent,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=RunConfig(
            name="tune",
            **(folder / storage).place_for_ray(),
            stop=_Interrupted(interruption),
            failure_config=FailureConfig(max_failures=0),  # a task begins again as a new trial of Ray Tune's
            checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )
    try:
        with interruption.watching():
            tuner.fit()
    finally:
        (folder / storage).delete()
    if interruption.problem is not None:
        raise interruption.problem


# Ray Tune's files are not what a study is restored from, so they are written as seldom as may be.
_RAY_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "5",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_THRESHOLD_S": "10",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


class _Tasks(Searcher):
    """The source, as Ray Tune asks it. A task begins again if its process died, ``max_failures`` times."""

    def __init__(self, source: Source, interruption: Interruption, max_failures: int) -> None:
        super().__init__()
        self._source = source
        self._interruption = interruption
        self._max_failures = max_failures
        self._running: dict[str, _Running] = {}
        self._again: list[_Running] = []

    def suggest(self, trial_id: str) -> Any:
        running: _Running | None = None
        if not self._interruption:
            with self._noticing():
                running = self._next()
        if running is None:
            # Whatever runs may have to begin again.
            return None if self._running and not self._interruption else Searcher.FINISHED
        self._running[trial_id] = running
        task = running.task
        return {"options": running.options, "whole": task.whole, "left_out": list(task.left_out), "key": task.key}

    def _next(self) -> "_Running | None":
        if self._again:
            died = self._again.pop(0)
            return _Running(died.task, died.options, died.deaths + 1)
        given = self._source.next()
        return None if given is None else _Running(*given)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        running = self._running.get(trial_id)
        if running is None or "report" not in result:
            return
        running.last = report = Report(**json.loads(result["report"]))
        if report.failure is None:
            running.history.append((report.epoch, report.step, report.metrics))
            with self._noticing():
                self._source.evaluated(running.task, report.epoch, report.percent, report.metrics)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if result and not error:
            self.on_trial_result(trial_id, result)
        running = self._running.pop(trial_id, None)
        if running is None:
            return
        report = running.last
        if self._interruption and (error or report is None or not report.last):
            return  # given up
        if error and running.deaths < self._max_failures:
            self._again.append(running)
            return
        failure = _DIED if error or report is None else report.failure
        metrics, stopped = {}, None
        if failure is None and report is not None:
            metrics, stopped = report.metrics, report.stopped if report.last else SCHEDULER
        now = time.time()
        ended = TrialResult(metrics, running.history, now - running.began, now, stopped, failure)
        with self._noticing():
            self._source.ended(running.task, ended)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Ray Tune would take what the source raises for a failure of the trial."""
        try:
            yield
        except Exception as error:
            self._interruption.problem = self._interruption.problem or error

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a study is restored from its journal."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: a study is restored from its journal."""

    def __reduce__(self) -> Any:
        return _nothing, ()  # Ray Tune keeps a copy of what it was given on disk, from which nothing is restored


@dataclass
class _Running:
    task: TrialSpec
    options: dict[str, Any]
    deaths: int = 0
    began: float = field(default_factory=time.time)
    history: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    last: Report | None = None


class _Interrupted(Stopper):
    """Ends all trials at an interruption."""

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False

    def stop_all(self) -> bool:
        return bool(self._interruption)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


def overrides(base: Options, config: Options) -> dict[str, Any]:
    """The options in which a trial's configuration differs from the one that all start from."""
    there = option_values(base)
    return {name: value for name, value in option_values(config).items() if value != there[name]}
