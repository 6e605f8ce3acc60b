"""The search space of a study: which options of a job are varied, from what, and under which condition.

A space maps names to domains. ``Choice``, ``Uniform``, ``LogUniform`` and ``Integers`` vary an option, ``OneOf`` picks
one of several branches, each with a space of its own, and a plain value fixes an option::

    Space(
        {
            "lr": LogUniform(1e-4, 1.0),
            "regularizer": OneOf(  # no option of this name: a switch
                {
                    "none": {"l1": 0.0, "l2": 0.0},
                    "l1": {"l1": Choice(1e-6, 1e-5, 1e-4), "l2": 0.0},
                    "l2": {"l1": 0.0, "l2": Choice(1e-5, 1e-4, 1e-3)},
                }
            ),
        }
    )

A *point* of a space holds the chosen values, switches included: ``{"lr": 0.01, "regularizer": "l1", "l1": 1e-5}``.
The same form as JSON (and TOML) is ``{"lr": {"log-uniform": [1e-4, 1]}, "batch_size": [64, 128], "dropout": 0.0,
"regularizer": {"one-of": {"none": {…}, …}}}``.
"""

import itertools
import math
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Union

from concord.errors import InputError, first_line

Value = Union[bool, int, float, str, None, tuple["Value", ...]]  # noqa: UP007
Point = dict[str, Value]


@dataclass(frozen=True, init=False)
class Choice:
    """One of these values, each as likely as the others."""

    values: tuple[Value, ...]

    def __init__(self, *values: Value) -> None:
        object.__setattr__(self, "values", tuple(map(frozen, values)))


@dataclass(frozen=True)
class Uniform:
    """A number between ``low`` and ``high``."""

    low: float
    high: float


@dataclass(frozen=True)
class LogUniform:
    """A number between ``low`` and ``high``, both above 0, its logarithm uniform."""

    low: float
    high: float


@dataclass(frozen=True)
class Integers:
    """A whole number from ``low`` to ``high``, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class OneOf:
    """One of these branches, by name; each maps names to domains and fixed values, as a space does."""

    branches: Mapping[str, Mapping[str, "Entry"]]


Domain = Choice | Uniform | LogUniform | Integers
Entry = Union[Domain, OneOf, Value]  # noqa: UP007
Entries = Mapping[str, Entry]
_ALWAYS: Mapping[str, str] = MappingProxyType({})  # the conditions of entries outside of branches
# The names of domains with two bounds, in JSON.
_BOUNDED = {"uniform": Uniform, "log-uniform": LogUniform, "integers": Integers}


@dataclass(frozen=True)
class Located:
    """A domain, the switch of a ``OneOf``, or a fixed value, with its place in the space.

    Attributes:
        label: unique in the space, such as ``regularizer=l1/l1``.
        name: the option or the switch.
        conditions: the values of switches under which the entry is active.
    """

    label: str
    name: str
    entry: Entry
    conditions: Mapping[str, str]

    @property
    def varied(self) -> bool:
        """Whether it is not fixed."""
        return isinstance(self.entry, OneOf | Domain)

    @property
    def domain(self) -> Domain:
        """The domain; of a switch the names of its branches."""
        assert isinstance(self.entry, OneOf | Domain)
        return Choice(*self.entry.branches) if isinstance(self.entry, OneOf) else self.entry

    def active(self, point: Point) -> bool:
        """Whether the switches of this point have chosen its branch."""
        return all(point.get(switch) == branch for switch, branch in self.conditions.items())


@dataclass(frozen=True)
class Space:
    """A search space.

    Raises:
        InputError: the space contradicts itself, or a domain is empty.
    """

    entries: Mapping[str, Entry]

    def __post_init__(self) -> None:
        _check(self.entries, ())

    def located(self) -> list[Located]:
        """Every entry, a switch before its branches' entries."""
        return list(_located(self.entries))

    def varied(self, name: str | None = None) -> list[Located]:
        """Every domain and switch, or those of this name."""
        return [each for each in self.located() if each.varied and name in (None, each.name)]

    def varied_entries(self) -> list[str]:
        """The names of the entries that are not fixed; a switch stands for all in its branches."""
        return [name for name, entry in self.entries.items() if isinstance(entry, OneOf | Domain)]

    def names(self) -> set[str]:
        """Every option and switch in the space, fixed ones included."""
        return {each.name for each in self.located()}

    def active(self, point: Point) -> Iterator[Located]:
        """The active domains at this point (InputError if a value is missing, unknown, or outside of its domain)."""
        seen = set()
        for located in self.varied():
            if not located.active(point):
                continue
            if located.name not in point:
                raise InputError(f"{located.name}: is missing; the point is {format_point(point)}")
            if not contains(located.domain, point[located.name]):
                right = describe(located.domain)
                raise InputError(f"{located.name} {point[located.name]}: is not in the space, which has {right}")
            seen.add(located.name)
            yield located
        fixed = self.fixed(point)
        for name in point:
            if name not in seen and (name not in fixed or fixed[name] != point[name]):
                right = f"it is fixed to {fixed[name]}" if name in fixed else "is not in the space at this point"
                raise InputError(f"{name} {point[name]}: {right}")

    def fixed(self, point: Point) -> Point:
        """The active fixed values at this point."""
        active = (each for each in self.located() if each.active(point))
        return {each.name: each.entry for each in active if not isinstance(each.entry, OneOf | Domain)}

    def grid(self) -> list[Point]:
        """Every point of the space (InputError if a domain is continuous)."""
        return list(_grid(self.entries))

    def filtered(self, keep: Callable[[str, Entry], bool]) -> "Space":
        """The space with only these entries, in any branch; a branch is filtered before its switch."""
        return Space(_filtered(self.entries, keep))

    def without(self, names: Collection[str]) -> "Space":
        """The space without these options, in any branch."""
        return self.filtered(lambda name, _: name not in names)

    def replacing(self, entries: Mapping[str, Entry]) -> "Space":
        """The space with these entries in place of those of the same names, in any branch."""
        return Space({**self.without(entries).entries, **entries})

    def as_json(self) -> dict[str, Any]:
        """The space as JSON; :meth:`from_json` reads it."""
        return _as_json(self.entries)

    @staticmethod
    def from_json(entries: Mapping[str, Any]) -> "Space":
        """A space from its form as JSON or TOML."""
        return Space({name: _entry(name, value) for name, value in entries.items()})

    @staticmethod
    def read(path: Path) -> "Space":
        """A space from a TOML file."""
        try:
            entries = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"--space {path}: cannot be read as TOML ({first_line(error)})") from error
        try:
            return Space.from_json(entries)
        except InputError as error:
            raise InputError(f"--space {path}: {str(error).removeprefix('space: ')}") from error


def contains(domain: Domain, value: Value) -> bool:
    """Whether the value is in the domain."""
    if isinstance(domain, Choice):
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in domain.values)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return domain.low <= value <= domain.high and not (isinstance(domain, Integers) and value != int(value))


def describe(domain: Domain) -> str:
    """The domain in words, for a message."""
    if isinstance(domain, Choice):
        return "one of " + ", ".join(map(str, domain.values))
    kind = {Uniform: "a number", LogUniform: "a number", Integers: "a whole number"}[type(domain)]
    return f"{kind} from {domain.low:g} to {domain.high:g}"


def format_point(point: Mapping[str, Value]) -> str:
    """A point in one line."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in point.items()
    )


def parse_entry(name: str, text: str, words: Sequence[Value] = ()) -> Entry:
    """Parse a domain of the command line: ``1e-4``, ``64,128``, ``uniform:0:1``, ``log:1e-4:1``, ``int:1:5``.

    Other text with a colon is a value, such as ``ema:0.9``, unless it has the form of a domain, as ``normal:0:1`` has.
    ``words`` are values that stay text, such as ``none`` if that is a choice of the option.
    """
    try:
        entry = _parsed(name, text, words)
        Space({name: entry})
    except InputError as error:
        raise InputError(f"--vary {name}={text}: {str(error).removeprefix(f'space: {name}: ')}") from error
    return entry


def as_python(value: Any) -> Any:
    """A number or an array of NumPy's, torch's or pandas' as Python's; other values as they are."""
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", 2) < 2 else value


def format_entry(name: str, entry: Entry | Sequence[Value]) -> str:
    """A domain as the command line takes it, ``lr=log:0.0001:1.0``; a list is a choice. :func:`parse_entry` reads it.

    Raises:
        InputError: the domain has no such form: branches, or values that are lists or have a comma or colon.
    """
    kinds = {Uniform: "uniform", LogUniform: "log", Integers: "int"}
    if isinstance(entry, Uniform | LogUniform | Integers):
        return f"{name}={kinds[type(entry)]}:{as_python(entry.low)!r}:{as_python(entry.high)!r}"
    given: Any = as_python(entry.values if isinstance(entry, Choice) else entry)
    values = [as_python(value) for value in (given if isinstance(given, list | tuple | range | set) else [given])]
    for value in values:
        if not isinstance(value, bool | int | float | str | None) or {*str(value)} & {*",:= "}:
            right = (
                "give [16, 32], Uniform, LogUniform, Integers or Choice; other spaces are TOML files, given as space"
            )
            raise InputError(f"vary {name}: {value!r:.80} has no form in one line; {right}")
    return f"{name}={','.join(map(str, values))}"


def _parsed(name: str, text: str, words: Sequence[Value]) -> Entry:
    kind, *given = text.split(":")
    bounds = [literal(bound) for bound in given]
    kinds = {"uniform": "uniform", "log": "log-uniform", "log-uniform": "log-uniform", "int": "integers"}
    if kind in kinds and len(bounds) == 2:
        return _entry(name, {kinds[kind]: bounds})
    numbers = [type(bound) in (int, float) for bound in (literal(kind), *bounds)]
    if (len(bounds) == 2 and all(numbers[1:])) or (bounds and (kind in kinds or all(numbers))):
        raise InputError("give values as 64,128, or uniform:LOW:HIGH, log:LOW:HIGH or int:LOW:HIGH")
    values = [literal(word.strip(), words) for word in text.split(",")]
    return _entry(name, values if len(values) > 1 else values[0])


def literal(text: str, words: Sequence[Value] = ()) -> Value:
    """Parse a single value of the command line; text if it is one of ``words`` or nothing else fits."""
    if text in words:
        return text
    names: dict[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in names:
        return names[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def frozen(value: Any) -> Value:
    """A value as in points: tuples in place of JSON's lists."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def _has_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_has_mapping, value)))


def _entry(name: str, value: Any) -> Entry:
    """One entry from its form as JSON."""
    if isinstance(value, list):
        if _has_mapping(value):
            raise InputError(f"space: {name}: expected plain values, or one-of with branches; found {value}")
        return Choice(*value)
    if not isinstance(value, Mapping):
        return frozen(value)
    kinds = (*_BOUNDED, "one-of", "fixed")
    if len(value) != 1 or next(iter(value)) not in kinds:
        raise InputError(f"space: {name}: expected one of {', '.join(kinds)}, found {', '.join(map(str, value))}")
    kind, given = next(iter(value.items()))
    if kind == "fixed":
        if _has_mapping(given):
            raise InputError(f"space: {name}: fixed {given}: give a plain value")
        return frozen(given)
    if kind == "one-of":
        if not isinstance(given, Mapping) or not all(isinstance(branch, Mapping) for branch in given.values()):
            raise InputError(f"space: {name}: one-of maps the names of branches to their entries")
        return OneOf(
            {
                branch: {inner: _entry(f"{name}={branch}/{inner}", entry) for inner, entry in entries.items()}
                for branch, entries in given.items()
            }
        )
    numbers = isinstance(given, list) and len(given) == 2
    if not numbers or any(isinstance(bound, bool) or not isinstance(bound, (int, float)) for bound in given):
        raise InputError(f"space: {name}: {kind} {given}: give the two numbers LOW and HIGH")
    low, high = given
    if kind == "integers":
        if not (math.isfinite(low) and math.isfinite(high)) or low != int(low) or high != int(high):
            raise InputError(f"space: {name}: integers {low} {high}: give whole numbers")
        return Integers(int(low), int(high))
    return Uniform(float(low), float(high)) if kind == "uniform" else LogUniform(float(low), float(high))


def _as_json(entries: Mapping[str, Entry]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for name, entry in entries.items():
        if isinstance(entry, Choice):
            written[name] = [list(value) if isinstance(value, tuple) else value for value in entry.values]
        elif isinstance(entry, OneOf):
            written[name] = {"one-of": {branch: _as_json(inner) for branch, inner in entry.branches.items()}}
        elif isinstance(entry, Domain):
            kind = next(name for name, each in _BOUNDED.items() if isinstance(entry, each))
            written[name] = {kind: [entry.low, entry.high]}
        else:
            written[name] = {"fixed": list(entry)} if isinstance(entry, tuple) else entry
    return written


def _check(entries: Mapping[str, Entry], outer: tuple[str, ...]) -> None:
    for name, entry in entries.items():
        if name in outer:
            raise InputError(f"space: {name} appears twice, outside and inside a branch")
        if isinstance(entry, Choice):
            if not entry.values:
                raise InputError(f"space: {name}: a choice needs at least one value")
            if len({(isinstance(value, bool), value) for value in entry.values}) < len(entry.values):
                raise InputError(f"space: {name}: {describe(entry)}: a value appears twice")
        elif isinstance(entry, OneOf):
            if not entry.branches:
                raise InputError(f"space: {name}: one-of needs at least one branch")
            for branch in entry.branches.values():
                # A name in this branch must not appear outside; the same name in another branch is another domain.
                elsewhere = [other for other in entries if other != name]
                _check(branch, (*outer, *elsewhere, name))
        elif isinstance(entry, Domain):
            if not (math.isfinite(entry.low) and math.isfinite(entry.high) and entry.low < entry.high):
                raise InputError(f"space: {name}: from {entry.low} to {entry.high}: must be finite, the first smaller")
            if isinstance(entry, LogUniform) and entry.low <= 0:
                raise InputError(f"space: {name}: log-uniform from {entry.low}: must be above 0")
    switches = [(name, entry) for name, entry in entries.items() if isinstance(entry, OneOf)]
    for (first, one), (second, other) in itertools.combinations(switches, 2):
        for shared in {each.name for each in _located({first: one})} & {
            each.name for each in _located({second: other})
        }:
            raise InputError(f"space: {shared} appears twice, in the branches of {first} and of {second}")


def _located(entries: Entries, prefix: str = "", conditions: Mapping[str, str] = _ALWAYS) -> Iterator[Located]:
    for name, entry in entries.items():
        label = prefix + name
        yield Located(label, name, entry, conditions)
        if isinstance(entry, OneOf):
            for branch, inner in entry.branches.items():
                yield from _located(inner, f"{label}={branch}/", {**conditions, name: branch})


def _grid(entries: Mapping[str, Entry]) -> Iterator[Point]:
    axes: list[Sequence[Point]] = []
    for name, entry in entries.items():
        if isinstance(entry, OneOf):
            axes.append([{name: key, **point} for key, branch in entry.branches.items() for point in _grid(branch)])
        elif isinstance(entry, Choice):
            axes.append([{name: value} for value in entry.values])
        elif isinstance(entry, Integers):
            axes.append([{name: value} for value in range(entry.low, entry.high + 1)])
        elif isinstance(entry, Domain):
            raise InputError(f"--search grid: {name} is {describe(entry)}; list its values, as in --vary {name}=1,2,3")
    for parts in itertools.product(*axes):
        yield {name: value for part in parts for name, value in part.items()}


def _filtered(entries: Entries, keep: Callable[[str, Entry], bool]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        if isinstance(entry, OneOf):
            entry = OneOf({branch: _filtered(inner, keep) for branch, inner in entry.branches.items()})
        if keep(name, entry):
            found[name] = entry
    return found
