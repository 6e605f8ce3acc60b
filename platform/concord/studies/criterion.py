"""How trials are judged: by a metric on the examples of a selection, and by conditions that end a trial early.

Results name the selection that chose them.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from concord.environments import Environments
from concord.errors import InputError
from concord.execution.preflight import PreflightResult, required
from concord.studies.environment_folds import LEAST_TO_LEAVE_OUT
from concord.studies.study_options import Selection, StudyOptions
from concord.tracking.run_search import Condition
from concord.training import JobFile, RunConfig, TrainConfig
from concord.training.declared_measures import Mode
from concord.training.evaluation import worst
from concord.training.metric_names import environment_metric, split_metric, split_of


class _Scored(Protocol):
    """A trial: its number, and its metrics."""

    @property
    def number(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


Scored = TypeVar("Scored", bound=_Scored)
_LEFT_OUT = split_metric("validation", "")  # a left-out environment is the only validation environment
_IN_LEFT_OUT = environment_metric("", "validation", "")
_SPLITS: Mapping[Selection, str] = {
    "held-out": "held_out",
    "validation": "validation",
    "leave-one-out": "left_out",
    "oracle": "ood",
    "own": "",
}
SCORED_ON: Mapping[Selection, str] = {
    "held-out": "held-out examples of the training environments",
    "validation": "validation environments",
    "leave-one-out": "training environments left out in turn",
    "oracle": "the o.o.d. test set itself, an oracle",
    "own": "the job's own evaluation",
}
SPREAD = "spread"
"""The measure of how far the environments' held-out losses differ."""
_WORST = -1e30  # the score for NaN; finite, so that means and quantiles of scores are numbers


@dataclass(frozen=True)
class Criterion:
    """The metric of a selection.

    Attributes:
        selection: the examples.
        metric: the name, such as ``held_out_accuracy``.
        required: the least values of other metrics; a run that misses one has no value.
    """

    selection: Selection
    metric: str
    mode: Mode
    required: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(selection: Selection, measure: str, mode: Mode) -> "Criterion":
        """The criterion of a measure, such as ``accuracy`` or ``worst_loss``, with its mode."""
        return Criterion(selection, metric_on(_SPLITS[selection], measure), mode)

    @property
    def loss(self) -> str:
        """The loss on the same examples, for ties."""
        return split_metric(_SPLITS[self.selection], "loss")

    @property
    def oracle(self) -> bool:
        """Whether it uses the test."""
        return self.selection == "oracle"

    @property
    def shown(self) -> str:
        """The metric, marked if it is of the test."""
        return self.metric + " (oracle)" * self.oracle

    @property
    def label(self) -> str:
        """The selection, marked if it uses the test."""
        return "o.o.d. test (oracle)" if self.oracle else self.selection

    @property
    def direction(self) -> str:
        """The mode in words."""
        return "the larger the better" if self.mode == "max" else "the smaller the better"

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric; NaN without it, or if another metric falls short of what is required."""
        met = all(metrics.get(name, math.nan) >= least for name, least in self.required.items())
        return metrics.get(self.metric, math.nan) if met else math.nan

    @property
    def missing(self) -> str:
        """What a run without a value has, in words."""
        least = "".join(f", or {name} below {value:.4g}" for name, value in self.required.items())
        return f"no finite {self.metric}{least}"

    def score(self, metrics: Mapping[str, float]) -> float:
        """The score: larger is better, always finite."""
        value = self.value(metrics)
        if not math.isfinite(value):
            return _WORST
        return value if self.mode == "max" else -value

    def ranked(self, trials: Iterable[Scored]) -> list[Scored]:
        """The trials with a value, best first; ties by loss, then by number."""
        scored = [each for each in trials if math.isfinite(self.value(each.metrics))]

        def key(each: Scored) -> tuple[float, float, int]:
            loss = each.metrics.get(self.loss, math.inf)
            return -self.score(each.metrics), loss if math.isfinite(loss) else math.inf, each.number

        return sorted(scored, key=key)


def measure_of(metric: str, measures: Iterable[str]) -> str | None:
    """The measure, such as ``loss`` or ``worst_loss``, whose metric on validation or held-out examples this is."""
    for measure in measures:
        for either in (measure, f"worst_{measure}"):
            if metric in (metric_on(split, either) for split in ("validation", "held_out")):
                return either
    return None


def metric_on(split: str, measure: str) -> str:
    """The name of the metric of a measure, such as ``accuracy`` or ``worst_loss``, on a split."""
    if not split:  # a metric of the job's own
        return measure
    return split_metric(split, measure.removeprefix("worst_"), worst=measure.startswith("worst_"))


def chosen_mode(measure: str, asked: Mode | None, known: Mapping[str, Mode | None]) -> Mode:
    """The mode of a measure, the job's or ``--mode`` (InputError if it is unknown or contradictory)."""
    plain = measure.removeprefix("worst_")
    if plain == SPREAD and (measure != SPREAD or plain not in known):
        raise InputError(
            f"--metric {measure}: the spread of losses is over held-out examples of the environments; "
            f"give --metric {SPREAD} --selection held-out, and --held-out above 0"
        )
    if plain not in known:
        parts = tuple(f"{part}_" for part in ("train", "held_out", "validation", "ood"))
        bare = next((plain.removeprefix(part) for part in parts if plain.startswith(part)), plain)
        if bare in known:
            raise InputError(f"--metric {measure}: is a measure on one part of the data; give --metric {bare}")
        others = ", ".join(sorted(set(known) - {SPREAD}))
        spread = f"; and {SPREAD}" * (SPREAD in known)
        raise InputError(
            f"--metric {measure}: the job does not report it; there are {others}, each also as worst_…{spread}"
        )
    own = known.get(plain)
    if own is None and asked is None:
        raise InputError(
            f"--metric {measure}: the job's measure has no mode; give --mode max or --mode min, "
            f'or in the job measures={{"{plain}": Measure(function, mode=…)}}'
        )
    if None not in (own, asked) and own != asked:
        raise InputError(f"--mode {asked}: the job's {plain} has mode {own}")
    mode = own or asked
    assert mode is not None
    return mode


def worst_environments(metrics: Mapping[str, float], measure: str, mode: Mode) -> dict[str, float]:
    """The worst environment of every split, for a measure without a mode of its own."""
    splits: dict[str, list[float]] = {}
    for name, value in metrics.items():
        if (split := split_of(name, measure)) is not None:
            splits.setdefault(split, []).append(value)
    if "held_out" in splits:
        splits.setdefault("validation", splits["held_out"])
    return {split_metric(split, measure, worst=True): worst(values, mode) for split, values in splits.items()}


def left_out_metrics(folds: Sequence[Mapping[str, float]], modes: Mapping[str, Mode | None]) -> dict[str, float]:
    """The mean and, for measures with a mode, the worst over the environments left out in turn; nothing without folds.

    A fold's validation metrics are those of its left-out environments, which are the only validation environments.
    """
    metrics: dict[str, float] = {}
    several = [_by_environment(fold) for fold in folds]
    for name in filter(lambda each: each.startswith(_LEFT_OUT), folds[0] if folds else ()):
        measure = name.removeprefix(_LEFT_OUT)
        values = [value for fold, each in zip(folds, several, strict=True) for value in each.get(measure, [fold[name]])]
        values = values or [math.nan]
        metrics[split_metric("left_out", measure)] = sum(values) / len(values)
        if (mode := modes.get(measure)) is not None:
            metrics[split_metric("left_out", measure, worst=True)] = worst(values, mode)
    return metrics


def default_selection(
    environments: Environments, measure: str | None, leave_out: bool = False, criterion: str = ""
) -> Selection:
    """What scores trials without the test: validation environments if there are some, else held-out examples.

    These, too, if the job's ``criterion`` is of them and no other measure is asked for. With ``leave_out`` three or
    more training environments are left out in turn before held-out examples, which have the same shortcuts, are used.
    The spread is of held-out examples.
    """
    if measure == SPREAD or (measure is None and criterion.removeprefix("worst_").startswith("held_out_")):
        return "held-out"
    if environments.validation:
        return "validation"
    return "leave-one-out" if leave_out and len(environments.to_leave_out) >= LEAST_TO_LEAVE_OUT else "held-out"


def _by_environment(fold: Mapping[str, float]) -> dict[str, list[float]]:
    """By measure the values in the environments of a fold where it is defined."""
    found: dict[str, dict[str, float]] = {}
    for metric, value in fold.items():
        measure, between, environment = metric.partition(_IN_LEFT_OUT)
        if between:
            found.setdefault(measure, {})[environment] = value
    converged = {name for name, loss in found.get("loss", {}).items() if math.isfinite(loss)}  # NaN there is no value
    return {
        measure: [value for name, value in values.items() if not (math.isnan(value) and name in converged)]
        for measure, values in found.items()
    }


def choose_criterion(
    job: JobFile,
    config: RunConfig,
    asked: StudyOptions,
    selection: Selection,
    declared: str | None,
    checked: PreflightResult,
) -> tuple[str, Criterion, Mapping[str, Mode | None]]:
    """The measure that scores a study's trials, its criterion, and the modes of all measures.

    ``config`` has the space's fixed values, and ``declared`` is the measure of the job's study (InputError if trials do
    not report the metric).
    """
    usual = "accuracy" if "accuracy" in checked.measures else "loss"
    usual = usual if job.job.loop is None else next(iter(checked.measures))
    modes = dict(checked.measures)
    if selection == "held-out" and (spread := metric_on("held_out", SPREAD)) in checked.reported:
        modes[SPREAD] = checked.reported[spread]
    job_measure = measure_of(job.job.criterion or "", modes)
    measure = asked.metric or declared or job_measure or usual
    asked_mode = asked.mode or (job.job.mode if measure == job_measure else None)
    mode = modes[measure.removeprefix("worst_")] = chosen_mode(measure, asked_mode, modes)
    criterion = Criterion.of(selection, measure, mode)
    unchanged = asked.metric is None and selection in ("held-out", "validation")
    if isinstance(config, TrainConfig) and (unchanged or criterion.metric == job.job.criterion):
        criterion = dataclasses.replace(criterion, required=required(job.job, config))
    check_metric(criterion, _reported(checked, criterion, modes))
    return measure, criterion, modes


def _reported(checked: PreflightResult, criterion: Criterion, modes: Mapping[str, Mode | None]) -> Collection[str]:
    """The metrics of a trial."""
    reported = set(checked.reported)
    if criterion.selection != "own" and criterion.metric.removeprefix("worst_") in reported:
        reported.add(criterion.metric)  # the trial computes the worst environment if the job does not
    if criterion.selection == "validation" and not checked.environments.validation:
        reported.discard(criterion.metric)  # without validation environments a run copies it from held-out examples
    if criterion.selection == "leave-one-out":
        if len(checked.environments.to_leave_out) < 2:
            raise InputError("--selection leave-one-out: needs at least two training environments, and the job has one")
        reported |= {metric_on("left_out", each) for each in modes}
        reported |= {metric_on("left_out", f"worst_{each}") for each, mode in modes.items() if mode is not None}
    return reported


def check_metric(criterion: Criterion, reported: Collection[str]) -> None:
    """Refuse a criterion that trials do not report (InputError)."""
    if criterion.metric in reported:
        return
    right = {
        "held-out": "no examples are held out; give --held-out above 0",
        "validation": "the job has no validation environments",
        "leave-one-out": "no environment is left out",
        "oracle": "the job has no test environments",
        "own": f"the job does not evaluate {criterion.metric}",
    }[criterion.selection]
    raise InputError(f"--selection {criterion.selection}: {right}")


@dataclass(frozen=True)
class StopRule:
    """A trial ends when all conditions hold, such as ``train_accuracy>0.97`` and ``ood_accuracy<0.6``.

    These two are the rule of the AND-mask paper (appendix B.3).
    """

    conditions: tuple[Condition, ...] = ()

    @staticmethod
    def of(texts: Sequence[str]) -> "StopRule":
        """Parse a rule."""
        right = "give METRIC>NUMBER or METRIC<NUMBER"
        conditions = tuple(Condition.of("--stop-when", text, right) for text in texts)
        for text, each in zip(texts, conditions, strict=True):
            if each.sign in ("=", "!=") or not math.isfinite(float(each.value)):
                raise InputError(f"--stop-when {text}: {right}")
        return StopRule(conditions)

    @staticmethod
    def read(text: str) -> "StopRule":
        """The rule of this text, as a record has it."""
        return StopRule.of([each for each in text.split(" and ") if each])

    @property
    def bounds(self) -> list[tuple[str, str, float]]:
        """Metric, sign and number of each condition: equal for ``.6`` and ``0.6``."""
        return [(each.name, each.sign, float(each.value)) for each in self.conditions]

    def check(self, reported: Iterable[str]) -> None:
        """Refuse a metric that is not reported (InputError)."""
        reported = list(reported)
        for each in self.conditions:
            if each.name not in reported:
                raise InputError(f"--stop-when {each.name}: is not reported; there are {', '.join(reported)}")

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether a trial with these metrics ends."""
        return bool(self.conditions) and all(each.holds(metrics.get(each.name)) for each in self.conditions)

    @property
    def oracle(self) -> bool:
        """Whether it uses the o.o.d. test."""
        return any("ood" in each.name.split("_") for each in self.conditions)

    def __str__(self) -> str:
        return " and ".join(map(str, self.conditions))


@dataclass(frozen=True)
class TrialEvaluator:
    """The evaluation of a group's runs.

    Attributes:
        criterion: None if no best run is selected.
        modes: the mode of each measure; None if unknown.
        stop_rule: the conditions for an early end.
    """

    criterion: Criterion | None = None
    modes: Mapping[str, Mode | None] = field(default_factory=dict)
    stop_rule: StopRule = field(default_factory=StopRule)

    def metrics(self, reported: Mapping[str, float]) -> dict[str, float]:
        """The metrics without those of single environments and layers, with the worst environments by these modes."""
        found = {name: value for name, value in reported.items() if "/" not in name}
        for measure, mode in self.modes.items():
            if mode is not None and split_metric("train", measure, worst=True) not in found:
                found |= worst_environments(reported, measure, mode)
        return found

    def score(self, reported: Mapping[str, float]) -> float:
        """The score of a run with these metrics, 0 without a criterion."""
        return 0.0 if self.criterion is None else self.criterion.score(self.metrics(reported))
