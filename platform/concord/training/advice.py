"""What a run tells its user beyond its numbers: what to expect of a mask before training, and what may help after it.

Each function after :func:`advice` looks for one problem in a finished run and returns a line, or None.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from concord.aggregation import (
    DEFAULT_SIGNIFICANCE,
    AndMask,
    GeometricMean,
    Mean,
    SignMask,
    TMask,
    XorMask,
    agreeing_signs,
    chance_of,
    threshold_at_chance,
)
from concord.aggregation.chance import MUCH_BY_CHANCE, format_chance, least_environments
from concord.environments import Environments
from concord.objectives import objective_type
from concord.options import option_values
from concord.record import Evaluation
from concord.training.declared_measures import Mode
from concord.training.evaluation import worst
from concord.training.job import Job
from concord.training.metric_names import environment_metric, names_by_split, split_metric
from concord.training.options import ResolvedConfig, ResolvedTrainConfig

# A threshold below this needs fewer than three quarters of the signs: it is meant to keep most components (0 averages).
_MEANT_TO_MASK = 0.5
# An exponential average of fewer steps, in multiples of 1 / (1 - decay), has over 5 % of the first step's weights.
_REACHES = 3
# From here on neighbouring float32 numbers are 1024 apart, so that steps of an optimizer are rounded away.
LARGE = 1e10
_FEWEST = 6  # evaluations; with fewer a fall cannot be told from noise
_STEADY, _FEWEST_STEADY = 8, 4  # unless the loss fell at all of so many
_CERTAIN = 2.6  # standard deviations of Kendall's statistic: one history without a trend in two hundred
_OF_LOSS, _OF_FIRST = 0.03, 0.02
_HIGHER_AGAIN = 1.01
_LESS, _TIMES, _OF_FIRST_OUTSIDE, _MOST = 0.2, 2.0, 0.2, 0.75
# Suggested values of --significance: the smallest that the environments allow and that is stricter than before.
_ADVISED = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def advice(
    job: Job[Any],
    config: ResolvedConfig,
    history: Sequence[Evaluation],
    environments: Environments,
    modes: Mapping[str, Mode | None],
) -> Iterator[str]:
    """The lines at the end of a run; none for a job with a loop of its own. ``modes`` are those of the measures."""
    if not isinstance(config, ResolvedTrainConfig):
        return
    end, schedule = history[-1].metrics, config.schedule
    if end.get("spread_reached") == 0:
        yield (
            f"--stop-spread {schedule.stop_spread}: never reached; the model of epoch "
            f"{end['kept_epoch']:.0f} is kept, with the least spread, {end['held_out_spread']:.4g}"
        )
    if schedule.averaging is not None and schedule.averaging[0] == "ema":
        steps, reach = history[-1].step, 1 / (1 - schedule.averaging[1])
        if steps < _REACHES * reach:
            yield (
                f"warning: --average {schedule.average}: averages about {reach:.0f} steps, and the run has "
                f"{steps}: it still holds first weights; give a smaller decay, or more epochs"
            )
    if "kept_epoch" in end and schedule.keep != "last":  # a baseline has one model
        yield f"--keep {schedule.keep}: the model of epoch {end['kept_epoch']:.0f} is kept"
    found = (
        large_losses(history),
        empty_masks(history, config, len(environments.train)),
        no_better_than_constant(history, environments),
        underfitting(history, config),
        shortcuts(history, job, config, environments, modes),
    )
    yield from filter(None, found)


def large_losses(history: Sequence[Evaluation]) -> str | None:
    """The largest loss of the first evaluation, if it is finite but above :data:`LARGE`, too large to train on."""
    losses = {name: value for name, value in history[0].metrics.items() if name.startswith("loss/")} if history else {}
    name = max(losses, key=lambda each: losses[each], default=None)
    if name is None or not losses[name] > LARGE:
        return None
    return (
        f"warning: {name} was {losses[name]:.3g} at the first evaluation; losses above {LARGE:.0e} exceed what float32 "
        "can tell apart: look for fill values in the data, and scale inputs and targets"
    )


# A measure, its value of the best constant, and the constant in words.
_CONSTANTS = (
    ("mse", "constant_mse", "the mean of the training target", "the constant"),
    ("accuracy", "majority_share", "the most frequent class for every row", "its share"),
)


def no_better_than_constant(history: Sequence[Evaluation], environments: Environments) -> str | None:
    """A model whose last squared error or accuracy is not better than that of a constant, and where."""
    end = history[-1].metrics
    for measure, of_constant, words, shown in _CONSTANTS:
        inside = "held_out" if split_metric("held_out", measure) in end else "train"
        places = {inside: f"{inside.replace('_', '-')} examples"}
        places |= {"validation": "validation environments"} if environments.validation else {}
        places |= {"ood": "the test (oracle: do not select by it)"} if environments.test else {}
        found = []
        for split, place in places.items():
            value, constant, auc = (end.get(split_metric(split, name)) for name in (measure, of_constant, "auc"))
            if value is None or constant is None or (value < constant if measure == "mse" else value > constant):
                continue
            found.append(f"{place} {value:.4g}, {shown} {constant:.4g}{'' if auc is None else f' (auc {auc:.3g})'}")
        if found:
            return f"warning: no better than {words}: {measure} on {'; on '.join(found)}"
    return None


def empty_masks(history: Sequence[Evaluation], config: ResolvedTrainConfig, environments: int) -> str | None:
    """A mask that kept no component at any evaluation, so that the model learned nothing.

    A converged model may also keep nothing, so every evaluation counts.
    """
    if not history or any(each.metrics.get("kept_fraction") != 0 for each in history):
        return None
    data, used, tries = config.data, config.aggregation, []
    values = option_values(used) | config.strictness(environments)
    if used.own_rule is None and values["significance"] is not None:
        tries.append(f"a larger --significance than {values['significance']:g}")
    elif used.own_rule is None:
        tries.append(f"a smaller --threshold than {values['threshold']:g}")
    compared = data.environments_per_step or environments
    fixed = used.environment_momentum > 0 or objective_type(config.objective.objective).every  # then refused
    if not used.per_example:
        tries.append(f"more examples of each environment at a step than --batch-size {data.batch_size}")
        if compared > 2 and not fixed:
            tries.append(f"fewer environments at a step than {compared} (--environments-per-step)")
    end = f"; try {', or '.join(tries)}" if tries else ""
    return f"warning: kept_fraction was 0 at every evaluation: the mask keeps nothing{end}"


def underfitting(history: Sequence[Evaluation], config: ResolvedTrainConfig) -> str | None:
    """A held-out loss that was still falling, so that more epochs under the same schedule would lower it.

    A falling rate flattens every run in the end, and lowers a converged loss by less noise. So only the evaluations
    count before the rate is half of --lr, see :func:`late_fall`. A run whose held-out loss rose after that is not
    underfitted.
    """
    loss = split_metric("held_out", "loss")
    seen = [(each.epoch, each.metrics[loss]) for each in history if loss in each.metrics]
    if not seen:
        return None
    halved = config.schedule.lr_halved(history[-1].step * config.schedule.epochs // history[-1].epoch)
    before = [(epoch, loss) for epoch, loss in seen if epoch <= halved * config.schedule.epochs]
    losses = [loss for _, loss in before]
    steady = len(seen) >= _STEADY and all(later < earlier for (_, earlier), (_, later) in itertools.pairwise(seen))
    fall = late_fall(losses, steady=steady)
    if fall is None or not seen[-1][1] <= _HIGHER_AGAIN * losses[-1]:
        return None
    since = before[-_late(len(before))][0]
    when = "at the end of the run" if halved == 1 else f"at epoch {before[-1][0]}, when --lr was lowered"
    return (
        f"the held-out loss was still falling {when}: by {fall:.3g} since epoch {since}, to {losses[-1]:.3g}; "
        f"more --epochs than {config.schedule.epochs} or a larger --lr than {config.optimizer.lr:g} may learn more"
    )


def late_fall(losses: Sequence[float], *, steady: bool = False) -> float | None:
    """The fall over the last 60 % of the losses, if it is a trend that matters; None otherwise.

    It is a trend if Kendall's rank statistic of loss and time is 2.6 standard deviations below zero, which one of two
    hundred sequences without a trend reaches. It matters if the fall, by the median slope of all
    pairs, is at least 3 % of the last loss and 2 % of the first, since a loss near 0 never stops falling. Fewer than
    six losses, or one that is not finite, give None. Of a ``steady`` run, whose loss fell at each of eight or more
    evaluations, four losses are enough: the last three then have a trend.
    """
    if len(losses) < (_FEWEST_STEADY if steady else _FEWEST) or not all(map(math.isfinite, losses)):
        return None
    late = losses[-_late(len(losses)) :]
    count = len(late)
    pairs = list(itertools.combinations(range(count), 2))
    order = sum((late[j] > late[i]) - (late[j] < late[i]) for i, j in pairs)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    fall = -statistics.median((late[j] - late[i]) / (j - i) for i, j in pairs) * (count - 1)
    certain = steady or -order - 1 >= _CERTAIN * deviation
    matters = fall >= max(_OF_LOSS * abs(late[-1]), _OF_FIRST * abs(losses[0]))
    return fall if certain and matters else None


def _late(count: int) -> int:
    return max(_FEWEST, math.ceil(0.6 * count)) if count >= _FEWEST else 3


def shortcuts(
    history: Sequence[Evaluation],
    job: Job[Any],
    config: ResolvedTrainConfig,
    environments: Environments,
    modes: Mapping[str, Mode | None],
) -> str | None:
    """A run that does well on held-out examples and badly in other environments: it learned shortcuts.

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
    names_inside = names_by_split(environments)["held_out"]
    inside, each = end[held_out], [end[environment_metric(measure, "held_out", name)] for name in names_inside]
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
                f"try {_against_shortcuts(job, config, len(environments.train))}"
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
    return outside >= _TIMES * inside and outside - inside >= _OF_FIRST_OUTSIDE * first


def _against_shortcuts(job: Job[Any], config: ResolvedTrainConfig, environments: int) -> str:
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
    if config.baseline is not None:
        return tries[-1]
    if plain and 1 < num_gradients == environments and (isinstance(rule, SignMask) or (averaged and few)):
        tries.append("--aggregator t-mask --environment-momentum 0.9")
    if environments > 1 and not config.aggregation.per_example and job.objective is None:
        other = f"an --objective other than {objective}"
        tries.append("--objective vrex --aggregator mean" if objective == "erm" else other)
    return ", or ".join(tries)


def mask_lines(config: ResolvedTrainConfig, environments: int, compare: str) -> list[str]:
    """Before a run: the mask's condition, its probability by chance, a warning if that is high, and what to expect; of
    the plain average, that it masks nothing.

    In the expectation several batches of one environment count as one, since they share its shortcuts. It ends with
    ``compare``, the command that compares methods.
    """
    num_gradients = config.num_gradients(environments)
    what = "environment" if config.aggregation.steps_per_update == 1 else "vote"
    what = "example" if config.aggregation.per_example else what
    count = f"{num_gradients} {what}{'s' * (num_gradients != 1)}"
    rule, own_rule = config.rule(environments), config.aggregation.own_rule
    if config.baseline is not None:
        return [
            f"baseline: fitted to all training examples at once, without steps; to compare it with methods: {compare}"
        ]
    if isinstance(rule, Mean) and config.objective.objective == "erm" and environments > 1:
        return [f"average: gradients are averaged, without a mask; to find a better method: {compare}"]
    if isinstance(rule, TMask) and own_rule is None and num_gradients > 1:
        asked = f"a mean must be {rule.quantile(num_gradients):.3g} standard errors from 0"
        line = f"mask: {count}, t-test at {format_chance(rule.significance)}: {asked}"
        return [line, *_expectation(config, environments, compare)]
    if config.aggregation.compares:
        return _exchange_lines(config, num_gradients)
    if not isinstance(rule, SignMask) or own_rule is not None:
        return []
    agreeing, chance = agreeing_signs(rule.threshold, num_gradients), rule.chance(num_gradients)
    asked = f"{agreeing} of {num_gradients} signs"
    passes = f"fewer than {asked} may agree" if isinstance(rule, XorMask) else f"{asked} must agree"
    by_chance = f"by chance a component passes with probability {format_chance(chance)}"
    lines = [f"mask: {count}, τ {rule.threshold:.4g}: {passes}; {by_chance}"]
    masks = config.aggregation.significance is None and rule.threshold >= _MEANT_TO_MASK
    if masks and chance > MUCH_BY_CHANCE and not isinstance(rule, XorMask):
        least = least_environments(MUCH_BY_CHANCE)
        stricter = f"at least {least} {what}s at a step bring it below {MUCH_BY_CHANCE:.0%}"
        if num_gradients >= least:
            strict = agreeing_signs(threshold_at_chance(MUCH_BY_CHANCE, num_gradients), num_gradients)
            stricter = f"--significance {MUCH_BY_CHANCE:g} asks for {strict} of {num_gradients} signs"
        lines.append(f"warning: chance alone keeps {chance:.0%} of the components; {stricter}")
    meant = isinstance(rule, AndMask | GeometricMean) and rule.threshold >= _MEANT_TO_MASK
    return lines + (_expectation(config, environments, compare) if meant else [])


def _exchange_lines(config: ResolvedTrainConfig, num_gradients: int) -> list[str]:
    """What workers send of several environments, if the rule compares them."""
    workers, batches = config.parallel.workers, config.aggregation.steps_per_update
    most, each = num_gradients // batches, num_gradients / workers
    if workers == 1 or each <= 1:
        return []
    fewest = f"; --workers {most} sends {batches} ×" if workers < most else ""
    return [
        f"exchange: {config.method} compares {num_gradients} gradients, and the workers send them all: "
        f"{each:.3g} × the bytes of a sum{fewest}"
    ]


def _expectation(config: ResolvedTrainConfig, environments: int, compare: str) -> list[str]:
    """What to expect with too few environments for a mask: they often agree by chance."""
    together, enough = config.data.environments_per_step or environments, least_environments(DEFAULT_SIGNIFICANCE)
    if together >= enough or config.aggregation.per_example:
        return []
    by_chance, seldom = format_chance(chance_of(1.0, together)), format_chance(DEFAULT_SIGNIFICANCE)
    return [
        f"expect: shortcuts may be learned: by chance these {together} environments agree fully with probability "
        f"{by_chance}, {enough} or more with at most {seldom}; to compare methods: {compare}"
    ]
