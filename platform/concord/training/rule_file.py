"""A rule of the user's own: a frozen dataclass in a Python file, named ``FILE.py:RULE``.

The text of the file travels to other processes and is kept with a run. So a rule also runs on machines without its
file, and a resumed run has the text that it began with, even if the file has changed.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

from concord.errors import ArgumentError, InputError
from concord.hyperparameters import Hyperparameter, options_of_part
from concord.options import defaults_of, flag_of, options_of, path_of
from concord.source_file import read_source, refusing, run_source

if TYPE_CHECKING:
    from concord.aggregation.families import Rule
    from concord.training.options import TrainConfig

Config = TypeVar("Config", bound="TrainConfig")
Group = TypeVar("Group")

# Options that set the rule's field of the same name and type.
_SHARED: dict[str, Any] = {"threshold": float, "seed": int}


@dataclass(frozen=True)
class RuleFile:
    """The file of a rule, its text, and the name of the rule in it."""

    path: str
    source: str = field(repr=False)
    name: str

    @staticmethod
    def is_reference(aggregator: str) -> bool:
        """Whether this names a Python file, and no built-in rule."""
        return re.fullmatch(r".*\.py(:.*)?", aggregator) is not None

    @staticmethod
    def read(reference: str) -> "RuleFile":
        """The file that ``FILE.py:RULE`` names."""
        file, name = RuleFile.parts(reference)
        path = Path(file).resolve()
        return RuleFile(str(path), read_source(path, partial(ArgumentError, "aggregator", reference)), name)

    @staticmethod
    def parts(reference: str) -> tuple[str, str]:
        """The file and the rule of ``FILE.py:RULE`` (ArgumentError if it names no rule)."""
        file, _, name = reference.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            expected = "name the rule in the file: FILE.py:RULE"
            raise ArgumentError("aggregator", reference, expected)
        return str(path_of(file)), name

    @property
    def file_name(self) -> str:
        """The name of the file without its folder, which belongs to one machine."""
        return Path(self.path).name

    @property
    def reference(self) -> str:
        """The name of the rule in configurations and runs."""
        return f"{self.file_name}:{self.name}"

    def load(self) -> "OwnRule":
        """Run the text, and take the rule from it."""
        refusal = partial(ArgumentError, "aggregator", self.reference)
        module = run_source(self.path, self.source, "rule", refusal)
        kind = getattr(module, self.name, None)
        if kind is None:
            parts = ("finish", "weights", "combine")
            rules = [name for name, each in vars(module).items() if any(hasattr(each, part) for part in parts)]
            raise refusal(f"there is no {self.name} in the file; it has {', '.join(rules) or 'no rule'}")
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            raise refusal(
                "is no dataclass; a rule is a frozen dataclass with statistics and finish(sums, environments), with "
                "weights(gram), or with combine(columns)"
            )
        with refusing("its fields have no types", self.path, refusal):
            return OwnRule(self, kind, options_of_part(kind))


@dataclass(frozen=True)
class OwnRule:
    """A rule of the user's own: its file, its class, and its options by name."""

    file: RuleFile
    kind: type[Any]
    options: Mapping[str, Hyperparameter]

    def build(self, values: Mapping[str, Any]) -> "Rule":
        """Make the rule with these values of its options; other values are ignored."""
        from concord.aggregation.rules_by_name import rule_with

        with refusing("cannot be made", self.file.path, self._refused):
            rule: Rule = rule_with(self.kind, values)
        return rule

    def check(self, rule: "Rule") -> None:
        """Refuse a rule that fails on a few numbers (ArgumentError)."""
        import torch

        from concord.aggregation.column_rule import ColumnRule, combined
        from concord.aggregation.families import as_rule
        from concord.aggregation.rule import aggregate
        from concord.aggregation.weighting import Weighting, weights_of

        gradients = torch.linspace(-1, 1, 12).reshape(3, 4)
        try:
            with refusing("cannot be used", self.file.path, InputError):
                known = as_rule(rule)
                if isinstance(known, Weighting):
                    weights_of(known, gradients @ gradients.T)
                elif isinstance(known, ColumnRule):
                    combined(known, gradients)
                else:
                    aggregate(known, gradients)
        except InputError as error:
            raise self._refused(str(error)) from error

    def _refused(self, problem: str) -> ArgumentError:
        return ArgumentError("aggregator", self.file.reference, problem)


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
        fields.append((name, each.annotation, dataclasses.field(default=each.default)))
    suffix = f"With{rule.file.name}"
    aggregation = _with_fields(type(given), f"{type(given).__name__}{suffix}", fields, own_rule=rule)
    group = ("aggregation", aggregation, dataclasses.field())
    kind = _with_fields(type(config), f"{type(config).__name__}{suffix}", [group])
    groups = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    chosen = dataclasses.replace(defaults_of(aggregation), **vars(given) | {"aggregator": reference})
    return kind(**groups | {"aggregation": chosen})


def _with_fields(
    group: type[Group], name: str, fields: Iterable[tuple[str, Any, Any]], **namespace: Any
) -> type[Group]:
    """A frozen dataclass, derived from a group of options, with these further fields."""
    namespace = {"__doc__": group.__doc__, **namespace}
    made: type[Group] = dataclasses.make_dataclass(
        name, fields, bases=(group,), namespace=namespace, frozen=True, kw_only=True
    )
    return made


def _can_be_given(hint: Any) -> bool:
    """Whether the command line and records have values of this type."""
    kind = get_origin(hint)
    if kind in (Union, UnionType, tuple):
        return all(each is ... or _can_be_given(each) for each in get_args(hint))
    return kind is Literal or hint in (bool, int, float, str, NoneType)
