"""``--config FILE`` and ``--print-config``: a run's options from a file, and as one."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml

from concord.cli.parsing import option_value, with_own_rule, without_options
from concord.errors import InputError
from concord.options import (
    OptionGroup,
    as_words,
    did_you_mean,
    fits,
    from_plain,
    kind_of,
    option_values,
    options_of,
)
from concord.redaction import is_hidden

Options = TypeVar("Options", bound=OptionGroup)

# A run's own; another run has others.
_OF_ONE_RUN = frozenset({"name", "resume"})


@dataclass(frozen=True, kw_only=True)
class ConfigFile(OptionGroup):
    """Options from a file, and as one."""

    # fmt: off
    config: Path | None = None
    """YAML, TOML or JSON file with options by their names, or a run's run.json or config.json; what is given on the
    command line counts before it."""
    print_config: bool = False
    """Print the options as YAML, in the form that --config takes, and do nothing else."""
    # fmt: on


@dataclass(frozen=True)
class FileOptions:
    """What a file says.

    Attributes:
        path: the file.
        values: options by name.
        rule: the rule of the user's own that a run's record names, None if it names none.
        sources: of the record: texts of the user's files that its options name.
    """

    path: Path
    values: Mapping[str, Any]
    rule: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def over(self, defaults: Options) -> Options:
        """The options with those of the file.

        Raises:
            InputError: one of them does not exist, or has a value that it does not take.
        """
        known = options_of(type(defaults))
        for name in self.values:
            if name not in known:
                raise InputError(f"--config {self.path}: {name}: there is no such option{did_you_mean(name, known)}")
        values = from_plain(known, self.values)
        for name, value in values.items():
            if not fits(value, known[name].hint):
                raise InputError(f"--config {self.path}: {name} {value}: must be {kind_of(known[name].hint)}")
        return defaults.with_options(**values)

    def as_record(self) -> Mapping[str, Any] | None:
        """What a file that is a run's record says of a rule of the user's own."""
        if self.rule is None:
            return None
        return {"config": {"aggregator": self.rule}, "sources": self.sources}


def file_as_words(job: Any, words: Sequence[str], defaults_for: Callable[[Any], OptionGroup]) -> tuple[Any, list[str]]:
    """The job with the rule of the user's own, and the words with those that the file of ``--config`` stands for.

    Args:
        job: the job with its file.
        words: the options.
        defaults_for: gives a command's options with a job, at their defaults.

    Raises:
        InputError: the file or the rule cannot be used.
    """
    file, words = file_options(words)
    job, words = with_own_rule(job, words, file.as_record() if file is not None else None)
    if file is None:
        return job, words
    defaults = defaults_for(job)
    usual = option_values(defaults)
    changed = {name: value for name, value in option_values(file.over(defaults)).items() if value != usual[name]}
    return job, [*as_words(changed), *without_options(words, ("--config",))]


def file_options(words: Sequence[str]) -> tuple[FileOptions | None, list[str]]:
    """What the file of ``--config`` says, and the words; with ``--aggregator`` where the file names a rule by its file.

    Raises:
        InputError: it cannot be read, or is no mapping of options.
    """
    from concord.aggregation.rule_file import RuleFile

    given = option_value(words, "--config")
    if given is None:
        return None, list(words)
    if not given or given.startswith("--"):
        raise InputError("--config: needs a value, a YAML, TOML or JSON file")
    path = Path(given)
    values = _read(path)
    sources: Mapping[str, str] = {}
    if {"job", "config"} <= values.keys() and isinstance(values["config"], dict):  # a run's record
        sources, values = values.get("sources", {}), values["config"]
    if path.suffix == ".json":
        values = {name: value for name, value in values.items() if name not in _OF_ONE_RUN}
    values = {str(name).replace("-", "_"): value for name, value in values.items() if not is_hidden(value)}
    rule = str(values.get("aggregator"))
    if not RuleFile.is_reference(rule):
        return FileOptions(path, values), list(words)
    del values["aggregator"]  # the words say it, or the record's text of the rule's file is taken
    if sources:
        return FileOptions(path, values, rule, sources), list(words)
    told = option_value(words, "--aggregator") is not None
    return FileOptions(path, values), [*words, *([] if told else ["--aggregator", rule])]


def _read(path: Path) -> dict[str, Any]:
    readers = {".json": json.loads, ".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    if path.suffix not in readers:
        raise InputError(f"--config {path}: is read by its ending; expected .yaml, .toml or .json")
    try:
        values = readers[path.suffix](path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--config {path}: there is no such file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: cannot be read ({' '.join(str(error).split())})") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: holds {type(values).__name__}; expected options by their names")
    return values


@dataclass(frozen=True, kw_only=True)
class WithFile(OptionGroup):
    """Options of a command, and those for a file of them."""

    options: OptionGroup
    file: ConfigFile = field(default_factory=ConfigFile)


def with_file_options(options: OptionGroup) -> WithFile:
    """These options, and ``--config`` and ``--print-config``."""
    kind = make_dataclass(
        "WithFile",
        # Without a name, so that panels are called by the groups alone.
        [("options", Annotated[type(options), tyro.conf.arg(name="")])],
        bases=(WithFile,),
        namespace={"__doc__": type(options).__doc__},
        frozen=True,
        kw_only=True,
    )
    made: WithFile = kind(options=options)
    return made


def print_options(job: str, options: Any, as_json: bool) -> Mapping[str, Any]:
    """What ``--print-config`` does."""
    from concord.runs.folder import recorded_config

    recorded = recorded_config(options)
    if not as_json:
        print(as_yaml(options, recorded), end="")
    return {"job": job, "config": recorded}


def as_yaml(options: OptionGroup, recorded: Mapping[str, Any]) -> str:
    """Options in the form that ``--config`` takes, those of a group together.

    Args:
        options: the options.
        recorded: their values as they are recorded; others are left out, and so are secrets.
    """
    lines: list[str] = []
    group: tuple[str, ...] = ()
    for name, option in options_of(type(options)).items():
        if name not in recorded or is_hidden(recorded[name]) or (name in _OF_ONE_RUN and not recorded[name]):
            continue
        if option.groups != group:
            group = option.groups
            lines.append(f"# {' '.join(group).replace('_', ' ')}\n")
        value = recorded[name]
        lines.append(yaml.safe_dump({name: list(value) if isinstance(value, tuple) else value}, width=10_000))
    return "".join(lines)
