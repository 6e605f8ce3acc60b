"""Options in groups: nested dataclasses. In flags and records every option has its plain name.

The declaration of an option says its role: ``lr: float`` is science, ``output: Place[Path]`` is place. No other list of
names exists; who needs one asks for the names of a role (:func:`names_of`).
"""

import dataclasses
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from concord.errors import InputError
from concord.redaction import is_secret, without_secrets


class _Needed:
    """Marks a required option without a value."""

    def __repr__(self) -> str:
        return "needed"


NEEDED = _Needed()

Type = TypeVar("Type")


class Role(Enum):
    """What an option is for. The result of a run depends on those of the first three.

    Attributes:
        SCIENCE: the data may depend on it.
        LEARNING: the data do not depend on it; the role of a whole group, such as the optimizer's, is its ``role``.
        SCORING: the comparison of results depends on it: a study cannot vary it.
        PLACE: where and how the work runs: folders, workers, devices, readers, checkpoints.
        UNKEPT: never recorded: it may hold a password, or it is of one command alone, as a run's name is.
    """

    SCIENCE = "science"
    LEARNING = "learning"
    SCORING = "scoring"
    PLACE = "place"
    UNKEPT = "unkept"


Learning = Annotated[Type, Role.LEARNING]
Scoring = Annotated[Type, Role.SCORING]
Place = Annotated[Type, Role.PLACE]
Unkept = Annotated[Type, Role.UNKEPT]

_DETAIL = "detail"
Detail = Annotated[Type, _DETAIL]
"""An option that the first screen of help leaves out."""

RESULT = (Role.SCIENCE, Role.LEARNING, Role.SCORING)
"""The roles of the options on which a result depends."""

# Options of which the first replaces the second: only one of them can be given.
ALTERNATIVES = (("significance", "threshold"),)


@dataclass(frozen=True)
class Option:
    """One option, as its dataclass declares it.

    Attributes:
        name: the plain name, without its groups'.
        groups: the fields that lead to it from the outermost dataclass.
        default: as declared; :data:`NEEDED` without one.
        detail: whether it is declared as a :data:`Detail`.
    """

    name: str
    groups: tuple[str, ...]
    hint: Any
    role: Role = Role.SCIENCE
    default: Any = NEEDED
    detail: bool = False

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return flag_of(self.name)


_AT_LEAST = {0: "must not be negative", 1: "must be at least 1"}
_TOO_LARGE = 1 << 63  # fails in tensors, seeds and files
_WITHIN_64_BITS = f"must not be above {_TOO_LARGE - 1}"


class OptionGroup:
    """Base of dataclasses of options; a field of such a type is an inner group.

    Attributes:
        role: of the fields whose declaration names none.
    """

    role: ClassVar[Role] = Role.SCIENCE

    def check(self) -> None:
        """Validate options, those of inner groups as well (InputError)."""
        for group in _groups(self).values():
            group.check()

    def implied(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002
        """The options of this group, or of groups in it, that change with these changes; usually none."""
        return {}

    def unused(self) -> frozenset[str]:
        """The options without effect, such as Adam's with SGD, of resolved options.

        They are not logged as parameters. A group with such options of its own adds them to ``super().unused()``.
        """
        return frozenset[str]().union(*(group.unused() for group in _groups(self).values()))

    @property
    def baseline(self) -> str | None:
        """The baseline that these options ask for in place of a method that is trained by steps; usually none."""
        return next((name for group in _groups(self).values() if (name := group.baseline) is not None), None)

    def require(self, option: str, right: bool, expected: str) -> None:
        """Raise InputError with the option, its value and ``expected``, unless ``right``."""
        if not right:
            value = without_secrets({option: option_values(self)[option]})[option]
            raise InputError(f"{flag_of(option)} {as_text(value)}: {expected}")

    def require_at_least(self, least: int, *options: str) -> None:
        """Raise InputError for the first of these options below ``least``, 0 or 1, or beyond 64 bits; None passes."""
        for option in options:
            value = option_values(self)[option]
            self.require(option, value is None or value >= least, _AT_LEAST[least])
            self.require(option, not isinstance(value, int) or value < _TOO_LARGE, _WITHIN_64_BITS)

    def with_options(self, **changes: Any) -> Self:
        """A copy with these values, in any group."""
        known = options_of(type(self))
        for name in changes:
            if name not in known:
                raise InputError(f"{name}: there is no such option{did_you_mean(name, known)}")
        changed: Self = _changed(self, changes)
        return changed


Group = TypeVar("Group", bound=OptionGroup)


def group(kind: type[Group], **values: Any) -> Group:
    """A field with an inner group at its defaults, but for these values.

    The group's docstring is given as its help, since tyro would search the classes' sources for it at every parse.
    """
    made: Any = dataclasses.field(default_factory=functools.partial(kind, **values), metadata={"help": help_of(kind)})
    return cast(Group, made)


def help_of(kind: type[Any]) -> str:
    """A group's docstring without its attributes."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")[0]


def options_of(kind: type[Any]) -> Mapping[str, Option]:
    """The options of a dataclass and its inner groups, by name."""
    return _options_of(cast(Hashable, kind))


@functools.lru_cache(maxsize=256)
def _options_of(kind: Any) -> Mapping[str, Option]:
    found: dict[str, Option] = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        hint, role = _hint_and_role(hints[field.name], getattr(kind, "role", Role.SCIENCE))
        if isinstance(hint, type) and issubclass(hint, OptionGroup):
            inner = [dataclasses.replace(each, groups=(field.name, *each.groups)) for each in options_of(hint).values()]
        else:
            default = field.default if _is_given(field.default) else NEEDED
            if _is_given(field.default_factory):
                default = cast(Callable[[], Any], field.default_factory)()
            detail = _DETAIL in getattr(hints[field.name], "__metadata__", ())
            inner = [Option(field.name, (), hint, role, default, detail)]
        for option in inner:
            if option.name in found:
                raise InputError(f"{kind.__name__}: {option.flag} is declared twice; remove one")
            found[option.name] = option
    return found


def _hint_and_role(hint: Any, usual: Role) -> tuple[Any, Role]:
    """The type without annotations, and the role among them."""
    if get_origin(hint) is not Annotated:
        return hint, usual
    plain, *annotations = get_args(hint)
    return plain, next((each for each in annotations if isinstance(each, Role)), usual)


def names_of(kind: type[Any], *roles: Role) -> frozenset[str]:
    """The names of the options with one of these roles."""
    return frozenset(name for name, option in options_of(kind).items() if option.role in roles)


def option_values(group: Any) -> dict[str, Any]:
    """The values of all options, by name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        if field.init:
            value = getattr(group, field.name)
            found |= option_values(value) if isinstance(value, OptionGroup) else {field.name: value}
    return found


def science_values(group: Any) -> dict[str, Any]:
    """The values of the options on which a result depends, by name."""
    names = names_of(type(group), *RESULT)
    return {name: value for name, value in option_values(group).items() if name in names}


def defaults_of(kind: type[Any]) -> Any:
    """An instance with the defaults; an option that has none is :data:`NEEDED`."""
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and not _is_given(field.default) and not _is_given(field.default_factory)
    ]
    return kind(**dict.fromkeys(needed, NEEDED))


def _is_given(default: object) -> bool:
    """Whether a field has this default. A class of a notebook has a copy of ``dataclasses.MISSING`` on a worker."""
    return not isinstance(default, type(dataclasses.MISSING))


def from_plain(options: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from Python, JSON, YAML or TOML to the options' types; unknown names are left out.

    A list of names may be one name, and a name a whole number.
    """
    return {name: _from_plain(options[name].hint, value) for name, value in values.items() if name in options}


def _from_plain(hint: Any, value: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if tuple[str, ...] in kinds:
        if isinstance(value, list | tuple):
            return tuple(str(name) if _is_name(name) else name for name in value)
        if _is_name(value):
            return str(value) if str in kinds else (str(value),)
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and Path in kinds and value.strip():
        return path_of(value)
    if isinstance(value, str) and float in kinds and str not in kinds:  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _is_name(value: Any) -> bool:
    """Whether it is a text, or a whole number such as a year, also of NumPy's."""
    return isinstance(value, str | Integral) and not isinstance(value, bool)


def path_of(text: str) -> Path:
    """The path that a user writes: ``~`` is the home folder, also where a shell leaves it (ValueError if empty)."""
    if not text.strip():
        raise ValueError("is empty")
    return Path(os.path.expanduser(text))  # which leaves an unknown ~name, as a shell does


def with_alternatives(names: Iterable[str]) -> set[str]:
    """The options, and those that they replace."""
    given = set(names)
    return given.union(*(pair for pair in ALTERNATIVES if not given.isdisjoint(pair)))


def require_one_way(given: Mapping[str, Any]) -> None:
    """Refuse two given options of which one replaces the other (InputError)."""
    for one, other in ALTERNATIVES:
        if given.get(one) is not None and other in given:
            instead = f"replaces {flag_of(other)}, which is given as {given[other]}; give one of them"
            raise InputError(f"{flag_of(one)} {given[one]}: {instead}")


_LONGEST_SHOWN = 80
# Names of earlier versions and of other libraries (PyTorch, Transformers, Lightning, DomainBed, MLflow), and ours.
_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "learning-rate": ("lr",),
    **dict.fromkeys(("clip-grad-norm", "max-grad-norm", "gradient-clip-val"), ("clip",)),
    "num-workers": ("readers",),
    **dict.fromkeys(("use-gpu", "accelerator", "gpus"), ("device",)),
    **dict.fromkeys(("data-dir", "data-path", "dataset-path"), ("data",)),
    "dtype": ("precision",),
    "algorithm": ("aggregator", "objective"),
    "tau": ("threshold",),
    "run-name": ("name",),
    "experiment-name": ("experiment",),
    "tags": ("tag",),
    "follow": ("wait",),
    "status": ("submissions",),
    "fit": ("train",),
    **dict.fromkeys(("sweep", "search"), ("tune",)),
}


def flag_of(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def shortened(text: str) -> str:
    """A text of any length as an error shows it, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text):,} characters)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean NEAREST?`` if a known name is near, or is called so elsewhere; else nothing."""

    def plain(each: str) -> str:
        return each.lstrip("-").replace("_", "-").lower()  # dashes would make any two flags alike

    names = {plain(each): each for each in known}
    asked = plain(name[:_LONGEST_SHOWN])
    meant = [each for each in _ELSEWHERE.get(asked, ()) if each in names]
    meant = meant or difflib.get_close_matches(asked, names, n=1)
    return f"; did you mean {' or '.join(names[each] for each in meant)}?" if meant else ""


def fits(value: Any, hint: Any) -> bool:
    """Whether the value fits an option of this type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in parts
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in parts)
    if hint in (type(None), bool, str, Path):
        return isinstance(value, hint)
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _TOO_LARGE
        return whole or (hint is float and isinstance(value, float))
    if origin is tuple:
        if isinstance(value, tuple) and parts[1:] == (...,):
            parts = parts[:1] * len(value)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(fits, value, parts))
    return True  # a type of the job's own


def takes_several(hint: Any) -> bool:
    """Whether an option of this type has several values on the command line."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any(get_origin(kind) is tuple for kind in kinds)


def kind_of(hint: Any) -> str:
    """A type of option in words."""
    if get_origin(hint) in (Union, UnionType) and len(some := set(get_args(hint)) - {NoneType}) == 1:
        return kind_of(some.pop())  # None: no value
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if parts[1:] == (...,):
            return f"a list, each {kind_of(parts[0])}"
        return f"a list of {', '.join(map(kind_of, parts))}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return words.get(hint, str(hint))


def choices_of(hint: Any) -> tuple[str, ...]:
    """The values of an option that has some to choose from."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))


def as_text(value: Any) -> str:
    """A value in one text, several values as on the command line: ``west north``."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Options as words of the command line; a secret is one word, which ``redact`` recognizes."""
    words: list[str] = []
    for name, value in values.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        elif is_secret(name) or str(value).startswith("-"):
            words.append(f"{flag}={value}")
        else:
            words += [flag, str(value)]
    return words


def _groups(group: Any) -> dict[str, OptionGroup]:
    values = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    return {name: value for name, value in values.items() if isinstance(value, OptionGroup)}


def _changed(group: Any, changes: Mapping[str, Any]) -> Any:
    changes = {**group.implied(changes), **changes}
    inner: dict[str, dict[str, Any]] = {}
    own = {}
    for name, option in options_of(type(group)).items():
        if name in changes and option.groups:
            inner.setdefault(option.groups[0], {})[name] = changes[name]
        elif name in changes:
            own[name] = changes[name]
    groups = {place: _changed(getattr(group, place), values) for place, values in inner.items()}
    return dataclasses.replace(group, **own, **groups) if own or groups else group
