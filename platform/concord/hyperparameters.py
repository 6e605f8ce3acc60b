"""The hyperparameters that the class of a rule or of an objective declares, as options of a run.

A hyperparameter is a field of a dataclass, or an argument of ``__init__``; its documentation is the option's help. A
class may declare, as class variables:

* ``constants``: hyperparameters that are no options.
* ``option_names``: the options of hyperparameters that are called otherwise.
"""

import functools
import importlib
import inspect
from collections.abc import Collection, Hashable, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Generic, TypeVar, cast, get_type_hints

from typing_extensions import Doc

from concord.errors import ArgumentError

Part = TypeVar("Part")


@dataclass(frozen=True)
class Hyperparameter:
    """An argument of the class ``owner``; ``default`` is MISSING if the argument needs a value."""

    owner: type[Any]
    name: str
    hint: Any
    default: Any

    @property
    def annotation(self) -> Any:
        """The type and the help of a field in a group of options."""
        return Annotated[self.hint, _Help(self)]

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


def options_of_part(kind: type[Any]) -> Mapping[str, Hyperparameter]:
    """The hyperparameters of a class that options set, by the options' names, in order."""
    return _options_of_part(cast(Hashable, kind))


@dataclass(frozen=True)
class Registry(Generic[Part]):
    """The built-in classes of a kind. Each is imported when it is asked for.

    Attributes:
        option: the option that names one.
        package: the package of the classes.
        places: ``MODULE.CLASS`` in the package, by name.
        shared: options of several classes or of every run; the others are of single classes.
    """

    option: str
    package: str
    places: Mapping[str, str]
    shared: Collection[str]

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self.places)

    def kind(self, name: str) -> type[Part]:
        """The class of this name (ArgumentError if no class has it)."""
        if name not in self.places:
            raise ArgumentError(self.option, name, f"must be one of {', '.join(self.places)}")
        module, _, kind = self.places[name].rpartition(".")
        found: type[Part] = getattr(importlib.import_module(f"{self.package}.{module}"), kind)
        return found

    def kinds(self) -> dict[str, type[Part]]:
        """All classes by name."""
        return {name: self.kind(name) for name in self.places}

    def own_options(self, kind: type[Part]) -> Mapping[str, Hyperparameter]:
        """The options of a class but for the shared ones."""
        return {name: each for name, each in options_of_part(kind).items() if name not in self.shared}

    def all_options(self) -> Mapping[str, Hyperparameter]:
        """The options of all classes but for the shared ones; several classes may have one option."""
        return {name: each for kind in self.kinds().values() for name, each in self.own_options(kind).items()}


@functools.lru_cache(maxsize=256)
def _documentation(kind: Any) -> Mapping[str, str]:
    import docstring_parser

    try:
        arguments = docstring_parser.parse_from_object(kind).params
    except (SyntaxError, TypeError):  # its source cannot be read
        return {}
    return {each.arg_name: " ".join((each.description or "").split()) for each in arguments}


@functools.lru_cache(maxsize=256)
def _options_of_part(kind: Any) -> Mapping[str, Hyperparameter]:
    names: dict[str, str] = {}
    constants: set[str] = set()
    for each in reversed(kind.__mro__):
        names |= vars(each).get("option_names", {})
        constants |= {*vars(each).get("constants", ())}
    parameters, fields = inspect.signature(kind).parameters, getattr(kind, "__dataclass_fields__", {})
    hints = get_type_hints(kind.__init__) if parameters else {}
    found: dict[str, Hyperparameter] = {}
    for name in (each for each in parameters if each not in constants):
        factory = fields[name].default_factory if name in fields else MISSING
        default = parameters[name].default if factory is MISSING else factory()
        default = MISSING if default is inspect.Parameter.empty else default
        found[names.get(name, name)] = Hyperparameter(kind, name, hints.get(name, Any), default)
    return found
