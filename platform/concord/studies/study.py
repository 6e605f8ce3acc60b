"""A whole study (``concord tune``): search or continue, score, register the best, repeat it."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule

from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.execution.execute import kept_checkpoint, remove_checkpoints
from concord.execution.finish import finish
from concord.execution.key import recorded_config
from concord.execution.lifecycle import Info, reopened
from concord.execution.preflight import preflight
from concord.execution.progress import duration
from concord.execution.spec import RunSpec
from concord.record import OpenRun, Run, require_run
from concord.space import Point, format_point
from concord.studies.criterion import SCORED_ON
from concord.studies.plan import StudyPlan
from concord.studies.pool import SCHEDULER, Pool, open_group
from concord.studies.proposals import GroupProgress, ProposalList, Trial
from concord.studies.results import StudyResult, study_result, write_results
from concord.studies.search import config_at
from concord.studies.trial import PROGRESS, SCORE
from concord.tracking.registry import deleted_version
from concord.training.options import LeftOut, TrainConfig
from concord.training.worker_data import check_environments

# How long MLflow may take to have the best trial before its model is registered.
_TRACKING_SECONDS = 60.0


def run_study(plan: StudyPlan, info: Info) -> StudyResult:
    """Run or continue a study, and keep everything."""
    started = time.perf_counter()
    logs.bind_context(study=plan.name, job=plan.job.name)
    pool: Pool | None = None
    try:
        with open_group(plan, plan.record, info) as pool:
            if pool.group.resumed:
                pool.group.run.describe(options=recorded_config(plan.options))
            result = _run(plan, pool, info)
    except StoppedError:
        if pool is None:
            raise
        done = len(pool.runs().ended("trial"))
        raise StoppedError(f"stopped after {done} of {plan.trials} trials; continue with {plan.continuation}") from None
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


class _Search:
    """Proposes first the unfinished trials of an earlier process, then the search's suggestions."""

    keep = False

    def __init__(self, plan: StudyPlan, pool: Pool, progress: GroupProgress) -> None:
        self._plan, self._progress, self.stopping = plan, progress, scheduler(plan.options.scheduler)
        runs = pool.runs()
        self._search = plan.search()
        begun = runs.begun("trial")
        self.again = [each for each in begun if not each.complete]
        self._begun = len(begun)
        self._finished: list[Trial] = []
        self._ended: dict[int, dict[LeftOut, Run]] = {}  # of each trial that is not over, by what is left out
        for each in runs.ended("trial"):
            self._observe(each)
            self._replay(each)

    @property
    def over(self) -> bool:
        """Whether the study has all its trials."""
        return not self.again and self._begun >= self._plan.trials

    def next(self) -> Sequence[RunSpec]:
        """The runs of the next trial."""
        if self.again:
            trial = self.again.pop(0)
            ended = {left_out: run for left_out, run in trial.parts.items() if run.status in ("FINISHED", "FAILED")}
            self._ended[trial.number] = ended
            specs = self._parts(trial.number, trial.point)
            return [each for each in specs if each.place.get("left_out") not in ended]
        if self.over or (point := self._search.suggest(self._begun)) is None:
            return []
        self._begun += 1
        return self._parts(self._begun - 1, point)

    def _parts(self, number: int, point: Point) -> list[RunSpec]:
        plan = self._plan
        return plan.parts("trial", number, point, folds=plan.folds, stop_when=str(plan.stop_rule))

    def ended(self, spec: RunSpec, run: Run) -> None:
        """Add the score of the run's trial to the search, once it is over; keep the best checkpoints."""
        place, number = spec.place, spec.place["trial"]
        ended = self._ended.setdefault(number, {})
        ended[place.get("left_out")] = run
        if len(ended) == 1 + len(self._plan.folds) or run.failure is not None:
            del self._ended[number]
            trial = Trial("trial", number, place["point"], None, place["resolved"], ended, self._plan.evaluator)
            self._observe(trial)
            if not isinstance(trial.run, OpenRun | None):  # it was finished before, so Ray Tune has not seen it
                self._replay(trial)

    def keep_above(self, spec: RunSpec) -> float:
        """The score of the last trial that is kept."""
        if "left_out" in spec.place:
            return float("inf")
        if self._plan.folds or len(self._finished) < self._plan.options.keep_trials:
            return float("-inf")
        return self._plan.criterion.score(self._finished[-1].metrics)

    def _replay(self, trial: Trial) -> None:
        if self._plan.options.scheduler != "none":
            replay(self.stopping, trial, self._plan.criterion.score, self._plan.epochs(trial))

    def _observe(self, trial: Trial) -> None:
        self._progress.compared(trial)
        if trial.failure is not None:
            return
        self._search.observe(trial.number, trial.point, self._plan.criterion.score(trial.metrics))
        ranked = self._plan.criterion.ranked([*self._finished, trial])
        self._finished = ranked[: self._plan.options.keep_trials]
        names = {each.run.name for each in self._finished if each.run is not None}  # two trials may have the same run
        for run in (each.run for each in [*ranked, trial]):
            if run is not None and run.name not in names and run.record.get("group") == self._plan.name:
                remove_checkpoints(run, 0)


def _run(plan: StudyPlan, pool: Pool, info: Info) -> StudyResult:
    """Run the remaining parts of a study."""
    runs = pool.runs()
    done = len(runs.ended("trial"))
    oracle = f"; the o.o.d. test decides over {plan.test_usage} (oracle)" if plan.test_usage else ""
    judged = (
        f"judged by {plan.criterion.metric}, {plan.criterion.direction} ({SCORED_ON[plan.criterion.selection]}){oracle}"
    )
    info(
        f"study {plan.name}: {plan.method}, {plan.options.search}, "
        + (f"{done} of {plan.trials} trials are done" if done else f"{plan.trials} trials")
        + f", {pool.resources.concurrent} at a time, {judged}"
    )
    names = plan.space.varied_entries()
    varied = f"**Study of {plan.job.name}**: {plan.method}, {plan.trials} trials ({plan.options.search}) of "
    pool.group.run.append("note", part="beginning", text=f"{varied}{', '.join(names)}; {judged}")
    info(f"varied: {', '.join(names)}{_rule(plan)}")
    if not pool.group.resumed and plan.own is not None:
        info(f"the first trial has the job's own settings: {plan.own}")
    progress = _search(plan, pool, info)
    finished = runs.finished("trial")
    if not finished:
        failed = runs.ended("trial")
        if not failed:
            raise RunFailedError("no trial finished in the given time; the same --name continues")
        raise RunFailedError(f"every trial failed ({len(failed)}): {failed[0].failure}")
    ranked = plan.criterion.ranked(finished)
    if not ranked:
        raise RunFailedError(f"none of {len(finished)} trials has a value: {plan.criterion.missing}")
    best = ranked[0]
    wanted = [
        *_left_out(plan, ranked[: plan.options.shortlist], info),
        *(spec for seed in plan.new_seeds for spec in plan.parts("seed", best.number, best.point, seed, plan.folds)),
    ]
    if left := [spec for spec, run in pool.ask(wanted) if run is None]:
        takes = progress.seconds_of(len(left)) or len(left) * best.runs[0].seconds / pool.resources.concurrent
        info(f"the search is over; {len(left)} trainings of the best trials follow, about {duration(takes)}")
        pool.run(ProposalList(left), GroupProgress("trainings of the best trials", len(left), info))
    if plan.base.run.register:
        pool.group.run.describe(**_register(plan, best, pool, info))
    return write_results(study_result(pool.group.run, runs), info, pool.group)


def _rule(plan: StudyPlan) -> str:
    """The method of a study's points, in words, if they have one."""
    point = plan.first[0] if plan.first else plan.search().suggest(0)
    config = config_at(plan.base, plan.space, point or {}).resolve()
    fixed = "aggregator" not in plan.varied and "objective" not in plan.varied
    return f"; trained with {config.method}" if isinstance(config, TrainConfig) and fixed else ""


def _left_out(plan: StudyPlan, shortlist: Sequence[Trial], info: Info) -> list[RunSpec]:
    """The best trials with environments left out in turn, so that all selections can be compared."""
    folds = plan.shortlist_folds
    if not folds:
        return []
    fewer = plan.checked.environments.only_names().leaving_out(folds[0])
    try:
        for each in shortlist:
            config = config_at(plan.base, plan.space, each.point)
            assert isinstance(config, TrainConfig)  # only the training loop has environments
            check_environments(config.resolve(), fewer)
    except InputError as error:
        info(f"the best trials are not repeated with environments left out: {error}")
        return []
    return [spec for each in shortlist for spec in plan.parts("left-out", each.number, each.point, folds=folds)]


def _search(plan: StudyPlan, pool: Pool, info: Info) -> GroupProgress:
    parts = 1 + len(plan.folds)
    progress = GroupProgress("trials", plan.trials, info, plan.criterion, parts, sum(plan.repetitions))
    proposer = _Search(plan, pool, progress)
    if proposer.again:
        info(f"{len(proposer.again)} unfinished trials are resumed or repeated")
    if proposer.over:
        return progress
    ended = pool.runs().ended("trial")
    for run in (run for trial in ended for run in trial.runs):
        progress.earlier(run)
    of_best = zip(plan.repetitions, ("with environments left out", "with new seeds"), strict=True)
    if after := " and ".join(f"{count} {what}" for count, what in of_best if count):
        info(f"trainings in the search: {(plan.trials - len(ended)) * parts}; after it of the best: {after}")
    labels = {"study": plan.name, "concord_job": plan.job.name, "method": plan.method}
    out_of_time = pool.run(proposer, progress, proposer.stopping, plan.options.max_minutes, labels)
    info(progress.line())
    if out_of_time:
        info(f"--max-minutes {plan.options.max_minutes:g}: the time has run out; the same --name continues the search")
    return progress


def _register(plan: StudyPlan, winner: Trial, pool: Pool, info: Info) -> Mapping[str, object]:
    """Register the best trial from its last checkpoint; return its registration."""
    lineage = {
        "concord.study": plan.name,
        "concord.trial": str(winner.number),
        "concord.selection": plan.criterion.selection + (" (oracle)" if plan.test_usage else ""),
    }
    config = config_at(plan.base, plan.space, winner.point)
    assert winner.run is not None
    run = winner.run
    earlier = pool.group.run.record
    if earlier.get("winner_of") == run.name and earlier.get("model"):
        if gone := deleted_version(pool.group.store, earlier["model"]):
            info(f"the version of the best trial, {gone}")
        return {}
    checked = preflight(plan.job, config)
    if plan.job.job.has_model and kept_checkpoint(run) is None:
        # It was stopped early, or another group has it: its checkpoint was not kept.
        point = format_point(winner.point)
        takes = f"about {duration(winner.run.seconds)}"
        info(f"the best trial, {winner.number}, has no checkpoint and is trained once more, {takes}: {point}")
        (spec,) = plan.parts("trial", winner.number, winner.point)
        spec = dataclasses.replace(spec, name=f"{spec.name}-again", place={**spec.place, "kind": "winner"})
        pool.run(ProposalList([spec], keep=True), GroupProgress("training of the best trial", 1, info))
        run = pool.runs().run(str(spec.name))
        if run.failure is not None:
            raise RunFailedError(f"the best trial, trained once more, failed: {run.failure}")
    info(f"the best trial, {winner.number}, is registered: {format_point(winner.point | winner.resolved)}")
    mirror = pool.group.mirror
    with run.folder.locked("run"), contextlib.ExitStack() as until_sent:
        try:
            mirror.wait_for(run, _TRACKING_SECONDS)  # if it was trained just now, so that no second MLflow run is made
            trained = require_run(run.folder)  # with that MLflow run
            opened = until_sent.enter_context(reopened(trained, mirror, pool.group.run))
            mirror.wait_for(opened, _TRACKING_SECONDS)
        except RunFailedError as error:
            info(f"the model could not be kept in MLflow: {error}; the same --name tries again")
            return {}
        config = plan.parts("trial", winner.number, winner.point)[0].config
        end = finish(plan.job, config, opened, pool.group.store, checked, info, None, lineage)
        opened.append("ended", status="FINISHED", **end)
        opened.sync()
    (report,) = end.values()
    return {**{name: report[name] for name in ("model", "champion", "registration")}, "winner_of": winner.run.name}


def scheduler(kind: Literal["none", "asha", "median"]) -> Any:
    """The Ray Tune scheduler, for scores of which larger is better."""
    if kind == "asha":
        return AsyncHyperBandScheduler(
            time_attr=PROGRESS, metric=SCORE, mode="max", max_t=100, grace_period=10, reduction_factor=3
        )
    if kind == "median":
        # With a finite slice it would pause trials, which needs checkpoints.
        never: Any = math.inf
        return MedianStoppingRule(
            time_attr=PROGRESS, metric=SCORE, mode="max", grace_period=20, min_samples_required=5, min_time_slice=never
        )
    return FIFOScheduler()


def replay(scheduler: Any, run: Trial, score: Callable[[Mapping[str, float]], float], epochs: int) -> None:
    """Report an earlier trial, which Ray Tune has not seen, to a scheduler, so that others are compared with it."""
    # Do not ask the median rule for decisions, which it would remember: the trials may have run in parallel.
    median = isinstance(scheduler, MedianStoppingRule)
    report = scheduler.on_trial_complete if median else scheduler.on_trial_result
    trial = TuneTrial("earlier", stub=True)
    scheduler.on_trial_add(None, trial)
    results = [{PROGRESS: 100 * at.epoch / epochs, SCORE: score(at.metrics)} for at in run.history]
    # As in Ray Tune, the last result is only reported as the end, unless the scheduler stopped the trial by it.
    if run.failure is not None:
        results.append({PROGRESS: 0.0, SCORE: 0.0})
    for result in results if run.stopped == SCHEDULER else results[:-1]:
        report(None, trial, result)
    scheduler.on_trial_complete(None, trial, results[-1])
