"""Compares methods on a job's data: the space of each, and the plan of ``concord compare JOB methods``.

A method is a rule or an objective. Each is tuned by a small study of its own around the job's settings, with the
same number of trials, and scored without the test: on validation environments, or training environments left out.
"""

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from typing_extensions import Doc

from concord.aggregation import RULES
from concord.aggregation.rules_by_name import has_chance, masks, searched
from concord.errors import InputError, RunFailedError, StoppedError, format_for_cli
from concord.execution.failures import sigterm_as_interrupt
from concord.execution.lifecycle import Info
from concord.execution.preflight import preflight
from concord.execution.progress import Pace, duration
from concord.execution.session import ray_session
from concord.objectives import OBJECTIVES, objective_type
from concord.options import OptionGroup, Place, did_you_mean, flag_of, group, option_values, options_of
from concord.record import Run, folder_of, read_record, read_run
from concord.space import Choice, Entry, LogUniform, OneOf, Space, Value
from concord.storage import check_local_folder
from concord.studies.comparison_plan import recorded_command, without_place
from concord.studies.criterion import default_selection
from concord.studies.expected_time import HOURS, require_time
from concord.studies.job_tables import METHODS
from concord.studies.methods_result import methods_name, methods_result, study_name
from concord.studies.plan import StudyPlan, plan_study
from concord.studies.proposals import GroupRuns
from concord.studies.recommendation import MethodsResult
from concord.studies.results import StudyResult, write_lines
from concord.studies.study_options import SharingOptions, StudyOptions, TuneOptions, with_config
from concord.training import JobFile, Study, TrainConfig
from concord.training.declared_measures import Mode
from concord.training.job import with_rule
from concord.training.options import ResolvedTrainConfig
from concord.training.rule_file import RuleFile, config_with_rule

_OBJECTIVES = tuple(name for name in OBJECTIVES if name != "erm")
KNOWN: tuple[str, ...] = (*RULES, *_OBJECTIVES)
# Any other method must be better than the average.
USUAL: tuple[str, ...] = ("mean", "and-mask", "t-mask", "vrex", "irm")
_RULES = ", ".join("mean or erm" if name == "mean" else name for name in RULES)
_METHODS_HELP = (
    f"Rules ({_RULES}) and objectives ({', '.join(_OBJECTIVES)}), or rules of your own, FILE.py:RULE; by default "
    f"{', '.join(USUAL[:-1])} and {USUAL[-1]}, without those that the job cannot use. All methods are compared with "
    "the first one."
)


def method_names(given: Sequence[str]) -> tuple[str, ...]:
    """The methods of ``--methods``, with spaces or commas between them; ``erm`` is the average."""
    names = [name for each in given for name in each.split(",") if name]
    for name in names:
        if name not in (*KNOWN, "erm") and not RuleFile.is_reference(name):
            named = ", ".join("mean (or erm)" if each == "mean" else each for each in KNOWN)
            near = did_you_mean(name, (*KNOWN, "erm")) or f"; there are {named}, and FILE.py:RULE"
            raise InputError(f"--methods {name}: there is no such method{near}")
    if given and not names:
        raise InputError(f"--methods {shlex.join(given)}: names no method; leave it out for the usual ones")
    chosen = tuple("mean" if name == "erm" else name for name in names)
    twice = next((each for each in chosen if chosen.count(each) > 1), None)
    if twice is not None:
        raise InputError(f"--methods {' '.join(given)}: {twice} is given twice")
    return chosen


@dataclass(frozen=True, kw_only=True)
class MethodsOptions(OptionGroup):
    """Compare methods on the job's data: a small study of each method, scored without the test, and one table. The same
    --name continues the comparison. Options of the job on the command line apply to every method."""

    # fmt: off
    methods: Annotated[tuple[str, ...], Doc(_METHODS_HELP)] = ()
    trials: int = 12
    """Number of trials of each method."""
    seeds: int = 5
    """Number of new seeds, with which each method's best settings are trained."""
    selection: Literal["auto", "validation", "leave-one-out", "held-out"] = "auto"
    """Examples that score settings and methods; auto is validation if the job has validation environments, else
    leave-one-out with three training environments, else held-out examples, which have the same shortcuts."""
    metric: str | None = None
    """Measure of the score, such as accuracy, worst_accuracy or spread; by default that of the job's criterion, else
    accuracy, or loss without one."""
    mode: Mode | None = None
    """Mode of the measure, if the job gives none."""
    folds: int = 0
    """Number of folds of environments that are left out in turn under leave-one-out, each environment once; 0 leaves
    each out alone, from ten environments on in five folds."""
    drawn: int = 0
    """Number of environments that are left out, drawn by the seed; the others always train; 0 takes all."""
    baselines: bool = True
    """Compare the job's baselines: of a table logistic or ridge regression, and gradient boosting, of scikit-learn."""
    hours: Place[float] = HOURS
    """Longest expected time, in hours, that begins without a question; without a terminal a longer one is refused."""
    results: Place[Path | None] = None
    """Folder for the values of each method's seeds, one JSON line a seed."""
    html: Place[Path | None] = None
    """File for a page to hand on: recommendation, table, columns, data and commands in one HTML file."""
    sharing: SharingOptions = group(SharingOptions)
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError); a study validates its own."""
        super().check()
        check_local_folder("--results", self.results)
        chosen = method_names(self.methods)
        self.require("methods", len(chosen) != 1, "give at least two, or none for the default ones")
        self.require_at_least(1, "trials")
        self.require("hours", self.hours > 0, "must be above 0")
        self.require("seeds", self.seeds >= 2, "must be at least 2, to have a spread")


@dataclass(frozen=True, kw_only=True)
class MethodsCommand(OptionGroup):
    """The options of ``concord compare JOB methods``: the comparison's, and those that every trial starts from."""

    comparison: MethodsOptions
    config: TrainConfig


def methods_options_for(job: JobFile) -> MethodsCommand:
    """The comparison's options and a job's, at their defaults."""
    job.require_platform_loop(f"compare {METHODS}")
    return with_config(MethodsCommand, "comparison", MethodsOptions(), job.job.config, "compare JOB methods")


@dataclass(frozen=True)
class MethodsPlan:
    """The plan of a comparison of methods.

    Attributes:
        base: the configuration that every method starts from.
        studies: by method.
        baselines: those that are baselines.
        left_out: the default methods that the job cannot use, with the reasons.
        hours: the longest expected time that begins without a question.
        command: the command, as files of results have it.
        results: the folder for them, if any.
    """

    job: JobFile
    base: TrainConfig
    studies: Mapping[str, StudyPlan]
    baselines: Collection[str]
    left_out: Mapping[str, str]
    hours: float
    command: str
    results: Path | None


def plan_methods(job: JobFile, command: MethodsCommand, given: Collection[str]) -> MethodsPlan:
    """Check everything that can be checked without a cluster or a store."""
    options, base = command.comparison, command.config
    check_methods(command, given)
    environments = preflight(job, base).environments
    usual = default_selection(environments, options.metric, leave_out=True)
    selection = usual if options.selection == "auto" else options.selection
    name = base.run.name or methods_name(job)
    baselines = job.job.baselines if options.baselines else {}
    shared = {each: value for each, value in option_values(options).items() if each in options_of(StudyOptions)}
    studies: dict[str, StudyPlan] = {}
    left_out: dict[str, str] = {}
    chosen = method_names(options.methods)
    for method in (*(chosen or USUAL), *baselines):
        try:
            method_job, start = _with_method(job, base, method)
            changed = start.with_options(register=False, **changes_of(job, base, method))
            changed.check()
            space = baselines[method].space if method in baselines else _space(changed, method)
            changed = changed.with_options(name=study_name(name, method))
            earlier = read_record(folder_of(base.run.output, str(changed.run.name), "study"), "study")
            # More trials continue a study, whose search goes on as it began.
            startup = max(1, options.trials // 2) if earlier is None else int(earlier["deciding"]["startup"])
            own = {"method": method, "startup": startup, "selection": selection, "reruns": options.seeds}
            asked = StudyOptions(shortlist=0).with_options(**shared | own)
            method_job = dataclasses.replace(
                method_job, job=dataclasses.replace(method_job.job, studies={method: Study(space)})
            )
            fixed = {*given} & options_of(type(base)).keys()
            studies[method] = plan_study(method_job, TuneOptions(study=asked, config=changed), fixed)
        except InputError as error:
            if method in chosen or method == USUAL[0]:
                raise InputError(f"{method}: {format_for_cli(error)}") from error
            left_out[method] = format_for_cli(error)
    if len(studies) < 2:
        reasons = "; ".join(f"{method}: {reason}" for method, reason in left_out.items())
        raise InputError(f"job {job.name}: no method is left to compare with the average: {reasons}")
    words = without_place(command, given)
    recorded = recorded_command(job, METHODS, words, option_values(base))
    return MethodsPlan(job, base, studies, baselines.keys(), left_out, options.hours, recorded, options.results)


def check_methods(command: Any, given: Collection[str]) -> None:
    """Refuse options that are wrong for any data (InputError)."""
    command.check()
    values = option_values(command.config)
    for option in ("aggregator", "objective"):
        if option in given:
            raise InputError(f"--{option} {values[option]}: the methods are compared; leave it out")
    if (baseline := command.config.baseline) is not None:
        option = next(name for name, value in values.items() if value == baseline)
        raise InputError(f"{flag_of(option)} {baseline}: baselines are compared in any case; leave it out")
    if "register" in given and values["register"]:
        raise InputError("--register: methods are compared and no model is kept; leave it out")


def _with_method(job: JobFile, base: TrainConfig, method: str) -> tuple[JobFile, TrainConfig]:
    """The job and its options; with a rule of the user's own its fields are among them."""
    if not RuleFile.is_reference(method):
        return job, base
    extended = with_rule(job, RuleFile.read(method))
    own = extended.job.config.aggregation.own_rule
    assert own is not None
    return extended, config_with_rule(base, own)


def changes_of(job: JobFile, base: TrainConfig, method: str) -> dict[str, Any]:
    """The changes of the job's settings that make this method, without options of other methods."""
    if method in _OBJECTIVES and job.job.objective is not None:
        raise InputError(f"--objective {method}: the job minimizes an objective of its own")
    own, baseline = RuleFile.is_reference(method), job.job.baselines.get(method)
    if baseline is not None:
        averaged = {
            "steps_per_update": 1,
            "environment_momentum": 0.0,
            "keep": "last",
            "patience": 0,
            "stop_spread": 0.0,
        }
        return {**changes_of(job, base, "mean"), **averaged, **baseline.options}
    changes: dict[str, Any] = {} if own else {"aggregator": method}
    if method in _OBJECTIVES:
        changes |= {"aggregator": "mean", "objective": method, "steps_per_update": 1, "environment_momentum": 0.0}
        changes |= {"accumulate": 1, "compile": False}  # which change no more than rounding and dropout's masks
        weight = objective_type(method).compared_weight
        if weight is not None and base.objective.penalty_weight is None:
            changes["penalty_weight"] = weight
    elif base.objective.objective != "erm":
        changes["objective"] = "erm"
    if not has_chance(RULES.get(method)):
        changes["significance"] = None
    return changes


def _space(config: TrainConfig, method: str) -> Space:
    """Learning rate and weight decay around the job's, and the method's own options."""
    rate, decay = config.optimizer.lr, config.optimizer.l2
    entries: dict[str, Entry] = {
        "lr": LogUniform(rate / 10, rate * 10),
        "l2": Choice(*sorted({0.0, 1e-4, 1e-2, decay})),
    }
    if method in _OBJECTIVES:
        return Space({**entries, **objective_type(method).space})
    entries |= searched(config.aggregation.rule_type)
    if method in RULES and masks(RULES[method]) and (votes := _votes(config)):
        entries["votes"] = OneOf(votes)
    return Space(entries)


def _votes(config: TrainConfig) -> dict[str, dict[str, Entry]]:
    """Options that give few environments more votes, if the job can use them."""
    ways: dict[str, dict[str, Value]] = {
        "of each step": {"environment_momentum": 0.0, "steps_per_update": 1},
        "over time": {"environment_momentum": 0.9, "steps_per_update": 1},
        "of four steps": {"environment_momentum": 0.0, "steps_per_update": 4},
    }
    possible: dict[str, dict[str, Entry]] = {}
    for name, changes in ways.items():
        with contextlib.suppress(InputError):
            config.with_options(**changes).check()
            possible[name] = dict(changes)
    return possible if len(possible) > 1 else {}


def run_methods(plan: MethodsPlan, given: Mapping[str, Any], info: Info) -> MethodsResult:
    """Run or continue the studies, one after another; after a stop or failures finished runs are kept.

    ``given`` has the command's options, for the message on how to continue.
    """
    from concord.studies.study import run_study  # imports Ray Tune, which takes seconds
    from concord.studies.trial import trial_resources

    started = time.perf_counter()
    found: dict[str, StudyResult] = {}
    failed: dict[str, str] = {}
    for method, reason in plan.left_out.items():
        info(f"{method} is left out: {reason}")
    try:
        with sigterm_as_interrupt(), ray_session(plan.base):
            left = {method: _trainings_left(study) for method, study in plan.studies.items()}
            total = sum(left.values())
            first = next(iter(plan.studies.values()))
            concurrent = trial_resources(first.sharing, first.base, info).concurrent
            resolved = cast(ResolvedTrainConfig, first.base.resolve())
            trainings = f"{total} trainings of {len(plan.studies)} methods"
            by_steps = sum(number for method, number in left.items() if method not in plan.baselines)
            first_look = "--seeds 2" if first.options.reruns > 2 else ""
            require_time(plan.job, resolved, by_steps, trainings, concurrent, plan.hours, info, first_look)
            pace = Pace()
            pace.at(0.0)
            for method, study in plan.studies.items():
                try:
                    found[method] = run_study(study, info)
                except StoppedError:
                    raise
                except RunFailedError as error:
                    if method == next(iter(plan.studies)):
                        raise RunFailedError(f"{method}, with which all others are compared: {error}") from error
                    failed[method] = str(error)
                    info(f"{method}: {error}")
                del left[method]
                pace.at(total - sum(left.values()))
                if any(left.values()) and (takes := pace.seconds_left(total)) is not None:
                    done = f"{len(found) + len(failed)} of {len(plan.studies)} methods"
                    info(f"{done}; the others take about {duration(takes)}")
    except (StoppedError, KeyboardInterrupt):
        again = plan.job.continuation("compare", METHODS, options=given)
        raise StoppedError(f"stopped; finished runs are kept; continue with {again}") from None
    if len(found) < 2:
        reasons = "; ".join(f"{method}: {failure.splitlines()[0]}" for method, failure in failed.items())
        raise RunFailedError(f"fewer than two methods have a result: {reasons}")
    result = methods_result(plan.job, found, failed, time.perf_counter() - started)
    if (results := plan.results) is not None:
        info(f"kept in {write_lines(result.result_lines(plan.command), results, plan.job.name, METHODS)}")
    return result


def _trainings_left(study: StudyPlan) -> int:
    """The trainings that a study still needs, each environment that is left out with its own."""
    runs = GroupRuns(read_run(study.folder, "study") or Run(study.folder))
    trials = max(0, study.trials - len(runs.ended("trial")))
    seeds = max(0, study.options.reruns - len(runs.finished("seed")))
    return (trials + seeds) * (1 + len(study.folds))
