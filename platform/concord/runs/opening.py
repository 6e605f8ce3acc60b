"""The first lines of a run: the purposes of the data, the meaning of the mask, the champion's criterion."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from concord.aggregation import (
    DEFAULT_SIGNIFICANCE,
    AndMask,
    GeometricMean,
    SandMask,
    SignMask,
    TMask,
    XorMask,
    agreeing_signs,
    chance_of,
    threshold_at_chance,
)
from concord.aggregation.chance import MUCH_BY_CHANCE, format_chance, least_environments
from concord.environments import Environments
from concord.options import as_words, option_values, options_of
from concord.redaction import redact, redact_words
from concord.runs.lifecycle import Open
from concord.training.job import JobFile
from concord.training.options import TrainConfig

# A threshold below this needs fewer than three quarters of the signs: it is meant to keep most components (0 averages).
_MEANT_TO_MASK = 0.5


def opening_lines(
    opened: Open,
    what: str,
    data: Sequence[str],
    criterion: tuple[str, str] | None,
    required: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """The first lines of a run; ``criterion`` is a metric and its mode, None if the model is not registered."""
    champion = "champion: none is selected, since the model is not registered"
    if criterion is not None:
        size = "largest" if criterion[1] == "max" else "smallest"
        least = "".join(f", with {name} of at least {value:.4g}" for name, value in required.items())
        champion = f"champion: the version with the {size} {criterion[0]}{least}"
    return [
        f"run {opened.run.name}: {what}",
        *data,
        champion,
        f"kept in {opened.run.folder.display_path}, tracked in {redact(opened.store.uri)}",
    ]


def method_line(config: TrainConfig, on_ray: bool, objective: str | None = None) -> str:
    """The method of a run, with the job's own objective, its number of workers, and whether they are Ray Train's."""
    method = config.method
    if objective is not None:
        method = objective if method == "mean" else f"{objective}-{method}"
    return f"{method}, {_count(config.parallel.workers, 'worker')}" + (" on Ray Train" if on_ray else "")


def purposes(environments: Environments, held_out: float) -> str:
    """The numbers of environments for training (a part held out), validation and test."""
    kept = f" ({held_out:.3g} of each held out)" if held_out else ""
    data = [f"{_count(len(environments.train), 'environment')} for training{kept}"]
    data += [f"{len(environments.validation)} for validation"] if environments.validation else []
    data += [f"{len(environments.test)} for test"] if environments.test else []
    return ", ".join(data)


def mask_parameters(config: TrainConfig, environments: int) -> dict[str, float]:
    """The derived parameters of a run for MLflow, from its options and its number of training environments.

    ``chance_fraction`` is the fraction of components that the mask keeps if signs are independent and fair; without
    ``--threshold`` the result has the derived ``threshold`` as well.
    """
    given, rule, derived = config.aggregation, config.rule(environments), dict[str, float]()
    if given.own_rule is None and isinstance(rule, SignMask | TMask):
        derived["chance_fraction"] = rule.chance(config.num_gradients(environments))
    derives = given.threshold is None or given.significance is not None
    if given.own_rule is None and derives and isinstance(rule, SignMask | SandMask):
        derived["threshold"] = rule.threshold
    if given.own_rule is None and isinstance(rule, TMask):
        derived["significance"] = rule.significance
    return derived


def comparison(job: JobFile, config: TrainConfig, given: Collection[str] = ()) -> str:
    """The command that compares methods on the data of a run: with the given options that say which data they are."""
    of_every_job = options_of(TrainConfig).keys() - {"data_dir"}
    values = {name: value for name, value in option_values(config).items() if name in {*given} - of_every_job}
    return shlex.join(["concord", "compare", job.reference, "methods", *redact_words(as_words(values))])


def mask_lines(config: TrainConfig, environments: int, compare: str) -> list[str]:
    """The mask's condition and its probability by chance, a warning if that is high, and what to expect.

    In the expectation several batches of one environment count as one, since they share its shortcuts. It ends with
    the command ``compare``, see :func:`comparison`.
    """
    num_gradients = config.num_gradients(environments)
    what = "environment" if config.aggregation.steps_per_update == 1 else "vote"
    what = "example" if config.aggregation.per_example else what
    rule, own_rule = config.rule(environments), config.aggregation.own_rule
    if isinstance(rule, TMask) and own_rule is None and num_gradients > 1:
        asked = f"a mean must be {rule.quantile(num_gradients):.3g} standard errors from 0"
        lines = [f"mask: {_count(num_gradients, what)}, t-test at {format_chance(rule.significance)}: {asked}"]
        return lines + _expectation(config, environments, compare)
    if config.aggregation.compares:
        return _exchange_lines(config, num_gradients)
    if not isinstance(rule, SignMask) or own_rule is not None:
        return []
    agreeing, chance = agreeing_signs(rule.threshold, num_gradients), rule.chance(num_gradients)
    asked = f"{agreeing} of {num_gradients} signs"
    passes = f"fewer than {asked} may agree" if isinstance(rule, XorMask) else f"{asked} must agree"
    lines = [
        f"mask: {_count(num_gradients, what)}, τ {rule.threshold:.4g}: {passes}; "
        f"by chance a component passes with probability {format_chance(chance)}"
    ]
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


def _exchange_lines(config: TrainConfig, num_gradients: int) -> list[str]:
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


def _expectation(config: TrainConfig, environments: int, compare: str) -> list[str]:
    """What to expect with too few environments for a mask: they often agree by chance."""
    together, enough = config.data.environments_per_step or environments, least_environments(DEFAULT_SIGNIFICANCE)
    if together >= enough or config.aggregation.per_example:
        return []
    by_chance, seldom = format_chance(chance_of(1.0, together)), format_chance(DEFAULT_SIGNIFICANCE)
    return [
        f"expect: shortcuts may be learned: by chance these {together} environments agree fully with probability "
        f"{by_chance}, {enough} or more with at most {seldom}; to compare methods: {compare}"
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
