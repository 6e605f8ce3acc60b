"""What a comparison is going to do, checked before anything is started or written."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.comparisons.options import CompareCommand, CompareOptions
from concord.errors import InputError, as_option
from concord.options import did_you_mean, fits, kind_of, options_of, require_one_way, with_alternatives
from concord.runs.folder import recorded_config
from concord.runs.preflight import preflight
from concord.runs.run import resolved_paths
from concord.source_file import read_source, run_source
from concord.space import frozen
from concord.storage import Folder
from concord.studies.journal import TrialSpec
from concord.training import Comparison, CustomJob, JobFile, RunConfig, TrainConfig
from concord.training.options import RUNTIME_OPTIONS, parallel_of

METHODS = "methods"  # in place of a table's name: a study of each method
DATA = "data version"  # among a run's options in the journal; no option has a space in its name


@dataclass(frozen=True)
class PlannedRun:
    """A run that a table needs.

    Attributes:
        configuration: the name of its row.
        seed: of its training.
        config: what is trained.
        point: all options that decide what comes out, resolved, with the version of the data if that is known.
    """

    configuration: str
    seed: int
    config: RunConfig
    point: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """Two runs with the same one are the same run."""
        return identity(self.point)


def identity(point: Mapping[str, Any]) -> str:
    """The options as text, without the version of the data."""
    return json.dumps({name: value for name, value in point.items() if name != DATA}, sort_keys=True)


@dataclass(frozen=True)
class Plan:
    """Tables of a job.

    Attributes:
        name: of the comparison; the same one continues it.
        job: what is trained.
        base: the configuration that every run starts from.
        options: of the comparison.
        tables: what is compared, by the tables' names.
        runs: what each table needs, by its name.
    """

    name: str
    job: JobFile
    base: RunConfig
    options: CompareOptions
    tables: Mapping[str, Comparison]
    runs: Mapping[str, Sequence[PlannedRun]]

    @property
    def kept(self) -> Folder:
        """Where it is kept."""
        return comparison_folder(self.base.run.output, self.name)

    @property
    def detail(self) -> tuple[str, ...]:
        """What any table of the job wants to be kept of single environments: a run may be in several."""
        return tuple(dict.fromkeys(each for table in comparisons_of(self.job).values() for each in table.detail))


def comparison_folder(output: Path, name: str) -> Folder:
    """Where a comparison of this name is kept."""
    return Folder(output / "comparisons" / name)


def comparison_name(job: str, name: str | None) -> str:
    """The name that is given, or the job's."""
    return name or re.sub(r"[^A-Za-z0-9_.-]+", "-", job).strip("-._") or "comparison"


def comparisons_of(job: JobFile) -> Mapping[str, Comparison]:
    """The tables of a job, from its file or from the one beside it that it names.

    Raises:
        InputError: it has none, or they cannot be read.
    """
    named = job.job.comparisons
    found: Mapping[str, Comparison] = _beside(job, named) if isinstance(named, str) else named
    if not found:
        raise InputError(
            f"job {job.name}: has no tables to compare; give it comparisons={{…}}, or tune its methods with "
            f"concord compare {job.name} {METHODS}"
        )
    if METHODS in found:
        raise InputError(f"job {job.name}: table {METHODS}: compare JOB {METHODS} tunes each method; rename the table")
    return found


def _beside(job: JobFile, name: str) -> Mapping[str, Comparison]:
    """What the file of this name, relative to the job's own, calls ``comparisons``."""
    path = Path(job.path).parent / name

    def refusal(problem: str) -> InputError:
        return InputError(f"job {job.path}: comparisons {name}: {problem}")

    found = getattr(run_source(str(path), read_source(path, refusal), "tables", refusal), "comparisons", None)
    if not isinstance(found, Mapping) or not all(isinstance(each, Comparison) for each in found.values()):
        raise refusal("needs comparisons = {…}, which maps the names of tables to Comparison(…)")
    return found


def make_plan(
    job: JobFile,
    tables: Sequence[str],
    command: CompareCommand,
    given: Collection[str],
    *,
    check: bool = True,
) -> Plan:
    """Check everything that can be checked without a cluster or a store.

    Args:
        job: what is trained.
        tables: names of the tables; none takes all.
        command: the options of the comparison with those of the job.
        given: the options that the command line named: they hold for every configuration.
        check: whether the runs are to be trained; otherwise they are only looked for, and no data are touched.

    Raises:
        InputError: something cannot be used.
    """
    there = comparisons_of(job)
    for table in tables:
        if table not in there:
            near = did_you_mean(table, there) or f"; there are {', '.join(there)}"
            raise InputError(f"table {table}: job {job.name} has no such table{near}")
    chosen = {name: there[name] for name in (dict.fromkeys(tables) if tables else there)}
    asked, base = command.comparison, command.config
    command.check()
    if "seed" in given:
        raise InputError(f"--seed {base.run.seed}: a comparison trains several; give --first-seed and --seeds")
    if base.run.resume:
        raise InputError("--resume: the same --name continues a comparison; leave --resume out")
    if (least := parallel_of(base).min_workers) is not None:
        raise InputError(f"--min-workers {least}: a run that lost its workers runs again; leave it out")
    name = comparison_name(job.name, base.run.name)
    base = base.with_options(**resolved_paths(base), name=None)
    configs = {
        table: {
            row: _configured(base, row_options, given, f"job {job.name}: {table}, {row}")
            for row, row_options in comparison.configurations.items()
        }
        for table, comparison in chosen.items()
    }
    versions: dict[str, str | None] = {}
    if check:
        # One is enough to try model and loss on: the others differ in a few options.
        preflight(job, next(config for table in configs.values() for config in table.values()))
    runs = {
        table: [
            _planned(job, row, config.with_options(seed=seed), versions if check else None)
            for row, config in configs[table].items()
            for seed in _seeds(comparison, asked)
        ]
        for table, comparison in chosen.items()
    }
    return Plan(name, job, base, asked, chosen, runs)


def _seeds(comparison: Comparison, options: CompareOptions) -> range:
    first = comparison.first_seed if options.first_seed is None else options.first_seed
    return range(first, first + (options.seeds or comparison.seeds))


def _configured(base: RunConfig, options: Mapping[str, Any], given: Collection[str], where: str) -> RunConfig:
    """The configuration of a row (InputError with where it stands)."""
    known = options_of(type(base))
    chosen = {name: frozen(value) for name, value in options.items()}
    for name, value in chosen.items():
        if name not in known:
            raise InputError(f"{where}: there is no option {name}{did_you_mean(name, known)}")
        if name == "seed" or name in RUNTIME_OPTIONS:
            raise InputError(f"{where}: {name} is not a configuration's to say; give it on the command line")
        if not fits(value, known[name].hint):
            raise InputError(f"{where}: {known[name].flag} {value}: must be {kind_of(known[name].hint)}")
    given = with_alternatives(given)
    config = base.with_options(**{name: value for name, value in chosen.items() if name not in given})
    masked = isinstance(config, TrainConfig) and config.chosen_aggregator != "mean"
    if "significance" in given and not masked:  # the average looks at none, as at no threshold
        config = config.with_options(significance=None)
    try:
        require_one_way(chosen)
        config.check()
    except InputError as error:
        raise InputError(f"{where}: {as_option(error)}") from error
    return config


def _planned(job: JobFile, row: str, config: RunConfig, versions: dict[str, str | None] | None) -> PlannedRun:
    resolved = config.resolved()
    left_out = (RUNTIME_OPTIONS - {"workers"}) | resolved.unused()
    point = {name: frozen(value) for name, value in recorded_config(resolved).items() if name not in left_out}
    if versions is not None and not isinstance(job.job, CustomJob):
        # Data are of a version that their seed does not change, and may be slow to look up.
        key = json.dumps({**point, "seed": None}, sort_keys=True)
        if key not in versions:
            environments = job.job.environments(resolved)
            if isinstance(resolved, TrainConfig):
                resolved.rule(len(environments.train))  # refuses a significance that so few cannot have
            versions[key] = environments.version
        if (version := versions[key]) is not None:
            point[DATA] = version
    return PlannedRun(row, config.run.seed, config, json.loads(json.dumps(point)))


def spec_of(run: PlannedRun, number: int, table: str, origin: Mapping[str, str]) -> TrialSpec:
    """The run as the engine has it."""
    return TrialSpec(
        "run",
        number,
        {name: frozen(value) for name, value in run.point.items()},
        name=f"{table}, {run.configuration}, seed {run.seed}",
        origin=origin,
    )
