"""``concord compare JOB leave-one-out``: each method, trained with each training environment left out.

A fold is a run that leaves environments out: one, or of ten and more several. Its record has their values at every
evaluation, beside the value of the others' held-out examples. From the run's history follow both choices: what was
chosen without an environment, and what choosing by it would have given (oracle).
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord.analysis.comparison_figures import Spread, left_out_figure
from concord.analysis.spread import finite
from concord.analysis.uncertainty import OF_ANY_CONSTANT
from concord.environments.parquet import read_table
from concord.errors import InputError, format_for_cli
from concord.execution.preflight import preflight
from concord.execution.restored_options import restored_config
from concord.options import Place, option_values
from concord.space import frozen
from concord.studies.comparison_plan import FOLDS, ComparisonPlan, plan_tables
from concord.studies.criterion import Criterion, chosen_mode, metric_on
from concord.studies.environment_folds import LEAST_TO_LEAVE_OUT, drawn, folds_of
from concord.studies.expected_time import HOURS
from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS
from concord.studies.methods import changes_of, check_methods, method_names
from concord.studies.results import ResultLine, table_of_lines
from concord.studies.study_options import CompareCommand, SeedsOptions, check_folds, with_config
from concord.table import Column, Table
from concord.training import Comparison, Evaluation, JobFile, Run, Runs, TrainConfig
from concord.training.comparison import Folds
from concord.training.declared_measures import Mode
from concord.training.evaluation import worst
from concord.training.left_out import PREDICTIONS, PROBABILITY
from concord.training.metric_names import environment_metric
from concord.training.options import as_names
from concord.training.rule_file import RuleFile
from concord.training.within_environment import ITSELF

if TYPE_CHECKING:
    import pandas  # takes a third of a second

ORACLE, HELD_OUT, TEST = " (oracle)", " (held-out)", " (test)"
# What is known of an environment beside its values: its rows, and the error of a constant.
ROWS, MAJORITY, CONSTANT = " (rows)", " (majority share)", " (constant mse)"
WITHIN = " (itself)"  # of a baseline: what it reaches if it is fitted there
_KINDS = ("", HELD_OUT, ORACLE, TEST, ROWS, CONSTANT, WITHIN, MAJORITY)
_MANY = 20  # of more environments text shows quartiles, and those that stand out
_EXTREME, _MOST_EXTREME = 2, 5  # environments at each end that text shows in any case, and at most
_QUARTILES = ("lower quartile", "median", "upper quartile")
_FENCE = 1.5  # interquartile ranges beyond a quartile, as in Tukey's box plots
CHOSEN, BEST = "chosen by held-out", "chosen by itself (oracle)"
_FITTED_THERE = "in the environment itself (oracle)"
# None of them needs tuning: V-REx at its default weight is the worst of every table in docs/table-results.md.
USUAL = ("mean", "and-mask", "group-dro")
# In the target's own unit; the loss of numbers is in each fold's standardized one.
_MEASURES = ("accuracy", "poisson_deviance", "mse")
_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutOptions(SeedsOptions):
    """Train each method with each training environment left out. The other environments' held-out examples choose the
    evaluation and the method. The job's test is measured by every model, and chooses nothing. Its validation
    environments are not used. Options of the job on the command line apply to every run."""

    # fmt: off
    methods: tuple[str, ...] = ()
    """Rules and objectives, such as erm (the average), and-mask, t-mask, vrex or group-dro, each with the job's
    settings; by default mean, and-mask and group-dro."""
    metric: str | None = None
    """Measure that chooses and is shown; by default accuracy, of numbers the squared error (mse), else loss."""
    mode: Mode | None = None
    """Mode of the measure, if the job gives none."""
    folds: int = 0
    """Number of folds of environments that are left out in turn, each environment once; 0 leaves each
    out alone, from ten environments on in five folds."""
    drawn: int = 0
    """Number of environments that are left out, drawn by the first seed; the others always train; 0 takes all."""
    hours: Place[float] = HOURS
    """Longest expected time, in hours, that begins without a question; without a terminal a longer one is refused."""
    baselines: bool = True
    """Compare the job's baselines: of a table logistic or ridge regression, and gradient boosting, of scikit-learn;
    each also fitted in the left-out environment itself, by cross-validation, where it has 50 rows (an oracle)."""
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        super().check()
        own = next(filter(RuleFile.is_reference, method_names(self.methods)), None)
        self.require("methods", own is None, f"{own}: a rule of your own is not compared here; {METHODS} takes it")
        check_folds(self)
        self.require("hours", self.hours > 0, "must be above 0")


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
    if "validation" in given:
        shown = " ".join(map(str, option_values(base)["validation"]))
        raise InputError(f"--validation {shown}: the environment left out validates; leave this option out")
    base.require("held_out", base.data.held_out > 0, "held-out examples choose; give a fraction above 0")
    check = folds is None
    if folds is None:
        folds = _folds(job, options, base)
    methods = {}
    for method in (*(method_names(options.methods) or USUAL), *(job.job.baselines if options.baselines else ())):
        try:
            methods[method] = changes_of(job, base, method)
            changed = base.with_options(leave_out=folds.left_out[0], **methods[method])
            changed.check()
            if check:
                preflight(job, changed)
        except InputError as error:
            raise InputError(f"{method}: {format_for_cli(error)}") from error
    figures = {LEAVE_ONE_OUT: functools.partial(draw_left_out, folds)}
    table = Comparison(methods, seeds=_SEEDS, figures=figures, folds=folds)
    plan = plan_tables(job, {LEAVE_ONE_OUT: table}, command, given, check)
    return dataclasses.replace(plan, hours=options.hours)


def _folds(job: JobFile, options: LeaveOneOutOptions, base: TrainConfig) -> Folds:
    checked = preflight(job, base.with_options(environments_per_step=0))  # no run trains on all of them
    train = checked.environments.to_leave_out
    if len(train) < LEAST_TO_LEAVE_OUT:
        raise InputError(
            f"compare {LEAVE_ONE_OUT}: job {job.name} has {len(train)} training environments ({', '.join(train)}); "
            f"it needs at least {LEAST_TO_LEAVE_OUT}, so that two are left to compare"
        )
    for option, count in (("folds", options.folds), ("drawn", options.drawn)):
        options.require(option, count <= len(train), f"there are {len(train)} training environments")
    measure = options.metric or next((name for name in _MEASURES if name in checked.measures), "loss")
    mode = chosen_mode(measure, options.mode, checked.measures)
    if metric_on("held_out", measure) not in checked.reported:
        plain = measure.removeprefix("worst_")
        raise InputError(f"--metric {measure}: runs do not report it, since {plain} has no mode; give --metric {plain}")
    seed = options.first_seed or 0
    left_out = drawn(train, options.drawn, seed)
    folds = folds_of(left_out, options.folds, seed)
    alone = len(folds) == len(left_out)
    return Folds(left_out, measure, mode, () if alone else tuple(map(as_names, folds)))


def leave_one_out_as_recorded(
    job: JobFile, record: Mapping[str, Any], output: Path, name: str | None
) -> ComparisonPlan:
    """The plan with the options of the last command that trained it, to find its runs."""
    given = dict(record.get("asked", {}).get(LEAVE_ONE_OUT, {}))
    if FOLDS not in given:
        raise InputError(
            f"table {LEAVE_ONE_OUT}: there is none in {output}; {job.command('compare', LEAVE_ONE_OUT)} makes it"
        )
    folds = given.pop(FOLDS)
    command = restored_config(leave_one_out_options_for(job), given).with_options(output=output, name=name)
    parts: dict[str, Any] = {name: frozen(value) for name, value in folds.items()}
    return plan_leave_one_out(job, command, given, Folds(**parts))


def chosen_evaluation(run: Run, folds: Folds) -> Evaluation:
    """The evaluation that the other environments' held-out examples choose; ties are decided by their loss."""
    criterion = Criterion.of("held-out", folds.measure, folds.mode)

    def rank(each: Evaluation) -> tuple[float, float]:
        return criterion.score(each.metrics), -each.metrics.get(criterion.loss, math.inf)

    return max(run.history, key=rank)


def fold_values(run: Run, folds: Folds) -> dict[str, float]:
    """The value of each left-out environment at the chosen evaluation, by its name.

    With ``(held-out)`` the value that chose, with ``(oracle)`` the left-out environment's own best, with ``(test)`` the
    test's; beside them what is known of the environment.
    """
    names, chosen = as_names(run.options["leave_out"]), chosen_evaluation(run, folds).metrics
    criterion = Criterion.of("held-out", folds.measure, folds.mode)
    test, rows = metric_on("ood", folds.measure), {part["name"]: float(part["examples"]) for part in run.data}
    found: dict[str, float] = {}
    for name in names:
        alone = environment_metric(folds.measure.removeprefix("worst_"), "validation", name)
        own = dataclasses.replace(criterion, metric=alone if len(names) > 1 else metric_on("validation", folds.measure))
        best = max((each.metrics for each in run.history), key=own.score)
        found |= {name: chosen[own.metric], name + HELD_OUT: chosen[criterion.metric], name + ORACLE: best[own.metric]}
        found |= {name + TEST: chosen[test]} if test in chosen else {}
        found |= {name + ROWS: rows[name]} if name in rows else {}
        constant = environment_metric("constant_mse", "validation", name)
        found |= {name + CONSTANT: run.metrics[constant]} if constant in run.metrics else {}
        within = environment_metric(folds.measure.removeprefix("worst_"), ITSELF, name)
        found |= {name + WITHIN: run.metrics[within]} if within in run.metrics else {}
    return found


def fold_predictions(run: Run, folds: Folds, method: str) -> "pandas.DataFrame | None":
    """The predictions of the chosen evaluation for what is left out, a row each; None if the run kept none."""
    import pandas

    if PREDICTIONS not in run.folder.names():
        return None
    kept = read_table(run.folder.fetch(PREDICTIONS)).to_pandas()
    kept = kept[kept.step == chosen_evaluation(run, folds).step].drop(columns="step")
    about: dict[str, Any] = {"method": method, "seed": run.options["seed"]}
    if "environment" not in kept:  # of an older run, which left out one
        about["environment"] = run.options["leave_out"]
    return pandas.concat([pandas.DataFrame(about, index=kept.index), kept], axis=1)


def majority_shares(predictions: "pandas.DataFrame") -> dict[str, float]:
    """The share of the largest class in each environment; nothing if these rows have numbers."""
    if not any(name.startswith(PROBABILITY) for name in predictions.columns):
        return {}
    counted = predictions.assign(weight=1.0) if "weight" not in predictions else predictions
    by_class = counted.groupby(["environment", "target"]).weight.sum()
    by_environment = by_class.groupby("environment")
    shares = by_environment.max() / by_environment.sum()
    return {f"{name}{MAJORITY}": float(share) for name, share in shares.items()}


def with_choices(lines: Iterable[ResultLine], folds: Folds, methods: int) -> list[ResultLine]:
    """A line for each method and seed, of the lines of its folds; and for each seed the choice among this many methods.

    In each fold the method is chosen as the evaluation is, by the others' held-out examples.
    """
    found: dict[tuple[str, int], ResultLine] = {}
    for line in lines:
        before = found.setdefault((line.configuration, line.seed), dataclasses.replace(line, values={}, seconds=0.0))
        values, seconds = {**before.values, **line.values}, before.seconds + line.seconds
        found[line.configuration, line.seed] = dataclasses.replace(before, values=values, seconds=seconds)

    def rank(value: float) -> float:
        """The larger the better; a value that is not finite is the worst."""
        return (value if folds.mode == "max" else -value) if math.isfinite(value) else -math.inf

    choices: list[ResultLine] = []
    for seed in dict.fromkeys(seed for _, seed in found):
        rows = [line for line in found.values() if line.seed == seed]
        choice, best = dict[str, float](), dict[str, float]()
        for name in folds.environments:
            each = [line.values for line in rows if name + HELD_OUT in line.values]
            if len(each) == methods:
                chosen = max(each, key=lambda values: rank(values[name + HELD_OUT]))
                choice |= {kind: chosen[kind] for kind in (name, name + TEST) if kind in chosen}
                best[name] = max((values[name + ORACLE] for values in each), key=rank)
        for row, values in ((CHOSEN, choice), (BEST, best)):
            choices.append(dataclasses.replace(rows[0], configuration=row, values=values, seconds=0.0))
    rows = [*found.values(), *filter(None, map(_fitted_there, found.values())), *choices]
    defined = _defined(list(found.values()), folds)
    return [_summarized(line, folds, defined) for line in rows]


def _fitted_there(line: ResultLine) -> ResultLine | None:
    """The line of a baseline that is fitted in each environment itself, with those that have rows enough."""
    values = {name.removesuffix(WITHIN): value for name, value in line.values.items() if name.endswith(WITHIN)}
    row = f"{line.configuration}, {_FITTED_THERE}"
    return dataclasses.replace(line, configuration=row, values=values, seconds=0.0) if values else None


def _defined(lines: Sequence[ResultLine], folds: Folds) -> list[str]:
    """The environments without those in which no trained method has a value: the measure is not defined there."""
    return [
        name
        for name in folds.environments
        if any(math.isfinite(line.values.get(name, math.nan)) for line in lines)
        or any(name not in line.values for line in lines)
    ]


def _summarized(line: ResultLine, folds: Folds, defined: Sequence[str]) -> ResultLine:
    """The line with its environments in order, and the summary of those in which the measure is defined."""
    own = {
        name + kind: line.values[name + kind]
        for name in folds.environments
        for kind in _KINDS
        if name + kind in line.values
    }
    return dataclasses.replace(line, values=own | _summary(own, folds, defined))


def _summary(values: Mapping[str, float], folds: Folds, defined: Sequence[str]) -> dict[str, float]:
    """Mean, worst and, of many, quartiles of the environments, if each has a value; the test's mean over all models."""
    found: dict[str, float] = {}
    for suffix in ("", ORACLE):
        each = [values.get(name + suffix, math.nan) for name in defined]
        if each and all(map(math.isfinite, each)):
            found[f"mean {folds.measure}{suffix}"] = statistics.fmean(each)
            found[f"worst {folds.measure}{suffix}"] = worst(each, folds.mode)
            if len(folds.environments) > _MANY and not suffix:
                quartiles = statistics.quantiles(each, method="inclusive")
                found |= {f"{which} {folds.measure}": at for which, at in zip(_QUARTILES, quartiles, strict=True)}
    test = [values.get(name + TEST, math.nan) for name in folds.environments]
    if all(map(math.isfinite, test)):
        found[f"test {folds.measure}"] = statistics.fmean(test)
    return found


def explained(folds: Folds, lines: Sequence[ResultLine] = ()) -> str:
    """The meaning of the numbers, in one line."""
    grouped = f" with its fold, one of {len(folds.folds)}" if folds.folds else ""
    many = f"; of {len(folds.environments)} those that stand out" if len(folds.environments) > _MANY else ""
    fitted = {name for line in lines if line.configuration.endswith(_FITTED_THERE) for name in line.values}
    there = f"{len(fitted.intersection(folds.environments))} of {len(folds.environments)} environments"
    many += f"; fitted in the environment itself, by cross-validation: {there} have rows enough" if fitted else ""
    return (
        f"{folds.measure} in each environment where it is left out{grouped}; the others' held-out examples choose "
        f"evaluation and method; (oracle): the left-out environment itself chooses{many}"
    )


def known_of_environments(lines: Iterable[ResultLine]) -> dict[str, dict[str, float]]:
    """Rows, and the majority's share or a constant's error, of each environment that the lines know them of."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        for heading, value in line.values.items():
            for kind in (ROWS, MAJORITY, CONSTANT):
                if heading.endswith(kind):
                    found.setdefault(heading.removesuffix(kind), {})[kind.strip(" ()")] = value
    return found


def constants_of(known: Mapping[str, Mapping[str, float]], measure: str) -> dict[str, float]:
    """What the best constant has in each of these environments, if it is known of this measure.

    ``known`` is that of :func:`known_of_environments`.
    """
    if measure in OF_ANY_CONSTANT:
        return dict.fromkeys(known, OF_ANY_CONSTANT[measure])
    kind = {"accuracy": MAJORITY, "mse": CONSTANT}.get(measure, "").strip(" ()")
    return {name: each[kind] for name, each in known.items() if kind in each}


def left_out_table(name: str, lines: Sequence[ResultLine], **parts: Any) -> Table:
    """The table of these lines: environments, their mean and worst, and the same with the oracle's evaluations.

    In text each environment is a row, of many those that stand out, and each method and choice a column, after what is
    known of the environment.
    """
    headings = dict.fromkeys(heading for line in lines for heading in line.values)
    environments = [heading.removesuffix(HELD_OUT) for heading in headings if heading.endswith(HELD_OUT)]
    hidden = {name + kind for name in environments for kind in _KINDS if kind}
    known, aside = known_of_environments(lines), {*environments} - _outstanding(lines, environments)
    columns = [
        Column(heading, about=known.get(heading, {}), aside=heading in aside)
        for heading in headings
        if heading not in hidden
    ]
    return table_of_lines(name, lines, columns, transposed=True, **parts)


def _outstanding(lines: Sequence[ResultLine], environments: Sequence[str]) -> set[str]:
    """All environments, or of many those whose mean over the methods is far from the others'."""
    if len(environments) <= _MANY:
        return {*environments}
    rows = [line.values for line in lines if line.configuration not in (CHOSEN, BEST)]
    values = {name: finite(row[name] for row in rows if name + HELD_OUT in row) for name in environments}
    means = {name: statistics.fmean(each) for name, each in values.items() if each}
    if len(means) <= _MANY:
        return {*means}
    ranked = sorted(means, key=lambda name: means[name])
    low, _, high = statistics.quantiles(means.values(), method="inclusive")
    reach = _FENCE * (high - low)
    below = sum(value < low - reach for value in means.values())
    above = sum(value > high + reach for value in means.values())
    first, last = (min(max(count, _EXTREME), _MOST_EXTREME) for count in (below, above))
    return {*ranked[:first], *ranked[-last:]}


def draw_left_out(folds: Folds, runs: Runs) -> object:
    """The figure of a comparison's folds."""
    values: dict[str, Spread] = {}
    for method, each in runs.items():
        found = [fold_values(run, folds) for run in each]
        values[method] = {
            name: ([run[name] for run in found if name in run], [run[name + ORACLE] for run in found if name in run])
            for name in folds.environments
        }
    return left_out_figure(values, folds.measure)
