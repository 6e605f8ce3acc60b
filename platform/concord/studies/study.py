"""A whole study (``concord tune``): search or continue, score, track, repeat the best."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.record import RECORD
from concord.runs.lifecycle import Lineage
from concord.runs.run import Info, run
from concord.runs.run_folder import recorded_config, run_folder
from concord.runs.tags import run_origin
from concord.space import format_point
from concord.studies.criterion import SCORED_ON, Judge
from concord.studies.group_progress import GroupProgress
from concord.studies.plan import StudyPlan
from concord.studies.pool import Interruption, Pool, open_group
from concord.studies.proposals import EndedRun, GroupRuns, ProposalList, RunProposal
from concord.studies.results import StudyResult, judged, write_results
from concord.studies.spaces import config_at
from concord.studies.stopping import StopRule, replay, scheduler
from concord.tracking.store import PARENT
from concord.training.options import TrainConfig
from concord.training.worker_data import check_environments


def run_study(plan: StudyPlan, info: Info) -> StudyResult:
    """Run or continue a study, and keep everything."""
    started = time.perf_counter()
    logs.bind_context(study=plan.name, job=plan.job.name)
    pool: Pool | None = None
    try:
        with open_group(plan, plan.description(), info) as pool:
            if pool.group.resumed:
                pool.group.describe(options=recorded_config(plan.options))
            result = _run(plan, pool, info)
    except StoppedError:
        if pool is None:
            raise
        done = len(pool.runs.ended("trial"))
        raise StoppedError(f"stopped after {done} of {plan.trials} trials; continue with {plan.command}") from None
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


class _Search:
    """Proposes first the unfinished runs of an earlier process, then the search's suggestions."""

    def __init__(self, plan: StudyPlan, runs: GroupRuns) -> None:
        self._plan = plan
        self._search = plan.search()
        for each in runs.finished("trial"):
            self.ended(each)
        again = runs.unfinished("trial")
        self.again = [plan.proposal("trial", each.trial, each.point, left_out=plan.folds) for each in again]
        self._begun = len(runs.begun("trial"))

    @property
    def over(self) -> bool:
        """Whether the study has all its trials."""
        return not self.again and self._begun >= self._plan.trials

    def next(self) -> RunProposal | None:
        """The next trial."""
        if self.again:
            return self.again.pop(0)
        if self.over or (point := self._search.suggest(self._begun)) is None:
            return None
        self._begun += 1
        return self._plan.proposal("trial", self._begun - 1, point, left_out=self._plan.folds)

    def ended(self, run: EndedRun) -> None:
        """Add its score to the search."""
        if run.failure is None:
            self._search.observe(run.run.trial, run.run.point, self._plan.criterion.score(run.metrics))


def _run(plan: StudyPlan, pool: Pool, info: Info) -> StudyResult:
    """Run the remaining parts of a study."""
    runs, done = pool.runs, len(pool.runs.ended("trial"))
    looks = f"; the o.o.d. test decides over {plan.test_usage} (oracle)" if plan.test_usage else ""
    info(
        f"study {plan.name}: {plan.method}, {plan.options.search}, "
        + (f"{done} of {plan.trials} trials are done" if done else f"{plan.trials} trials")
        + f", {pool.resources.concurrent} at a time, judged by {plan.criterion.metric}, "
        f"{plan.criterion.direction} ({SCORED_ON[plan.criterion.selection]}){looks}"
    )
    if not pool.group.resumed and plan.own is not None:
        info(f"the first trial has the job's own settings: {plan.own}")
    judge = Judge(plan.criterion, plan.modes, plan.stop_rule)
    _search(plan, pool, judge, info)
    finished = runs.finished("trial")
    if not finished:
        failed = runs.ended("trial")
        if not failed:
            raise RunFailedError("no trial finished in the given time; the same --name continues")
        raise RunFailedError(f"every trial failed ({len(failed)}): {failed[0].failure}")
    ranked = plan.criterion.ranked(finished)
    if not ranked:
        raise RunFailedError(f"none of {len(finished)} trials has a value: {plan.criterion.missing}")
    best, from_here = ranked[0].run, run_origin(plan.job.path, plan.checked.environments.version)
    wanted = [
        *_left_out(plan, [each.run for each in ranked[: plan.options.shortlist]], info),
        *(plan.proposal("seed", best.trial, best.point, seed, plan.folds, from_here) for seed in plan.new_seeds),
    ]
    _train(pool, wanted, judge, info)
    if plan.base.run.register:
        pool.group.describe(**_register(plan, best, pool.group.run_id, info))
    return write_results(judged(pool.group.record, runs, pool.group.kept), info, pool.group)


def _left_out(plan: StudyPlan, shortlist: Sequence[RunProposal], info: Info) -> list[RunProposal]:
    """The best trials with environments left out in turn, so that all selections can be compared."""
    folds = plan.shortlist_folds
    if plan.folds or not folds:
        return []
    fewer = plan.checked.environments.only_names().leaving_out(folds[0])
    try:
        for each in shortlist:
            config = config_at(plan.base, plan.space, each.point)
            assert isinstance(config, TrainConfig)  # only the training loop has environments
            check_environments(config, fewer)
    except InputError as error:
        info(f"the best trials are not repeated with environments left out: {error}")
        return []
    return [plan.proposal("left-out", each.trial, each.point, left_out=folds) for each in shortlist]


def _search(plan: StudyPlan, pool: Pool, judge: Judge, info: Info) -> None:
    proposer, earlier = _Search(plan, pool.runs), pool.runs.ended("trial")
    if proposer.again:
        info(f"{len(proposer.again)} unfinished trials are resumed or repeated")
    if proposer.over:
        return
    stopping = scheduler(plan.options.scheduler)
    if plan.options.scheduler != "none":
        replay(stopping, earlier, plan.criterion.score, plan.epochs)
    interruption = Interruption(plan.options.max_minutes)
    progress = GroupProgress("trials", plan.trials, info, plan.criterion)
    for each in earlier:
        progress.earlier(each)
    labels = {"study": plan.name, "concord_job": plan.job.name, "method": plan.method}
    pool.run(proposer, progress, judge, stopping, interruption, labels)
    info(progress.line())
    if interruption.out_of_time:
        info(f"--max-minutes {plan.options.max_minutes:g}: the time has run out; the same --name continues the search")


def _train(pool: Pool, wanted: Sequence[RunProposal], judge: Judge, info: Info) -> None:
    """Train the unfinished runs, including those that failed before."""
    there = [each.run for kind in ("left-out", "seed") for each in pool.runs.finished(kind)]
    finished = {(each.key, each.left_out) for each in there}
    left = [each for each in wanted if (each.key, each.left_out) not in finished]
    if left:
        progress = GroupProgress("trainings of the best trials", len(left), info)
        pool.run(ProposalList(left), progress, dataclasses.replace(judge, stop_rule=StopRule()))


def _register(plan: StudyPlan, winner: RunProposal, study_run: str, info: Info) -> Mapping[str, object]:
    """Train the winner once more, as any other run; return its registration."""
    name = f"{plan.name}-winner-{winner.trial}"
    begun = RECORD in run_folder(plan.base.run.output, name).names()
    config = config_at(plan.base, plan.space, winner.point).with_options(name=name, resume=begun)
    tags = {
        PARENT: study_run,
        "concord.study": plan.name,
        "concord.trial": str(winner.trial),
        "concord.method": plan.method,
        "concord.seed": str(config.run.seed),
        "concord.selection": plan.options.selection + (" (oracle)" if plan.test_usage else ""),
    }
    info(f"the winner, trial {winner.trial}, is trained once more: {format_point(winner.point | winner.resolved)}")
    finished = run(plan.job, config, info, Lineage(plan.experiment, tags))
    registered = finished.registered
    return {
        "model": finished.model,
        "champion": registered is not None and registered.champion,
        "registration": registered.reason if registered else None,
    }
