"""The plan of ``concord compare JOB leave-one-out``: each method, trained with each training environment left out."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.errors import InputError, format_for_cli
from concord.runs.lifecycle import restored_config
from concord.runs.preflight import preflight
from concord.studies.comparison_plan import FOLDS, LEAVE_ONE_OUT, METHODS, ComparisonPlan, plan_tables
from concord.studies.criterion import chosen_mode, metric_on
from concord.studies.left_out_table import draw_left_out
from concord.studies.methods import changes_of, check_methods, method_names
from concord.studies.plan import drawn
from concord.studies.study_options import CompareCommand, SeedsOptions, with_config
from concord.training import Comparison, JobFile, TrainConfig
from concord.training.comparison import Folds
from concord.training.evaluation import Mode
from concord.training.rule_file import RuleFile

USUAL = ("mean", "and-mask", "vrex")
_LEAST = 3  # with one of two left out, nothing is left to compare
_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutOptions(SeedsOptions):
    """Train each method with each training environment left out. The other environments' held-out examples choose the
    evaluation and the method. The job's validation environments and test are not used. Options of the job on the
    command line apply to every run."""

    # fmt: off
    methods: tuple[str, ...] = ()
    """Rules and objectives, such as erm (the average), and-mask, t-mask, vrex or group-dro, each with the job's
    settings; by default mean, and-mask and vrex."""
    metric: str | None = None
    """Measure that chooses and is shown; by default accuracy, or loss without one."""
    mode: Mode | None = None
    """Mode of the measure, if the job gives none."""
    folds: int = 0
    """Number of environments left out in turn, drawn by the first seed; 0 takes all."""
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        super().check()
        own = next(filter(RuleFile.is_reference, method_names(self.methods)), None)
        self.require("methods", own is None, f"{own}: a rule of your own is not compared here; {METHODS} takes it")
        self.require("folds", self.folds == 0 or self.folds >= 2, "must be at least 2, or 0 for all environments")


def leave_one_out_options_for(job: JobFile) -> CompareCommand:
    """The comparison's options and a job's, at their defaults."""
    called = f"compare {LEAVE_ONE_OUT}"
    job.require_platform_loop(called)
    return with_config(CompareCommand, "comparison", LeaveOneOutOptions(), job.job.config, called)


def plan_leave_one_out(
    job: JobFile, command: CompareCommand, given: Collection[str], folds: Folds | None = None
) -> ComparisonPlan:
    """Check everything that can be checked without a cluster or a store.

    ``folds`` are those of kept runs, which are only searched, without loading data; None to train.
    """
    check_methods(command, given)
    options, base = command.comparison, command.config
    assert isinstance(options, LeaveOneOutOptions)
    assert isinstance(base, TrainConfig)
    base.require(
        "leave_out", base.data.leave_out is None, "each environment is left out in turn; leave this option out"
    )
    base.require("held_out", base.data.held_out > 0, "held-out examples choose; give a fraction above 0")
    check = folds is None
    if folds is None:
        folds = _folds(job, options, base)
    methods = {}
    for method in method_names(options.methods) or USUAL:
        try:
            methods[method] = changes_of(job, base, method)
            changed = base.with_options(leave_out=folds.environments[0], **methods[method])
            changed.check()
            if check:
                preflight(job, changed)
        except InputError as error:
            raise InputError(f"{method}: {format_for_cli(error)}") from error
    figures = {LEAVE_ONE_OUT: functools.partial(draw_left_out, folds)}
    table = Comparison(methods, seeds=_SEEDS, figures=figures, folds=folds)
    return plan_tables(job, {LEAVE_ONE_OUT: table}, command, given, check)


def _folds(job: JobFile, options: LeaveOneOutOptions, base: TrainConfig) -> Folds:
    checked = preflight(job, base.with_options(environments_per_step=0))  # no run trains on all of them
    train = checked.environments.train
    if len(train) < _LEAST:
        raise InputError(
            f"compare {LEAVE_ONE_OUT}: job {job.name} has {len(train)} training environments ({', '.join(train)}); "
            f"it needs at least {_LEAST}, so that two are left to compare"
        )
    options.require("folds", options.folds <= len(train), f"there are {len(train)} training environments")
    measure = options.metric or ("accuracy" if "accuracy" in checked.measures else "loss")
    mode = chosen_mode(measure, options.mode, checked.measures)
    if metric_on("held_out", measure) not in checked.reported:
        plain = measure.removeprefix("worst_")
        raise InputError(f"--metric {measure}: runs do not report it, since {plain} has no mode; give --metric {plain}")
    return Folds(drawn(train, options.folds or len(train), options.first_seed or 0), measure, mode)


def leave_one_out_as_recorded(
    job: JobFile, record: Mapping[str, Any], output: Path, name: str | None
) -> ComparisonPlan:
    """The plan with the options of the last command that trained it, to find its runs."""
    given = dict(record.get("asked", {}).get(LEAVE_ONE_OUT, {}))
    if FOLDS not in given:
        raise InputError(
            f"table {LEAVE_ONE_OUT}: there is none in {output}; "
            f"concord compare {job.reference} {LEAVE_ONE_OUT} makes it"
        )
    folds = given.pop(FOLDS)
    command = restored_config(leave_one_out_options_for(job), given).with_options(output=output, name=name)
    return plan_leave_one_out(job, command, given, Folds(**{**folds, "environments": tuple(folds["environments"])}))
