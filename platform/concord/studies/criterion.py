"""What a trial is judged by, and the best by it. Selections disagree; each says what it looked at."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from concord.errors import InputError
from concord.studies.proposals import EndedRun
from concord.studies.stopping import StopRule
from concord.studies.study_options import Selection
from concord.training import Evaluation
from concord.training.evaluation import Mode, worst
from concord.training.metric_names import environment_of, split_metric

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
        return split_metric(_SPLITS[self.selection], "loss")

    @property
    def oracle(self) -> bool:
        """Whether it looks at the test."""
        return self.selection == "oracle"

    @property
    def shown(self) -> str:
        """The metric, marked where it is of the test."""
        return self.metric + " (oracle)" * self.oracle

    @property
    def label(self) -> str:
        """The selection, marked where it looks at the test."""
        return "o.o.d. test (oracle)" if self.oracle else self.selection

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

    def ranked(self, runs: Iterable[EndedRun]) -> list[EndedRun]:
        """The runs that have the metric, best first; equals by loss, then by number."""
        scored = [each for each in runs if math.isfinite(each.metrics.get(self.metric, math.nan))]

        def key(each: EndedRun) -> tuple[float, float, int]:
            loss = each.metrics.get(self.loss, math.inf)
            return -self.score(each.metrics), loss if math.isfinite(loss) else math.inf, each.run.trial

        return sorted(scored, key=key)


def metric_on(split: str, measure: str) -> str:
    """The name of the metric that a measure, ``accuracy`` or ``worst_loss`` for example, is on a split."""
    if not split:  # a metric of the job's own
        return measure
    return split_metric(split, measure.removeprefix("worst_"), worst=measure.startswith("worst_"))


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
        if (found := environment_of(name)) is not None and found.measure == measure:
            splits.setdefault(found.split, []).append(value)
    if "held_out" in splits:
        splits.setdefault("validation", splits["held_out"])
    return {split_metric(split, measure, worst=True): worst(values, mode) for split, values in splits.items()}


def left_out_metrics(folds: Sequence[Mapping[str, float]], modes: Mapping[str, Mode | None]) -> dict[str, float]:
    """The mean and, where it is known what is worse, the worst over the environments that were left out in turn.

    Args:
        folds: of each, the metrics on the environment that was left out, the only validation environment.
        modes: whether large or small is good, by measure.
    """
    metrics: dict[str, float] = {}
    for name in folds[0]:
        measure = name.removeprefix(split_metric("validation", ""))
        values = [fold[name] for fold in folds]
        metrics[split_metric("left_out", measure)] = sum(values) / len(values)
        if (mode := modes.get(measure)) is not None:
            metrics[split_metric("left_out", measure, worst=True)] = worst(values, mode)
    return metrics


def check_metric(criterion: Criterion, reported: Collection[str]) -> None:
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


@dataclass(frozen=True)
class Judge:
    """What the runs of a group are judged by.

    Attributes:
        criterion: None where nothing is chosen among them.
        modes: whether large or small is good, by measure; None where that is not known.
        stop_rule: when they end early.
        detail: beginnings of the metrics of single environments that are reported all the same.
    """

    criterion: Criterion | None = None
    modes: Mapping[str, Mode | None] = field(default_factory=dict)
    stop_rule: StopRule = field(default_factory=StopRule)
    detail: tuple[str, ...] = ()

    def metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """Those that are reported, with the worst environments by what the group knows."""
        found = {
            name: value for name, value in evaluation.metrics.items() if "/" not in name or name.startswith(self.detail)
        }
        for measure, mode in self.modes.items():
            if mode is not None and split_metric("train", measure, worst=True) not in found:
                found |= worst_environments(evaluation.metrics, measure, mode)
        return found
