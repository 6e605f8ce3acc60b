"""The hyperparameters that the class of a rule or of an objective declares, as options of a run.

A hyperparameter is a field of a dataclass, or an argument of ``__init__``; its documentation is the option's help.
"""

import dataclasses
import functools
import inspect
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import docstring_parser
from typing_extensions import Doc

Group = TypeVar("Group")


@dataclass(frozen=True)
class Hyperparameter:
    """An argument of the class ``owner``; ``default`` is MISSING if the argument needs a value."""

    owner: type[Any]
    name: str
    hint: Any
    default: Any

    def as_field(self, option: str) -> tuple[str, Any, Any]:
        """The field of a group of options, for ``make_dataclass``."""
        return option, Annotated[self.hint, _Help(self)], dataclasses.field(default=self.default)

    @property
    def text(self) -> str:
        """The documentation: the string after the field, or the entry of ``Args`` in the class's docstring."""
        texts = (_documentation(cast(Hashable, each)).get(self.name) for each in self.owner.__mro__)
        return next(filter(None, texts), f"Of {self.owner.__name__}.")


class _Help(Doc):
    """The documentation of an argument, parsed when help is shown: it would take a tenth of the platform's import."""

    def __init__(self, argument: Hyperparameter) -> None:
        self._argument = argument

    @property
    def documentation(self) -> str:  # type: ignore[override]
        return self._argument.text

    __hash__, __eq__ = object.__hash__, object.__eq__  # those of Doc would parse it


def hyperparameters_of(kind: type[Any]) -> Mapping[str, Hyperparameter]:
    """The arguments of a class by name, in order."""
    return _hyperparameters_of(cast(Hashable, kind))


@functools.lru_cache(maxsize=256)
def _documentation(kind: Any) -> Mapping[str, str]:
    try:
        arguments = docstring_parser.parse_from_object(kind).params
    except (SyntaxError, TypeError):  # its source cannot be read
        return {}
    return {each.arg_name: " ".join((each.description or "").split()) for each in arguments}


@functools.lru_cache(maxsize=256)
def _hyperparameters_of(kind: Any) -> Mapping[str, Hyperparameter]:
    parameters, fields = inspect.signature(kind).parameters, getattr(kind, "__dataclass_fields__", {})
    hints = get_type_hints(kind.__init__) if parameters else {}
    found: dict[str, Hyperparameter] = {}
    for name, each in parameters.items():
        factory = fields[name].default_factory if name in fields else MISSING
        default = each.default if factory is MISSING else factory()
        found[name] = Hyperparameter(kind, name, hints.get(name, Any), MISSING if default is each.empty else default)
    return found


def with_fields(group: type[Group], name: str, fields: Iterable[tuple[str, Any, Any]], **namespace: Any) -> type[Group]:
    """A frozen dataclass, derived from a group of options, with these further fields."""
    namespace = {"__doc__": group.__doc__, **namespace}
    made: type[Group] = dataclasses.make_dataclass(
        name, fields, bases=(group,), namespace=namespace, frozen=True, kw_only=True
    )
    return made
