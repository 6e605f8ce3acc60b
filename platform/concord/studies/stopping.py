"""When a trial ends early: conditions on its own metrics, and schedulers that compare it with the others."""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from concord.errors import InputError
from concord.studies.proposals import EndedRun

_CONDITION = re.compile(r"\s*([\w-]+)\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*")
_OPERATORS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
# Schedulers see how far a trial is in per cent, so that trials of different lengths compare.
PROGRESS, SCORE = "percent", "score"
# What stopped a trial, where a scheduler did.
SCHEDULER = "the scheduler"


@dataclass(frozen=True)
class StopRule:
    """A trial ends when all conditions hold, such as ``train_accuracy>0.97`` and ``ood_accuracy<0.6``.

    These two are the rule of the AND-mask paper (appendix B.3).
    """

    conditions: tuple[tuple[str, str, float], ...] = ()

    @staticmethod
    def of(texts: Sequence[str]) -> "StopRule":
        """The rule in these words.

        Raises:
            InputError: a word that is no condition.
        """
        conditions = []
        for text in texts:
            found = _CONDITION.fullmatch(text)
            try:
                assert found is not None
                conditions.append((found[1].replace("-", "_"), found[2], float(found[3])))
            except (AssertionError, ValueError):
                raise InputError(f"--stop-when {text}: give METRIC>NUMBER or METRIC<NUMBER") from None
        return StopRule(tuple(conditions))

    def check(self, reported: Iterable[str]) -> None:
        """Refuse a metric that is not reported (InputError)."""
        reported = list(reported)
        for name, _, _ in self.conditions:
            if name not in reported:
                raise InputError(f"--stop-when {name}: not reported; there are {', '.join(reported)}")

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether a trial with these metrics ends."""
        return bool(self.conditions) and all(
            name in metrics and _OPERATORS[sign](metrics[name], bound) for name, sign, bound in self.conditions
        )

    @property
    def oracle(self) -> bool:
        """Whether it looks at the o.o.d. test."""
        return any("ood" in name for name, _, _ in self.conditions)

    def __str__(self) -> str:
        return " and ".join(f"{name} {sign} {str(bound).removesuffix('.0')}" for name, sign, bound in self.conditions)


def scheduler(kind: Literal["none", "asha", "median"]) -> Any:
    """The Ray Tune scheduler; scores are better the larger they are."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule

    if kind == "asha":
        return AsyncHyperBandScheduler(
            time_attr=PROGRESS, metric=SCORE, mode="max", max_t=100, grace_period=10, reduction_factor=3
        )
    if kind == "median":
        # With a finite slice it would pause trials, which asks for checkpoints, to let others go first.
        never: Any = math.inf
        return MedianStoppingRule(
            time_attr=PROGRESS, metric=SCORE, mode="max", grace_period=20, min_samples_required=5, min_time_slice=never
        )
    return FIFOScheduler()


def replay(scheduler: Any, runs: Sequence[EndedRun], score: Any, epochs: Any) -> None:
    """Tell a new scheduler of earlier trials, so that a study that continues compares with them too.

    Args:
        scheduler: of :func:`scheduler`.
        runs: the earlier trials.
        score: maps metrics to the score.
        epochs: maps a proposal to its epochs.
    """
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import MedianStoppingRule

    # The median rule is asked for no decision, which it would hold to: the trials may have run side by side.
    median = isinstance(scheduler, MedianStoppingRule)
    keep = scheduler.on_trial_complete if median else scheduler.on_trial_result
    for run in runs:
        trial = Trial("earlier", stub=True)
        scheduler.on_trial_add(None, trial)
        told = [{PROGRESS: 100 * at.epoch / epochs(run.run), SCORE: score(at.metrics)} for at in run.history]
        # As Ray Tune does: the last result comes as the end alone, unless it was the scheduler's reason to stop.
        if run.failure is not None:
            told.append({PROGRESS: 0.0, SCORE: 0.0})
        for result in told if run.stopped == SCHEDULER else told[:-1]:
            keep(None, trial, result)
        scheduler.on_trial_complete(None, trial, told[-1])
