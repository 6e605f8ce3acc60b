"""The options of ``concord tune`` and ``concord compare``: their own, and the job's base options."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import tyro

from concord.errors import InputError
from concord.options import OptionGroup, Place, flag_of, group, options_of
from concord.storage import check_local_folder
from concord.training import RunConfig
from concord.training.declared_measures import Mode

Selection = Literal["held-out", "validation", "leave-one-out", "oracle", "own"]
Command = TypeVar("Command", bound=OptionGroup)
SELECTIONS: tuple[Selection, ...] = get_args(Selection)


@dataclass(frozen=True, kw_only=True)
class SharingOptions(OptionGroup):
    """The division of a cluster among trials, or a comparison's runs."""

    # fmt: off
    concurrent: Place[int] = 0
    """Number of parallel runs; 0 fills the cluster."""
    gpus_per_trial: Place[float] = 1.0
    """GPUs of each run, with --device cuda; with 0.25 four share one."""
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        self.require_at_least(0, "concurrent")
        self.require("gpus_per_trial", self.gpus_per_trial > 0, "must be above 0")


def check_folds(options: Any) -> None:
    """Refuse a number of folds, or of drawn environments, that leaves nothing to compare (InputError)."""
    for option in ("folds", "drawn"):
        count = getattr(options, option)
        options.require(option, count == 0 or count >= 2, "must be at least 2, or 0 for all environments")
    drawn = options.drawn or options.folds
    options.require("folds", options.folds <= drawn, f"only {drawn} environments are left out (--drawn)")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(OptionGroup):
    """Run one study; the same --name continues it. Options of the job on the command line are not varied."""

    # fmt: off
    trials: Place[int] = 64
    """Number of trials; a larger number extends an existing study."""
    sharing: SharingOptions = group(SharingOptions)
    method: str | None = None
    """One of the job's studies by name, derived (a space around the job's settings) or wide; by default the job's first
    study, else derived."""
    space: Path | None = None
    """TOML file with a space that replaces the job's."""
    vary: tuple[str, ...] = ()
    """Options to vary, beside or in place of the space's: lr=log:1e-4:1, threshold=uniform:0:1, batch_size=64,128."""
    suggest: tuple[str, ...] = ()
    """Points to try first, such as lr=0.01,threshold=0.8; a missing option takes the first value of its domain."""
    search: Literal["tpe", "random", "grid"] = "tpe"
    """Tree-structured Parzen estimator (HyperOpt), random search, or every point of the space."""
    startup: int = 20
    """Number of random trials before TPE suggests."""

    selection: Selection | None = None
    """Examples that score a trial: held-out examples of the training environments, validation environments, training
    environments left out in turn, or the o.o.d. test (results are then marked as oracle); by default the selection of
    the job's study, else validation environments if the job has some, else held-out examples."""
    metric: str | None = None
    """Measure of the score, such as accuracy, worst_accuracy or spread; by default that of the job's study, else of
    its criterion, else accuracy, or loss without one."""
    mode: Mode | None = None
    """Mode of the measure, if the job gives none."""
    folds: int = 0
    """Number of folds of environments that are left out in turn under leave-one-out, each environment once; 0 leaves
    each out alone, from ten environments on in five folds."""
    drawn: int = 0
    """Number of environments that are left out, drawn by the seed; the others always train; 0 takes all."""
    shortlist: Place[int] = 4
    """Number of best trials that are also trained without each of 4 (or --drawn) environments at the end, so that the
    selections can be compared."""

    stop_when: tuple[str, ...] | None = None
    """Conditions that end a trial when all hold, such as 'train_accuracy>0.97' 'ood_accuracy<0.6' (with quotes, since >
    and < are redirections in a shell); by default the job's rule."""
    scheduler: Literal["none", "asha", "median"] = "none"
    """Stop trials that are worse than others: by asynchronous successive halving, or the median rule."""
    max_minutes: Place[float] = 0.0
    """Minutes after which the search ends; running trials continue with the study; 0 sets no limit."""

    reruns: Place[int] = 5
    """Number of runs of the best configuration with new seeds."""
    keep_trials: Place[int] = 1
    """Number of best trials of which the last checkpoint is kept; the best one's model is registered."""
    top: Place[int] = 5
    """Number of rows in the table of the best trials."""
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        super().check()
        self.require_at_least(1, "trials", "startup", "top", "keep_trials")
        self.require_at_least(0, "folds", "drawn", "shortlist", "max_minutes", "reruns")
        if self.selection == "leave-one-out":
            expected = "leave-one-out scores a trial only at its end; give another --selection, or no scheduler"
            self.require("scheduler", self.scheduler == "none", expected)
            check_folds(self)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(OptionGroup):
    """The options of ``concord tune``: the study's, and the base options of every trial."""

    study: StudyOptions
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class SeedsOptions(OptionGroup):
    """The seeds of a comparison, and the division of a cluster among its runs."""

    # fmt: off
    seeds: int | None = None
    """Number of seeds of each configuration; by default the table's."""
    first_seed: int | None = None
    """First seed; by default the table's."""
    results: Place[Path | None] = None
    """Folder for the data of each table: one file a table, one JSON line a run."""
    html: Place[Path | None] = None
    """File for a page to hand on: answer, tables, columns, data and commands in one HTML file."""
    sharing: SharingOptions = group(SharingOptions)
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        super().check()
        check_local_folder("--results", self.results)
        self.require_at_least(1, "seeds")
        self.require_at_least(0, "first_seed")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SeedsOptions):
    """Train the missing runs of a job's tables: concord compare JOB [TABLE…]. Options of the job on the command line
    apply to every configuration."""

    # fmt: off
    only: tuple[str, ...] = ()
    """Rows of the tables: names, or patterns such as 'ERM, *' (with quotes); by default all."""
    keep_checkpoints: Place[bool] = False
    """Keep the last checkpoint of every run, for concord analyze; otherwise only while it trains."""
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class CompareCommand(OptionGroup):
    """The options of ``concord compare``: the comparison's, and the base options of every run."""

    comparison: SeedsOptions
    config: RunConfig


def compare_options_for(config: RunConfig) -> CompareCommand:
    """The comparison's options and a job's, at their defaults (InputError if both have an option)."""
    return with_config(CompareCommand, "comparison", CompareOptions(), config, "compare")


def options_for(config: RunConfig, methods: Sequence[str] = ()) -> TuneOptions:
    """The study's options and a job's, at their defaults; the class's docstring names the job's own methods."""
    named = f" Methods of this job: {', '.join(methods)}." if methods else ""
    return with_config(TuneOptions, "study", StudyOptions(), config, "tune", f"{StudyOptions.__doc__}{named}")


def with_config(
    kind: type[Command], part: str, own: OptionGroup, config: RunConfig, command: str, text: str | None = None
) -> Command:
    """A command's own options and a job's, at their defaults (InputError if both have an option).

    ``kind`` is the class of both, with the fields ``part`` and ``config``; ``text`` replaces the help of the command's
    options.
    """
    for name in options_of(type(own)).keys() & options_of(type(config)).keys():
        raise InputError(f"job option {flag_of(name)}: is also an option of concord {command}; rename it")
    # The panel without a name comes first in the help.
    names = {part: (type(own), ""), "config": (type(config), "job")}
    fields: list[Any] = [(field, Annotated[kind, tyro.conf.arg(name=name)]) for field, (kind, name) in names.items()]
    namespace = {"__doc__": text or type(own).__doc__}
    made = dataclasses.make_dataclass(
        kind.__name__, fields, bases=(kind,), namespace=namespace, frozen=True, kw_only=True
    )
    command_options: Command = made(**{part: own, "config": config})
    return command_options


def combined(first: type[Any], second: type[Any]) -> type[Any]:
    """A dataclass with the options of both; its docstring, and the default of a common option, are the first's."""
    both = type(f"{first.__name__}And{second.__name__}", (first, second), {"__doc__": first.__doc__})
    return dataclass(frozen=True, kw_only=True)(both)
