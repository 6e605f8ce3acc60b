"""The options of ``concord tune`` and ``concord compare``: their own, and the job's, which every run starts from."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import tyro

from concord.errors import InputError
from concord.options import OptionGroup, flag_of, options_of
from concord.training import RunConfig
from concord.training.evaluation import Mode

Selection = Literal["held-out", "validation", "leave-one-out", "oracle", "own"]
Command = TypeVar("Command", bound=OptionGroup)
SELECTIONS: tuple[Selection, ...] = get_args(Selection)


@dataclass(frozen=True, kw_only=True)
class SharingOptions(OptionGroup):
    """How a cluster is divided among trials, or among a comparison's runs."""

    # fmt: off
    concurrent: int = 0
    """How many at a time; 0 takes what the cluster holds."""
    gpus_per_trial: float = 1.0
    """GPUs of each, with --use-gpu; 0.25 puts four on one."""
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        self.require("concurrent", self.concurrent >= 0, "must not be negative")
        self.require("gpus_per_trial", self.gpus_per_trial > 0, "must be above 0")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(OptionGroup):
    """One study; the same --name continues it. Options of the job given here are fixed: they leave the space."""

    # fmt: off
    trials: int = 64
    """Trials of the study; asking for more later extends it."""
    sharing: SharingOptions = field(default_factory=SharingOptions)
    method: str | None = None
    """Which of the job's studies; for every job there are also derived (from its configuration) and wide."""
    space: Path | None = None
    """TOML file with the space, in place of the job's."""
    vary: tuple[str, ...] = ()
    """Options to vary, over those of the space: lr=log:1e-4:1, threshold=uniform:0:1, batch_size=64,128."""
    suggest: tuple[str, ...] = ()
    """Points to try first: lr=0.01,threshold=0.8 (values that are left out are the first of the space)."""
    search: Literal["tpe", "random", "grid"] = "tpe"
    """Tree-structured Parzen estimator (HyperOpt), random search, or every point of the space."""
    startup: int = 20
    """Random trials before TPE suggests."""

    selection: Selection = "held-out"
    """What a trial is judged by: held-out examples of the training environments, validation environments, training
    environments left out in turn, or the o.o.d. test (which makes an oracle of the study, and is called so); the job's
    own choice for the method if not given."""
    metric: str | None = None
    """Measure to judge by, such as accuracy, loss or worst_accuracy; if not given the job's own choice for the method,
    else accuracy, or loss where there is none."""
    mode: Mode | None = None
    """Whether the measure is to be large or small, where the job does not say."""
    folds: int = 0
    """Environments left out in turn under leave-one-out, drawn by the seed; 0 takes every one."""
    shortlist: int = 4
    """Best trials that are judged by all selections in the end (4 environments are left out in turn, or --folds)."""

    stop_when: tuple[str, ...] | None = None
    """A trial ends when all of these hold, such as 'train_accuracy>0.97' 'ood_accuracy<0.6' (with quotes: to a shell >
    and < are redirections); the job's own rule if not given."""
    scheduler: Literal["none", "asha", "median"] = "none"
    """Stop trials that fall behind: asynchronous successive halving, or the median rule."""
    max_minutes: float = 0.0
    """Stop searching after this time (what runs then is run again when the study continues); 0 does not stop."""

    reruns: int = 5
    """Runs of the best configuration with new seeds; 0 does none."""
    top: int = 5
    """Rows of the table of the best trials."""
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        super().check()
        for option in ("trials", "startup", "top"):
            self.require(option, getattr(self, option) >= 1, "must be at least 1")
        for option in ("folds", "shortlist", "max_minutes", "reruns"):
            self.require(option, getattr(self, option) >= 0, "must not be negative")
        if self.selection == "leave-one-out":
            said = "leave-one-out knows a trial's score only at its end; choose another --selection, or no scheduler"
            self.require("scheduler", self.scheduler == "none", said)
            self.require("folds", self.folds != 1, "leave out at least two environments in turn, or 0 for every one")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(OptionGroup):
    """The options of ``concord tune``: the study's, and those that every trial starts from."""

    study: StudyOptions
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class CompareOptions(OptionGroup):
    """Train what tables of the job need and is not there yet: concord compare JOB [TABLE…]. Options of the job given
    here hold for every configuration."""

    # fmt: off
    seeds: int | None = None
    """Seeds of each configuration; the table's own number if not given."""
    first_seed: int | None = None
    """The first of them; the table's own if not given."""
    sharing: SharingOptions = field(default_factory=SharingOptions)
    # fmt: on

    def check(self) -> None:
        """Validate the options (InputError)."""
        super().check()
        self.require("seeds", self.seeds is None or self.seeds >= 1, "must be at least 1")
        self.require("first_seed", self.first_seed is None or self.first_seed >= 0, "must not be negative")


@dataclass(frozen=True, kw_only=True)
class CompareCommand(OptionGroup):
    """The options of ``concord compare``: the comparison's, and those that every run starts from."""

    comparison: CompareOptions
    config: RunConfig


def compare_options_for(config: RunConfig) -> CompareCommand:
    """The comparison's options and a job's, at their defaults (InputError for an option that means two things)."""
    return with_config(CompareCommand, "comparison", CompareOptions(), config, "compare")


def options_for(config: RunConfig, methods: Sequence[str] = ()) -> TuneOptions:
    """The study's options and a job's, at their defaults; the class's docstring names the job's own methods.

    Raises:
        InputError: the job has an option that means something else here.
    """
    named = f" Methods of this job: {', '.join(methods)}." if methods else ""
    return with_config(TuneOptions, "study", StudyOptions(), config, "tune", f"{StudyOptions.__doc__}{named}")


def with_config(
    kind: type[Command], part: str, own: OptionGroup, config: RunConfig, command: str, text: str | None = None
) -> Command:
    """A command's own options and a job's, at their defaults.

    Args:
        kind: has both, its own as ``part`` and the job's as ``config``.
        part: the name of its own.
        own: its own.
        config: the job's.
        command: its name.
        text: what its help says; that of its own options if None.

    Raises:
        InputError: the job has an option that means something else there.
    """
    for name in options_of(type(own)).keys() & options_of(type(config)).keys():
        raise InputError(f"job option {flag_of(name)}: also an option of concord {command}; rename it")
    # Of the help's panels the one without a name comes first.
    names = {part: (type(own), ""), "config": (type(config), "job")}
    fields: list[Any] = [(field, Annotated[kind, tyro.conf.arg(name=name)]) for field, (kind, name) in names.items()]
    namespace = {"__doc__": text or type(own).__doc__}
    made = dataclasses.make_dataclass(
        kind.__name__, fields, bases=(kind,), namespace=namespace, frozen=True, kw_only=True
    )
    command_options: Command = made(**{part: own, "config": config})
    return command_options


def combined(first: type[Any], second: type[Any]) -> type[Any]:
    """A dataclass with the options of both; what it says of itself, and a default of both, is the first's."""
    both = type(f"{first.__name__}And{second.__name__}", (first, second), {"__doc__": first.__doc__})
    return dataclass(frozen=True, kw_only=True)(both)
