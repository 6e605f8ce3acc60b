"""Early ends of trials: conditions on a trial's metrics, and schedulers that compare trials."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from concord.errors import InputError
from concord.tracking.run_search import Condition

if TYPE_CHECKING:
    from concord.studies.proposals import Trial

# Schedulers see progress in per cent, so that trials of different lengths are comparable.
PROGRESS, SCORE = "percent", "score"
# The reason of a trial that a scheduler stopped.
SCHEDULER = "the scheduler"


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


def scheduler(kind: Literal["none", "asha", "median"]) -> Any:
    """The Ray Tune scheduler, for scores of which larger is better."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule

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


def replay(scheduler: Any, run: "Trial", score: Callable[[Mapping[str, float]], float], epochs: int) -> None:
    """Tell a scheduler of a trial of so many epochs that Ray Tune has not seen, so that others are compared with it."""
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import MedianStoppingRule

    # Do not ask the median rule for decisions, which it would remember: the trials may have run in parallel.
    median = isinstance(scheduler, MedianStoppingRule)
    keep = scheduler.on_trial_complete if median else scheduler.on_trial_result
    trial = Trial("earlier", stub=True)
    scheduler.on_trial_add(None, trial)
    told = [{PROGRESS: 100 * at.epoch / epochs, SCORE: score(at.metrics)} for at in run.history]
    # As in Ray Tune, the last result is only reported as the end, unless the scheduler stopped the trial by it.
    if run.failure is not None:
        told.append({PROGRESS: 0.0, SCORE: 0.0})
    for result in told if run.stopped == SCHEDULER else told[:-1]:
        keep(None, trial, result)
    scheduler.on_trial_complete(None, trial, told[-1])
