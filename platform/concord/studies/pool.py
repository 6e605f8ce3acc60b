"""Runs the proposals of a proposer in parallel, and records how each began and ended.

The runs of a group are trials of Ray Tune, in processes that are reused. The record's events are the truth: the state
of Ray Tune, of the search and of MLflow follows from them. So a kill loses no finished run, and none counts twice.
"""

import contextlib
import gc
import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ray import tune
from ray.exceptions import OutOfMemoryError
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, Stopper, Trainable, TuneConfig
from ray.tune.search import Searcher

import concord
from concord.errors import RunFailedError
from concord.options import option_values
from concord.record import Events
from concord.runs.dashboard import described
from concord.runs.lifecycle import Description, Opened, open_run, reserved_group
from concord.runs.live_metrics import Published
from concord.runs.run import Info
from concord.runs.session import ray_session
from concord.runs.tags import run_origin
from concord.runs.termination import signal_handler
from concord.runs.worker import RunSpec
from concord.studies.criterion import Judge
from concord.studies.group_progress import STUDY_METRICS, GroupProgress
from concord.studies.plan import GroupPlan
from concord.studies.proposals import GroupRuns, Proposer, RunProposal
from concord.studies.shared_data import SharedData, share_data
from concord.studies.stopping import SCHEDULER, scheduler
from concord.studies.trial import PoolSpec, TrialProcess, TrialReport
from concord.studies.trial_resources import TrialResources, check_trial_resources, trial_resources
from concord.studies.unfinished import UNFINISHED, UnfinishedRuns
from concord.training import TrainConfig
from concord.training.options import parallel_of

_DIED = "its process died (killed, or out of memory), and so did its replacements"
_SCRATCH = "distributed"  # the files of runs with several workers
_CHECKPOINT_SECONDS = 300.0

# A group is not restored from Ray Tune's files, so they are written as rarely as possible.
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


@contextmanager
def open_group(plan: GroupPlan, description: Description, info: Info) -> Iterator["Pool"]:
    """Begin or continue a group in a Ray session; at the end record and MLflow state how it ended.

    Invalid input leaves nothing of a new group. To a StoppedError the caller adds how to continue.
    """
    base = plan.base
    check_trial_resources(plan.sharing, base)  # before anything is written
    with reserved_group(plan.kind, plan.job.name, base, plan.kept) as reserved, ray_session(base) as dashboard:
        resources = trial_resources(plan.sharing, base, info)
        with open_run(reserved, description, info) as group:
            if group.resumed:  # a killed process may have left them
                for name in (*(each for each in group.kept.names() if each.startswith("tune-")), _SCRATCH):
                    group.kept.remove(name)
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            yield Pool(plan, group, resources)


class Interruption:
    """The reason to give up running trials: Ctrl-C, the end of the time, or a failure to record."""

    def __init__(self, minutes: float = 0.0) -> None:
        self._deadline = time.monotonic() + 60 * minutes if minutes > 0 else None
        self.stopped_by_user = False
        self.problem: Exception | None = None

    @property
    def out_of_time(self) -> bool:
        """Whether the time has run out."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def __bool__(self) -> bool:
        return self.stopped_by_user or self.out_of_time or self.problem is not None

    @contextmanager
    def handle_sigint(self) -> Iterator[None]:
        """Note the first Ctrl-C in the body, and raise the second."""
        before = signal.getsignal(signal.SIGINT)

        def note(*_: Any) -> None:
            self.stopped_by_user = True
            signal.signal(signal.SIGINT, before)

        with signal_handler(signal.SIGINT, note):
            yield


class Pool:
    """An open group; made by :func:`open_group`.

    Attributes:
        group: its record, open.
    """

    def __init__(self, plan: GroupPlan, group: Opened, resources: TrialResources) -> None:
        self.plan, self.group, self.resources = plan, group, resources

    @property
    def runs(self) -> GroupRuns:
        """The runs of the group as they are now."""
        return GroupRuns(self.group.events.history)

    def run(
        self,
        proposer: Proposer,
        progress: GroupProgress,
        judge: Judge,
        stopping: Any = None,
        interruption: Interruption | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Run all proposals, until the last one ended or the time has run out (KeyboardInterrupt by the user).

        Exceptions of the proposer are raised here. The progress is exported if there are labels. A run that the
        interruption gives up has not ended.
        """
        os.environ.update(_RAY_TUNE)
        for name in ("ray.tune", "ray.train"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        interruption = Interruption() if interruption is None else interruption
        kept, resources, job = self.group.kept, self.resources, self.plan.job
        code = [
            concord.__version__,
            run_origin(job.path)["commit"],
            job.source,
            job.rule and job.rule.source,
            judge.detail,
        ]
        unfinished = UnfinishedRuns(kept / UNFINISHED, json.dumps(code))
        max_failures = parallel_of(self.plan.base).max_failures
        searcher = _Runs(proposer, self.group.events, progress, interruption, max_failures, unfinished)
        bundle: dict[str, float] = {"CPU": resources.cpus} | ({"GPU": resources.gpus} if resources.gpus else {})
        # Ray Tune needs a resource; a process that only waits must take no CPU from its workers.
        bundles = tune.PlacementGroupFactory([bundle if resources.cpus else {"memory": 1}])
        run = RunSpec(
            job.path,
            job.source,
            job.rule,
            option_values(self.plan.base),
            folder=unfinished.folder,
            scratch=kept / _SCRATCH,
            checkpoint_seconds=_CHECKPOINT_SECONDS,
        )
        spec = PoolSpec(run, judge, self._shared_data, resources.threads)
        trainable = tune.with_resources(tune.with_parameters(TrialProcess, pool=spec), bundles)
        published = Published(STUDY_METRICS, labels, progress.samples) if labels else contextlib.nullcontext()
        try:
            with progress, published, interruption.handle_sigint():
                while not self._finish(trainable, searcher, stopping, interruption) and not interruption:
                    searcher.count_deaths()
        finally:
            searcher.give_up()
        if interruption.problem is not None:
            raise interruption.problem
        unfinished.close([key for key in self.group.events.history if key and self.runs.find(key) is not None])
        if interruption.stopped_by_user:
            raise KeyboardInterrupt

    def _finish(self, trainable: type[Trainable], searcher: "_Runs", stopping: Any, interruption: Interruption) -> bool:
        """Run Ray Tune; False if Ray ended a process for lack of memory, which stops Ray Tune (2.60) before its end."""
        place = self.group.kept / f"tune-{os.getpid()}-{time.time_ns()}"
        tuner = tune.Tuner(
            trainable,
            tune_config=TuneConfig(
                search_alg=searcher,
                scheduler=scheduler("none") if stopping is None else stopping,
                num_samples=-1,
                max_concurrent_trials=self.resources.concurrent,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=RunConfig(
                name="tune",
                **place.place_for_ray(),
                stop=_Interrupted(interruption),
                failure_config=FailureConfig(max_failures=0),  # a run is repeated as a new trial of Ray Tune
                checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except RuntimeError as error:
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
        else:
            return True
        finally:
            place.delete()
        del tuner
        gc.collect()  # with its last reference a process of Ray Tune ends
        return False

    @cached_property
    def _shared_data(self) -> SharedData | None:
        base, job = self.plan.base, self.plan.job.job
        if job.loop is not None or not isinstance(base, TrainConfig) or base.parallel.workers > 1:
            return None
        return share_data(job, base.resolve(), self.plan.varied)


@dataclass
class _Running:
    run: RunProposal
    deaths: int = 0
    seconds_before: float = 0.0
    began: float = field(default_factory=time.time)
    last: TrialReport | None = None


class _Runs(Searcher):
    """Gives proposals to Ray Tune. A run whose process died is repeated, ``max_failures`` times."""

    def __init__(
        self,
        proposer: Proposer,
        group: Events,
        progress: GroupProgress,
        interruption: Interruption,
        max_failures: int,
        unfinished: UnfinishedRuns,
    ) -> None:
        super().__init__()
        self._proposer, self._group, self._progress, self._unfinished = proposer, group, progress, unfinished
        self._interruption, self._max_failures = interruption, max_failures
        self._running: dict[str, _Running] = {}
        self._again: list[_Running] = []

    def suggest(self, trial_id: str) -> Any:
        running: _Running | None = None
        if not self._interruption:
            with self._noticing():
                running = self._next()
        if running is None:
            # A running run may have to start again.
            return None if self._running and not self._interruption else Searcher.FINISHED
        self._running[trial_id] = running
        run = running.run
        parts = {"whole": run.whole, "left_out": list(run.left_out)}
        return {"options": dict(run.options), "folder": self._unfinished.name(run), **parts}

    def _next(self) -> _Running | None:
        if self._again:
            died = self._again.pop(0)
            running = _Running(died.run, died.deaths + 1)
        elif (proposed := self._proposer.next()) is not None:
            running = _Running(proposed)
        else:
            return None
        run, earlier = running.run, self._group.history.get(running.run.key)
        failed = earlier is not None and (earlier.ended or {}).get("status") == "FAILED"
        self._group.append("began", run=run.key, **run.as_event(), **({"anew": True} if failed else {}))
        self._progress.evaluated(run, 0.0)
        return running

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        running = self._running.get(trial_id)
        if running is None or "report" not in result:
            return
        report = TrialReport(**json.loads(result["report"]))
        if report.seconds_before > running.seconds_before:
            running.seconds_before = report.seconds_before
            self._progress.continues(running.run, report.seconds_before)
        running.last = report
        if report.failure is None:
            self._progress.evaluated(running.run, report.percent)
            at = {"epoch": report.epoch, "step": report.step, "metrics": report.metrics}
            with self._noticing():
                self._group.append("evaluated", run=running.run.key, **at)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if result and not error:
            self.on_trial_result(trial_id, result)
        running = self._running.get(trial_id)
        if running is None:
            return
        report = running.last
        if self._interruption and (error or report is None or not report.last):
            return  # given up
        del self._running[trial_id]
        if error and running.deaths < self._max_failures:
            self._again.append(running)
            return
        if error or report is None:
            why = {"failure": _DIED}
        elif report.failure is not None:
            why = {"failure": report.failure}
        else:
            stopped = report.stopped if report.last else SCHEDULER
            why = {} if stopped is None else {"stopped": stopped}
        with self._noticing():
            self._end(running, "FAILED" if "failure" in why else "FINISHED", **why)
            self._group.sync()
            ended = GroupRuns(self._group.history).find(running.run.key)
            assert ended is not None
            self._proposer.ended(ended)
            self._progress.ended(ended)
            if ended.failure is not None or ended.seconds > _CHECKPOINT_SECONDS:  # else it has written no checkpoint
                self._unfinished.remove([running.run.key])

    def _end(self, running: _Running, status: str, **why: str) -> None:
        seconds = running.seconds_before + time.time() - running.began
        self._group.append("ended", run=running.run.key, status=status, seconds=seconds, **why)

    def count_deaths(self) -> None:
        """Count a death for every running run: Ray Tune does not say whose process was ended, and ends the others."""
        for trial_id in list(self._running):
            self.on_trial_complete(trial_id, error=True)

    def give_up(self) -> None:
        """Record running runs as given up."""
        for running in (*self._running.values(), *self._again):
            with contextlib.suppress(RunFailedError):  # the group ends with this error anyway
                self._end(running, "KILLED")

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Keep an exception of the body: Ray Tune would treat it as a failure of the trial."""
        try:
            yield
        except Exception as error:
            self._interruption.problem = self._interruption.problem or error

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a group is restored from its record."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: a group is restored from its record."""

    def __reduce__(self) -> Any:
        return _nothing, ()  # Ray Tune would pickle this object, which is never restored


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
