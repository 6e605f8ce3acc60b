"""The plan of a study, checked before anything is started or written."""

import abc
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from concord.aggregation import threshold_at_chance
from concord.errors import InputError, format_for_cli
from concord.execution.key import plain, recorded_config, require_same, require_secrets
from concord.execution.preflight import PreflightResult, preflight
from concord.execution.spec import JOB, GroupSpec, RunSpec, new_names, plain_name, resolved_paths, run_origin, run_tags
from concord.options import Role, names_of, option_values, options_of, science_values
from concord.record import FOLDERS, RECORD, folder_of, read_record
from concord.record import Kind as GroupKind
from concord.redaction import is_secret
from concord.space import Point, Space
from concord.storage import Folder
from concord.studies.criterion import Criterion, StopRule, TrialEvaluator, choose_criterion, default_selection
from concord.studies.environment_folds import drawn, ends_of, folds_of, most_left_out
from concord.studies.proposals import GroupRuns, Kind, Trial
from concord.studies.search import (
    OwnPoint,
    Search,
    chosen_study,
    config_at,
    first_points,
    least_significance,
    own_point,
    study_space,
)
from concord.studies.study_options import SharingOptions, StudyOptions
from concord.tracking import Store
from concord.training import JobFile, RunConfig, TrainConfig
from concord.training.options import LeftOut, in_short, parallel_of

# The number of environments left out for the short list, without --folds.
_SHORTLIST_FOLDS = 4


@dataclass(frozen=True)
class GroupPlan(abc.ABC):
    """A group of runs that start from one configuration.

    Attributes:
        name: the group's name; the same name continues it.
        base: the configuration that every run starts from.
        sharing: the division of the cluster among the runs.
        evaluator: of the runs, by the metrics that they report.
    """

    kind: ClassVar[GroupKind]
    name: str
    job: JobFile
    base: RunConfig
    sharing: SharingOptions
    evaluator: TrialEvaluator

    @property
    @abc.abstractmethod
    def continuation(self) -> str:
        """The command, or the call of Python's interface, that continues the group, without secrets."""

    @abc.abstractmethod
    def there(self, runs: GroupRuns) -> str:
        """What is there of all that the group trains, in words."""

    @property
    def varied(self) -> Collection[str]:
        """The options that differ between the runs."""
        return options_of(type(self.base))

    @property
    def folder(self) -> Folder:
        """The folder, or its address."""
        return folder_of(self.base.run.output, self.name, self.kind)

    @property
    def experiment(self) -> str:
        """The MLflow experiment, separate from the job's own runs."""
        return f"{self.job.name}-{FOLDERS[self.kind]}"

    def overrides(self, config: RunConfig) -> dict[str, Any]:
        """The options in which a run's configuration differs from the base."""
        base = option_values(self.base)
        return {name: value for name, value in option_values(config).items() if value != base[name]}

    @cached_property
    def run_tags(self) -> Mapping[str, str]:
        """The tags of a job's run."""
        return run_tags(self.job.name, self.job.path)

    @cached_property
    def _origin(self) -> Mapping[str, str]:
        return run_origin(self.job.path)

    def member(
        self,
        spec: RunSpec,
        name: str,
        place: Mapping[str, Any],
        data: str | None,
        parameters: Mapping[str, object],
        tags: Mapping[str, str],
    ) -> RunSpec:
        """A run of this group at this place; ``data`` is the version of its data."""
        unused = spec.config.unused()
        return dataclasses.replace(
            spec,
            name=name,
            experiment=self.experiment,
            parameters={name: value for name, value in parameters.items() if name not in unused},
            # Runs with the tag of a job are listed by themselves.
            tags={
                **{name: value for name, value in self.run_tags.items() if name != JOB},
                "concord.kind": place["kind"],
                **tags,
            },
            origin={**self._origin, **({} if data is None else {"data": data})},
            place=place,
        )


def check_group(base: RunConfig, what: str) -> None:
    """Refuse options that do not fit a group (InputError)."""
    if base.run.resume:
        raise InputError(f"--resume: the same --name continues a {what}; leave --resume out")
    if (least := parallel_of(base).min_workers) is not None:
        raise InputError(f"--min-workers {least}: a trial that loses its workers starts again; leave it out")


@dataclass(frozen=True)
class StudyPlan(GroupPlan):
    """A study.

    Attributes:
        method: the name of the job's study, or of one for every job.
        measure: the measure of the score, such as ``accuracy``.
        suggested: points to try first, from the job or the command line.
        own: the point of the job's own settings, which is tried first without suggestions.
        folds: what every trial leaves out in turn: environments, or folds of several.
        shortlist_folds: environments that the short list leaves out in turn; none if every trial leaves some out.
    """

    kind = "study"
    options: StudyOptions
    given: frozenset[str]
    method: str
    space: Space
    measure: str
    suggested: tuple[Point, ...]
    own: OwnPoint | None
    folds: tuple[LeftOut, ...]
    shortlist_folds: tuple[str, ...]
    trials: int
    checked: PreflightResult

    @property
    def varied(self) -> Collection[str]:
        """The names of the varied options and switches."""
        return {located.name for located in self.space.varied()}

    @property
    def criterion(self) -> Criterion:
        """The criterion of its trials."""
        assert self.evaluator.criterion is not None
        return self.evaluator.criterion

    @property
    def stop_rule(self) -> StopRule:
        """The conditions for an early end of its trials."""
        return self.evaluator.stop_rule

    @property
    def test_usage(self) -> str | None:
        """The parts of the study that use the o.o.d. test, in words; None if none does."""
        parts = ["selection"] * self.criterion.oracle + ["early stopping"] * self.stop_rule.oracle
        return " and ".join(parts) or None

    @property
    def continuation(self) -> str:
        """See :class:`GroupPlan`; the record has the options that decide a study."""
        unkept = names_of(type(self.base), Role.UNKEPT)
        usual = option_values(self.job.job.config)
        where = {
            name: value for name, value in option_values(self.base).items() if name in unkept and value != usual[name]
        }
        options = {"name": self.name, "output": self.base.run.output, **where}
        return self.job.continuation("tune", options=options)

    def there(self, runs: GroupRuns) -> str:
        """See :class:`GroupPlan`."""
        return f"{len(runs.ended('trial'))} of {self.trials} trials are there"

    @property
    def new_seeds(self) -> range:
        """The seeds of the runs of the best configuration."""
        return range(self.base.run.seed + 1, self.base.run.seed + 1 + self.options.reruns)

    @property
    def repetitions(self) -> tuple[int, int]:
        """The trainings after the search: of the best trials with environments left out, of the best with new seeds."""
        shortlist = min(self.options.shortlist, self.trials)
        return shortlist * len(self.shortlist_folds), self.options.reruns * (1 + len(self.folds))

    @property
    def first(self) -> tuple[Point, ...]:
        """The points to try first."""
        return (self.own.point,) if self.own is not None else self.suggested

    def search(self) -> Search:
        """A new search."""
        return Search(self.space, self.options.search, self.base.run.seed, self.first, self.options.startup)

    def epochs(self, trial: Trial) -> int:
        """The epoch of a trial's last evaluation."""
        return self.job.epochs(config_at(self.base, self.space, trial.point))

    def parts(
        self,
        kind: Kind,
        trial: int,
        point: Point,
        seed: int | None = None,
        folds: Sequence[LeftOut] = (),
        stop_when: str = "",
    ) -> list[RunSpec]:
        """The runs of a trial, or of its repetition with another seed: on all environments, and without each fold.

        Of kind ``left-out`` only those without a fold.
        """
        seeded: dict[str, Any] = {} if seed is None else {"seed": seed}
        config, version = config_at(self.base, self.space, point).with_options(**seeded), self._version
        if kind == "left-out":
            assert isinstance(config, TrainConfig)
            # One evaluation is enough unless evaluations choose the weights that are kept.
            choosing = config.schedule.keep != "last" or config.schedule.stop_spread > 0
            config = config.with_options(consistency=0, **({} if choosing else {"evaluations": 1}))
        tags = {
            "concord.study": self.name,
            "concord.trial": str(trial),
            "concord.seed": str(config.run.seed),
            "concord.method": self.method,
            "concord.selection": self.criterion.selection,
        }
        found = []
        whole: list[LeftOut] = [] if kind == "left-out" else [None]
        for left_out in [*whole, *folds]:
            without: dict[str, Any] = {} if left_out is None else {"left_out": left_out}
            part = config if left_out is None else config.with_options(leave_out=left_out)
            spec = RunSpec.of(self.job, part.resolve(), version, stop_when if left_out is None else "")
            resolved = _derived(part, spec.config)
            words = [self.name, "left-out" if kind == "left-out" else "trial", str(trial)]
            words += [] if seed is None else ["seed", str(seed)]
            words += [] if left_out is None else ["without", in_short(left_out)]
            text = "-".join(words)
            name = plain_name(text, "trial")
            if name != text:  # the key tells environments apart whose names are alike, or have other letters
                name += f"-{spec.key.without_data[:6]}"
            parameters = {**self.space.fixed(point), **point, **resolved, **seeded}
            place = {"kind": kind, "trial": trial, "point": point, "resolved": resolved, **seeded, **without}
            fold_tags = {} if left_out is None else {"concord.left_out": in_short(left_out)}
            found.append(self.member(spec, name, place, version, parameters, tags | fold_tags))
        return found

    @property
    def _version(self) -> str | None:
        return self.checked.environments.version

    @cached_property
    def run_tags(self) -> Mapping[str, str]:
        """The tags of a job's run, with the version of the data."""
        return run_tags(self.job.name, self.job.path, len(self.checked.environments.train), self._version)

    def spec(self) -> GroupSpec:
        """What the study is: the options that its trials start from, and those that decide its trials."""
        deciding = {
            **science_values(self.options),
            "method": self.method,
            "space": self.space.as_json(),
            "stop_when": str(self.stop_rule),
            "suggestions": list(self.suggested),
        }
        if any(
            isinstance(fold, tuple) for fold in self.folds
        ):  # a number alone, of an older study, was of environments
            deciding["folds"] = f"{len(self.folds)} of several environments"
        parameters = {
            **{name: value for name, value in option_values(self.options).items() if value not in (None, ())},
            "seed": self.base.run.seed,
            "register": self.base.run.register,
            "metric": self.criterion.metric,
            "mode": self.criterion.mode,
            "stop_when": self.stop_rule,
        }
        tags = {
            **self.run_tags,
            "concord.study": self.name,
            "concord.method": self.method,
            "concord.selection": self.criterion.selection,
            "concord.oracle": self.test_usage or "no",
        }
        key = RunSpec.of(self.job, self.base.resolve(), self._version).key
        return GroupSpec(
            self.job,
            self.base,  # as given, so that derived values follow when an option is varied
            dataclasses.replace(key, options={**key.options, **plain(deciding)}),
            experiment=self.experiment,
            parameters=parameters,
            tags=tags,
            artifacts={"space.json": self.space.as_json()},
        )

    def record(self, store: Store) -> dict[str, Any]:
        """The record of a new study."""
        spec = self.spec()
        return {
            **spec.record(store, "study"),
            "deciding": dict(spec.key.options),
            "own": None if self.own is None else dataclasses.asdict(self.own),
            "criterion": dataclasses.asdict(self.criterion),
            "measure": self.measure,
            "modes": dict(self.evaluator.modes),
            "method": self.method,
            "space": self.space.as_json(),
            "oracle": self.test_usage,
            "validation": bool(self.checked.environments.validation),
            "options": recorded_config(self.options),
            "given": sorted(self.given),
            "started": time.time(),
        }


def plan_study(
    job: JobFile, options: Any, given: set[str], sources: Mapping[str, str] = MappingProxyType({})
) -> StudyPlan:
    """Check everything that needs neither a cluster nor a store, and whether an earlier study of this name fits.

    ``sources`` says of given options that are not on the command line where they are, for errors.
    """
    asked, base, own_loop = options.study, options.config, job.job.loop
    asked.check()
    base.check()
    check_group(base, "study")
    if own_loop is not None and own_loop.check_trial is not None:
        own_loop.check_trial(base)
    base = base.with_options(**resolved_paths(base))
    method, study = chosen_study(job.job.studies, asked, base)
    if own_loop is None and asked.selection == "own":
        raise InputError("--selection own: is for jobs with a loop of their own")
    if own_loop is not None and asked.selection not in (None, "own"):
        wrong = "the job's own loop decides what it evaluates; leave it out"
        raise InputError(f"--selection {asked.selection}: {wrong}")
    folders = (folder_of(base.run.output, name, "study") for name in new_names(f"{job.name}-{method}", base))
    name = base.run.name or next(folder.place.name for folder in folders if not folder.exists())
    base = base.with_options(name=None)
    space = study_space(study.space, asked, given & options_of(type(base)).keys(), base, sources)
    config = config_at(base, space, {})
    checked = preflight(job, config)
    stop_rule = StopRule.of(study.stop_when if asked.stop_when is None else asked.stop_when)
    stop_rule.check(checked.reported)
    record = read_record(folder_of(base.run.output, name, "study"), "study")
    began = None if record is None else record["criterion"]["selection"]
    usual = default_selection(checked.environments, asked.metric or study.metric, criterion=job.job.criterion or "")
    selection = "own" if own_loop is not None else asked.selection or began or study.selection or usual
    asked = dataclasses.replace(asked, selection=selection)
    asked.check()
    measure, criterion, modes = choose_criterion(job, config, asked, selection, study.metric, checked)
    train, leave_out = checked.environments.to_leave_out, selection == "leave-one-out"
    folds: tuple[LeftOut, ...] = ()
    if leave_out:
        for option, count in (("folds", asked.folds), ("drawn", asked.drawn)):
            asked.require(option, count <= len(train), f"there are {len(train)} training environments")
        folds = folds_of(drawn(train, asked.drawn, base.run.seed), asked.folds, base.run.seed)
    environments = len(checked.environments.train) - most_left_out(folds)
    fixed = base.data.leave_out if isinstance(base, TrainConfig) else None
    if leave_out and fixed is not None:
        raise InputError(
            f"--leave-out {fixed}: --selection leave-one-out leaves each out in turn; leave this option out"
        )
    if leave_out:
        try:
            for fold in ends_of(folds):
                preflight(job, config.with_options(leave_out=fold))
        except InputError as error:
            raise InputError(f"{format_for_cli(error)}, since --selection leave-one-out leaves one out") from error
    smallest = least_significance(space, base) if isinstance(base, TrainConfig) else None
    masks_by_signs = isinstance(checked.config, TrainConfig) and checked.config.aggregation.aggregator != "t-mask"
    if isinstance(base, TrainConfig) and smallest is not None and masks_by_signs:
        threshold_at_chance(smallest, base.num_gradients(environments))  # refuses what too few can have
    suggested = tuple(first_points(space, asked.suggest, study.suggestions))
    alone = suggested or asked.search == "grid"  # a grid is searched from its first point
    plan = StudyPlan(
        name=name,
        job=job,
        base=base,
        sharing=asked.sharing,
        options=asked,
        given=frozenset(given),
        method=method,
        space=space,
        measure=measure,
        evaluator=TrialEvaluator(criterion, modes, stop_rule),
        suggested=suggested,
        own=None if alone else own_point(space, base, environments),
        folds=folds,
        shortlist_folds=drawn(train, min(asked.drawn or _SHORTLIST_FOLDS, len(train)), base.run.seed)
        if len(train) > 1 and fixed is None and not leave_out
        else (),
        trials=asked.trials,
        checked=checked,
    )
    size = plan.search().size
    if size is not None and ("trials" not in given or asked.trials > size):
        plan = dataclasses.replace(plan, trials=size)
    if record is not None:
        try:
            recorded = StopRule.read(record["deciding"]["stop_when"])
        except InputError as error:
            problem = format_for_cli(error).removeprefix("--")
            raise InputError(f"--name {name}: {plan.folder.path / RECORD} cannot be read ({problem})") from error
        if recorded.bounds == stop_rule.bounds:  # the text of the study's beginning is in the keys of its trials
            plan = dataclasses.replace(plan, evaluator=dataclasses.replace(plan.evaluator, stop_rule=recorded))
        _check_same(plan, record)
        evaluator = dataclasses.replace(plan.evaluator, criterion=Criterion(**record["criterion"]))
        own, measure = OwnPoint.read(record["own"]), record["measure"]
        plan = dataclasses.replace(plan, own=own, measure=measure, evaluator=evaluator)  # as the study began
    return plan


def _derived(config: RunConfig, resolved: RunConfig) -> Point:
    """The values of options that follow from others, as with ``auto``."""
    given, unused = option_values(config), resolved.unused()
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in science_values(resolved).items()
        if value != given[name] and name not in unused and not is_secret(name)
    }


def _check_same(plan: StudyPlan, record: dict[str, Any]) -> None:
    """Refuse a name that belongs to another study (InputError)."""
    what = f"the study {plan.name}"
    require_secrets(what, plan.base, record)
    before = Criterion(**record["criterion"])
    if before.metric == plan.criterion.metric and before.mode != plan.criterion.mode:
        raise InputError(
            f"--name {plan.name}: a study scored by {before.metric}, {before.direction}; here "
            f"{plan.criterion.direction}; give another name"
        )
    require_same(what, plan.spec().key, {**record, "config": record["deciding"]}, plan.name, "give another name")
