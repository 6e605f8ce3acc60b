"""Whether a run learned what holds in its training environments alone, which only other environments show."""

from collections.abc import Mapping, Sequence
from typing import Any

from concord.aggregation import DEFAULT_SIGNIFICANCE, AndMask, GeometricMean, Mean, SignMask
from concord.aggregation.chance import least_environments
from concord.environments import Environments
from concord.training.evaluation import Mode, worst
from concord.training.job import Job
from concord.training.metric_names import environment_metric, split_metric
from concord.training.options import TrainConfig
from concord.training.outcome import Evaluation

_LESS, _TIMES, _OF_FIRST, _MOST = 0.2, 2.0, 0.2, 0.75
# What --significance is advised to be: the smallest that the environments can have, and stricter than the mask was.
_ADVISED = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def shortcuts(
    history: Sequence[Evaluation],
    job: Job[Any],
    config: TrainConfig,
    environments: Environments,
    modes: Mapping[str, Mode | None],
) -> str | None:
    """A line about a run that does well on the held-out examples and badly in environments it was not trained on.

    It looks at the measure of the job's criterion; without one at the accuracy, or the loss. What it compares with the
    held-out examples has to fall short of them, see :func:`falls_short`, and to be worse than three in four of the
    training environments. The validation environments show it. Where they do not, or there are none, and the o.o.d.
    test does, the line says ``oracle``.

    Args:
        history: the run's evaluations.
        job: what was trained.
        config: its options.
        environments: its data.
        modes: whether large or small is good, by measure.

    Returns:
        The line, with what to try; None where there is nothing to say, or no such environment.
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
        ("ood", environments.test, "the test (oracle: only it shows this, and nothing should be chosen by it)"),
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
    """Whether a measure is so much worse outside that what was learned inside does not hold there.

    A measure between 0 and 1 that is to be large, such as an accuracy: 0.2 less, and twice the distance from 1. Any
    other that is to be large: half of it, or less. One that is to be small, such as a loss: twice as much, and more by
    a fifth of ``first``, which it was inside at the first evaluation: a loss that is nearly 0 doubles easily. Of a
    measure that is not above 0 inside nothing is known.
    """
    if mode == "max" and min(inside, outside) >= 0 and max(inside, outside) <= 1:
        return inside - outside >= _LESS and 1 - outside >= _TIMES * (1 - inside)
    if inside <= 0:
        return False
    if mode == "max":
        return _TIMES * outside <= inside
    return outside >= _TIMES * inside and outside - inside >= _OF_FIRST * first


def _advice(job: Job[Any], config: TrainConfig, environments: int) -> str:
    """What to try, by the rule and the number of environments: a stricter mask, more environments, an objective.

    A test of the gradients' means asks what no count of signs does; an average is to be masked by signs first, where
    they seldom agree by chance.
    """
    rule, num_gradients = config.rule(environments), config.num_gradients(environments)
    averaged, objective = isinstance(rule, Mean), config.objective.objective
    before = rule.chance(num_gradients) if isinstance(rule, AndMask | GeometricMean) else float(averaged)
    possible = [each for each in _ADVISED if each < before and least_environments(each) <= num_gradients]
    tries = []
    plain, few = objective == "erm" and job.objective is None, num_gradients < least_environments(DEFAULT_SIGNIFICANCE)
    if averaged and plain and not few:
        tries.append("--aggregator and-mask")  # its default threshold is as seldom reached by chance as it should be
    elif possible and plain:
        tries.append(f"{'--aggregator and-mask ' * averaged}--significance {possible[0]:g}")
    tries.append(f"more training environments than {environments}")
    if plain and 1 < num_gradients == environments and (isinstance(rule, SignMask) or (averaged and few)):
        tries.append("--aggregator t-mask --environment-momentum 0.9")
    if environments > 1 and not config.aggregation.per_example and job.objective is None:
        other = f"an --objective other than {objective}"
        tries.append("--objective vrex --aggregator mean" if objective == "erm" else other)
    return ", or ".join(tries)
