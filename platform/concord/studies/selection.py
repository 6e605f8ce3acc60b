"""What a trial is judged by, and the best by it. Selections disagree; each says what it looked at."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from concord.errors import InputError
from concord.studies.journal import TrialResult, TrialSpec
from concord.studies.options import Selection
from concord.training.evaluation import Mode, worst

_SPLITS: Mapping[Selection, str] = {
    "held-out": "held_out",
    "validation": "validation",
    "leave-one-out": "left_out",
    "oracle": "ood",
    "own": "",
}
LOOKED_AT: Mapping[Selection, str] = {
    "held-out": "held-out examples of the training environments",
    "validation": "validation environments",
    "leave-one-out": "training environments left out in turn",
    "oracle": "the o.o.d. test set itself, an oracle",
    "own": "what the job itself evaluates",
}
_WORST = -1e30  # a score that is no number; finite, so that means and quantiles of scores stay numbers


@dataclass(frozen=True)
class Criterion:
    """The metric that a selection judges by.

    Attributes:
        selection: what it looks at.
        metric: its name among the metrics, such as ``held_out_accuracy``.
        mode: whether the metric is to be large or small.
    """

    selection: Selection
    metric: str
    mode: Mode

    @staticmethod
    def of(selection: Selection, measure: str, mode: Mode) -> "Criterion":
        """The criterion by this measure, ``accuracy`` or ``worst_loss`` for example, which is to be large or small."""
        return Criterion(selection, metric_on(_SPLITS[selection], measure), mode)

    @property
    def loss(self) -> str:
        """The loss on the same examples; it decides between equals."""
        return f"{_SPLITS[self.selection]}_loss"

    @property
    def oracle(self) -> bool:
        """Whether it looks at the test."""
        return self.selection == "oracle"

    @property
    def direction(self) -> str:
        """Whether large or small is good, in words."""
        return "the larger the better" if self.mode == "max" else "the smaller the better"

    def score(self, metrics: Mapping[str, float]) -> float:
        """The larger the better, always finite."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return _WORST
        return value if self.mode == "max" else -value

    def ranked(self, results: Iterable[tuple[TrialSpec, TrialResult]]) -> list[tuple[TrialSpec, TrialResult]]:
        """The trials that have the metric, best first; equals by loss, then by number."""
        scored = [pair for pair in results if math.isfinite(pair[1].metrics.get(self.metric, math.nan))]

        def key(pair: tuple[TrialSpec, TrialResult]) -> tuple[float, float, int]:
            loss = pair[1].metrics.get(self.loss, math.inf)
            return -self.score(pair[1].metrics), loss if math.isfinite(loss) else math.inf, pair[0].trial

        return sorted(scored, key=key)


def metric_on(split: str, measure: str) -> str:
    """The name of the metric that a measure, ``accuracy`` or ``worst_loss`` for example, is on a split."""
    if not split:  # a metric of the job's own
        return measure
    worst_of = "worst_" if measure.startswith("worst_") else ""
    return f"{worst_of}{split}_{measure.removeprefix('worst_')}"


def chosen_mode(measure: str, asked: Mode | None, known: Mapping[str, Mode | None]) -> Mode:
    """Whether the measure is to be large or small.

    Args:
        measure: ``accuracy`` or ``worst_loss`` for example.
        asked: ``--mode``.
        known: what the job's measures say.

    Raises:
        InputError: the job does not report it; or does not say, nor does ``--mode``; or they contradict each other.
    """
    plain = measure.removeprefix("worst_")
    if plain not in known:
        there = ", ".join(sorted(known))
        raise InputError(f"--metric {measure}: the job does not report it; there are {there}, each also as worst_…")
    said = known.get(plain)
    if said is None and asked is None:
        raise InputError(
            f"--metric {measure}: the job does not say whether large or small is good; give --mode max or --mode min, "
            f'or in the job measures={{"{plain}": Measure(function, mode=…)}}'
        )
    if None not in (said, asked) and said != asked:
        raise InputError(f"--mode {asked}: the job's {plain} says {said}")
    mode = said or asked
    assert mode is not None
    return mode


def worst_environments(metrics: Mapping[str, float], measure: str, mode: Mode) -> dict[str, float]:
    """The worst environment of every split by a measure whose direction the job does not say.

    Args:
        metrics: with those of single environments, ``{measure}/{split}/{environment}``.
        measure: its name.
        mode: whether it is to be large or small.
    """
    splits: dict[str, list[float]] = {}
    for name, value in metrics.items():
        of, _, rest = name.partition("/")
        if of == measure and "/" in rest:
            splits.setdefault(rest.partition("/")[0], []).append(value)
    if "held_out" in splits:
        splits.setdefault("validation", splits["held_out"])
    return {f"worst_{split}_{measure}": worst(values, mode) for split, values in splits.items()}


def check_metric(criterion: Criterion, reported: Sequence[str]) -> None:
    """Refuse a criterion that trials do not report (InputError)."""
    if criterion.metric in reported:
        return
    right = {
        "held-out": "nothing is held out; give --held-out above 0",
        "validation": "the job has no validation environments",
        "leave-one-out": "nothing is left out",
        "oracle": "the job has no test environments",
        "own": f"the job does not evaluate {criterion.metric}",
    }[criterion.selection]
    raise InputError(f"--selection {criterion.selection}: {right}")
