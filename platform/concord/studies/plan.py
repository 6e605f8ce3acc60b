"""What a study is going to do, checked before anything is started or written."""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from concord.aggregation import threshold_at_chance
from concord.errors import InputError
from concord.options import option_values, options_of
from concord.redaction import is_secret, without_secrets
from concord.runs.folder import new_name, recorded_config
from concord.runs.preflight import Checked, preflight
from concord.runs.resume import require_same_sources, require_secrets
from concord.runs.run import resolved_paths
from concord.space import Point, Space
from concord.storage import Folder, StorageError
from concord.studies.journal import STUDY, read_study
from concord.studies.options import StudyOptions
from concord.studies.search import Search
from concord.studies.selection import Criterion, check_metric, chosen_mode
from concord.studies.spaces import OwnPoint, chosen_study, first_points, least_significance, own_point, study_space
from concord.studies.stopping import StopRule
from concord.training import CustomJob, JobFile, RunConfig, TrainConfig
from concord.training.evaluation import Mode
from concord.training.job import epochs_of
from concord.training.options import RUNTIME_OPTIONS, parallel_of

# How many environments are left out to judge the short list, if --folds does not say.
_FOLDS_OF_SHORTLIST = 4
# The options of a study that make its trials what they are: they stay when it continues.
_SCIENCE = ("search", "startup", "selection", "metric", "folds", "scheduler")


@dataclass(frozen=True)
class Plan:
    """A study.

    Attributes:
        name: of the study.
        job: what is trained.
        base: the configuration that every trial starts from.
        options: of the study.
        given: the options that the command line named.
        method: the name of the job's study, or of one for every job.
        space: that is searched.
        measure: that trials are judged by, such as ``accuracy``.
        modes: whether large or small is good, by measure; None where neither the job nor ``--mode`` says it.
        criterion: the same, with the examples it is taken on.
        stop_rule: when a trial ends early.
        suggested: points that are tried first, since somebody suggests them.
        own: the point of the job's own settings, which is tried first where nothing is suggested.
        folds: environments that every trial leaves out in turn.
        shortlist_folds: environments that the short list leaves out in turn.
        trials: how many trials there are to be.
        checked: what is known of the job.
    """

    name: str
    job: JobFile
    base: RunConfig
    options: StudyOptions
    given: frozenset[str]
    method: str
    space: Space
    measure: str
    modes: Mapping[str, Mode | None]
    criterion: Criterion
    stop_rule: StopRule
    suggested: tuple[Point, ...]
    own: OwnPoint | None
    folds: tuple[str, ...]
    shortlist_folds: tuple[str, ...]
    trials: int
    checked: Checked

    @property
    def kept(self) -> Folder:
        """Where it is kept."""
        return study_folder(self.base.run.output, self.name)

    @property
    def folder(self) -> Path:
        """Where it is on this machine."""
        return self.kept.path

    def epochs(self, config: Any) -> int:
        """The epoch of a trial's last evaluation."""
        return epochs_of(self.job, config)

    @property
    def looks_at_test(self) -> str | None:
        """What of it looks at the o.o.d. test, in words; None if nothing does."""
        looks = (["selection"] if self.criterion.oracle else []) + (["early stopping"] if self.stop_rule.oracle else [])
        return " and ".join(looks) or None

    @property
    def first(self) -> tuple[Point, ...]:
        """The points that are tried before any other."""
        return (self.own.point,) if self.own is not None else self.suggested

    def search(self) -> Search:
        """A search that has observed nothing yet."""
        options = self.options
        return Search(self.space, options.search, self.base.run.seed, self.first, options.startup)

    def identity(self) -> dict[str, Any]:
        """What must not change when the study continues, as JSON."""
        science = {k: v for k, v in recorded_config(self.base).items() if k not in RUNTIME_OPTIONS - {"workers"}}
        identity = {
            "method": self.method,
            "space": self.space.as_json(),
            **{name: getattr(self.options, name) for name in _SCIENCE},
            "stop_when": str(self.stop_rule),
            "suggestions": list(self.suggested),
            "config": science,
            **({"data": version} if (version := self.checked.environments.version) is not None else {}),
        }
        written: dict[str, Any] = json.loads(json.dumps(identity))
        return written

    def record(self) -> dict[str, Any]:
        """What is written down of it, beside what every group of trials writes down."""
        options = {k: str(v) if isinstance(v, Path) else v for k, v in option_values(self.options).items()}
        return {
            "identity": self.identity(),
            "own": None if self.own is None else dataclasses.asdict(self.own),
            "criterion": dataclasses.asdict(self.criterion),
            "measure": self.measure,
            "oracle": self.looks_at_test,
            "validation": bool(self.checked.environments.validation),
            "options": options,
            "given": sorted(self.given),
            **({"sources": sources} if (sources := self.base.sources()) else {}),
        }


def studies_folder(output: Path) -> Path:
    """Where the studies of an output folder are."""
    return output / "studies"


def study_folder(output: Path, name: str) -> Folder:
    """Where a study of this name is kept."""
    return Folder(studies_folder(output) / name)


def kept_study(kept: Folder) -> dict[str, Any] | None:
    """What the study that is kept in this folder is, begun on this machine or on another; None if there is none.

    Raises:
        InputError: it cannot be read, or the storage does not answer.
    """
    try:
        kept.fetch(STUDY)
    except StorageError as error:
        raise InputError(f"--output {error}") from error
    return read_study(kept.path) if (kept.path / STUDY).exists() else None


def make_plan(job: JobFile, options: Any, given: set[str]) -> Plan:
    """Check everything that can be checked without a cluster or a store.

    Args:
        job: what is tuned.
        options: an instance of what :func:`concord.studies.options.options_for` made of the job's configuration.
        given: the options that the command line named.

    Raises:
        InputError: something cannot be used, or does not fit the study of this name.
    """
    study_options, base = options.study, options.config
    study_options.check()
    base.check()
    if base.run.resume:
        raise InputError("--resume: the same --name continues a study; leave --resume out")
    if (least := parallel_of(base).min_workers) is not None:
        raise InputError(f"--min-workers {least}: a trial that lost its workers runs again; leave it out")
    base = base.with_options(**resolved_paths(base))
    method, study = chosen_study(job.job.studies, study_options, base)
    own = isinstance(job.job, CustomJob)
    if "selection" not in given:
        study_options = dataclasses.replace(study_options, selection="own" if own else study.selection)
        study_options.check()
    if own != (study_options.selection == "own"):
        said = "the job says what it evaluates; leave it out" if own else "is for jobs with a loop of their own"
        raise InputError(f"--selection {study_options.selection}: {said}")
    name = base.run.name or _new_name(job, method, base)
    base = base.with_options(name=None)
    space = study_space(study.space, study_options, given & options_of(type(base)).keys(), base)
    checked = preflight(job, base)
    stop_rule = StopRule.of(study.stop_when if study_options.stop_when is None else study_options.stop_when)
    stop_rule.check(checked.reported)
    usual = next(iter(checked.measures)) if own else "accuracy" if "train_accuracy" in checked.reported else "loss"
    measure = study_options.metric or study.metric or usual
    plain = measure.removeprefix("worst_")
    mode_of, reported = dict(checked.measures), list(checked.reported)
    mode_of[plain] = mode = chosen_mode(measure, study_options.mode, mode_of)
    criterion = Criterion.of(study_options.selection, measure, mode)
    if (
        criterion.metric.removeprefix("worst_") in reported and not own
    ):  # trials find the worst environment, if the job does not
        reported.append(criterion.metric)
    train = checked.environments.train
    leave_out = study_options.selection == "leave-one-out"
    if leave_out:
        if len(train) < 2:
            raise InputError("--selection leave-one-out: there is one training environment; nothing is left without it")
        reported += [f"left_out_{each}" for each in mode_of]
        reported += [f"worst_left_out_{each}" for each, mode in mode_of.items() if mode is not None]
    check_metric(criterion, reported)
    smallest = least_significance(space, base) if isinstance(base, TrainConfig) else None
    if isinstance(base, TrainConfig) and smallest is not None and base.chosen_aggregator != "t-mask":
        threshold_at_chance(smallest, base.voters(len(train) - leave_out))  # refuses what too few environments can have
    if study_options.folds > len(train):
        raise InputError(f"--folds {study_options.folds}: there are {len(train)} training environments")
    suggested = tuple(first_points(space, study_options.suggest, study.suggestions))
    alone = suggested or study_options.search == "grid"  # a grid is gone through from its beginning
    decided = base.decided(len(train) - leave_out) if isinstance(base, TrainConfig) else base
    plan = Plan(
        name=name,
        job=job,
        base=base,
        options=study_options,
        given=frozenset(given),
        method=method,
        space=space,
        measure=measure,
        modes=mode_of,
        criterion=criterion,
        stop_rule=stop_rule,
        suggested=suggested,
        own=None if alone else own_point(space, decided),
        folds=_drawn(train, study_options.folds or len(train), base.run.seed) if leave_out else (),
        shortlist_folds=_drawn(train, study_options.folds or _FOLDS_OF_SHORTLIST, base.run.seed)
        if len(train) > 1
        else (),
        trials=study_options.trials,
        checked=checked,
    )
    size = plan.search().size
    if size is not None and ("trials" not in given or study_options.trials > size):
        plan = dataclasses.replace(plan, trials=size)
    if (record := kept_study(plan.kept)) is not None:
        _check_same(plan, record)
        plan = dataclasses.replace(plan, own=OwnPoint.read(record.get("own")))  # as the study began
    return plan


def _check_same(plan: Plan, record: dict[str, Any]) -> None:
    """Refuse a name that belongs to another study (InputError)."""
    if record["job"] != plan.job.name:
        raise InputError(f"--name {plan.name}: is a study of job {record['job']}, not of {plan.job.name}")
    require_secrets(f"the study {plan.name}", recorded_config(plan.base), without_secrets(record["config"]))
    before = Criterion(**record["criterion"])
    if before.metric == plan.criterion.metric and before.mode != plan.criterion.mode:
        raise InputError(
            f"--name {plan.name}: a study that was judged by {before.metric}, {before.direction}; here "
            f"{plan.criterion.direction}; give another name"
        )
    ours, theirs = _without_secret_options(plan.identity()), _without_secret_options(record["identity"])
    for part in ours:
        if ours[part] == theirs.get(part):
            continue
        if part in ("space", "config"):
            there = theirs.get(part, {})
            differing = (name for name in {**ours[part], **there} if ours[part].get(name) != there.get(name))
            if (option := next(differing, None)) is None:  # an option is newer than the study, and has no value
                continue
            what = "varied from" if part == "space" else "set to"
            raise InputError(
                f"--name {plan.name}: a study with another {'space' if part == 'space' else 'configuration'}: there "
                f"{option} is {what} {there.get(option, 'nothing')}, here {ours[part].get(option, 'nothing')}; "
                "give another name"
            )
        raise InputError(
            f"--name {plan.name}: a study with another {part.replace('_', ' ')}: {theirs.get(part) or 'none'}, "
            f"not {ours[part] or 'none'}; give another name"
        )
    require_same_sources(f"the study {plan.name}", plan.base.sources(), record.get("sources", {}))


def _without_secret_options(identity: dict[str, Any]) -> dict[str, Any]:
    """What can be compared: of a secret, all that is recorded is that it was given."""
    config = without_secrets(identity.get("config", {}))
    return {**identity, "config": {name: value for name, value in config.items() if not is_secret(name)}}


def _drawn(names: tuple[str, ...], count: int, seed: int) -> tuple[str, ...]:
    """So many of the names, drawn by the seed, in their order."""
    if count >= len(names):
        return names
    order = np.random.default_rng(seed).permutation(len(names))[:count]
    return tuple(names[index] for index in sorted(order))


def _new_name(job: JobFile, method: str, base: Any) -> str:
    name = new_name(f"{job.name}-{method}", base)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(each for each in names if not study_folder(base.run.output, each).exists())
