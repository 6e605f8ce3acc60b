"""Makes the fields of the user's own rule options of the job, in a class derived from the job's."""

import dataclasses
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from typing_extensions import Doc

from concord.errors import ArgumentError
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
    documentation = rule.documentation()
    for each in dataclasses.fields(rule.kind):
        if not each.init:
            continue
        hint, option = rule.options[each.name], flag_of(each.name)
        if each.name in _SHARED:
            if hint is not _SHARED[each.name]:
                expected = f"its field {each.name} must be of type {_SHARED[each.name].__name__}, as {option} is"
                raise ArgumentError("aggregator", reference, expected)
            continue
        if hasattr(config, each.name) or hasattr(given, each.name) or each.name in options_of(type(config)):
            problem = f"its field {each.name} is another option of the job; rename it"
            raise ArgumentError("aggregator", reference, problem)
        if not _can_be_given(hint):
            problem = (
                f"its field {each.name} is of type {hint}; make it a number, text, true or false, or a tuple of these"
            )
            raise ArgumentError("aggregator", reference, problem)
        if each.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=each.default_factory)
        else:
            default = dataclasses.field(default=each.default)
        fields.append((each.name, Annotated[hint, Doc(documentation.get(each.name, f"Of {rule.file.name}."))], default))
    aggregation = dataclasses.make_dataclass(
        f"{type(given).__name__}With{rule.file.name}",
        fields,
        bases=(type(given),),
        namespace={"__doc__": given.__doc__, "own_rule": rule},
        frozen=True,
        kw_only=True,
    )
    kind = dataclasses.make_dataclass(
        f"{type(config).__name__}With{rule.file.name}",
        [("aggregation", aggregation)],
        bases=(type(config),),
        namespace={"__doc__": config.__doc__},
        frozen=True,
        kw_only=True,
    )
    groups = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    chosen = dataclasses.replace(defaults_of(aggregation), **vars(given) | {"aggregator": reference})
    made: Config = kind(**groups | {"aggregation": chosen})
    return made


def _can_be_given(hint: Any) -> bool:
    """Whether the command line and records have values of this type."""
    kind = get_origin(hint)
    if kind in (Union, UnionType, tuple):
        return all(each is ... or _can_be_given(each) for each in get_args(hint))
    return kind is Literal or hint in (bool, int, float, str, NoneType)
