"""Reads a command's options from a file: YAML, TOML or JSON, or the record of a run."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from concord.errors import InputError
from concord.options import OptionGroup, did_you_mean, fits, from_plain, kind_of, options_of, shortened
from concord.redaction import is_hidden
from concord.training.rule_file import RuleFile

Options = TypeVar("Options", bound=OptionGroup)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of these names, none of them twice (ValueError)."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = value
    return values


def _yaml(text: str) -> Any:
    """A value in YAML 1.2, in which ``1:30`` and ``NO`` are text and ``010`` is ten (ValueError)."""
    from ruamel.yaml import YAML  # takes a seventh of a second
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:  # its text tells how to allow it
        raise ValueError(f"{str(error.problem).split(chr(34))[1]} is given twice") from error
    except MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        raise ValueError(
            f"{error.problem or error.context}" + ("" if at is None else f", line {at.line + 1}")
        ) from error
    except YAMLError as error:
        raise ValueError(str(error)) from error


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": partial(json.loads, object_pairs_hook=_once),
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
# A file of options has at most some hundred values.
_MOST_BYTES, _MOST_VALUES = 1 << 20, 100_000


@dataclass(frozen=True)
class FileOptions:
    """The options in a file.

    Attributes:
        rule: the user's own rule that it names, which is not among the values; None if it names none.
        sources: from a run's record, the texts of files that its options name.
    """

    path: Path
    values: Mapping[str, Any]
    rule: str | None
    sources: Mapping[str, str]

    @staticmethod
    def read(path: Path) -> "FileOptions":
        """Read a file of options, or a run's record."""
        values, sources = read_mapping(path), {}
        if {"job", "config"} <= values.keys() and isinstance(values["config"], dict):  # a run's record
            values, sources = values["config"], values.get("sources", {})
        try:
            named = _once([(str(name).replace("-", "_"), value) for name, value in values.items()])
        except ValueError as error:
            raise InputError(f"--config {path}: {error}") from None
        values = {name: value for name, value in named.items() if not is_hidden(value)}
        rule = values.pop("aggregator") if RuleFile.is_reference(str(values.get("aggregator"))) else None
        return FileOptions(path, values, rule, sources)

    def over(self, defaults: Options) -> Options:
        """These options with the values of the file."""
        known = options_of(type(defaults))
        for name in self.values:
            if name not in known:
                near = did_you_mean(name, known)
                raise InputError(f"--config {self.path}: {shortened(name)}: there is no such option{near}")
        values = from_plain(known, self.values)
        for name, value in values.items():
            if not fits(value, known[name].hint):
                given = self.values[name]
                shown = shortened(given if isinstance(given, str) else json.dumps(given, default=str))
                raise InputError(f"--config {self.path}: {name} {shown}: must be {kind_of(known[name].hint)}")
        return defaults.with_options(**values)


def read_mapping(path: Path, option: str = "--config") -> dict[str, Any]:
    """The mapping in a YAML, TOML or JSON file that an option names (InputError if it has none)."""
    if path.suffix not in _READERS:
        raise InputError(f"{option} {path}: has an unknown ending; give a .yaml, .toml or .json file")
    if not path.is_file():
        raise InputError(f"{option} {path}: {'is not a file' if path.exists() else 'there is no such file'}")
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"has {size:,} bytes; a file of options has at most {_MOST_BYTES:,}")
        values = _READERS[path.suffix](path.read_text(encoding="utf-8"))
        _require_few(values)
    except RecursionError:
        raise InputError(f"{option} {path}: cannot be read (nests too deeply)") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{option} {path}: cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict | None):
        raise InputError(f"{option} {path}: holds {type(values).__name__}; expected a mapping of options by name")
    return values or {}


def _require_few(values: Any) -> None:
    """Refuse too many values (ValueError): aliases of YAML can repeat a few without end."""
    left, count = [values], 0
    while left:
        each = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise ValueError(f"holds more than {_MOST_VALUES:,} values, with each alias counted as often as it stands")
        if isinstance(each, dict | list):
            left += each.values() if isinstance(each, dict) else each
