"""The verdict of a comparison of methods: which one, whether more than chance, and what to expect in a new environment.

Whether B beats A in a *new* environment rests on environments: each one left out is one unit, and the paired difference
over them has a t interval. A thousand rows in four hospitals are four hospitals. The rows inside set a floor: the
variance over environments is never taken to be smaller than what the rows' own chance makes of it.

All methods are compared with the first one, and the intervals hold together (Bonferroni): the best of many methods,
chosen by its value, is called better by chance in at most 5 % of comparisons.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from concord.analysis.intervals import (
    LEAST_ENVIRONMENTS,
    LEVEL,
    Estimate,
    Interval,
    next_interval,
    scale_of,
    t_interval,
)

ByEnvironment = Mapping[str, Sequence[float]]
"""The values of each environment over seeds."""
OF_ANY_CONSTANT = {"auc": 0.5, "r2": 0.0}
"""Measures that are the same of every constant, in any environment."""
_MOST_NAMES = 5  # in a line
_EQUAL = 1e-9  # a difference of rounding alone
_OF_SEEDS = "seeds repeat training on the same rows; they show no chance of other rows or of a new environment"


@dataclass(frozen=True)
class MethodValue:
    """A method's mean over units, each the mean over seeds; the interval is of the mean over units like these."""

    method: str
    value: float
    interval: Interval | None


@dataclass(frozen=True)
class EnvironmentValue:
    """A method's value in an environment, the mean over seeds.

    Attributes:
        interval: 95 % over its rows or clusters; None without their predictions, or of fewer than two.
        units: the number of rows or clusters; None without predictions.
        clusters: whether they are clusters.
        deviation: the standard deviation over seeds; None of one seed.
    """

    method: str
    environment: str
    value: float
    interval: Interval | None
    units: int | None
    clusters: bool
    seeds: int
    deviation: float | None


@dataclass(frozen=True)
class Difference:
    """A method's value minus that of the first method, paired.

    Attributes:
        interval: 95 % together with those of the other comparisons; None of fewer than three environments or two seeds.
        advantage: of the method: the difference, positive if the method is better.
        wins, losses: the units in which the method is better, and worse.
        verdict: better, worse, or chance.
    """

    method: str
    against: str
    value: float
    interval: Interval | None
    advantage: float
    wins: int
    losses: int
    units: int
    comparisons: int
    verdict: Literal["better", "worse", "chance"]


@dataclass(frozen=True)
class NextEnvironment:
    """The 95 % prediction interval of a method's value in the next environment, with the number it rests on.

    Attributes:
        share_of_rows: the part of the variance between environments that the chance of their few rows makes; None if
            there are no predictions of rows.
    """

    method: str
    interval: Interval
    basis: str
    environments: int
    share_of_rows: float | None


@dataclass(frozen=True)
class Verdict:
    """A finished comparison, in numbers and in lines.

    Attributes:
        recommended: the best method among those that are better than the first; the first if none is.
        unit: of the differences: environments, or seeds where fewer than three environments judge.
        methods: best first.
        environments: each method's value in each environment, with intervals over rows.
        differences: of each other method with the first.
        next_environment: for the recommended method; None without three environments.
        below: environments in which it is no better than a constant; None if no constant's value is known.
        left_out: methods and environments without a value, with the reason.
        lines: the verdict in words.
    """

    measure: str
    unit: Literal["environments", "seeds"]
    recommended: str
    methods: Sequence[MethodValue]
    environments: Sequence[EnvironmentValue]
    differences: Sequence[Difference]
    next_environment: NextEnvironment | None
    below: Sequence[str] | None
    left_out: Mapping[str, str]
    lines: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """The numbers and the lines, as JSON."""
        found = asdict(self)
        parts = [*found["methods"], *found["environments"], *found["differences"], found["next_environment"] or {}]
        for each in parts:
            if each.get("interval") is not None:
                each["interval"] = [number if math.isfinite(number) else None for number in each["interval"]]
        return found


def verdict(
    values: Mapping[str, ByEnvironment],
    measure: str,
    mode: Literal["max", "min"],
    *,
    estimates: Mapping[str, Mapping[str, Estimate]] | None = None,
    rows: Mapping[str, float] | None = None,
    constants: Mapping[str, float] | None = None,
    unfinished: str = "",
    unit: Literal["environments", "seeds"] = "environments",
    label: Callable[[str], str] = str,
    digits: int = 3,
) -> Verdict | None:
    """The verdict over methods, the first of which all others must beat; None if no method has a value in every unit.

    Args:
        values: by method, then environment (or seed), the values over seeds.
        measure: its name, such as accuracy.
        mode: whether a large or a small value is good.
        estimates: by method and environment the values with the influence of their rows, if predictions were kept.
        rows: of each environment.
        constants: the values of the best constant in environments where it is known.
        unfinished: what is missing, in words; nothing is recommended in the lines then.
        unit: what the second names of ``values`` are; seeds say nothing of a new environment.
        label: a method's name in the lines.
        digits: of numbers in the lines.
    """
    means, left_out = _complete(values)
    if not means:
        return None
    units, first = list(next(iter(means.values()))), next(iter(means))
    ranked = sorted(means, key=lambda each: statistics.fmean(means[each].values()), reverse=mode == "max")
    enough = len(units) >= (LEAST_ENVIRONMENTS if unit == "environments" else 2)
    others = [method for method in means if method != first]
    differences = [_difference(method, first, means, mode, len(others), estimates or {}, enough) for method in others]
    better = {each.method for each in differences if each.verdict == "better"}
    recommended = next((method for method in ranked if method in better), first)
    methods = [_method_value(method, means[method], enough) for method in ranked]
    following = None
    if enough and unit == "environments":
        following = _next_environment(recommended, means[recommended], measure, estimates or {}, rows)
    each = [
        _environment_value(method, name, values[method][name], measure, (estimates or {}).get(method, {}).get(name))
        for method in (ranked if unit == "environments" else ())
        for name in units
    ]
    sign, own = 1 if mode == "max" else -1, means[recommended]
    known = {name: value for name, value in (constants or {}).items() if name in own}
    below = [name for name, value in known.items() if not sign * (own[name] - value) > _EQUAL] if known else None
    found = Verdict(measure, unit, recommended, methods, each, differences, following, below, left_out, ())
    return replace(found, lines=_Words(found, label, digits).lines(units, known, sign, unfinished))


def _complete(values: Mapping[str, ByEnvironment]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The means over seeds of the methods and units that have a value in each; and what is left out."""
    left_out: dict[str, str] = {}

    def mean(method: str, unit: str) -> float:
        return statistics.fmean(values[method].get(unit) or [math.nan])

    means = {
        method: {unit: mean(method, unit) for unit in dict.fromkeys(unit for each in values.values() for unit in each)}
        for method in values
    }
    for unit in next(iter(means.values())):
        if not any(math.isfinite(each[unit]) for each in means.values()):
            left_out[unit] = "the measure is not defined there"
    means = {method: {unit: each[unit] for unit in each if unit not in left_out} for method, each in means.items()}
    for method, each in means.items():
        if lacking := [unit for unit, value in each.items() if not math.isfinite(value)]:
            left_out[method] = f"no value in {'any' if len(lacking) == len(each) else ', '.join(lacking)}"
    complete = {method: each for method, each in means.items() if method not in left_out and each}
    return complete, left_out


def _method_value(method: str, means: Mapping[str, float], enough: bool) -> MethodValue:
    each = list(means.values())
    spread = t_interval(statistics.fmean(each), statistics.variance(each) / len(each), len(each)) if enough else None
    return MethodValue(method, statistics.fmean(each), spread)


def _environment_value(
    method: str, name: str, values: Sequence[float], measure: str, estimate: Estimate | None
) -> EnvironmentValue:
    return EnvironmentValue(
        method,
        name,
        statistics.fmean(values),
        None if estimate is None else estimate.interval(scale_of(measure)),
        None if estimate is None else estimate.units,
        estimate is not None and estimate.clusters,
        len(values),
        statistics.stdev(values) if len(values) > 1 else None,
    )


def _difference(
    method: str,
    first: str,
    means: Mapping[str, Mapping[str, float]],
    mode: str,
    comparisons: int,
    estimates: Mapping[str, Mapping[str, Estimate]],
    enough: bool,
) -> Difference:
    each = [means[method][unit] - means[first][unit] for unit in means[first]]
    value, count, sign = statistics.fmean(each), len(each), 1 if mode == "max" else -1
    interval, verdict = None, "chance"
    if enough:
        known = [unit for unit in means[first] if all(unit in estimates.get(one, {}) for one in (method, first))]
        pairs = [(estimates[method][unit], estimates[first][unit]) for unit in known]
        # Where each seed has rows of its own, a method that lacks a seed has others than the first.
        of_rows = [one.difference(other).variance for one, other in pairs if one.units == other.units]
        floor = statistics.fmean(of_rows) if of_rows else 0.0
        interval = t_interval(value, max(statistics.variance(each), floor) / count, count, comparisons)
        if interval.low > 0 or interval.high < 0:
            verdict = "better" if sign * value > 0 else "worse"
    wins, losses = sum(sign * one > 0 for one in each), sum(sign * one < 0 for one in each)
    numbers = sign * value, wins, losses, count, comparisons
    return Difference(method, first, value, interval, *numbers, verdict)  # type: ignore[arg-type]


def _next_environment(
    method: str,
    means: Mapping[str, float],
    measure: str,
    estimates: Mapping[str, Mapping[str, Estimate]],
    rows: Mapping[str, float] | None,
) -> NextEnvironment | None:
    sizes = None if rows is None or not means.keys() <= rows.keys() else [rows[unit] for unit in means]
    found = next_interval(list(means.values()), scale_of(measure), sizes)
    if found is None:
        return None
    own, share = estimates.get(method, {}), None
    if own.keys() >= means.keys():
        between = statistics.variance(means.values())
        inside = statistics.fmean(own[unit].variance for unit in means)
        share = min(1.0, inside / between) if between > 0 else 1.0
    return NextEnvironment(method, *found, len(means), share)


class _Words:
    """A verdict in words."""

    def __init__(self, found: Verdict, label: Callable[[str], str], digits: int) -> None:
        self._found, self._label, self._digits = found, label, digits
        self._of = {each.method: each for each in found.methods}
        self._measure = found.measure.replace("_", " ")

    def lines(
        self, units: Sequence[str], constants: Mapping[str, float], sign: int, unfinished: str
    ) -> tuple[str, ...]:
        """The lines: whether it holds, which method, and what to expect; ``sign`` is 1 if a large value is good."""
        expected = [*self._next(len(units)), *self._unstable(), *self._left_out()]
        holds = self._holds(units, constants, sign)
        if unfinished:
            return (f"unfinished, so no method is recommended yet: {unfinished}", *holds, *expected)
        return (*holds, *self._which(len(units)), *expected)

    def _holds(self, units: Sequence[str], constants: Mapping[str, float], sign: int) -> list[str]:
        """Whether the recommended method is better than a constant, here and in a new environment."""
        found, name = self._found, self._label(self._found.recommended)
        if found.below is None:
            return []
        if found.below:
            where = f"{_some(found.below)} ({len(found.below)} of {len(units)})"
            return [
                f"does it hold? not everywhere: in {where} {name} is no better than a constant, which needs no model"
            ]
        known = f"where its value is known ({len(constants)} of {len(units)} environments)"
        where = f"in all {len(units)} environments" if len(constants) == len(units) else known
        line = f"does it hold? {where} {name} is better than a constant, which needs no model"
        if found.next_environment is not None:
            interval, mean = found.next_environment.interval, statistics.fmean(constants.values())
            worst = interval.low if sign > 0 else interval.high
            line += "; a new one is likely to follow" if sign * worst > sign * mean else "; a new one need not follow"
        return [line]

    def _unstable(self) -> list[str]:
        """Environments where the seeds differ by more than the chance of the rows."""
        names = [
            each.environment
            for each in self._found.environments
            if each.method == self._found.recommended and each.interval is not None and each.deviation is not None
            if each.deviation > (each.interval.high - each.interval.low) / 2
        ]
        if not names:
            return []
        return [
            f"in {_some(names)} the seeds differ by more than the interval over the rows: there the value depends on "
            "chance in training, and more seeds would tell more"
        ]

    def _which(self, units: int) -> tuple[str, ...]:
        """The recommended method with its evidence."""
        found = self._found
        if not found.differences:
            only = f"recommended: {self._label(found.recommended)}; no other method has a value in all"
            return (f"{only} {units} {found.unit}",)
        first = found.differences[0].against
        # A recommended method shows its own evidence, also where another has the best value, by chance.
        best = found.recommended if found.recommended != first else found.methods[0].method
        shown = best if best != first else found.methods[1].method
        difference = next(each for each in found.differences if each.method == shown)
        return (self._compared(best, difference), *self._chance(difference))

    def _number(self, value: float) -> str:
        return f"{value:.{self._digits}f}"

    def _range(self, interval: Interval) -> str:
        return f"{self._number(interval.low)} to {self._number(interval.high)}"

    def _compared(self, best: str, each: Difference) -> str:
        found = self._found
        other = each.against if best == each.method else each.method
        one, two = (f"{self._label(name)} {self._number(self._of[name].value)}" for name in (best, other))
        value = one.removeprefix(f"{self._label(best)} ") if best == found.recommended else f"of {one}"
        judged = f"{each.units} {found.unit}"
        begin = f"recommended: {self._label(found.recommended)}; {self._measure} {value} against {two}"
        if each.interval is None:
            least = f"{LEAST_ENVIRONMENTS} environments" if found.unit == "environments" else "2 seeds"
            return f"{begin} in {judged}; an interval needs at least {least}, so nothing is said of chance"
        sign = 1 if best == each.method else -1
        ends = sorted(sign * end for end in each.interval)
        corrected = f", for {each.comparisons} comparisons together" if each.comparisons > 1 else ""
        shown = (
            f"difference {self._number(sign * each.value)} (95 % {self._range(Interval(*ends))}{corrected}; {judged})"
        )
        chance = "chance" if found.unit == "environments" else "the chance of seeds"
        return f"{begin}: {shown}, {'not ' if each.verdict == 'chance' else ''}more than {chance}"

    def _chance(self, each: Difference) -> list[str]:
        """What the number of environments cannot show."""
        found = self._found
        if found.unit == "seeds":
            return [_OF_SEEDS]
        if each.verdict == "chance" or each.interval is None:
            return []
        wins = each.wins if each.verdict == "better" else each.losses
        lines = [f"it holds in {wins} of {each.units} environments"]
        if wins == each.units:
            rare = 1 - (1 - LEVEL) ** (1 / each.units)
            lines[0] += f", which leaves room for up to {100 * rare:.0f} % of new environments where it does not"
        return lines

    def _next(self, units: int) -> list[str]:
        found, following = self._found, self._found.next_environment
        if following is None:
            if found.unit == "environments" and units < LEAST_ENVIRONMENTS:
                few = f"{units} environments are too few to say what to expect in a new one"
                return [f"{few}; {LEAST_ENVIRONMENTS} are needed"]
            return []
        name, count = self._label(following.method), following.environments
        line = (
            f"expect {self._measure} {self._range(following.interval)} of {name} in a new environment "
            f"(with 95 % probability; {following.basis} of {count} environments)"
        )
        share = following.share_of_rows
        if share is None:
            return [line, "more environments would tell more"]
        part = f"{100 * share:.0f} % of the variance between environments is the chance of their rows"
        if share > 0.5:
            return [line, f"{part}: more rows in each environment would tell more, and more environments too"]
        return [line, f"{part}: more environments would narrow it, more rows in them hardly"]

    def _left_out(self) -> list[str]:
        """A line for each reason, with at most some names."""
        found = self._found
        reasons: dict[str, list[str]] = {}
        for name, reason in found.left_out.items():
            reasons.setdefault(reason, []).append(self._label(name))
        alone = dict.fromkeys(each.environment for each in found.environments if each.units == 1)
        lines = [f"{_some(names)} {_is(names)} left out: {reason}" for reason, names in reasons.items()]
        names = list(alone)
        return [*lines, f"{_some(names)} {_is(names)} one cluster: no interval of its own"] if names else lines


def _some(names: Sequence[str]) -> str:
    """The names; of many the first, and the number of the others."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_MOST_NAMES])} and {more} more"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
