"""The fields of a rule of the user's own as options of a job: a class of options derived from the job's."""

import dataclasses
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from typing_extensions import Doc

from concord.aggregation.rule_file import OwnRule
from concord.errors import ArgumentError
from concord.training.options import TrainConfig

Config = TypeVar("Config", bound=TrainConfig)

# Options that a rule's field of the same name and type takes its value from.
_SHARED: dict[str, Any] = {"threshold": float, "seed": int}


def config_with_rule(config: type[Config], rule: OwnRule) -> type[Config]:
    """The job's options and the rule's fields, with this rule as the only aggregator.

    A field called ``threshold`` or ``seed`` is the option of this name.

    Raises:
        ArgumentError: a field has the name of another option, or a type that no option has.
    """
    reference = rule.file.reference
    fields: list[tuple[str, Any, Any]] = [("aggregator", Literal[reference], dataclasses.field(default=reference))]
    said = rule.documentation()
    for each in dataclasses.fields(rule.kind):
        if not each.init:
            continue
        hint, option = rule.options[each.name], f"--{each.name.replace('_', '-')}"
        if each.name in _SHARED:
            if hint is not _SHARED[each.name]:
                expected = f"its field {each.name} has to be of type {_SHARED[each.name].__name__}, as {option} is"
                raise ArgumentError("aggregator", reference, expected)
            continue
        if hasattr(config, each.name) or each.name in {field.name for field in dataclasses.fields(config)}:
            problem = f"its field {each.name} is something else in the job's options; rename it"
            raise ArgumentError("aggregator", reference, problem)
        if not _can_be_given(hint):
            problem = (
                f"its field {each.name} is of type {hint}; an option is a number, a text, true or false, or several"
            )
            raise ArgumentError("aggregator", reference, problem)
        if each.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=each.default_factory)
        else:
            default = dataclasses.field(default=each.default)
        fields.append((each.name, Annotated[hint, Doc(said.get(each.name, f"Of {rule.file.name}."))], default))
    return dataclasses.make_dataclass(
        f"{config.__name__}With{rule.file.name}",
        fields,
        bases=(config,),
        namespace={"__doc__": config.__doc__, "own_rule": property(lambda _: rule)},
        frozen=True,
        kw_only=True,
    )


def _can_be_given(hint: Any) -> bool:
    """Whether the command line and records have values of this type."""
    kind = get_origin(hint)
    if kind in (Union, UnionType, tuple):
        return all(each is ... or _can_be_given(each) for each in get_args(hint))
    return kind is Literal or hint in (bool, int, float, str, NoneType)
