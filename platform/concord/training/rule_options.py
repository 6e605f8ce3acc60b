"""Makes the fields of the user's own rule options of the job, in a class derived from the job's."""

import dataclasses
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from concord.errors import ArgumentError
from concord.hyperparameters import with_fields
from concord.options import defaults_of, flag_of, options_of
from concord.training.options import TrainConfig
from concord.training.rule_file import OwnRule

Config = TypeVar("Config", bound=TrainConfig)

# Options that set the rule's field of the same name and type.
_SHARED: dict[str, Any] = {"threshold": float, "seed": int}


def config_with_rule(config: Config, rule: OwnRule) -> Config:
    """The job's options and the rule's fields, at their defaults, with this rule as the only aggregator.

    A field called ``threshold`` or ``seed`` takes the value of that option.
    """
    reference, given = rule.file.reference, config.aggregation
    fields: list[tuple[str, Any, Any]] = [("aggregator", Literal[reference], dataclasses.field(default=reference))]
    for name, each in rule.options.items():
        if name in _SHARED:
            if each.hint is not _SHARED[name]:
                expected = f"its field {name} must be of type {_SHARED[name].__name__}, as {flag_of(name)} is"
                raise ArgumentError("aggregator", reference, expected)
            continue
        if hasattr(config, name) or hasattr(given, name) or name in options_of(type(config)):
            problem = f"its field {name} is another option of the job; rename it"
            raise ArgumentError("aggregator", reference, problem)
        if not _can_be_given(each.hint):
            kinds = "a number, text, true or false, or a tuple of these"
            problem = f"its field {name} is of type {each.hint}; make it {kinds}"
            raise ArgumentError("aggregator", reference, problem)
        fields.append(each.as_field(name))
    suffix = f"With{rule.file.name}"
    aggregation = with_fields(type(given), f"{type(given).__name__}{suffix}", fields, own_rule=rule)
    group = ("aggregation", aggregation, dataclasses.field())
    kind = with_fields(type(config), f"{type(config).__name__}{suffix}", [group])
    groups = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    chosen = dataclasses.replace(defaults_of(aggregation), **vars(given) | {"aggregator": reference})
    return kind(**groups | {"aggregation": chosen})


def _can_be_given(hint: Any) -> bool:
    """Whether the command line and records have values of this type."""
    kind = get_origin(hint)
    if kind in (Union, UnionType, tuple):
        return all(each is ... or _can_be_given(each) for each in get_args(hint))
    return kind is Literal or hint in (bool, int, float, str, NoneType)
