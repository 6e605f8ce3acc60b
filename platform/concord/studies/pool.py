"""Runs the proposals of a proposer in parallel: trials of Ray Tune, in processes that are reused.

A run that is there by its key is not trained again. Every other run has a record of its own, to which this process
appends the events that the training process sends. The records are the truth: the state of Ray Tune, of the search and
of MLflow follows from them. So a kill loses no finished run, and none counts twice.
"""

import contextlib
import gc
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from ray import tune
from ray.exceptions import OutOfMemoryError
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, Stopper, Trainable, TuneConfig
from ray.tune.search import Searcher

from concord.errors import RunFailedError
from concord.execution.execute import (
    RunTask,
    checkpoint_step,
    kept_checkpoint,
    last_checkpoint,
    remove_checkpoints,
    remove_older,
)
from concord.execution.failures import signal_handler
from concord.execution.key import finished_run, index_run, keep_source, plain
from concord.execution.lifecycle import ActiveRun, Info, Member, open_run, reopened, require_own, reserved_group
from concord.execution.live_metrics import Published
from concord.execution.session import ray_session, send_by_value
from concord.execution.spec import RunSpec
from concord.execution.submission.profile import described
from concord.options import option_values
from concord.record import EVENTS, Run, folder_of
from concord.studies.plan import GroupPlan
from concord.studies.proposals import STUDY_METRICS, GroupProgress, GroupRuns, Proposer
from concord.studies.trial import (
    PoolSpec,
    SharedData,
    TrialProcess,
    TrialResources,
    check_trial_resources,
    share_data,
    trial_resources,
)
from concord.tracking import Store
from concord.tracking.mirror import forget, is_sent
from concord.tracking.store import PARENT
from concord.training import TrainConfig
from concord.training.options import parallel_of

_WORKER_LOST = "its process died (killed, or out of memory), and so did its replacements"
SCHEDULER = "the scheduler"  # the reason of a trial that a scheduler stopped
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
def open_group(
    plan: GroupPlan,
    record: Callable[[Store], Mapping[str, Any]],
    info: Info,
    approve: Callable[[int], None] = lambda _: None,
) -> Iterator["Pool"]:
    """Begin or continue a group in a Ray session; at the end record and MLflow state how it ended.

    After a stop MLflow also states how far it is, and the command that continues it.

    ``record`` makes that of a new group, and ``approve``, called with the number of parallel runs, may refuse it.
    Invalid input leaves nothing of one. The caller appends how to continue to a StoppedError.
    """
    base = plan.base
    check_trial_resources(plan.sharing, base)  # before anything is written
    with reserved_group(plan.kind, base, plan.folder) as reserved, ray_session(base) as dashboard:
        resources = trial_resources(plan.sharing, base, info)
        approve(resources.concurrent)
        with open_run(reserved, record(reserved.store), info) as group:
            if group.resumed:  # a killed process may have left them
                for name in (*(each for each in group.run.folder.names() if each.startswith("tune-")), _SCRATCH):
                    group.run.folder.remove(name)
            keep_source(plan.job, group.run)
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            pool = Pool(plan, group, resources)
            if group.earlier is not None:
                pool.send_unsent(lost=group.earlier.run_id != group.run.run_id)
            try:
                yield pool
            except BaseException as error:
                if group.is_stop(error):
                    text = f"stopped: {plan.there(pool.runs())}; continue with `{plan.continuation}`"
                    group.run.append("note", part="stopped", text=text)
                raise


class _Interruption(Stopper):
    """The reason to give up running trials: Ctrl-C, the end of the time, or a failure to record."""

    def __init__(self, minutes: float) -> None:
        self._deadline = time.monotonic() + 60 * minutes if minutes > 0 else None
        self.stopped_by_user = False
        self.problem: Exception | None = None

    @property
    def out_of_time(self) -> bool:
        """Whether the time has run out."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def requested(self) -> bool:
        """Whether running trials are given up."""
        return self.stopped_by_user or self.out_of_time or self.problem is not None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Ray Tune asks whether a single trial ends: none does."""
        return False

    def stop_all(self) -> bool:
        """Ray Tune asks whether all trials end."""
        return self.requested

    def __reduce__(self) -> Any:
        return _nothing, ()

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

    def __init__(self, plan: GroupPlan, group: ActiveRun, resources: TrialResources) -> None:
        self.plan, self.group, self.resources = plan, group, resources
        self.known: dict[str, Run] = {}
        self._asked = set(map(_as_text, group.run.asked))

    def runs(self) -> GroupRuns:
        """The runs of the group as they are now."""
        runs = GroupRuns(self.group.run, self.plan.evaluator)
        runs.known = self.known
        return runs

    def ask(self, specs: Iterable[RunSpec], keep: bool = False) -> list[tuple[RunSpec, Run | None]]:
        """Add runs to the group's list, and return each with the finished run of its key; None must be trained.

        With ``keep`` a run counts as finished only with its last checkpoint.
        """
        group, answers = self.group.run, list[tuple[RunSpec, Run | None]]()
        requests: dict[str, Mapping[str, Any]] = {}
        for spec in specs:
            run = finished_run(group.output, spec.key)
            if run is None or (keep and kept_checkpoint(run) is None):
                run = None
                require_own(folder_of(group.output, str(spec.name)), group.name)
            else:
                self.known[run.name] = run
            answers.append((spec, run))
            name = str(spec.name) if run is None else run.name
            request = plain({"run": name, "key": spec.key.value, **spec.place})
            if (text := _as_text(request)) not in self._asked:
                requests[text] = request
        self._asked |= requests.keys()
        group.ask(list(requests.values()))
        group.folder.keep(EVENTS)  # at an address, for another machine that goes on
        return answers

    def send_unsent(self, lost: bool) -> None:
        """Let MLflow have what an earlier process could not send of runs that ended, and runs that were deleted there;
        all, if it has lost the group."""
        store, group = self.group.store, self.group.run
        present = set() if lost else {each.run_id for each in store.search(f"tags.`{PARENT}` = '{group.run_id}'")}
        for name in dict.fromkeys(each["run"] for each in self.group.run.asked):
            run = self.runs().run(name)
            if run.record.get("group") != self.group.run.name:
                continue
            if lost:
                forget(run)
            elif run.run_id is not None and run.run_id not in present:
                self.group.mirror.recover(run)
            if run.status is not None and not is_sent(run):
                with reopened(run, self.group.mirror, self.group.run) as self.known[name]:
                    pass

    def run(
        self,
        proposer: Proposer,
        progress: GroupProgress,
        stopping: Any = None,
        minutes: float = 0.0,
        labels: Mapping[str, str] | None = None,
    ) -> bool:
        """Run all proposals, until the last one ended or the time has run out; return whether it has.

        Exceptions of the proposer are raised here, and KeyboardInterrupt after Ctrl-C. The progress is exported if
        there are labels. A run that is given up has not ended. 0 minutes set no limit.
        """
        os.environ.update(_RAY_TUNE)
        for name in ("ray.tune", "ray.train"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        interruption = _Interruption(minutes)
        resources, job = self.resources, self.plan.job
        searcher = _Runs(self, proposer, progress, interruption)
        bundle: dict[str, float] = {"CPU": resources.cpus} | ({"GPU": resources.gpus} if resources.gpus else {})
        # Ray Tune needs a resource; a process that only waits must take no CPU from its workers.
        bundles = tune.PlacementGroupFactory([bundle if resources.cpus else {"memory": 1}])
        task = RunTask(
            job.sent,
            option_values(self.plan.base),
            folder=self.group.run.folder,
            scratch=self.group.run.folder / _SCRATCH,
            # A loop of the job's own may write its last checkpoint before its last evaluation.
            checkpoint_seconds=_CHECKPOINT_SECONDS if job.job.loop is None else 0.0,
        )
        send_by_value(task.sent.value)
        spec = PoolSpec(task, self.plan.evaluator, self._shared_data, resources.threads)
        trainable = tune.with_resources(tune.with_parameters(TrialProcess, pool=spec), bundles)
        published = Published(STUDY_METRICS, labels, progress.samples) if labels else contextlib.nullcontext()
        try:
            with progress, published, interruption.handle_sigint():
                while not self._finish(trainable, searcher, stopping) and not interruption.requested:
                    searcher.count_retries()
        finally:
            searcher.give_up()
        if interruption.problem is not None:
            raise interruption.problem
        if interruption.stopped_by_user:
            raise KeyboardInterrupt
        return interruption.out_of_time

    def _finish(self, trainable: type[Trainable], searcher: "_Runs", stopping: Any) -> bool:
        """Run Ray Tune; False if Ray ended a process for lack of memory, which stops Ray Tune (2.60) before its end."""
        place = self.group.run.folder / f"tune-{os.getpid()}-{time.time_ns()}"
        tuner = tune.Tuner(
            trainable,
            tune_config=TuneConfig(
                search_alg=searcher,
                scheduler=stopping,
                num_samples=-1,
                max_concurrent_trials=self.resources.concurrent,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=RunConfig(
                name="tune",
                **place.place_for_ray(),
                stop=searcher.interruption,
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
        return share_data(job, base, self.plan.varied)


class _Runs(Searcher):
    """Gives proposals to Ray Tune. A run whose process died is repeated, ``max_failures`` times."""

    def __init__(self, pool: Pool, proposer: Proposer, progress: GroupProgress, interruption: _Interruption) -> None:
        super().__init__()
        self._pool, self._group, self._proposer = pool, pool.group, proposer
        self._progress, self.interruption = progress, interruption
        self._max_failures = parallel_of(pool.plan.base).max_failures
        self._running: dict[str, Member] = {}  # by the names of Ray Tune's trials
        self._last: dict[str, dict[str, Any]] = {}  # the last result of each
        self._again: list[Member] = []
        self._retries: dict[str, int] = {}
        self._unrecorded: set[str] = set()  # runs of which an event could not be written: their records end before it
        self._waiting: list[RunSpec] = []

    def suggest(self, trial_id: str) -> Any:
        member: Member | None = None
        if not self.interruption.requested:
            with self._capture_error():
                member = self._next()
        if member is None:
            # A running run may have to start again.
            return None if self._running and not self.interruption.requested else Searcher.FINISHED
        self._running[trial_id] = member
        return self._task(member)

    def _task(self, member: Member) -> dict[str, Any]:
        """What the training process is asked for."""
        run, spec, start = member.run, member.spec, None
        with contextlib.suppress(RunFailedError):  # no checkpoint can be read: it begins again
            start = last_checkpoint(run, lambda _: None)
        step = -1 if start is None else checkpoint_step(start)
        plan = self._pool.plan
        epochs, score = plan.job.epochs(spec.config), plan.evaluator.score
        earlier = [(100 * each.epoch / epochs, score(each.metrics)) for each in run.history if each.step <= step]
        return {
            "options": plan.overrides(spec.config),
            "folder": run.name,
            "start": start,
            "earlier": earlier[: len(earlier) - (len(earlier) > 0 and earlier[-1][0] >= 100)],
            "stop_when": bool(spec.stop_when),
            "keep_above": self._proposer.keep_above(spec),
        }

    def _next(self) -> Member | None:
        if self._again:
            member = self._again.pop(0)
            member.begin()
        else:
            while not self._waiting:
                if not (specs := self._proposer.next()):
                    return None
                answers = self._pool.ask(specs, self._proposer.keep)
                self._waiting = [spec for spec, run in answers if run is None]
                for spec, run in answers:
                    if run is not None:
                        self._tell(spec, run)
            member = Member(self._waiting.pop(0), self._group)
            self._pool.known[member.run.name] = member.run
        self._progress.evaluated(member.run.name, 0.0)
        if member.run.seconds_before > 0:
            self._progress.continues(member.run.name, member.run.seconds_before)
        return member

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        member = self._running.get(trial_id)
        if member is None or "events" not in result or member.run.name in self._unrecorded:
            return
        self._last[trial_id] = result
        run = member.run
        with self._capture_error():
            self._unrecorded.add(run.name)
            for name, fields in json.loads(result["events"]):
                run.append(name, **fields)
                if name == "checkpoint":
                    run.folder.keep(EVENTS)
                    remove_older(run)
            self._unrecorded.remove(run.name)
        if result["failure"] is None:
            self._progress.evaluated(run.name, result["percent"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if result and not error:
            self.on_trial_result(trial_id, result)
        member = self._running.get(trial_id)
        if member is None:
            return
        last = self._last.pop(trial_id, None)
        unrecorded = member.run.name in self._unrecorded
        if unrecorded or (self.interruption.requested and (error or last is None or not last["ended"])):
            return  # given up
        del self._running[trial_id]
        name = member.run.name
        if error and self._retries.get(name, 0) < self._max_failures:
            self._retries[name] = self._retries.get(name, 0) + 1
            self._again.append(member)
            return
        if error or last is None:
            why = {"failure": _WORKER_LOST}
        elif last["failure"] is not None:
            why = {"failure": last["failure"]}
        else:
            stopped = last["stopped"] if last["ended"] else SCHEDULER
            why = {} if stopped is None else {"stopped": stopped}
        with self._capture_error():
            run = member.run
            if why.get("stopped") != SCHEDULER and "failure" not in why:
                index_run(run)  # first, so that a kill loses no end
            member.end("FAILED" if "failure" in why else "FINISHED", **why)
            keep = 1 if run.failure is None and self._proposer.keep_above(member.spec) < float("inf") else 0
            remove_checkpoints(run, keep)
            self._tell(member.spec, run)

    def _tell(self, spec: RunSpec, run: Run) -> None:
        """Report the end of a run. What belongs to one that failed is not trained."""
        if run.failure is not None and "trial" in spec.place:
            same = {name: spec.place.get(name) for name in ("kind", "trial", "seed")}
            self._waiting = [each for each in self._waiting if {name: each.place.get(name) for name in same} != same]
        self._progress.ended(run, spec.place.get("label", run.name))
        self._proposer.ended(spec, run)

    def count_retries(self) -> None:
        """Count a retry of every running run: Ray Tune does not say whose process was ended, and ends the others."""
        for trial_id in list(self._running):
            self.on_trial_complete(trial_id, error=True)

    def give_up(self) -> None:
        """Record running runs as given up."""
        for member in (*self._running.values(), *self._again):
            member.end("KILLED")
        self._running.clear()
        self._again.clear()

    @contextmanager
    def _capture_error(self) -> Iterator[None]:
        """Keep an exception of the body: Ray Tune would treat it as a failure of the trial."""
        try:
            yield
        except Exception as error:
            self.interruption.problem = self.interruption.problem or error

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a group is restored from its record."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: a group is restored from its record."""

    def __reduce__(self) -> Any:
        return _nothing, ()  # Ray Tune would pickle this object, which is never restored


def _nothing() -> None:
    return None


def _as_text(request: Mapping[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)
