"""The tables of a job, and the runs that they need, checked before anything is started or written."""

import dataclasses
import fnmatch
import itertools
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from concord.analysis.method_names import method_name
from concord.errors import InputError, format_for_cli
from concord.execution.key import Key, recorded_config
from concord.execution.preflight import as_input_error, preflight
from concord.execution.restored_options import restored_config
from concord.execution.spec import GroupSpec, RunSpec, plain_name, resolved_paths
from concord.options import (
    RESULT,
    Role,
    did_you_mean,
    fits,
    kind_of,
    names_of,
    option_values,
    options_of,
    require_one_way,
    with_alternatives,
)
from concord.redaction import is_secret
from concord.space import frozen
from concord.studies.criterion import TrialEvaluator
from concord.studies.environment_folds import ends_of
from concord.studies.job_tables import comparisons_of
from concord.studies.plan import GroupPlan, check_group
from concord.studies.proposals import GroupRuns
from concord.studies.study_options import CompareCommand, CompareOptions, SeedsOptions, compare_options_for
from concord.tracking import Store
from concord.training import Comparison, JobFile, RunConfig, TrainConfig
from concord.training.job import command_line, with_recorded_rule
from concord.training.options import LeftOut, ResolvedConfig, in_short

FOLDS = "left out"  # in the record of that table; no option has a space in its name
_NAMED = 12  # rows in the message that there is no such row; a job may have hundreds


@dataclass(frozen=True)
class ComparisonPlan(GroupPlan):
    """Tables of a job.

    Attributes:
        given: the options of the command line, as JSON, without those of place and workers.
        where: the options of the command line of place and workers, without the folder's.
        keep: whether the last checkpoint of every run is kept.
        hours: the longest expected time that begins without a question; None begins any.
    """

    kind = "comparison"
    tables: Mapping[str, Comparison]
    runs: Mapping[str, Sequence[RunSpec]]
    given: Mapping[str, Any]
    where: Mapping[str, Any]
    keep: bool = False
    hours: float | None = None

    @property
    def command(self) -> str:
        """The command that makes or continues the tables, without secrets."""
        return self.job.command("compare", *self.tables, options=self._command_options)

    @property
    def continuation(self) -> str:
        """See :class:`GroupPlan`."""
        return self.job.continuation("compare", *self.tables, options=self._command_options)

    @property
    def _command_options(self) -> dict[str, Any]:
        name = {} if self.name == self.job.name else {"name": self.name}
        return {**self.job.for_command(self.given), **name, "output": self.base.run.output, **self.where}

    @cached_property
    def usual(self) -> Mapping[str, Any]:
        """The job's own options, as they are recorded."""
        return recorded_config(self.job.job.config)

    @cached_property
    def wanted(self) -> Mapping[str, RunSpec]:
        """The runs by their keys; one of several tables is named after the first."""
        found: dict[str, RunSpec] = {}
        for spec in itertools.chain.from_iterable(self.runs.values()):
            found.setdefault(spec.key.value, spec)
        return found

    def there(self, runs: GroupRuns) -> str:
        """See :class:`GroupPlan`."""
        found = [runs.by_key(spec.key) for spec in self.wanted.values()]
        finished = sum(run is not None and run.status == "FINISHED" for run in found)
        return f"{finished} of {len(found)} trainings are there"

    def train_command(self, table: str, row: str) -> str:
        """The command that trains and registers a row of a table, on all environments, without secrets."""
        config = row_config(self.base, self.tables[table].configurations[row], self.given, f"{table}, {row}")
        return train_command(self.job, config, {**self.given, **self.where})

    @property
    def asked(self) -> Mapping[str, Mapping[str, Any]]:
        """For each table what a report needs to find its runs, as JSON."""
        folds = {name: table.folds for name, table in self.tables.items()}
        given = {name: value for name, value in self.given.items() if name != "only"}  # a report shows all rows
        return {
            name: {**given, **({} if each is None else {FOLDS: dataclasses.asdict(each)})}
            for name, each in folds.items()
        }

    def with_rows(self, tables: Mapping[str, Comparison], only: Sequence[str]) -> Self:
        """The plan of these tables, which ``only_rows`` made of its own."""
        runs = {
            name: [run for run in self.runs[name] if run.place["row"] in table.configurations]
            for name, table in tables.items()
        }
        return dataclasses.replace(self, tables=tables, runs=runs, given={**self.given, "only": tuple(only)})

    def record(self, store: Store) -> dict[str, Any]:
        """The record of a new comparison."""
        tags = {**self.run_tags, "concord.comparison": self.name}
        key = Key(self.job.name, {})
        return GroupSpec(self.job, self.base, key, experiment=self.experiment, tags=tags).record(store, "comparison")


def recorded_command(job: JobFile, table: str, given: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """A command as files of results have it, without folders of this machine; ``values`` are the job's options."""
    asked = {name: value for name, value in given.items() if not isinstance(values.get(name), Path)}
    return command_line("compare", Path(job.reference).name, table, options=asked)


def train_command(job: JobFile, config: RunConfig, given: Mapping[str, Any]) -> str:
    """The command that trains and registers this configuration; ``given`` are values as the user has written them."""
    usual, values = option_values(job.job.config), option_values(config)
    left_out = names_of(type(config), Role.UNKEPT) | config.resolve().unused() | {"output", "register"}
    changed = {
        name: given.get(name, value)
        for name, value in values.items()
        # None takes back a default of the job that the method cannot use, such as the average's significance.
        if (name not in left_out or value is None) and value != usual.get(name) and not is_secret(name)
    }
    return job.command("train", options={**changed, "output": config.run.output})


def comparison_name(job: str, name: str | None) -> str:
    """The given name, or the job's."""
    return name or plain_name(job, "comparison")


def plan_comparison(
    job: JobFile, tables: Sequence[str], command: CompareCommand, given: Collection[str], *, check: bool = True
) -> ComparisonPlan:
    """Check everything that can be checked without a cluster or a store; no names of tables take all.

    ``given`` has the options of the command line, which hold for every configuration. Without ``check`` kept runs are
    only searched, without loading data.
    """
    declared = comparisons_of(job, tables)
    options = command.comparison
    assert isinstance(options, CompareOptions)
    chosen = only_rows({name: declared[name] for name in (dict.fromkeys(tables) or declared)}, options.only)
    return plan_tables(job, chosen, command, given, check)


def only_rows(tables: Mapping[str, Comparison], only: Sequence[str]) -> Mapping[str, Comparison]:
    """The tables with the rows that match ``--only``, without figures, which need all rows; all rows if it is empty.

    A row matches by its name, or by its name as the table shows it.
    """
    if not only:
        return tables

    def matches(row: str, pattern: str) -> bool:
        return any(each == pattern or fnmatch.fnmatchcase(each, pattern) for each in (row, method_name(row)))

    rows = list(dict.fromkeys(row for table in tables.values() for row in table.configurations))
    for pattern in only:
        if not any(matches(row, pattern) for row in rows):
            more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
            near = did_you_mean(pattern, map(shlex.quote, rows)) or f"; there are {shlex.join(rows[:_NAMED])}{more}"
            raise InputError(f"--only {shlex.quote(pattern)}: no row of {', '.join(tables)} has this name{near}")
    found: dict[str, Comparison] = {}
    for name, table in tables.items():
        chosen = {
            row: options for row, options in table.configurations.items() if any(matches(row, each) for each in only)
        }
        if chosen:
            paper = {
                row: cells for row, cells in table.paper.items() if row in chosen or row not in table.configurations
            }
            found[name] = dataclasses.replace(table, configurations=chosen, paper=paper, figures={})
    return found


def plan_tables(
    job: JobFile, chosen: Mapping[str, Comparison], command: CompareCommand, given: Collection[str], check: bool
) -> ComparisonPlan:
    """The plan of these tables, see :func:`plan_comparison`."""
    asked, base = command.comparison, command.config
    command.check()
    if "seed" in given:
        raise InputError(f"--seed {base.run.seed}: a comparison trains several; give --first-seed and --seeds")
    check_group(base, "comparison")
    name = comparison_name(job.name, base.run.name)
    base = base.with_options(**resolved_paths(base), name=None)
    configs = {
        (table, row): row_config(base, options, given, f"job {job.name}: {table}, {row}")
        for table, comparison in chosen.items()
        for row, options in comparison.configurations.items()
    }
    if check:
        (table, _), first = next(iter(configs.items()))  # one suffices: the others differ in few options
        folds = chosen[table].folds
        for left_out in (None,) if folds is None else ends_of(folds.left_out):
            preflight(job, first if left_out is None else first.with_options(leave_out=left_out))
    places = names_of(type(command), Role.PLACE, Role.UNKEPT) & {*given} - {"output", "name"}
    where = {name: value for name, value in option_values(command).items() if name in places}
    keep = isinstance(asked, CompareOptions) and asked.keep_checkpoints
    runs: dict[str, list[RunSpec]] = {table: [] for table in chosen}
    recorded = without_place(command, given)
    plan = ComparisonPlan(name, job, base, asked.sharing, TrialEvaluator(), chosen, runs, recorded, where, keep)
    versions = _Versions(job) if check and job.job.loop is None else None
    for (table, row), config in configs.items():
        folds = chosen[table].folds
        parts: Sequence[LeftOut] = [None] if folds is None else folds.left_out
        for seed in _seeds(chosen[table], asked):
            for left_out in parts:
                part = config.with_options(seed=seed, **({} if left_out is None else {"leave_out": left_out}))
                runs[table].append(_cell(plan, table, row, part.resolve(), versions))
    return plan


def without_place(command: Any, given: Collection[str]) -> dict[str, Any]:
    """The given options on which results depend, as JSON."""
    names = names_of(type(command), *RESULT)
    return {name: value for name, value in recorded_config(command).items() if name in given and name in names}


def plan_as_recorded(
    job: JobFile, table: str, record: Mapping[str, Any], output: Path, name: str | None
) -> ComparisonPlan:
    """The plan of a table with the options of the last command that trained it, to find its runs."""
    given = record.get("asked", {}).get(table, {})
    job = with_recorded_rule(job, given.get("aggregator"), record.get("sources", {}))
    command = restored_config(compare_options_for(job.job.config), given).with_options(output=output, name=name)
    return plan_comparison(job, [table], command, given, check=False)


def _seeds(comparison: Comparison, options: SeedsOptions) -> range:
    first = comparison.first_seed if options.first_seed is None else options.first_seed
    return range(first, first + (options.seeds or comparison.seeds))


def row_config(base: RunConfig, options: Mapping[str, Any], given: Collection[str], where: str) -> RunConfig:
    """The configuration of a row (an InputError names the row)."""
    known, given = options_of(type(base)), with_alternatives(given)
    chosen = {name: frozen(value) for name, value in options.items()}
    for name, value in chosen.items():
        if name not in known:
            raise InputError(f"{where}: there is no option {name}{did_you_mean(name, known)}")
        # How often it writes a checkpoint is a run's own; the rest of its place is the comparison's.
        if name == "seed" or (known[name].role in (Role.PLACE, Role.UNKEPT) and name != "checkpoints"):
            raise InputError(f"{where}: {name} cannot differ between configurations; give it on the command line")
        if name not in given and not fits(value, known[name].hint):
            raise InputError(f"{where}: {known[name].flag} {value}: must be {kind_of(known[name].hint)}")
    config = base.with_options(**{name: value for name, value in chosen.items() if name not in given})
    averaged = isinstance(config, TrainConfig) and config.resolve().aggregation.aggregator == "mean"
    if averaged and "significance" in given:
        config = config.with_options(significance=None)  # the average uses neither significance nor threshold
    try:
        require_one_way(chosen)
        config.check()
    except InputError as error:
        raise InputError(f"{where}: {format_for_cli(error)}") from error
    return config


def _cell(plan: ComparisonPlan, table: str, row: str, config: ResolvedConfig, versions: "_Versions | None") -> RunSpec:
    """The run of a row, with a seed."""
    data = None if versions is None else versions.of(config, f"{table}, {row}")
    left_out = config.data.leave_out if isinstance(config, TrainConfig) else None
    spec = RunSpec.of(plan.job, config, data)
    if versions is None:  # kept runs are searched, whatever their data were
        spec = dataclasses.replace(spec, key=dataclasses.replace(spec.key, data=None))
    label = f"{table}, {row}, seed {config.run.seed}" + ("" if left_out is None else f", without {in_short(left_out)}")
    # The key tells rows apart whose names are alike, and the same row with other options.
    name = f"{plain_name(f'{plan.name}-{label}', 'run')}-{spec.key.without_data[:6]}"
    parameters = {
        name: value
        for name, value in recorded_config(spec.config).items()
        if (plan.usual.get(name) != value or name == "seed") and value is not None
    }
    tags = {"concord.comparison": plan.name, "concord.row": label}
    place = {"kind": "cell", "table": table, "row": row, "seed": config.run.seed, "label": label}
    place |= {} if left_out is None else {"left_out": left_out}
    return plan.member(spec, name, place, data, parameters, tags)


class _Versions:
    """The versions of a job's data, each computed once: that may take long."""

    def __init__(self, job: JobFile) -> None:
        self._job = job
        self._known: dict[str, str | None] = {}

    def of(self, config: ResolvedConfig, row: str) -> str | None:
        """The version of these options' data (InputError with the row if they do not fit it)."""
        # It depends neither on the seed nor on what is left out.
        values = {**recorded_config(config), "seed": None, "leave_out": None}
        key = json.dumps(values, sort_keys=True, default=str)
        if key not in self._known:
            job = self._job
            try:
                with as_input_error(job, "its environments cannot be made"):
                    environments = job.job.environments_of(config)
                if isinstance(config, TrainConfig):
                    config.rule(len(environments.train))  # refuses a significance that too few cannot reach
            except InputError as error:
                problem = format_for_cli(error).removeprefix(f"job {job.name}: ")
                raise InputError(f"job {job.name}: {row}: {problem}") from error
            self._known[key] = environments.version
        return self._known[key]
