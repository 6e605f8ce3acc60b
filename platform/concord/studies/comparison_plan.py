"""The tables of a job, and the runs that they need, checked before anything is started or written."""

import dataclasses
import fnmatch
import hashlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from concord.analysis.figures import method_name
from concord.errors import InputError, format_for_cli
from concord.options import (
    as_words,
    did_you_mean,
    fits,
    kind_of,
    option_values,
    options_of,
    require_one_way,
    with_alternatives,
)
from concord.redaction import is_secret, redact_words
from concord.runs.lifecycle import Description
from concord.runs.preflight import as_input_error, preflight
from concord.runs.run import resolved_paths
from concord.runs.run_folder import plain_name, recorded_config, restored_config
from concord.runs.tags import run_tags
from concord.source_file import read_source, run_source
from concord.space import frozen
from concord.storage import display_path
from concord.studies.plan import GroupPlan, check_group, place_words
from concord.studies.proposals import EndedRun, GroupRuns, RunProposal
from concord.studies.study_options import CompareCommand, CompareOptions, SeedsOptions, compare_options_for
from concord.training import Comparison, JobFile, RunConfig, TrainConfig
from concord.training.job import with_recorded_rule
from concord.training.options import RUNTIME_OPTIONS

_FOLDER = frozenset({"output", "name"})
# The options of a comparison's place and workers; a later report does not need them.
_WHERE = _FOLDER | {"results", "tracking_uri", "address", "concurrent", "gpus_per_trial"}
METHODS = "methods"  # instead of a table's name: a study of each method
LEAVE_ONE_OUT = "leave-one-out"  # a table that every job has: each method without each environment
FOLDS = "left out"  # in the record of that table; no option has a space in its name
DATA = "data version"  # among a run's options in the record; no option has a space in its name
_RULE = "text of the rule"  # likewise
_NAMED = 12  # rows in the message that there is no such row; a job may have hundreds


@dataclass(frozen=True)
class PlannedRun:
    """A run that a table needs.

    Attributes:
        config: the options; a fold's have the environment that is left out.
        point: the resolved options that decide the result, with the version of the data if known.
        at_default: the options in ``point`` at the job's default.
    """

    table: str
    configuration: str
    seed: int
    config: RunConfig
    point: Mapping[str, Any]
    at_default: frozenset[str]

    @property
    def name(self) -> str:
        """The run's name for a reader."""
        without = self.point.get("leave_out")
        return f"{self.table}, {self.configuration}, seed {self.seed}" + (f", without {without}" if without else "")

    @property
    def identity(self) -> str:
        """The identity of the run: equal for equal options and data."""
        return _identity(self.point, self.point.keys())


def _identity(point: Mapping[str, Any], names: Collection[str]) -> str:
    return json.dumps({name: point[name] for name in names if name != DATA}, sort_keys=True)


class KeptRuns:
    """The kept runs of a comparison, found by their options; an option that is newer than a run has its default."""

    def __init__(self, runs: GroupRuns) -> None:
        self._runs = runs
        self._by_names: dict[frozenset[str], dict[str, list[RunProposal]]] = {}
        for each in runs.begun("run"):
            names = frozenset(name for name in each.point if name != DATA and not is_secret(name))
            self._by_names.setdefault(names, {}).setdefault(_identity(each.point, names), []).append(each)

    def begun(self, run: PlannedRun) -> RunProposal | None:
        """The proposal of the run; if the version of the data is unknown, that with the latest data."""
        ours = run.point.keys() - {DATA}
        for names in sorted(self._by_names, key=len, reverse=True):
            if names <= ours and ours - names <= run.at_default:
                for each in reversed(self._by_names[names].get(_identity(run.point, names), [])):
                    if DATA not in run.point or each.point.get(DATA) == run.point[DATA]:
                        return each
        return None

    def ended(self, run: PlannedRun) -> EndedRun | None:
        """The ended run, if it ended."""
        begun = self.begun(run)
        return None if begun is None else self._runs.find(begun.key)


@dataclass(frozen=True)
class ComparisonPlan(GroupPlan):
    """Tables of a job.

    Attributes:
        given: the options of the command line, as JSON, without those of place and workers.
        where: the options of the command line of place and workers, without the folder's.
    """

    kind = "comparison"
    tables: Mapping[str, Comparison]
    runs: Mapping[str, Sequence[PlannedRun]]
    given: Mapping[str, Any]
    where: Mapping[str, Any]

    @property
    def command(self) -> str:
        """The command that makes or continues the tables, without secrets."""
        folder = [*(["--name", self.name] if self.name != self.job.name else []), *place_words(self.base.run.output)]
        options = [*as_words(self.job.for_command(self.given)), *folder, *as_words(self.where)]
        return shlex.join(["concord", "compare", self.job.reference, *self.tables, *redact_words(options)])

    @property
    def detail(self) -> tuple[str, ...]:
        """The prefixes of detailed metrics that any table of the job needs, since a run may be in several."""
        declared = comparisons_of(self.job).values() if self.job.job.comparisons else ()
        return tuple(dict.fromkeys(each for table in declared for each in table.detail))

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
            name: [run for run in self.runs[name] if run.configuration in table.configurations]
            for name, table in tables.items()
        }
        return dataclasses.replace(self, tables=tables, runs=runs, given={**self.given, "only": tuple(only)})

    def description(self) -> Description:
        """The description of a new comparison."""
        tags = {**run_tags(self.job.name, self.job.path), "concord.comparison": self.name}
        return Description(self.experiment, {}, tags)

    def proposal(self, run: PlannedRun, number: int, origin: Mapping[str, str]) -> RunProposal:
        """The proposal of a run for the pool. Its parameters are the options from the table or the command line."""
        usual = recorded_config(self.job.job.config)
        proposed = RunProposal("run", number, {name: frozen(value) for name, value in run.point.items()})
        return dataclasses.replace(
            proposed,
            name=run.name,
            origin={**origin, **({"data": str(run.point[DATA])} if DATA in run.point else {})},
            options=self.overrides(run.config),
            parameters={name: value for name, value in run.point.items() if usual.get(name) != value or name == "seed"},
            tags={"concord.comparison": self.name, "concord.kind": "run"},
        )


def kept_command(job: JobFile, table: str, given: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """A command as kept results have it, without folders of this machine; ``values`` are the job's options."""
    asked = {name: value for name, value in given.items() if not isinstance(values.get(name), Path)}
    return shlex.join(["concord", "compare", Path(job.reference).name, table, *as_words(asked)])


def comparison_name(job: str, name: str | None) -> str:
    """The given name, or the job's."""
    return name or plain_name(job, "comparison")


def comparisons_of(job: JobFile) -> Mapping[str, Comparison]:
    """The tables of a job, from its file or from the one beside it that it names."""
    named = job.job.comparisons
    found: Mapping[str, Comparison] = _beside(job, named) if isinstance(named, str) else named
    if not found:
        raise InputError(
            f"job {job.name}: has no tables to compare; give it comparisons={{…}}, or compare methods with "
            f"concord compare {job.reference} {METHODS}, or {LEAVE_ONE_OUT}"
        )
    for name, makes in ((METHODS, "tunes each method"), (LEAVE_ONE_OUT, "leaves out each environment")):
        if name in found:
            raise InputError(f"job {job.name}: table {name}: compare JOB {name} {makes}; rename the table")
    return found


def _beside(job: JobFile, name: str) -> Mapping[str, Comparison]:
    """The variable ``comparisons`` of this file, whose path is relative to the job's."""
    path = Path(job.path).parent / name

    def refusal(problem: str) -> InputError:
        return InputError(f"job {job.path}: comparisons {name}: {problem}")

    found = getattr(run_source(str(path), read_source(path, refusal), "tables", refusal), "comparisons", None)
    if not isinstance(found, Mapping) or not all(isinstance(each, Comparison) for each in found.values()):
        raise refusal("needs comparisons = {…}, which maps the names of tables to Comparison(…)")
    return found


def plan_comparison(
    job: JobFile, tables: Sequence[str], command: CompareCommand, given: Collection[str], *, check: bool = True
) -> ComparisonPlan:
    """Check everything that can be checked without a cluster or a store; no names of tables take all.

    ``given`` has the options of the command line, which hold for every configuration. Without ``check`` kept runs are
    only searched, without loading data.
    """
    there = comparisons_of(job)
    for table in tables:
        if table not in there:
            near = did_you_mean(table, there) or f"; there are {', '.join(there)}"
            raise InputError(f"table {table}: job {job.name} has no such table{near}")
    options = command.comparison
    assert isinstance(options, CompareOptions)
    chosen = only_rows({name: there[name] for name in (dict.fromkeys(tables) or there)}, options.only)
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
        (table, row): _configured(base, options, given, f"job {job.name}: {table}, {row}")
        for table, comparison in chosen.items()
        for row, options in comparison.configurations.items()
    }
    if check:
        (table, _), first = next(iter(configs.items()))  # one suffices: the others differ in few options
        left_out = chosen[table].folds
        preflight(job, first if left_out is None else first.with_options(leave_out=left_out.environments[0]))
    runs: dict[str, list[PlannedRun]] = {table: [] for table in chosen}
    versions: dict[str, str | None] | None = {} if check else None
    for (table, row), config in configs.items():
        folds = chosen[table].folds
        for seed in _seeds(chosen[table], asked):
            parts = [{}] if folds is None else [{"leave_out": name} for name in folds.environments]
            for part in parts:
                runs[table].append(_planned(job, table, row, config.with_options(seed=seed, **part), versions))
    recorded = without_place(recorded_config(command), given)
    where = {
        name: display_path(value) if isinstance(value, Path) else value
        for name, value in option_values(command).items()
        if name in (_WHERE - _FOLDER) & {*given}
    }
    return ComparisonPlan(name, job, base, asked.sharing, chosen, runs, recorded, where)


def without_place(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The given options, without those of place and workers."""
    return {name: value for name, value in values.items() if name in given and name not in _WHERE}


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


def _configured(base: RunConfig, options: Mapping[str, Any], given: Collection[str], where: str) -> RunConfig:
    """The configuration of a row (an InputError names the row)."""
    known, given = options_of(type(base)), with_alternatives(given)
    chosen = {name: frozen(value) for name, value in options.items()}
    for name, value in chosen.items():
        if name not in known:
            raise InputError(f"{where}: there is no option {name}{did_you_mean(name, known)}")
        if name == "seed" or name in RUNTIME_OPTIONS:
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


def _planned(
    job: JobFile, table: str, row: str, config: RunConfig, versions: dict[str, str | None] | None
) -> PlannedRun:
    resolved = config.resolve()
    left_out = (RUNTIME_OPTIONS - {"workers"}) | resolved.unused()
    values = recorded_config(resolved)  # without the values of secrets, which a report does not know
    point = {name: frozen(value) for name, value in values.items() if name not in left_out and not is_secret(name)}
    if sources := config.sources():  # a file's name does not say what is in it
        point[_RULE] = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]
    if versions is not None and job.job.loop is None:
        # The version of the data depends neither on the seed nor on what is left out, and may be slow to compute.
        key = json.dumps({**point, "seed": None, "leave_out": None}, sort_keys=True)
        if key not in versions:
            try:
                with as_input_error(job, "its environments cannot be made"):
                    environments = job.job.environments_of(resolved)
                if isinstance(resolved, TrainConfig):
                    resolved.rule(len(environments.train))  # refuses a significance that too few cannot reach
            except InputError as error:
                problem = format_for_cli(error).removeprefix(f"job {job.name}: ")
                raise InputError(f"job {job.name}: {table}, {row}: {problem}") from error
            versions[key] = environments.version
        if (version := versions[key]) is not None:
            point[DATA] = version
    defaults, values = option_values(job.job.config), option_values(config)
    at_default = frozenset(name for name in point if name in defaults and values[name] == defaults[name])
    return PlannedRun(table, row, config.run.seed, config, json.loads(json.dumps(point)), at_default)
