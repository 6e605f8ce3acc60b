"""Reads the options of a command on a job from words."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from concord.cli.help import job_help
from concord.cli.parsing import asks_for_help, given_options, parse
from concord.errors import InputError
from concord.options import flag_of, option_values, options_of

if TYPE_CHECKING:
    from concord.interface.command_options import JobCommand

# The options that decide which other options there are, and their values without words.
_EARLY = ("config", "output", "name", "aggregator", "tracking-patience")


def read_command(
    name: str, job: Any, words: Sequence[str], program: str, around: type[Any] | None = None
) -> "JobCommand":
    """A command from its words; ``program`` is the command with its job, for help and errors.

    ``around`` has the options of a command that sends this one to a cluster, where the record of an earlier run or
    study is.
    """
    from concord.cli.config_file import with_file_options
    from concord.interface.command_options import start_of
    from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS
    from concord.training.options import TrainConfig

    tables, words = tables_and_options(words) if name == "compare" else ([], list(words))
    early = early_values(words)
    if early.get("config") is not None and not early["config"].strip():
        raise InputError("--config: needs a value; give a YAML, TOML or JSON file")
    early["resume"] = "--resume" in words
    if asks_for_help(words) or around is not None:
        early["name"] = None
    start = start_of(name, job, early, tables)
    words = with_canonical_rule(start.job, words)
    lacking = given_options(TrainConfig, words) - options_of(type(start.options)).keys()
    if job.job.loop is not None and lacking:
        flags = ", ".join(sorted(map(flag_of, lacking)))
        raise InputError(f"{flags}: job {job.name} has its own loop, without this; {program} --help lists its options")
    program = f"{program} {tables[0]}" if tables and tables[0] in (METHODS, LEAVE_ONE_OUT) else program
    options = with_file_options(start.options)
    brief = partial(job_help, name, start.job, tables, program, options)
    parsed = parse(type(options), words, program, options, brief, around)
    values = option_values(parsed.options)
    given = given_options(type(start.options), words)
    command = start.with_values({each: values[each] for each in given})
    return replace(command, print_config=parsed.file.print_config)


def tables_and_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first option, and the rest."""
    at = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:at]), list(words[at:])


def early_values(words: Sequence[str]) -> dict[str, Any]:
    """The values of options that decide the job's other options; None for one that is not given."""
    return vars(_parser(_EARLY).parse_known_args(list(words))[0])


def with_canonical_rule(job: Any, words: Sequence[str]) -> list[str]:
    """The words with the canonical name of the user's own rule, if they name it."""
    early, others = _parser(["aggregator"]).parse_known_args(list(words))
    if job.rule is None or early.aggregator is None:
        return list(words)
    return [*others, "--aggregator", job.rule.reference]


def _parser(options: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        parser.add_argument(f"--{option}", nargs="?", const="")
    return parser
