"""Trials that belong together, kept in a journal and tracked under one MLflow run: a study's, or a comparison's."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from concord.errors import InputError, RunFailedError, StoppedError
from concord.options import option_values
from concord.runs.dashboard import described
from concord.runs.folder import recorded_config
from concord.runs.run import Info
from concord.runs.session import ray_session
from concord.runs.termination import sigterm_as_interrupt
from concord.storage import Folder
from concord.studies import journal as journals
from concord.studies.execution import Interruption, execute
from concord.studies.journal import Journal, TrialResult, TrialSpec
from concord.studies.options import SharingOptions
from concord.studies.plan import kept_study
from concord.studies.progress import StudyProgress
from concord.studies.resources import Room, check_trial_resources, trial_resources
from concord.studies.selection import Criterion
from concord.studies.shared_data import SharedData
from concord.studies.stopping import StopRule, scheduler
from concord.studies.trial import TrialSpecCommon
from concord.tracking import ChildRuns, Store, redact
from concord.training import JobFile, RunConfig
from concord.training.evaluation import Mode
from concord.training.options import parallel_of

_CHILDREN = "children.jsonl"
_DISTRIBUTED = "distributed"  # what distributed trials keep while they run
# How long the end goes on trying to send trials that a store did not take.
_LAST_TRIALS_SECONDS = 60.0


@dataclass(frozen=True)
class TrialGroup:
    """What is known of a group before it begins.

    Attributes:
        what: a study or a comparison.
        name: of it.
        job: what is trained.
        base: the configuration that every trial starts from.
        kept: where it is kept.
        sharing: how the cluster is divided among the trials.
        experiment: of its run in MLflow.
        parameters, tags: of that run; it is also tagged with the group's name.
        artifacts: JSON values kept with that run, by file name, beside the configuration.
        record: what is written down of it beside job, name, beginning and configuration, see
            :func:`concord.studies.journal.write_study`; the keys in ``updated`` are written anew when it continues.
        updated: those keys.
    """

    what: str
    name: str
    job: JobFile
    base: RunConfig
    kept: Folder
    sharing: SharingOptions
    experiment: str
    parameters: Mapping[str, object]
    tags: Mapping[str, str]
    artifacts: Mapping[str, Any]
    record: Mapping[str, Any]
    updated: tuple[str, ...]


@dataclass(frozen=True)
class Tracked:
    """How a trial appears in MLflow."""

    name: str
    parameters: Mapping[str, object]
    tags: Mapping[str, str]


@contextlib.contextmanager
def opened(group: TrialGroup, tracked: Callable[[TrialSpec], Tracked], info: Info) -> Iterator["Trials"]:
    """Begin a group, or go on with it; at the end of the body MLflow has every trial, and how it ended.

    Args:
        group: what is begun.
        tracked: how a trial appears in MLflow.
        info: takes a line of progress.

    Raises:
        InputError: something cannot be used; nothing of a new group is left.
        StoppedError: the user stopped it; its text has to be completed by who knows how to continue.
    """
    base = group.base
    check_trial_resources(group.sharing, base)  # before anything is written
    store = Store.open(base.run.output, base.run.tracking_uri)
    if (record := kept_study(group.kept)) is not None:
        before = record["store"]
        if before != redact(store.uri):
            raise InputError(
                f"--tracking-uri {redact(store.uri)}: the {group.what} {group.name} was started with {before}"
            )
    with sigterm_as_interrupt(), ray_session(base) as dashboard:
        where = trial_resources(group.sharing, base, info)
        group.kept.make()
        with journals.opened(group.kept, group.what) as journal:
            kept = journal.kept
            new = not (kept.path / journals.STUDY).exists()
            if new:
                _create(group, kept, store)
            record = journals.read_study(kept.path)
            write_record(kept, {**record, **{key: group.record[key] for key in group.updated}})
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            trials = Trials(group, tracked, kept, journal, store, record["run_id"], where, new, info)
            with trials.lifecycle():
                if not new:
                    trials.resume()
                yield trials


def write_record(kept: Folder, record: Mapping[str, Any]) -> None:
    """Write down what the group is, here and where it is kept."""
    journals.write_study(kept.path, record)
    kept.keep(journals.STUDY)


def _create(group: TrialGroup, kept: Folder, store: Store) -> None:
    run_id = None
    config = recorded_config(group.base)
    record = {"job": group.job.name, "name": group.name, "started": time.time(), "config": config, **group.record}
    try:
        tags = {**group.tags, f"concord.{group.what}": group.name}
        run_id = store.start_run(group.experiment, group.name, group.parameters, tags)
        write_record(kept, {**record, "run_id": run_id, "store": redact(store.uri)})
        for name, value in {**group.artifacts, "config.json": config}.items():
            store.log_json(run_id, value, name)
        for name, source in group.base.sources().items():
            store.log_text(run_id, source, name)
    except BaseException:
        _forget(kept, store, run_id)
        raise


def _forget(kept: Folder, store: Store, run_id: str | None) -> None:
    """Leave nothing of a group that cannot begin."""
    kept.delete()
    if run_id is not None:
        with contextlib.suppress(RunFailedError):
            store.delete_run(run_id)


class Trials:
    """A group at work; made by :func:`opened`.

    Attributes:
        kept: its folder.
        journal: what began and ended.
        store: where it is tracked.
        run_id: its run in MLflow.
        where: what trials run on.
        new: whether it begins now.
    """

    def __init__(
        self,
        group: TrialGroup,
        tracked: Callable[[TrialSpec], Tracked],
        kept: Folder,
        journal: Journal,
        store: Store,
        run_id: str,
        where: Room,
        new: bool,
        info: Info,
    ) -> None:
        self._group = group
        self._tracked = tracked
        self.kept = kept
        self.journal = journal
        self.store = store
        self.run_id = run_id
        self.where = where
        self.new = new
        self._info = info
        lines = kept.lines(_CHILDREN)
        lines.fetch()
        self._children = ChildRuns(store, run_id, lines.file, known=not new, kept=lines.keeper)

    @contextlib.contextmanager
    def lifecycle(self) -> Iterator[None]:
        """See that MLflow has every trial and says how the group ended."""
        status: Any = "FAILED"
        try:
            yield
            status = "FINISHED"
        except (KeyboardInterrupt, StoppedError):
            status = "KILLED"
            raise StoppedError("stopped") from None
        except InputError:
            status = None if self.new and not self.journal.tasks else "FAILED"
            raise
        finally:
            unsent = self._children.close(_LAST_TRIALS_SECONDS)
            if unsent:
                self._info(f"tracking: {unsent} trials are not in MLflow; the same --name sends them")
            if status is None:
                _forget(self.kept, self.store, self.run_id)
            else:
                with contextlib.suppress(RunFailedError):
                    self.store.finish_run(self.run_id, status)

    def resume(self) -> None:
        """Clear up what a process that was killed left, and send what it had not sent."""
        for stale in (*(name for name in self.kept.names() if name.startswith("tune-")), _DISTRIBUTED):
            self.kept.remove(stale)
        self.store.resume_run(self.run_id)
        for key, task in self.journal.tasks.items():
            if (ended := self.journal.ended.get(key)) is not None:
                self._track_begin(task, ended.ended - ended.seconds)
                for epoch, _, metrics in ended.history:
                    self._children.log(key, metrics, epoch)
                self._track_end(task, ended)

    def run(
        self,
        propose: Callable[[], TrialSpec | None],
        options_of: Callable[[TrialSpec], dict[str, Any]],
        progress: StudyProgress,
        *,
        learn: Callable[[TrialSpec, TrialResult], None] = lambda _task, _ended: None,
        criterion: Criterion | None = None,
        modes: Mapping[str, Mode | None] | None = None,
        stop_rule: StopRule | None = None,
        stopping: Any = None,
        interruption: Interruption | None = None,
        shared: SharedData | None = None,
        detail: tuple[str, ...] = (),
    ) -> None:
        """Run everything that is proposed, keep it and track it.

        Args:
            propose: gives the next trial; None when there are no more.
            options_of: in what a trial's configuration differs from the one that all start from.
            progress: is shown meanwhile.
            learn: hears how trials ended.
            criterion: what they are judged by, if there is something to choose.
            modes: whether large or small is good, by measure.
            stop_rule: when a trial ends early.
            stopping: scheduler of Ray Tune.
            interruption: why trials may be given up.
            shared: their data, if all have the same.
            detail: beginnings of the metrics of single environments that are kept.
        """
        group = self._group
        interruption = interruption or Interruption(0)
        common = TrialSpecCommon(
            group.job.path,
            group.job.source,
            group.job.rule,
            option_values(group.base),
            criterion,
            modes or {},
            stop_rule or StopRule(()),
            shared,
            self.where.threads,
            self.kept / _DISTRIBUTED,
            detail,
        )
        source = _Source(self, propose, options_of, learn, progress)
        stopping = stopping if stopping is not None else scheduler("none")
        with progress:
            max_failures = parallel_of(group.base).max_failures
            execute(source, common, self.where, stopping, interruption, self.kept, max_failures)
        if interruption.stopped_by_user:
            raise KeyboardInterrupt

    def _begin(self, task: TrialSpec) -> None:
        if task.key in self.journal.ended:
            self._children.forget(task.key)
        self.journal.begin(task)
        self._track_begin(task, time.time())

    def _evaluated(self, task: TrialSpec, epoch: int, metrics: dict[str, float]) -> None:
        self._children.log(task.key, metrics, epoch)

    def _end(self, task: TrialSpec, ended: TrialResult) -> None:
        self.journal.end(task, ended)
        self._track_end(task, ended)

    def _track_begin(self, task: TrialSpec, began: float) -> None:
        tracked = self._tracked(task)
        self._children.begin(task.key, tracked.name, tracked.parameters, tracked.tags, began)

    def _track_end(self, task: TrialSpec, ended: TrialResult) -> None:
        tags = {"concord.stopped": ended.stopped or "", "concord.failure": ended.failure or ""}
        tags = {name: text for name, text in tags.items() if text}
        self._children.end(task.key, "FAILED" if ended.failure else "FINISHED", ended.ended, tags)


@dataclass
class _Source:
    """Tasks for :func:`execute`; what becomes of them goes to the journal, then to whoever wants to know."""

    trials: Trials
    propose: Callable[[], TrialSpec | None]
    options_of: Callable[[TrialSpec], dict[str, Any]]
    learn: Callable[[TrialSpec, TrialResult], None]
    progress: StudyProgress

    def next(self) -> tuple[TrialSpec, dict[str, Any]] | None:
        task = self.propose()
        if task is None:
            return None
        self.trials._begin(task)
        self.progress.began(task)
        return task, self.options_of(task)

    def evaluated(self, task: TrialSpec, epoch: int, percent: float, metrics: dict[str, float]) -> None:
        self.progress.evaluated(task, percent)
        self.trials._evaluated(task, epoch, metrics)

    def ended(self, task: TrialSpec, ended: TrialResult) -> None:
        self.trials._end(task, ended)
        self.learn(task, ended)
        self.progress.ended(task, ended)
