"""The names of environments, and the purpose of each; a module of its own, which needs no PyTorch."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from concord.errors import ArgumentError, InputError
from concord.options import shortened

_EXPECTED_NAMES = "must be a list of names, such as ['north', 'south']"


def environment_names(argument: str, given: Iterable[Any]) -> tuple[str, ...]:
    """The names of environments in an argument; refuse other values (InputError)."""
    for name in (names := _listed(argument, given)):
        if not isinstance(name, str) or not name.strip():
            raise ArgumentError(argument, shortened(str(name)) or repr(name), _EXPECTED_NAMES)
        if name.encode(errors="replace").decode() != name:  # of a file, by os.fsdecode
            raise InputError(f"environment {name}: its name is not UTF-8; rename it")
    return tuple(map(str, names))


def _listed(argument: str, given: Iterable[Any]) -> tuple[Any, ...]:
    """The values of an argument; those of a set in order, which differs between processes (InputError)."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ArgumentError(argument, given, _EXPECTED_NAMES)
    return tuple(sorted(given, key=str) if isinstance(given, set | frozenset) else given)


def require_names(names: Iterable[str], known: Iterable[str], option: str | None = None) -> None:
    """Refuse the name of an unknown environment (InputError); ``option`` is the argument that has the names."""
    known = list(known)
    for name in names:
        if name not in known:
            shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
            if option is not None:
                raise ArgumentError(option, name, f"there is no such environment; there are {shown}")
            raise InputError(f"environment {name}: there is none of this name; there are {shown}")


def purposes_of(
    known: Iterable[str], validation: Iterable[Any], test: Iterable[Any], *, options: bool = False
) -> dict[str, tuple[str, ...]]:
    """The environments of each purpose: those that are named, and all others to train on.

    Names may be given as numbers, and one alone. Refuses unknown ones, and those that are named twice (InputError), as
    the values of options with ``options``.
    """
    known = tuple(known)
    validation, test = (
        (str(names),) if isinstance(names, str | Integral) else tuple(map(str, _listed(argument, names)))
        for argument, names in (("validation", validation), ("test", test))
    )
    require_names(validation, known, "validation" if options else None)
    require_names(test, known, "test" if options else None)
    for name in (*validation, *test):
        if name in validation and name in test:
            where = f"--test {name}" if options else "test"
            raise ArgumentError(
                "validation", name, f"is also in {where}; an environment has one purpose, leave out one"
            )
        for option, names in (("validation", validation), ("test", test)):
            if names.count(name) > 1:
                raise ArgumentError(option, names, f"{name} is named twice; name it once")
    train = tuple(name for name in known if name not in {*validation, *test})
    return {"train": train, "validation": validation, "test": test}
