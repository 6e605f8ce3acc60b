"""A whole study: searched or continued, judged, tracked, its best run again. What ``concord tune`` does."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from concord import logs
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, RunFailedError, StoppedError
from concord.options import option_values
from concord.runs.dashboard import described
from concord.runs.folder import RECORD, Lineage, run_folder, run_tags
from concord.runs.live_metrics import Published
from concord.runs.run import Info, run
from concord.runs.session import ray_session
from concord.runs.termination import sigterm_as_interrupt
from concord.space import Point, format_point
from concord.storage import Folder, display_path, resolve
from concord.studies import journal as journals
from concord.studies.execution import Interruption, Room, execute, nodes_to_be, overrides, room
from concord.studies.journal import Journal, TrialResult, TrialSpec
from concord.studies.plan import Plan, kept_study
from concord.studies.progress import STUDY_METRICS, StudyProgress
from concord.studies.results import FIGURES, SUMMARY, TABLE, StudyResult, judged, write_results
from concord.studies.selection import LOOKED_AT
from concord.studies.shared_data import SharedData, share_data
from concord.studies.spaces import config_at, resolved_at
from concord.studies.stopping import StopRule, replay, scheduler
from concord.studies.trial import TrialSpecCommon
from concord.tracking import ChildRuns, Store, redact
from concord.training.job import built_in_jobs

_CHILDREN = "children.jsonl"
_DISTRIBUTED = "distributed"  # what distributed trials keep while they run
# How long the end of a study goes on trying to send trials that a store did not take.
_LAST_TRIALS_SECONDS = 60.0


def run_study(plan: Plan, info: Info) -> StudyResult:
    """Run a study, or continue it, and keep everything.

    Raises:
        InputError: something cannot be used; nothing of a new study is left.
        RunFailedError: it was stopped, or every trial failed; what was finished is kept.
    """
    started = time.perf_counter()
    base = plan.base
    logs.bind_context(study=plan.name, job=plan.job.name)
    if there := nodes_to_be(base):  # before anything is written, and before Ray takes its seconds to start
        room(plan.options, base, there)
    store = Store.open(base.run.output, base.run.tracking_uri)
    if (record := kept_study(plan.kept)) is not None:
        before = record["store"]
        if before != redact(store.uri):
            raise InputError(f"--tracking-uri {redact(store.uri)}: the study {plan.name} was started with {before}")
    with sigterm_as_interrupt(), ray_session(base.with_options(workers=1)) as dashboard:
        where = room(plan.options, base, nodes_to_be(base))
        plan.kept.make()
        with journals.opened(plan.kept) as journal:
            kept = journal.kept
            new = not (kept.path / journals.STUDY).exists()
            if new:
                _create(plan, kept, store)
            record = journals.read_study(kept.path)
            _write(kept, {**record, "options": plan.record()["options"]})
            if dashboard:
                info(f"Ray dashboard {described(dashboard)}")
            study = _Study(plan, kept, journal, store, record["run_id"], where, new, info)
            with study.lifecycle():
                study.run()
            result = study.result()
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def experiment(job: str) -> str:
    """The MLflow experiment of a job's studies: beside the job's own runs, which trials would bury."""
    return f"{job}-studies"


def _write(kept: Folder, study: Mapping[str, Any]) -> None:
    journals.write_study(kept.path, study)
    kept.keep(journals.STUDY)


def _create(plan: Plan, kept: Folder, store: Store) -> None:
    environments = plan.checked.environments
    tags = run_tags(plan.job.name, plan.job.path, len(environments.train), environments.version) | {
        "concord.study": plan.name,
        "concord.method": plan.method,
        "concord.selection": plan.options.selection,
        "concord.oracle": plan.looks_at_test or "no",
    }
    parameters = {
        **{k: v for k, v in vars(plan.options).items() if v not in (None, ())},
        "seed": plan.base.run.seed,
        "register": plan.base.run.register,
        "metric": plan.criterion.metric,
        "mode": plan.criterion.mode,
        "stop_when": plan.stop_rule,
    }
    run_id = None
    try:
        run_id = store.start_run(experiment(plan.job.name), plan.name, parameters, tags)
        _write(kept, {**plan.record(), "run_id": run_id, "store": redact(store.uri)})
        store.log_json(run_id, plan.space.as_json(), "space.json")
        store.log_json(run_id, plan.record()["config"], "config.json")
        for name, source in plan.base.sources().items():
            store.log_text(run_id, source, name)
    except BaseException:
        _forget(kept, store, run_id)
        raise


def _forget(kept: Folder, store: Store, run_id: str | None) -> None:
    """Leave nothing of a study that cannot begin."""
    kept.delete()
    if run_id is not None:
        with contextlib.suppress(RunFailedError):
            store.delete_run(run_id)


class _Study:
    """A study at work."""

    def __init__(
        self,
        plan: Plan,
        kept: Folder,
        journal: Journal,
        store: Store,
        run_id: str,
        where: Room,
        new: bool,
        info: Info,
    ) -> None:
        self.plan = plan
        self.kept = kept
        self.journal = journal
        self.store = store
        self.run_id = run_id
        self.where = where
        self.info = info
        self.new = new
        lines = kept.lines(_CHILDREN)
        lines.fetch()
        self.children = ChildRuns(store, run_id, lines.file, known=not new, kept=lines.keeper)
        self.shared: SharedData | None = None

    @contextlib.contextmanager
    def lifecycle(self) -> Iterator[None]:
        """See that MLflow has every trial and says how the study ended."""
        status: Any = "FAILED"
        try:
            yield
            status = "FINISHED"
        except (KeyboardInterrupt, StoppedError):
            status = "KILLED"
            raise self._stopped() from None
        except InputError:
            status = None if self.new and not self.journal.tasks else "FAILED"
            raise
        finally:
            unsent = self.children.close(_LAST_TRIALS_SECONDS)
            if unsent:
                self.info(f"tracking: {unsent} trials are not in MLflow; the same --name sends them")
            if status is None:
                _forget(self.kept, self.store, self.run_id)
            else:
                with contextlib.suppress(RunFailedError):
                    self.store.finish_run(self.run_id, status)

    def _stopped(self) -> StoppedError:
        plan = self.plan
        done = len(self.journal.results("trial"))
        job = plan.job.name if plan.job.name in built_in_jobs() else plan.job.path
        output = (
            "" if plan.base.run.output == resolve(DEFAULT_OUTPUT) else f" --output {display_path(plan.base.run.output)}"
        )
        return StoppedError(
            f"stopped after {done} of {plan.trials} trials; continue with concord tune {job} --name {plan.name}{output}"
        )

    def _continue(self) -> None:
        """Clear up what a process that was killed left, and send what it had not sent."""
        for stale in (*(name for name in self.kept.names() if name.startswith("tune-")), _DISTRIBUTED):
            self.kept.remove(stale)
        self.store.resume_run(self.run_id)
        for key, task in self.journal.tasks.items():
            if (ended := self.journal.ended.get(key)) is not None:
                self._track_begin(task, ended.ended - ended.seconds)
                for epoch, _, metrics in ended.history:
                    self.children.log(key, metrics, epoch)
                self._track_end(task, ended)

    def run(self) -> None:
        """Everything that is still to be done."""
        plan = self.plan
        if not self.new:
            self._continue()
        done = len(self.journal.results("trial"))
        looks = f"; the o.o.d. test decides over {plan.looks_at_test} (oracle)" if plan.looks_at_test else ""
        self.info(
            f"study {plan.name}: {plan.method}, {plan.options.search}, "
            + (f"{done} of {plan.trials} trials are there" if done else f"{plan.trials} trials")
            + f", {self.where.concurrent} at a time, judged by {plan.criterion.metric}, {plan.criterion.direction} "
            f"({LOOKED_AT[plan.criterion.selection]}){looks}"
        )
        if self.new and plan.own is not None:
            self.info(f"the first trial has the job's own settings: {plan.own}")
        self._search()
        finished = self.journal.finished("trial")
        if not finished:
            failed = self.journal.results("trial")
            if not failed:
                raise RunFailedError("no trial was finished in the time given; the same --name continues")
            raise RunFailedError(f"every trial failed ({len(failed)}): {failed[0][1].failure}")
        ranked = plan.criterion.ranked(finished)
        if not ranked:
            raise RunFailedError(f"no trial of {len(finished)} has a finite {plan.criterion.metric}")
        winner = ranked[0][0]
        seeds = range(plan.base.run.seed + 1, plan.base.run.seed + 1 + plan.options.reruns)
        self._execute(
            [
                *self._shortlist([task for task, _ in ranked[: plan.options.shortlist]]),
                *(self._task("seed", winner.trial, winner.point, seed=seed) for seed in seeds),
            ]
        )
        if plan.base.run.register:
            self._register(winner)
        write_results(self.result(), self.store, self.run_id, self.info)
        self.kept.keep(FIGURES, TABLE, SUMMARY)

    def result(self) -> StudyResult:
        """What there is so far."""
        return judged(journals.read_study(self.kept.path), self.journal, self.kept)

    def _search(self) -> None:
        plan, journal = self.plan, self.journal
        search = plan.search()
        ended = journal.results("trial")
        for task, result in ended:
            if result.failure is None:
                search.observe(task.trial, task.point, plan.criterion.score(result.metrics))
        again = journal.unfinished("trial")
        if again:
            self.info(f"{len(again)} trials that had not ended run again")

        def propose() -> TrialSpec | None:
            if again:
                return again.pop(0)
            number = sum(task.kind == "trial" for task in journal.tasks.values())
            if number >= plan.trials:
                return None
            point = search.suggest(number)
            return None if point is None else self._task("trial", number, point, left_out=plan.folds)

        def learn(task: TrialSpec, result: TrialResult) -> None:
            if result.failure is None:
                search.observe(task.trial, task.point, plan.criterion.score(result.metrics))

        if len(ended) >= plan.trials and not again:
            return
        stopping = scheduler(plan.options.scheduler)
        if plan.options.scheduler != "none":
            replay(
                stopping,
                ended,
                plan.criterion.score,
                lambda task: config_at(plan.base, plan.space, task.point).resolved().schedule.epochs,
            )
        interruption = Interruption(60 * plan.options.max_minutes)
        progress = StudyProgress("trials", plan.trials, plan.criterion, self.info)
        for task, result in ended:
            progress.earlier(task, result)
        source = _Source(self, propose, learn, progress)
        labels = {"study": plan.name, "concord_job": plan.job.name, "method": plan.method}
        with Published(STUDY_METRICS, labels, progress.samples):
            self._run(source, plan.stop_rule, stopping, interruption, progress)
        self.info(progress.line())
        if interruption.out_of_time:
            self.info(
                f"--max-minutes {plan.options.max_minutes:g}: the time is over; the same --name goes on searching"
            )

    def _shortlist(self, best: Sequence[TrialSpec]) -> list[TrialSpec]:
        """Leave environments out in turn for the best trials, so that all selections can be compared."""
        left_out = self.plan.shortlist_folds
        if self.plan.folds or not left_out:
            return []
        return [self._task("left-out", task.trial, task.point, left_out=left_out, whole=False) for task in best]

    def _task(self, kind: journals.Kind, trial: int, point: Point, **others: Any) -> TrialSpec:
        plan = self.plan
        return TrialSpec(kind, trial, point, resolved=resolved_at(plan.base, plan.space, point), **others)

    def _execute(self, tasks: Sequence[TrialSpec]) -> None:
        """Run those of the tasks that have not finished, also those that failed when they were tried before."""
        ended = self.journal.ended
        queue = [task for task in tasks if task.key not in ended or ended[task.key].failure is not None]
        if not queue:
            return
        progress = StudyProgress("trainings of the best trials", len(queue), None, self.info)
        source = _Source(self, lambda: queue.pop(0) if queue else None, _nothing_learned, progress)
        self._run(source, StopRule(()), scheduler("none"), Interruption(0), progress)

    def _run(
        self,
        source: "_Source",
        stop_rule: StopRule,
        stopping: Any,
        interruption: Interruption,
        progress: StudyProgress,
    ) -> None:
        plan = self.plan
        if self.shared is None and plan.base.parallel.workers == 1:
            varied = {located.name for located in plan.space.varied()}
            self.shared = share_data(plan.job.job, plan.base.resolved(), varied)
        assignment = TrialSpecCommon(
            plan.job.path,
            plan.job.source,
            plan.job.rule,
            option_values(plan.base),
            plan.criterion,
            plan.modes,
            stop_rule,
            self.shared,
            self.where.threads,
            self.kept / _DISTRIBUTED,
        )
        with progress:
            execute(source, assignment, self.where, stopping, interruption, self.kept, plan.base.parallel.max_failures)
        if interruption.stopped_by_user:
            raise KeyboardInterrupt

    def _register(self, winner: TrialSpec) -> None:
        plan = self.plan
        name = f"{plan.name}-winner-{winner.trial}"
        begun = RECORD in run_folder(plan.base.run.output, name).names()
        config = config_at(plan.base, plan.space, winner.point).with_options(name=name, resume=begun)
        looked_at = plan.options.selection + (" (oracle)" if plan.looks_at_test else "")
        lineage = Lineage(
            experiment(plan.job.name),
            {
                "mlflow.parentRunId": self.run_id,
                "concord.study": plan.name,
                "concord.trial": str(winner.trial),
                "concord.method": plan.method,
                "concord.seed": str(config.run.seed),
                "concord.selection": looked_at,
            },
        )
        self.info(
            f"the winner, trial {winner.trial}, is trained once more: {format_point(winner.point | winner.resolved)}"
        )
        finished = run(plan.job, config, self.info, lineage)
        became = {
            "model": finished.model,
            "champion": finished.registered is not None and finished.registered.champion,
            "registration": finished.registered.reason if finished.registered else None,
        }
        _write(self.kept, {**journals.read_study(self.kept.path), **became})

    def options_of(self, task: TrialSpec) -> dict[str, Any]:
        """In what the task's configuration differs from the one that all start from."""
        plan = self.plan
        config = config_at(plan.base, plan.space, task.point)
        if task.seed is not None:
            config = config.with_options(seed=task.seed)
        if not task.whole:
            config = config.with_options(evaluations=1)
        return overrides(plan.base, config)

    def _track_begin(self, task: TrialSpec, began: float) -> None:
        plan = self.plan
        unused = config_at(plan.base, plan.space, task.point).resolved().unused()
        chosen = {**plan.space.fixed(task.point), **task.point, **task.resolved}
        parameters: dict[str, object] = {name: value for name, value in chosen.items() if name not in unused}
        if task.seed is not None:
            parameters["seed"] = task.seed
        tags = {"concord.study": plan.name, "concord.trial": str(task.trial), "concord.kind": task.kind}
        self.children.begin(task.key, f"{plan.name} {task.key}", parameters, tags, began)

    def _track_end(self, task: TrialSpec, ended: TrialResult) -> None:
        tags = {"concord.stopped": ended.stopped or "", "concord.failure": ended.failure or ""}
        tags = {name: text for name, text in tags.items() if text}
        self.children.end(task.key, "FAILED" if ended.failure else "FINISHED", ended.ended, tags)


def _nothing_learned(task: TrialSpec, ended: TrialResult) -> None:
    """What a fixed list of tasks learns from one of them."""


@dataclass
class _Source:
    """Tasks for :func:`execute`; what becomes of them goes to the journal, then to whoever wants to know."""

    study: _Study
    propose: Callable[[], TrialSpec | None]
    learn: Callable[[TrialSpec, TrialResult], None]
    progress: StudyProgress

    def next(self) -> tuple[TrialSpec, dict[str, Any]] | None:
        task = self.propose()
        if task is None:
            return None
        if task.key in self.study.journal.ended:
            self.study.children.forget(task.key)
        self.study.journal.begin(task)
        self.study._track_begin(task, time.time())
        self.progress.began(task)
        return task, self.study.options_of(task)

    def evaluated(self, task: TrialSpec, epoch: int, percent: float, metrics: dict[str, float]) -> None:
        self.progress.evaluated(task, percent)
        self.study.children.log(task.key, metrics, epoch)

    def ended(self, task: TrialSpec, ended: TrialResult) -> None:
        self.study.journal.end(task, ended)
        self.study._track_end(task, ended)
        self.learn(task, ended)
        self.progress.ended(task, ended)
