"""The result of a comparison of methods: one table with spread over seeds, and the recommended method.

The methods are ranked by their studies' criterion, never by the test. A method counts as better than the average only
by the paired differences of :mod:`concord.analysis.uncertainty`: over environments, or over seeds if fewer than three
environments judge.
"""

import functools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from concord.aggregation import chance_of
from concord.aggregation.chance import MUCH_BY_CHANCE, format_chance
from concord.analysis.intervals import LEAST_ENVIRONMENTS
from concord.analysis.method_names import method_name
from concord.analysis.spread import finite, mean_and_std, with_spread
from concord.analysis.uncertainty import OF_ANY_CONSTANT, ByEnvironment, Verdict, verdict
from concord.space import format_point
from concord.studies.criterion import SCORED_ON, SPREAD, metric_on
from concord.studies.results import ResultLine, StudyResult
from concord.table import Column, Table
from concord.training.metric_names import environment_metric

TEST = "o.o.d. test"  # the heading of the test's values begins so
_DIGITS = 3


@dataclass(frozen=True)
class MethodsResult:
    """Methods on the same data.

    Attributes:
        studies: by method; the others are compared with the first.
        failed: methods without a result, with the reasons.
        environments: the least number that a trial trained on.
        seeds: the seeds of each method's runs; a run that failed is missing.
        seconds: the time of this call; 0 if it only read.
        baselines: the methods among the studies that are baselines.
        train: the command that trains a model with the recommended method and its settings.
    """

    job: str
    studies: Mapping[str, StudyResult]
    failed: Mapping[str, str]
    environments: int
    seeds: Sequence[int]
    seconds: float = 0.0
    train: str = ""
    baselines: Collection[str] = ()

    @property
    def metric(self) -> str:
        """The metric of the criterion."""
        return self._first.criterion.metric

    @functools.cached_property
    def verdict(self) -> Verdict | None:
        """Over the environments that judge, if there are three, else over seeds; None if no method has all values."""
        by_environment = {method: self._by_environment(method) for method in self.studies}
        judges = dict.fromkeys(name for each in by_environment.values() for name in each)
        if len(judges) >= LEAST_ENVIRONMENTS:
            return self._verdict(by_environment, self._first.measure, "environments")
        runs = {method: self._runs(method) for method in self.studies}
        by_seed = {
            method: {f"seed {seed}": [each[seed][self.metric]] for seed in each if self._has_value(method, seed)}
            for method, each in runs.items()
        }
        return self._verdict(by_seed, self.metric, "seeds")

    def _verdict(
        self, values: Mapping[str, ByEnvironment], measure: str, unit: Literal["environments", "seeds"]
    ) -> Verdict | None:
        how: dict[str, Any] = {"unit": unit, "label": method_name, "digits": _DIGITS}
        if unit == "environments":
            how["constants"] = self._constants(
                measure, dict.fromkeys(name for each in values.values() for name in each)
            )
        return verdict(values, measure, self._first.criterion.mode, **how)

    def _constants(self, measure: str, environments: Iterable[str]) -> dict[str, float]:
        """What the best constant has in each of these environments, if it is known of this measure."""
        if measure in OF_ANY_CONSTANT:
            return dict.fromkeys(environments, OF_ANY_CONSTANT[measure])
        constant = {"accuracy": "majority_share", "mse": "constant_mse"}.get(measure, "")
        runs = [run for trial in self._first.repeated for run in trial.runs]
        names = {name: environment_metric(constant, "validation", name) for name in environments}
        found = {name: finite(run.metrics.get(metric, math.nan) for run in runs) for name, metric in names.items()}
        return {name: statistics.fmean(values) for name, values in found.items() if values}

    @property
    def recommended(self) -> str:
        """The best method that is better than the first by more than chance; the first one if none is."""
        return self._simplest if self.verdict is None else self.verdict.recommended

    def table(self) -> Table:
        """The methods, best first; the test, which selected nothing, is last."""
        metrics = [
            Column(heading, partial(self._values, metric=metric), _DIGITS)
            for heading, metric in self._metrics().items()
            if any(self._values(method, metric) for method in self.studies)
        ]
        columns = [
            Column("method", method_name),
            Column("trials", lambda method: len(self.studies[method].finished)),
            *metrics,
            Column("settings", lambda method: format_point(self.studies[method].best.point)),
        ]
        return Table.of(columns, sorted(self.studies, key=self._score, reverse=True))

    def lines(self) -> list[str]:
        """The recommendation, its evidence and the rule behind it, one line each."""
        ranked = sorted(self.studies, key=self._score, reverse=True)
        best = ranked[0]
        found, judged = self.verdict, SCORED_ON[self._first.criterion.selection]
        said = [f"recommended: {method_name(self.recommended)}"] if found is None else [*found.lines]
        ahead = 1 + next(at for at, line in enumerate(said) if line.startswith("recommended:"))
        lines, said = said[:ahead], said[ahead:]
        if best in self.baselines:
            lines.append(self._won(best, next(each for each in ranked if each not in self.baselines)))
        lines.append(
            f"judged by {judged}, which also chose the settings; a method replaces {method_name(self._simplest)} only "
            "if it is better by more than chance"
        )
        lines += said
        for method in ranked:
            lacking = ", ".join(str(seed) for seed in self.seeds if not self._has_value(method, seed))
            if lacking:
                lines.append(
                    f"{method_name(method)}: ranks last; on seed {lacking} it has {self._first.criterion.missing}"
                )
        if (chance := chance_of(1.0, self.environments)) > MUCH_BY_CHANCE:
            lines.append(
                f"{self.environments} environments, on which each trial trains, are few votes for a mask: "
                f"random signs all agree with probability {format_chance(chance)}"
            )
        if self._first.criterion.selection == "held-out" and self._first.measure != SPREAD:
            lines.append("held-out examples have the shortcuts of their environments and cannot reveal them")
        lines += [f"{method}: {failure.splitlines()[0]}" for method, failure in self.failed.items()]
        return lines

    def output(self) -> list[str | Table]:
        """The table, the recommendation, and its command."""
        return [
            self.table(),
            *self.lines(),
            f"train it  {self.train}",
            f"studies   {', '.join(study.record['name'] for study in self.studies.values())}",
            *([f"seconds   {self.seconds:.1f}"] if self.seconds else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """The contract of ``concord compare JOB methods --json``."""
        rows = []
        for method, study in self.studies.items():
            values = {metric: self._values(method, metric) for metric in self._metrics().values()}
            rows.append(
                {
                    "method": method,
                    "study": study.record["name"],
                    "trials": len(study.finished),
                    "seeds": len(self._runs(method)),
                    "config": study.best.point | study.best.resolved,
                    "metrics": {metric: mean_and_std(each) for metric, each in values.items() if each},
                }
            )
        return {
            "job": self.job,
            "selection": self._first.criterion.selection,
            "metric": self.metric,
            "mode": self._first.criterion.mode,
            "rows": rows,
            "failed": dict(self.failed),
            "recommended": self.recommended,
            "reasons": self.lines(),
            **({} if self.verdict is None else {"verdict": self.verdict.as_json()}),
            "seconds": round(self.seconds, 3),
            "train": self.train,
        }

    def result_lines(self, command: str) -> list[ResultLine]:
        """The seeds of each method as lines of results, best method first; ``command`` made them."""
        return [
            ResultLine(
                method,
                seed,
                {heading: run.metrics[metric] for heading, metric in self._metrics().items() if metric in run.metrics},
                run.seconds,
                {"command": command, **run.origin},
            )
            for method in sorted(self.studies, key=self._score, reverse=True)
            for run in self.studies[method].repeated
            if (seed := run.seed) is not None and seed in self.seeds
        ]

    @property
    def _simplest(self) -> str:
        return next(iter(self.studies))

    @property
    def _first(self) -> StudyResult:
        return self.studies[self._simplest]

    def _metrics(self) -> dict[str, str]:
        """Metrics by heading: the criterion's, then other examples of the training environments, then the test."""
        measure = self._first.reported_measure
        others = {f"{name} {measure}": metric_on(split, measure) for name, split in _OTHERS.items()}
        judged = {f"{self.metric.replace('_', ' ')} (criterion)": self.metric}
        return judged | {name: metric for name, metric in others.items() if metric != self.metric}

    def _runs(self, method: str) -> dict[int, dict[str, float]]:
        """The metrics of the method's finished runs, by seed."""
        reruns = self.studies[method].reruns
        return {seed: reruns[seed] for seed in self.seeds if seed in reruns}

    def _values(self, method: str, metric: str) -> list[float]:
        """The finite values over seeds."""
        return finite(metrics[metric] for metrics in self._runs(method).values() if metric in metrics)

    def _has_value(self, method: str, seed: int) -> bool:
        return math.isfinite(self._first.criterion.value(self._runs(method).get(seed, {})))

    def _score(self, method: str) -> float:
        if not all(self._has_value(method, seed) for seed in self.seeds):
            return -math.inf
        return self._sign * statistics.fmean(self._values(method, self.metric))

    @property
    def _sign(self) -> int:
        return 1 if self._first.criterion.mode == "max" else -1

    def _by_environment(self, method: str) -> dict[str, list[float]]:
        """The values over seeds in each environment that judges; none if the score is another, or a seed is missing."""
        study, found = self.studies[method], dict[str, list[float]]()
        leaves_out = study.criterion.selection == "leave-one-out"
        mean = metric_on("left_out" if leaves_out else "validation", study.measure)
        if study.criterion.metric != mean or not all(self._has_value(method, seed) for seed in self.seeds):
            return found
        for trial in study.repeated:
            runs = trial.folds if leaves_out else trial.runs[:1]
            for metric, value in (pair for run in runs if trial.seed in self.seeds for pair in run.metrics.items()):
                measure, *place = metric.split("/", 2)
                if measure == study.measure and place[:1] == ["validation"]:
                    found.setdefault(place[1], []).append(value)
        return found

    def _evidence(self, method: str, other: str) -> str:
        """The values of two methods over seeds, in words."""
        value, against = (
            with_spread(values, _DIGITS) if (values := self._values(each, self.metric)) else "without a value"
            for each in (method, other)
        )
        return f"{value} against {method_name(other)} {against}, {len(self.seeds)} seeds"

    def _won(self, baseline: str, method: str) -> str:
        """A baseline ranks first, in words."""
        return (
            f"a baseline ranks first: {method_name(baseline)} has {self.metric.replace('_', ' ')} "
            f"{self._evidence(baseline, method)}; no rule or objective here is above what people would use anyway"
        )


_OTHERS = {"held-out": "held_out", TEST: "ood"}
