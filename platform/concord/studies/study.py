"""A whole study: searched or continued, judged, tracked, its best run again. What ``concord tune`` does."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from concord import logs
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import RunFailedError, StoppedError
from concord.job_files import built_in_jobs
from concord.options import option_values
from concord.runs.folder import RECORD, run_folder
from concord.runs.lifecycle import Lineage
from concord.runs.live_metrics import Published
from concord.runs.run import Info, run
from concord.runs.tags import run_tags
from concord.space import Point, format_point
from concord.storage import display_path, resolve
from concord.studies import journal as journals
from concord.studies.execution import Interruption, overrides
from concord.studies.journal import TrialResult, TrialSpec
from concord.studies.plan import Plan
from concord.studies.progress import STUDY_METRICS, StudyProgress
from concord.studies.results import FIGURES, SUMMARY, TABLE, StudyResult, judged, write_results
from concord.studies.selection import LOOKED_AT
from concord.studies.shared_data import SharedData, share_data
from concord.studies.spaces import config_at, resolved_at
from concord.studies.stopping import StopRule, replay, scheduler
from concord.studies.trial_group import Tracked, TrialGroup, Trials, opened, write_record
from concord.tracking import add_lineage
from concord.training import TrainConfig


def run_study(plan: Plan, info: Info) -> StudyResult:
    """Run a study, or continue it, and keep everything.

    Raises:
        InputError: something cannot be used; nothing of a new study is left.
        RunFailedError: it was stopped, or every trial failed; what was finished is kept.
    """
    started = time.perf_counter()
    logs.bind_context(study=plan.name, job=plan.job.name)
    study: _Study | None = None
    try:
        with opened(_group(plan), lambda task: _tracked(plan, task), info) as trials:
            study = _Study(plan, trials, info)
            study.run()
    except StoppedError:
        if study is None:
            raise
        raise study.stopped() from None
    return dataclasses.replace(study.result(), seconds=time.perf_counter() - started)


def experiment(job: str) -> str:
    """The MLflow experiment of a job's studies: beside the job's own runs, which trials would bury."""
    return f"{job}-studies"


def _group(plan: Plan) -> TrialGroup:
    environments = plan.checked.environments
    tags = run_tags(plan.job.name, plan.job.path, len(environments.train), environments.version) | {
        "concord.method": plan.method,
        "concord.selection": plan.options.selection,
        "concord.oracle": plan.looks_at_test or "no",
    }
    parameters = {
        **{k: v for k, v in option_values(plan.options).items() if v not in (None, ())},
        "seed": plan.base.run.seed,
        "register": plan.base.run.register,
        "metric": plan.criterion.metric,
        "mode": plan.criterion.mode,
        "stop_when": plan.stop_rule,
    }
    return TrialGroup(
        what="study",
        name=plan.name,
        job=plan.job,
        base=plan.base,
        kept=plan.kept,
        sharing=plan.options.sharing,
        experiment=experiment(plan.job.name),
        parameters=parameters,
        tags=tags,
        artifacts={"space.json": plan.space.as_json()},
        record=plan.record(),
        updated=("options",),
    )


def _tracked(plan: Plan, task: TrialSpec) -> Tracked:
    unused = config_at(plan.base, plan.space, task.point).resolved().unused()
    chosen = {**plan.space.fixed(task.point), **task.point, **task.resolved}
    parameters: dict[str, object] = {name: value for name, value in chosen.items() if name not in unused}
    if task.seed is not None:
        parameters["seed"] = task.seed
    tags = {"concord.study": plan.name, "concord.trial": str(task.trial), "concord.kind": task.kind}
    return Tracked(f"{plan.name} {task.key}", parameters, tags)


class _Study:
    """A study at work."""

    def __init__(self, plan: Plan, trials: Trials, info: Info) -> None:
        self.plan = plan
        self.trials = trials
        self.kept, self.journal = trials.kept, trials.journal
        self.info = info
        self.shared: SharedData | None = None

    def stopped(self) -> StoppedError:
        """How to go on."""
        plan = self.plan
        done = len(self.journal.results("trial"))
        job = plan.job.name if plan.job.name in built_in_jobs() else plan.job.path
        output = (
            "" if plan.base.run.output == resolve(DEFAULT_OUTPUT) else f" --output {display_path(plan.base.run.output)}"
        )
        return StoppedError(
            f"stopped after {done} of {plan.trials} trials; continue with concord tune {job} --name {plan.name}{output}"
        )

    def run(self) -> None:
        """Everything that is still to be done."""
        plan = self.plan
        done = len(self.journal.results("trial"))
        looks = f"; the o.o.d. test decides over {plan.looks_at_test} (oracle)" if plan.looks_at_test else ""
        self.info(
            f"study {plan.name}: {plan.method}, {plan.options.search}, "
            + (f"{done} of {plan.trials} trials are there" if done else f"{plan.trials} trials")
            + f", {self.trials.where.concurrent} at a time, judged by {plan.criterion.metric}, "
            f"{plan.criterion.direction} ({LOOKED_AT[plan.criterion.selection]}){looks}"
        )
        if self.trials.new and plan.own is not None:
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
        write_results(self.result(), self.trials.store, self.trials.run_id, self.info)
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
                lambda task: plan.epochs(config_at(plan.base, plan.space, task.point).resolved()),
            )
        interruption = Interruption(60 * plan.options.max_minutes)
        progress = StudyProgress("trials", plan.trials, plan.criterion, self.info)
        for task, result in ended:
            progress.earlier(task, result)
        labels = {"study": plan.name, "concord_job": plan.job.name, "method": plan.method}
        with Published(STUDY_METRICS, labels, progress.samples):
            self._run(propose, progress, learn, plan.stop_rule, stopping, interruption)
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
        self._run(lambda: queue.pop(0) if queue else None, progress)

    def _run(
        self,
        propose: Callable[[], TrialSpec | None],
        progress: StudyProgress,
        learn: Callable[[TrialSpec, TrialResult], None] = lambda _task, _ended: None,
        stop_rule: StopRule | None = None,
        stopping: Any = None,
        interruption: Interruption | None = None,
    ) -> None:
        plan = self.plan
        if self.shared is None and isinstance(plan.base, TrainConfig) and plan.base.parallel.workers == 1:
            varied = {located.name for located in plan.space.varied()}
            self.shared = share_data(plan.job.job, plan.base.resolved(), varied)
        self.trials.run(
            propose,
            self.options_of,
            progress,
            learn=learn,
            criterion=plan.criterion,
            modes=plan.modes,
            stop_rule=stop_rule,
            stopping=stopping,
            interruption=interruption,
            shared=self.shared,
        )

    def _register(self, winner: TrialSpec) -> None:
        plan = self.plan
        name = f"{plan.name}-winner-{winner.trial}"
        begun = RECORD in run_folder(plan.base.run.output, name).names()
        config = config_at(plan.base, plan.space, winner.point).with_options(name=name, resume=begun)
        looked_at = plan.options.selection + (" (oracle)" if plan.looks_at_test else "")
        lineage = Lineage(
            experiment(plan.job.name),
            {
                "mlflow.parentRunId": self.trials.run_id,
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
        if isinstance(config, TrainConfig):
            finished = run(plan.job, config, self.info, lineage)
        else:
            finished = plan.job.job.run(plan.job, config, self.info)
            add_lineage(self.trials.store, finished.run_id, finished.registered, lineage.tags)
        became = {
            "model": finished.model,
            "champion": finished.registered is not None and finished.registered.champion,
            "registration": finished.registered.reason if finished.registered else None,
        }
        write_record(self.kept, {**journals.read_study(self.kept.path), **became})

    def options_of(self, task: TrialSpec) -> dict[str, Any]:
        """In what the task's configuration differs from the one that all start from."""
        plan = self.plan
        config = config_at(plan.base, plan.space, task.point)
        if task.seed is not None:
            config = config.with_options(seed=task.seed)
        if not task.whole:
            config = config.with_options(evaluations=1)
        return overrides(plan.base, config)
