"""The options of a job's command, from defaults, a record, a file and the command line."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from concord.cli.help import job_help
from concord.cli.parsing import given_options, parse
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.options import as_words, option_values, path_of
from concord.storage import check_address, resolve

Record = Mapping[str, Any]


@dataclass(frozen=True)
class JobCommand:
    """A command on a job, with its options.

    Attributes:
        name: train, tune or compare.
        job: the job with its file; with the user's own rule its options have the rule's fields.
        tables: the tables given to ``compare``.
        given: the options from the command line, the file or the record of a continued study.
        sources: of the given options that are not on the command line, `` in FILE`` or `` of the study NAME``.
    """

    name: str
    job: Any
    tables: Sequence[str]
    options: Any
    given: frozenset[str]
    print_config: bool
    sources: Mapping[str, str] = field(default_factory=dict)

    def given_values(self) -> dict[str, Any]:
        """The given options with their values."""
        return {name: value for name, value in option_values(self.options).items() if name in self.given}

    def words(self) -> list[str]:
        """The given options as words of the command line."""
        return as_words(self.given_values())


def read_command(
    name: str,
    job: Any,
    words: Sequence[str],
    program: str,
    earlier: Callable[[Path, str, Sequence[str]], Record | None] | None = None,
) -> JobCommand:
    """A command's options: the words override the file, which overrides the record of a resumed run or study.

    ``earlier(output, name, words)`` returns that record, if there is one.
    """
    from concord.cli.config_file import FileOptions, with_file_options
    from concord.runs.spec import restored_config
    from concord.studies.comparison_plan import LEAVE_ONE_OUT, METHODS, comparisons_of

    tables, words = tables_and_options(words) if name == "compare" else ([], list(words))
    early = _early_values(words, "config", "output", "name")[0]
    if early.config is not None and not early.config.strip():
        raise InputError("--config: needs a value; give a YAML, TOML or JSON file")
    file = None if early.config is None else FileOptions.read(path_of(early.config))
    in_file = {} if file is None else {name: value for name, value in file.values.items() if isinstance(value, str)}
    output, run = early.output or in_file.get("output"), early.name or in_file.get("name")
    record = earlier(_output(output), run, words) if earlier and run else None
    job, words = with_own_rule(job, words, record, file)
    defaults = options = default_options(name, job, program.removeprefix("concord "), tables)
    if record is not None:
        recorded = dict(record["config"])
        if _early_values(words, "aggregator")[0].aggregator is not None:
            recorded.pop("aggregator", None)
        options = restored_config(options, recorded, f"--name {run}: record.json")
        options = options.with_options(output=_output(output))  # it may have been moved
    if file is not None:
        options = file.over(options)
    program = f"{program} {tables[0]}" if tables and tables[0] in (METHODS, LEAVE_ONE_OUT) else program
    command = with_file_options(options)
    parsed = parse(type(command), words, program, command, partial(job_help, name, job, tables, program, command))
    if name == "compare" and not {METHODS, LEAVE_ONE_OUT} & {*tables}:
        comparisons_of(job)  # refuses a job without tables
    sources = dict.fromkeys(record.get("given", ()), f" of the study {run}") if record else {}
    if file is not None:  # a default value does not fix the option
        usual, values = option_values(defaults), option_values(file.over(defaults))
        sources |= {each: f" in {file.path}" for each, value in values.items() if value != usual[each]}
    of_words = given_options(type(options), words)
    given = frozenset(of_words | sources.keys())
    sources = {each: source for each, source in sources.items() if each not in of_words}
    return JobCommand(name, job, tables, parsed.options, given, parsed.file.print_config, sources)


def default_options(command: str, job: Any, called: str, tables: Sequence[str] = ()) -> Any:
    """The options of a command with this job, at their defaults (InputError if it does not apply to the job)."""
    from concord.studies.study_options import compare_options_for, options_for

    if command == "train":
        return job.job.config
    if command == "tune":
        return options_for(job.job.config, list(job.job.studies))
    from concord.studies.comparison_plan import LEAVE_ONE_OUT, METHODS
    from concord.studies.leave_one_out import leave_one_out_options_for
    from concord.studies.methods import methods_options_for

    for name, options_of_name in ((METHODS, methods_options_for), (LEAVE_ONE_OUT, leave_one_out_options_for)):
        if name in tables:
            if len(tables) > 1:
                raise InputError(f"{called} {' '.join(tables)}: {name} is not a table of the job; give it alone")
            return options_of_name(job)
    return compare_options_for(job.job.config)


def tables_and_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first option, and the rest."""
    at = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:at]), list(words[at:])


def with_own_rule(
    job: Any, words: Sequence[str], record: Record | None = None, file: Any = None
) -> tuple[Any, list[str]]:
    """The job with the user's own rule, whose fields are options, and the words with the rule's canonical name.

    The words name the rule, or the record of a resumed run or study, or the file of ``--config``. Without an own rule
    both are unchanged.
    """
    from concord.training.job import with_recorded_rule, with_rule
    from concord.training.rule_file import RuleFile

    early, others = _early_values(words, "aggregator")
    named = early.aggregator
    if named is None and file is not None and not file.sources:
        named = file.rule
    if named is not None:
        if not RuleFile.is_reference(named):
            return job, list(words)
        job = with_rule(job, RuleFile.read(named))
        return job, [*others, "--aggregator", job.rule.reference]
    recorded, sources = (None, {}) if file is None else (file.rule, file.sources)
    if record is not None:
        recorded, sources = record["config"].get("aggregator"), record.get("sources", {})
    return with_recorded_rule(job, recorded, sources), list(words)


def _early_values(words: Sequence[str], *options: str) -> tuple[argparse.Namespace, list[str]]:
    """The values of options that decide the job's other options, and the remaining words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        parser.add_argument(f"--{option}", nargs="?", const="")
    return parser.parse_known_args(list(words))


def _output(given: str | None) -> Path:
    """The output folder, before the options are parsed."""
    output = path_of(given) if given is not None and given.strip() else DEFAULT_OUTPUT
    check_address("output", output)
    return resolve(output) if ":/" in str(output) else output
