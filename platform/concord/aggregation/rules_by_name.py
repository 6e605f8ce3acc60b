"""The built-in rules by name, and what the other rooms need to know of them.

A new rule is its file, a line in :mod:`concord.built_in`, and its fields as options in
:class:`~concord.training.options.AggregatorOptions`.
A rule may declare, as class variables, beside those of :mod:`concord.hyperparameters`:

* ``display_name``: its published name, for figures and tables.
* ``space``: the domains in which ``compare methods`` searches its options, by name.
* ``at_chance(significance, environments)``: makes the rule that chance passes with at most this probability.
* ``check_environments(environments)``: refuses a number of environments at a step (ArgumentError).
"""

from collections.abc import Mapping
from typing import Any

from concord import built_in
from concord.aggregation.chance import DEFAULT_SIGNIFICANCE, threshold_at_chance
from concord.aggregation.mean import Mean
from concord.aggregation.rule import Aggregator
from concord.errors import ArgumentError
from concord.hyperparameters import options_of_part
from concord.space import Entries, Uniform

RULES: dict[str, type[Any]] = built_in.RULES.kinds()
# The rules of sums, which run wherever gradients come from.
AGGREGATORS: tuple[str, ...] = tuple(name for name, kind in RULES.items() if hasattr(kind, "finish"))

# The published experiments have 0.8. With their 32 environments chance reaches it with probability 2.6e-6. With 20 it
# does with 4.0e-4, often enough to learn shortcuts; with 100 it does with 3e-17, and so does too little of what all
# of them share (``concord compare synthetic environments``). Below 0.5 fewer than three quarters of the signs have
# to agree: a shortcut of most environments would pass.
_USUAL, _LEAST = 0.8, 0.5


def rule_type(name: str) -> type[Any]:
    """The class of the rule called ``name``.

    Raises:
        ArgumentError: no rule has this name.
    """
    return built_in.RULES.kind(name)


def rule_with(kind: type[Any], values: Mapping[str, Any], *, shared: bool = True) -> Any:
    """A rule of this class with these options; without ``shared`` its fields of shared options keep their defaults."""
    options = options_of_part(kind) if shared else built_in.RULES.own_options(kind)
    return kind(**{each.name: values[name] for name, each in options.items()})


def compares(kind: type[Any]) -> bool:
    """Whether a rule compares whole gradients or columns, for which sums are not enough; it drops no components."""
    return not hasattr(kind, "finish")


def masks(kind: type[Any]) -> bool:
    """Whether a rule drops components."""
    return not compares(kind) and kind is not Mean


def searched(kind: type[Any]) -> Entries:
    """The space of a rule's options in a comparison of methods: the declared one, or that of its threshold."""
    if isinstance(space := getattr(kind, "space", None), Mapping):
        return space
    return {"threshold": Uniform(0.0, 1.0)} if "threshold" in options_of_part(kind) else {}


def aggregator(name: str, threshold: float = 1.0) -> Aggregator:
    """The rule of sums called ``name`` with agreement threshold τ (which ``mean`` and ``t-mask`` do not use).

    Raises:
        ArgumentError: no such rule has this name, or τ is outside [0, 1].
    """
    kind = RULES.get(name)
    if kind is None or compares(kind):
        raise ArgumentError("aggregator", name, f"must be one of {', '.join(AGGREGATORS)}")
    rule: Aggregator = kind(threshold=threshold) if "threshold" in options_of_part(kind) else kind()
    return rule


def default_threshold(name: str, environments: int) -> float:
    """The default τ: 0.8; for ``and-mask`` and ``geometric-mean`` the least from 0.5 with at most 1e-5 by chance.

    With 17 environments or fewer even full agreement is more probable by chance, and the default is 0.8.
    """
    by_chance = getattr(RULES.get(name), "threshold_by_chance", False)
    if not by_chance or 2.0 ** (1 - environments) > DEFAULT_SIGNIFICANCE:
        return _USUAL
    return max(_LEAST, threshold_at_chance(DEFAULT_SIGNIFICANCE, environments))


def aggregator_at_chance(name: str, significance: float, environments: int) -> Aggregator:
    """The rule called ``name`` that keeps a component of d environments by chance with at most this probability.

    Raises:
        ArgumentError: the rule decides by neither signs nor a test of the mean, or d signs cannot be as strict.
    """
    if not has_chance(RULES.get(name)):
        raise ArgumentError("significance", significance, without_chance(name))
    rule: Aggregator = RULES[name].at_chance(significance, environments)
    return rule


def has_chance(kind: type[Any] | None) -> bool:
    """Whether a rule can have a significance."""
    return hasattr(kind, "at_chance")


def without_chance(name: str) -> str:
    """The reason why a rule cannot have a significance."""
    known = ", ".join(each for each, kind in RULES.items() if has_chance(kind))
    return f"{name} does not keep components by their signs alone; it is for {known}"
