"""The result of a comparison of methods: one table with spread over seeds, and the recommended method.

The methods are ranked by their studies' criterion, never by the test. Seeds are paired: a method counts as better than
the average only by differences on the same seeds and data.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from concord.aggregation import chance_of
from concord.aggregation.chance import MUCH_BY_CHANCE, format_chance
from concord.analysis.method_names import method_name
from concord.analysis.spread import finite, mean_and_std, with_spread
from concord.space import format_point
from concord.studies.criterion import SCORED_ON, SPREAD, metric_on
from concord.studies.results import ResultLine, StudyResult
from concord.table import Column, Table

TEST = "o.o.d. test"  # the heading of the test's values begins so
_DIGITS = 3
# A difference below this number of standard errors may change its sign with other seeds.
_CLEAR = 2.0


@dataclass(frozen=True)
class MethodsResult:
    """Methods on the same data.

    Attributes:
        studies: by method; the others are compared with the first.
        failed: methods without a result, with the reasons.
        environments: the number that each trial trained on.
        seeds: the seeds of each method's runs; a run that failed is missing.
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

    @property
    def recommended(self) -> str:
        """The best method; the first one if no other is clearly better."""
        best = max(self.studies, key=self._score)
        return best if best == self._simplest or self._clear(best) else self._simplest

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
        simplest, best = self._simplest, ranked[0]
        metric = self.metric.replace("_", " ")
        if best == simplest:
            why = f"no other method has a better {metric}: {self._evidence(simplest, ranked[1])}"
        else:
            owner = f"{method_name(best)}'s " if self.recommended == simplest else ""
            why = f"{owner}{metric} {self._evidence(best, simplest)}, {self._difference(best)}"
        judged = SCORED_ON[self._first.criterion.selection]
        lines = [
            f"recommended: {method_name(self.recommended)}; {why}",
            f"judged by {judged}; a method replaces {method_name(simplest)} only if "
            f"its advantage, seed by seed, is above {_CLEAR:g} standard errors: other seeds rarely reverse that",
        ]
        if best in self.baselines:
            lines.insert(1, self._won(best, next(each for each in ranked if each not in self.baselines)))
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
            f"seconds   {self.seconds:.1f}",
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

    def _paired(self, method: str) -> list[float]:
        """The advantage over the first method, seed by seed."""
        pair = (self._values(each, self.metric) for each in (method, self._simplest))
        return [self._sign * (value - first) for value, first in zip(*pair, strict=True)]

    def _clear(self, method: str) -> bool:
        if self._score(self._simplest) == -math.inf:
            return True  # it has no value on some seed
        paired = self._paired(method)
        return statistics.fmean(paired) > _CLEAR * statistics.stdev(paired) / math.sqrt(len(paired))

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

    def _difference(self, method: str) -> str:
        """The advantage over the first method, in words."""
        if self._score(self._simplest) == -math.inf:
            return f"and {method_name(self._simplest)} has no finite value on some seed"
        paired = self._paired(method)
        error = statistics.stdev(paired) / math.sqrt(len(paired))
        clear = "" if self._clear(method) else ", which is not clear"
        return f"better by {statistics.fmean(paired):.{_DIGITS}f} with standard error {error:.{_DIGITS}f}{clear}"


_OTHERS = {"held-out": "held_out", TEST: "ood"}
