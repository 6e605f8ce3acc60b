"""The options ``--config FILE``, see :mod:`concord.interface.option_file`, and ``--print-config``."""

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
import yaml

from concord.options import OptionGroup, group, help_of, options_of
from concord.redaction import is_hidden

if TYPE_CHECKING:
    from concord.training import JobFile


@dataclass(frozen=True, kw_only=True)
class ConfigFile(OptionGroup):
    """Options read from a file, and printed as one."""

    # fmt: off
    config: Path | None = None
    """YAML, TOML or JSON file with options by name, or a run's record.json or config.json; options on the command line
    override it."""
    print_config: bool = False
    """Print the options as YAML for --config, and exit."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class WithFile(OptionGroup):
    """The options of a command, and those of its option file."""

    options: OptionGroup
    file: ConfigFile = group(ConfigFile)


def with_file_options(options: OptionGroup) -> WithFile:
    """These options, and ``--config`` and ``--print-config``."""
    kind = make_dataclass(
        "WithFile",
        # Without a name, so that help panels have the names of groups; with its help, as in group().
        [("options", Annotated[type(options), tyro.conf.arg(name="", help=help_of(type(options)))])],
        bases=(WithFile,),
        namespace={"__doc__": type(options).__doc__},
        frozen=True,
        kw_only=True,
    )
    made: WithFile = kind(options=options)
    return made


def print_options(job: "JobFile", options: Any, as_json: bool) -> Mapping[str, Any]:
    """Print the options, see ``--print-config``."""
    from concord.execution.key import recorded_config

    recorded = job.for_command(recorded_config(options))
    if not as_json:
        print(as_yaml(options, recorded), end="")
    return {"job": job.name, "config": recorded}


def as_yaml(options: OptionGroup, recorded: Mapping[str, Any]) -> str:
    """Options in the form of ``--config``, by group; those without a recorded value, and secrets, are left out."""
    lines: list[str] = []
    group: tuple[str, ...] = ()
    for name, option in options_of(type(options)).items():
        if name not in recorded or is_hidden(recorded[name]):
            continue
        if option.groups != group:
            group = option.groups
            lines.append(f"# {' '.join(group).replace('_', ' ')}\n")
        value = recorded[name]
        # Readers of YAML 1.1 take this form, too.
        lines.append(yaml.safe_dump({name: list(value) if isinstance(value, tuple) else value}, width=10_000))
    return "".join(lines)
