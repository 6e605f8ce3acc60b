"""The options of a command on a job: given values over those of a file, of a record, and the job's defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.execution.patience import wait_for_answer
from concord.execution.restored_options import restored_config
from concord.interface.frames import FrameFiles, frame_of
from concord.interface.option_file import FileOptions
from concord.options import (
    NEEDED,
    as_words,
    choices_of,
    did_you_mean,
    fits,
    flag_of,
    from_plain,
    kind_of,
    option_values,
    options_of,
    path_of,
    require_one_way,
    shortened,
)
from concord.record import folder_of, read_record, require_run
from concord.space import as_python
from concord.storage import check_address, resolve
from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS, comparisons_of
from concord.studies.study_options import compare_options_for, options_for
from concord.training.job import JobFile, with_recorded_rule, with_rule
from concord.training.options.run_options import RunOptions
from concord.training.rule_file import RuleFile

Record = Mapping[str, Any]


@dataclass(frozen=True)
class JobCommand:
    """A command on a job, with its options.

    Attributes:
        name: train, tune or compare.
        job: the job with its file; with the user's own rule its options have the rule's fields.
        tables: the tables given to ``compare``.
        given: the options that were given, in a file or the record of a continued study as well.
        sources: of the given options that are not in the call, `` in FILE`` or `` of the study NAME``.
        print_config: whether its options are to be printed instead.
    """

    name: str
    job: JobFile
    tables: Sequence[str]
    options: Any
    given: frozenset[str]
    sources: Mapping[str, str] = field(default_factory=dict)
    print_config: bool = False

    def given_values(self) -> dict[str, Any]:
        """The given options with their values."""
        return {name: value for name, value in option_values(self.options).items() if name in self.given}

    def words(self) -> list[str]:
        """The given options as words of the command line."""
        return as_words(self.given_values())


@dataclass(frozen=True)
class Start:
    """A command's options before those of the call: from a file, which overrides a record, which overrides defaults."""

    name: str
    job: JobFile
    tables: Sequence[str]
    options: Any
    sources: Mapping[str, str]

    def with_values(self, values: Mapping[str, Any]) -> JobCommand:
        """The command with these values of the call, of their options' types."""
        if self.name == "compare" and not {METHODS, LEAVE_ONE_OUT} & {*self.tables}:
            comparisons_of(self.job, self.tables)  # refuses a job without them
        require_one_way(values)
        options = self.options.with_options(**values)
        needed = sorted(flag_of(name) for name, value in option_values(options).items() if value is NEEDED)
        if needed:
            help_of = f"concord {self.name} {self.job.reference} --help explains it"
            raise InputError(f"{', '.join(needed)}: is required" + ("" if self.job.made_here else f"; {help_of}"))
        sources = {name: source for name, source in self.sources.items() if name not in values}
        return JobCommand(self.name, self.job, self.tables, options, frozenset({*values, *self.sources}), sources)


def start_of(name: str, job: JobFile, given: Mapping[str, Any], tables: Sequence[str] = ()) -> Start:
    """The options of a command before those of the call.

    ``given`` has the values of the call that decide them, as the user wrote them: config, output, name, resume,
    aggregator and tracking_patience.
    """
    file = None if given.get("config") is None else FileOptions.read(path_of(str(given["config"])))
    in_file = {} if file is None else {name: value for name, value in file.values.items() if isinstance(value, str)}
    output, run = given.get("output") or in_file.get("output"), given.get("name") or in_file.get("name")
    find = _RECORDS.get(name)
    patience = _minutes(given.get("tracking_patience") or in_file.get("tracking_patience"))
    record = None
    if run and find is not None:
        record = wait_for_answer(partial(find, job, _output(output), str(run), given), patience)
    rule = given.get("aggregator")
    job = with_own_rule(job, rule, record, file)
    defaults = options = default_options(name, job, f"{name} {job.reference}", tables)
    if record is not None:
        recorded = dict(record["config"])
        if rule is not None:
            recorded.pop("aggregator", None)
        options = restored_config(options, recorded, f"--name {run}: record.json")
        options = options.with_options(output=_output(output))  # it may have been moved
    sources = dict.fromkeys(record.get("given", ()), f" of the study {run}") if record else {}
    if file is not None:  # a default value does not fix the option
        usual, values = option_values(defaults), option_values(file.over(defaults))
        sources |= {each: f" in {file.path}" for each, value in values.items() if value != usual[each]}
        options = file.over(options)
    return Start(name, job, tables, options, sources)


def command_of(
    name: str, job: JobFile, values: Mapping[str, Any], frames: FrameFiles, tables: Sequence[str] = ()
) -> JobCommand:
    """A command with options as Python has them; a wrong name, type or value is an InputError that names the option.

    A pandas frame in place of a file becomes one of ``frames``.
    """
    start = start_of(name, job, values, tables)
    rule = {} if start.job.rule is None else {"aggregator": start.job.rule.reference}
    values = {name: value for name, value in values.items() if name != "config"}
    return start.with_values(_typed(start.options, {**values, **rule} if "aggregator" in values else values, frames))


def _typed(options: Any, values: Mapping[str, Any], frames: FrameFiles) -> dict[str, Any]:
    """The values in the types of their options (InputError with the option)."""
    known = options_of(type(options))
    for name in values:
        if name not in known:
            raise InputError(f"{name}: there is no such option{did_you_mean(name, known)}")
    files = {name for name in values if fits(Path(), known[name].hint)}
    values = {  # NAME=VALUE pairs
        name: [f"{key}={each}" for key, each in value.items()]
        if isinstance(value, Mapping) and fits(("",), known[name].hint)
        else value
        for name, value in values.items()
    }
    tables = {name: frame for name in files if (frame := frame_of(values[name])) is not None}
    plain = {name: as_python(value) for name, value in values.items() if name not in tables}
    found = from_plain(known, plain)
    for name, value in found.items():
        if not fits(value, hint := known[name].hint):
            right = f"must be {kind_of(hint)}" + " or a pandas frame" * (name in files)
            near = did_you_mean(str(value), choices_of(hint)) if isinstance(value, str) else ""
            raise InputError(f"{flag_of(name)} {shortened(repr(values[name]))}: {right}{near}")
    output = _output(values.get("output"))
    return {**found, **{name: frames.keep(name, frame, output) for name, frame in tables.items()}}


def default_options(command: str, job: JobFile, called: str, tables: Sequence[str] = ()) -> Any:
    """The options of a command with this job, at their defaults (InputError if it does not apply to the job)."""
    if command == "train":
        return job.job.config
    if command == "tune":
        return options_for(job.job.config, list(job.job.studies))
    for name in (METHODS, LEAVE_ONE_OUT):
        if name in tables and len(tables) > 1:
            raise InputError(f"{called} {' '.join(tables)}: {name} is not a table of the job; give it alone")
    if METHODS in tables:
        from concord.studies.methods import methods_options_for  # with PyTorch

        return methods_options_for(job)
    if LEAVE_ONE_OUT in tables:
        from concord.studies.leave_one_out import leave_one_out_options_for  # with PyTorch

        return leave_one_out_options_for(job)
    return compare_options_for(job.job.config)


def with_own_rule(job: JobFile, named: Any, record: Record | None = None, file: FileOptions | None = None) -> JobFile:
    """The job with the user's own rule, whose fields are options.

    The call names the rule, or the record of a resumed run or study, or the file of ``--config``. Without an own rule
    the job is unchanged.
    """
    if named is None and file is not None and not file.sources:
        named = file.rule
    if named is not None:
        if not RuleFile.is_reference(str(named)) or (job.rule is not None and job.rule.reference == named):
            return job
        return with_rule(job, RuleFile.read(str(named)))
    recorded, sources = (None, MappingProxyType({})) if file is None else (file.rule, file.sources)
    if record is not None:
        recorded, sources = record["config"].get("aggregator"), record.get("sources", {})
    return job if job.rule is not None else with_recorded_rule(job, recorded, sources)


def _resumed_run(_: JobFile, output: Path, name: str, given: Mapping[str, Any]) -> Record | None:
    """With --resume, the record of the resumed run."""
    return require_run(folder_of(output, name)).record if given.get("resume") else None


def _earlier_study(job: JobFile, output: Path, name: str, _: Mapping[str, Any]) -> Record | None:
    """The record of the study of this --name, with its initial options as the configuration."""
    if "/" in name:
        return None
    record = read_record(folder_of(output, name, "study"), "study")
    if record is None:
        return None
    if record["job"] != job.name:
        raise InputError(f"--name {name}: is a study of job {record['job']}, not of {job.name}")
    return {**record, "config": {**record["config"], **record["options"], "name": name}}


_RECORDS: Mapping[str, Callable[[JobFile, Path, str, Mapping[str, Any]], Record | None]] = {
    "train": _resumed_run,
    "tune": _earlier_study,
}


def _minutes(given: Any) -> float:
    """The value of --tracking-patience, before the options are checked."""
    try:
        return float(given)
    except (TypeError, ValueError):
        return RunOptions.tracking_patience


def _output(given: Any) -> Path:
    """The output folder, before the options are checked."""
    output = path_of(str(given)) if given is not None and str(given).strip() else DEFAULT_OUTPUT
    check_address("output", output)
    return resolve(output) if ":/" in str(output) else output
