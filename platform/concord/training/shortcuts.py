"""Detects a run that learned shortcuts: rules that hold in its training environments alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from concord.aggregation import DEFAULT_SIGNIFICANCE, AndMask, GeometricMean, Mean, SignMask
from concord.aggregation.chance import least_environments
from concord.environments import Environments
from concord.record import Evaluation
from concord.training.evaluation import Mode, worst
from concord.training.job import Job
from concord.training.metric_names import environment_metric, split_metric
from concord.training.options import TrainConfig

_LESS, _TIMES, _OF_FIRST, _MOST = 0.2, 2.0, 0.2, 0.75
# Suggested values of --significance: the smallest that the environments allow and that is stricter than before.
_ADVISED = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def shortcuts(
    history: Sequence[Evaluation],
    job: Job[Any],
    config: TrainConfig,
    environments: Environments,
    modes: Mapping[str, Mode | None],
) -> str | None:
    """A line of advice if a run does well on held-out examples and badly in other environments; None if not.

    The measure is that of the job's criterion, else the accuracy or the loss. The other environments' value must fall
    short of the held-out value, see :func:`falls_short`, and be worse than three in four of the training environments.
    The validation environments are compared first. If they do not fall short and the o.o.d. test does, the line is
    marked ``oracle``.
    """
    criterion = job.criterion or ""
    named = [measure for measure in modes if criterion.endswith(f"_{measure}")]
    measure = max(named, key=len, default="accuracy" if "accuracy" in modes else "loss")
    mode = modes[measure] or (job.mode if named else None)
    end, first = history[-1].metrics, history[0].metrics
    held_out = split_metric("held_out", measure)
    if mode is None or held_out not in end:
        return None
    inside, each = end[held_out], [end[environment_metric(measure, "held_out", name)] for name in environments.train]
    for split, names, what in (
        ("validation", environments.validation, "validation environments"),
        ("ood", environments.test, "the test (oracle: only it shows this; do not select by it)"),
    ):
        if not names:
            continue
        outside = end[split_metric(split, measure)]
        better = sum(value != outside and worst((value, outside), mode) == outside for value in each)
        if better >= _MOST * len(each) and falls_short(inside, outside, first[held_out], mode):
            return (
                f"shortcuts were learned: {measure} on held-out examples {inside:.3g}, in {what} {outside:.3g}; "
                f"try {_advice(job, config, len(environments.train))}"
            )
    return None


def falls_short(inside: float, outside: float, first: float, mode: Mode) -> bool:
    """Whether a measure is so much worse outside that the learned rule does not hold there.

    A measure in [0, 1] with mode ``max``, such as an accuracy: 0.2 less, and twice the distance from 1. Another
    measure with mode ``max``: half or less. With mode ``min``, such as a loss: twice as much, and more by
    a fifth of ``first``, the inside value at the first evaluation, since a loss near 0 doubles easily. A
    measure that is not above 0 inside never falls short.
    """
    if mode == "max" and min(inside, outside) >= 0 and max(inside, outside) <= 1:
        return inside - outside >= _LESS and 1 - outside >= _TIMES * (1 - inside)
    if inside <= 0:
        return False
    if mode == "max":
        return _TIMES * outside <= inside
    return outside >= _TIMES * inside and outside - inside >= _OF_FIRST * first


def _advice(job: Job[Any], config: TrainConfig, environments: int) -> str:
    """Advice by rule and number of environments: a stricter mask, more environments, an objective.

    With few environments a t-test detects more than a count of signs. An average is masked by signs first, if
    they seldom agree by chance.
    """
    rule, num_gradients = config.rule(environments), config.num_gradients(environments)
    averaged, objective = isinstance(rule, Mean), config.objective.objective
    before = rule.chance(num_gradients) if isinstance(rule, AndMask | GeometricMean) else float(averaged)
    possible = [each for each in _ADVISED if each < before and least_environments(each) <= num_gradients]
    tries = []
    plain, few = objective == "erm" and job.objective is None, num_gradients < least_environments(DEFAULT_SIGNIFICANCE)
    if averaged and plain and not few:
        tries.append("--aggregator and-mask")  # its default threshold is seldom reached by chance
    elif possible and plain:
        tries.append(f"{'--aggregator and-mask ' * averaged}--significance {possible[0]:g}")
    tries.append(f"more training environments than {environments}")
    if plain and 1 < num_gradients == environments and (isinstance(rule, SignMask) or (averaged and few)):
        tries.append("--aggregator t-mask --environment-momentum 0.9")
    if environments > 1 and not config.aggregation.per_example and job.objective is None:
        other = f"an --objective other than {objective}"
        tries.append("--objective vrex --aggregator mean" if objective == "erm" else other)
    return ", or ".join(tries)
