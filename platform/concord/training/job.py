"""A job: what to train on what. A Python file that names one is all a user writes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor, nn

from concord.aggregation.rule_file import RuleFile
from concord.environments import Environments
from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Risk, Supervised, as_risk
from concord.job_files import built_in_jobs
from concord.objectives import Objective
from concord.options import defaults_of, options_of
from concord.source_file import read_source, run_source
from concord.space import Space, Value
from concord.training.comparison import Comparison
from concord.training.evaluation import EnvironmentEvaluation, Measure, Mode, PerExample
from concord.training.options import RunConfig, TrainConfig
from concord.training.outcome import Evaluation, Outcome
from concord.training.rule_options import config_with_rule

Config = TypeVar("Config", bound=TrainConfig)
OwnConfig = TypeVar("OwnConfig", bound=RunConfig)


@dataclass(frozen=True)
class Job(Generic[Config]):
    """What a run needs to know; ``job = Job(...)`` in a file makes it a job file.

    A loss is for batches ``(inputs, targets)``; for batches of another form give a risk, which calls the model itself::

        def risk(model, batch, step):
            return model(**batch).loss

        job = Job(environments, model, risk=risk)

    Attributes:
        environments: the data, from the configuration. It is called in every worker.
        model: the network, from the configuration. Outputs are ``(batch, ...)``.
        loss: maps outputs and targets of a batch to a scalar, the mean over the batch.
        risk: in place of a loss, maps model, batch and step to a scalar, the mean over the batch, or to a sum and its
            weight, see :mod:`concord.gradients.risk`. It is reported as ``loss``, evaluated under ``torch.no_grad()``.
            With an ``objective`` and neither loss nor risk it is the objective's, so that it may depend on the options.
        objective: from the configuration, what is minimized in place of what ``--objective`` names, see
            :class:`~concord.objectives.Objective`; it may have parameters, an optimizer and a schedule of its own.
        config: the options at their defaults, such as ``TrainConfig().with_options(lr=1e-2)``; derive from
            :class:`TrainConfig` to add some. A class means its defaults.
        measures: further numbers to report, by name: ``{"rmse": Measure(function, mode="min")}``, where the function
            maps outputs and targets to one number an example ``(batch,)``, averaged over examples. A function alone
            does where nothing is chosen by it. With a risk the function gets what the model gave, and the batch. None:
            ``accuracy`` where there is a loss and the targets are classes.
        evaluation: the job's own evaluation of whole environments, at the same moments as the measures; or what makes
            it, from the configuration.
        criterion: the metric by which one version of the model is better than another.
        mode: whether the criterion is to be large or small, where it is no measure that says so itself.
        required: the least values of metrics with which a version can be the champion at all, from the configuration:
            for a criterion that a model can fulfil without having learned anything.
        name: of the job and the registered model; None takes the file's.
        reproduces: what of which paper, for ``concord jobs``.
        figures: draws figures of a finished run: file name (without ending) to matplotlib figure, or to frames
            ``(length, channels, height, width)``, also several such side by side, which become a moving picture.
        report: options (a dataclass with defaults) and the function behind ``concord report``.
        final_measures: further numbers of the trained model, at the end of a run: gets the options and the model in
            evaluation mode, on its device, and gives numbers by name. They are not known before a run, so none of them
            can be the criterion.
        data: options (a dataclass with defaults) and the function behind ``concord data``, where data have to be made.
        studies: what ``concord tune`` searches, by the names of the methods that are to be compared; the first is
            the default. Without any, a space is derived from the configuration.
        comparisons: the tables of ``concord compare``, by name; or the Python file beside the job's own that has them,
            as ``comparisons = {…}``. Workers never read that file.
    """

    environments: Callable[[Config], Environments]
    model: Callable[[Config], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    config: Config = field(default_factory=TrainConfig)  # type: ignore[assignment]
    measures: Mapping[str, Measure | PerExample] | None = None
    criterion: str | None = None
    mode: Mode | None = None
    required: Callable[[Config], Mapping[str, float]] | None = None
    name: str | None = None
    reproduces: str = ""
    figures: Callable[["Job[Config]", Config, Outcome, nn.Module], Mapping[str, Any]] | None = None
    report: "Report | None" = None
    final_measures: Callable[[Config, nn.Module], Mapping[str, float]] | None = None
    data: "Data | None" = None
    studies: Mapping[str, "Study"] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] | str = field(default_factory=dict)
    risk: Risk | None = field(default=None, kw_only=True)
    objective: Callable[[Config], Objective] | None = field(default=None, kw_only=True)
    evaluation: EnvironmentEvaluation | Callable[[Config], EnvironmentEvaluation] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        _make_defaults(self)
        if isinstance(self.config, TrainConfig):
            object.__setattr__(self, "config", _with_objective(self.config, self.objective))
        own = self.objective is not None and self.loss is None
        if (self.loss is None) == (self.risk is None) and not own:
            raise InputError("Job: give a loss(outputs, targets) or a risk(model, batch, step), one of them")
        if callable(self.risk) and as_risk(self.risk) is not self.risk:
            raise InputError("Job: risk: takes other arguments; expected a function of (model, batch, step)")

    @property
    def batch_risk(self) -> Risk:
        """The risk of a batch: the risk, or the loss of inputs and targets."""
        if self.risk is not None:
            return self.risk
        assert self.loss is not None
        return Supervised(self.loss)

    def risk_of(self, config: Config) -> Risk:
        """The same, also where the risk is that of the job's own objective."""
        if self.risk is None and self.loss is None:
            assert self.objective is not None
            return self.objective(config).risk
        return self.batch_risk

    def evaluation_of(self, config: Config) -> EnvironmentEvaluation | None:
        """The job's own evaluation, of this configuration.

        Raises:
            InputError: what is to make one gives something else.
        """
        if self.evaluation is None or isinstance(self.evaluation, EnvironmentEvaluation):
            return self.evaluation
        made = self.evaluation(config)
        if not isinstance(made, EnvironmentEvaluation):
            raise InputError(f"job {self.name}: evaluation gave {type(made).__name__}, expected EnvironmentEvaluation")
        return made


@dataclass(frozen=True)
class Study:
    """What ``concord tune JOB --method NAME`` searches.

    Attributes:
        space: the options that are varied, and those that make the method, fixed.
        stop_when: conditions such as ``train_accuracy>0.97``; a trial ends early when all of them hold.
        suggestions: points of the space that are tried first.
        selection: what its trials are judged by, unless ``--selection`` says otherwise.
        metric: the measure of it, unless ``--metric`` says otherwise; None: accuracy, or loss where there is none.
    """

    space: Space
    stop_when: tuple[str, ...] = ()
    suggestions: tuple[Mapping[str, Value], ...] = ()
    selection: Literal["held-out", "validation", "leave-one-out", "oracle"] = "held-out"
    metric: str | None = None


@dataclass(frozen=True)
class Report:
    """What ``concord report JOB`` does.

    Attributes:
        options: a dataclass whose fields become the options.
        make: gets the options and a function that prints a line of progress; writes figures and returns a
            mapping that is the JSON result.
    """

    options: type[Any]
    make: Callable[[Any, Callable[[str], None]], Mapping[str, Any]]


@dataclass(frozen=True)
class Data:
    """What ``concord data JOB`` does.

    Attributes:
        options: a dataclass whose fields become the options.
        make: gets the options and a function that prints a line of progress; makes the data, or what is missing of
            them, and returns a mapping that is the JSON result.
    """

    options: type[Any]
    make: Callable[[Any, Callable[[str], None]], Mapping[str, Any]]


@dataclass(frozen=True)
class TrialLoop(Generic[OwnConfig]):
    """How studies and comparisons train a job that has a loop of its own.

    Attributes:
        evaluations: trains with these options and gives every evaluation as it comes; it tracks nothing, and may be
            ended at any of them.
        epochs: the epoch of the last evaluation, from the options.
        metrics: the names of the metrics in the evaluations, and whether large or small is good; None where trials are
            not judged by it. They are judged by the first one, unless ``--metric`` names another.
        check: refuses options with which there can be no trial (InputError); None refuses none.
    """

    evaluations: Callable[[OwnConfig], Iterator[Evaluation]]
    epochs: Callable[[OwnConfig], int]
    metrics: Mapping[str, Mode | None]
    check: Callable[[OwnConfig], None] | None = None

    def __post_init__(self) -> None:
        if not self.metrics or next(iter(self.metrics.values())) not in ("max", "min"):
            raise InputError(f"TrialLoop: metrics are {dict(self.metrics)}; the first has to say max or min")


@dataclass(frozen=True)
class CustomJob(Generic[OwnConfig]):
    """A job that trains in a way of its own, not by the training loop: an agent, for one.

    Attributes:
        run: does the whole run, tracked, and gives the finished run that ``concord train`` shows; its arguments are
            the job's file, the options, and a function that prints a line of progress.
        config: the options at their defaults; derive from :class:`~concord.training.options.RunConfig`.
        name: of the job and the registered model; None takes the file's.
        reproduces: what of which paper, for ``concord jobs``.
        report: options (a dataclass with defaults) and the function behind ``concord report``.
        data: options (a dataclass with defaults) and the function behind ``concord data``.
        trials: how studies and comparisons train the job; None: it has none.
        studies: what ``concord tune`` searches, by the names of methods; without any, what ``--vary`` says.
        comparisons: the tables of ``concord compare``, see :class:`Job`; columns are metrics of ``trials``.
    """

    run: Callable[["JobFile", OwnConfig, Callable[[str], None]], Any]
    config: OwnConfig
    name: str | None = None
    reproduces: str = ""
    report: "Report | None" = None
    data: "Data | None" = None
    trials: TrialLoop[OwnConfig] | None = None
    studies: Mapping[str, "Study"] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] | str = field(default_factory=dict)

    def __post_init__(self) -> None:
        _make_defaults(self)


def _make_defaults(job: Any) -> None:
    """Of a class of options make its defaults, and refuse two options of one name (InputError)."""
    if isinstance(job.config, type) and issubclass(job.config, RunConfig):
        object.__setattr__(job, "config", defaults_of(job.config))
    if isinstance(job.config, RunConfig):
        options_of(type(job.config))


def _with_objective(config: Config, objective: Callable[[Any], Objective] | None) -> Config:
    """The options of a class that knows the job's own objective, so that what they leave to others follows from it."""
    kind = type(config)
    if kind is not TrainConfig and "own_objective" in vars(kind):  # of a job that this one was made of
        kind = kind.__mro__[1]
    if objective is not None:
        namespace = {"__doc__": kind.__doc__, "own_objective": property(lambda _: objective)}
        kind = type(kind.__name__, (kind,), namespace)
    if kind is type(config):
        return config
    return kind(**{each.name: getattr(config, each.name) for each in fields(config) if each.init})


@dataclass(frozen=True)
class JobFile:
    """A job and the file it came from, which is what travels to the workers.

    Attributes:
        job: the job, with its name filled in; Any, since an :class:`CustomJob` has other parts.
        path: the file.
        source: its text.
        rule: the user's own that --aggregator names, the fields of which are options of the job then; it travels, too.
    """

    job: Any
    path: str
    source: str
    rule: RuleFile | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        name: str = self.job.name
        return name


def epochs_of(file: JobFile, config: Any) -> int:
    """The epoch of the last evaluation of a run or trial with these options."""
    loop: TrialLoop[Any] | None = file.job.trials if isinstance(file.job, CustomJob) else None
    epochs: int = config.schedule.epochs if loop is None else loop.epochs(config)
    return epochs


def load_job(reference: str) -> JobFile:
    """The job of this name, or the job in this file.

    Raises:
        InputError: there is none, or the file cannot be run, or it names no job.
    """
    known = built_in_jobs()
    path = known.get(reference, Path(reference))
    if reference not in known and path.suffix != ".py":
        raise InputError(f"job {reference}: there is none; give one of {', '.join(known)}, or a Python file")
    path = path.resolve()
    source = read_source(path, lambda problem: InputError(f"job {reference}: {problem}"))
    return job_from_source(str(path), source)


def job_from_source(path: str, source: str, rule: RuleFile | None = None) -> JobFile:
    """The job that this text of a file names; used where the file itself may not be (on another node).

    Args:
        path: of the job's file.
        source: its text.
        rule: the user's own that it is trained with; None where --aggregator names a built-in one.

    Raises:
        InputError: the text cannot be run, or names no job, or the rule cannot be used.
    """
    module = run_source(path, source, "job", lambda problem: InputError(f"job {path}: {problem}"))
    job = getattr(module, "job", None)
    if not isinstance(job, Job | CustomJob):
        raise InputError(f"job {path}: names no job; it needs a line job = Job(environments=…, model=…, loss=…)")
    job = replace(job, name=job.name or Path(path).stem.replace("_", "-"))
    _check_parts(job, path)
    file = JobFile(job, path, source)
    return file if rule is None else with_rule(file, rule)


def with_rule(file: JobFile, rule: RuleFile) -> JobFile:
    """The job with this rule as its aggregator, and the rule's fields among its options.

    Raises:
        InputError: there is no such rule in the file, its fields cannot be options, or the job takes none.
    """
    if isinstance(file.job, CustomJob):
        raise ArgumentError("aggregator", rule.reference, f"job {file.name} trains in a way of its own, without it")
    config = config_with_rule(file.job.config, rule.load())
    return replace(file, job=replace(file.job, config=config), rule=rule)


def _parts_of(job: Job[Any] | CustomJob[Any]) -> tuple[str, ...]:
    """The parts without which there is no job."""
    if isinstance(job, CustomJob):
        return ("run",)
    of_batch = "risk" if job.risk else "loss" if job.loss else "objective"
    return ("environments", "model", of_batch)


def _check_parts(job: Job[Any] | CustomJob[Any], path: str) -> None:
    """Refuse what is no job: a network where a function that makes one is wanted, and the like."""

    def require(right: bool, problem: str) -> None:
        if not right:
            raise InputError(f"job {path}: {problem}")

    def maps_to(kind: Callable[[Any], bool], value: Any) -> bool:
        return isinstance(value, Mapping) and all(map(kind, value.values()))

    for part in _parts_of(job):
        value = getattr(job, part)
        right = callable(value) and not (part == "model" and isinstance(value, nn.Module))
        require(right, f"{part} is of type {type(value).__name__}; expected a function, see Job")
    kind = RunConfig if isinstance(job, CustomJob) else TrainConfig
    said = f"config is {job.config!r}; expected an instance of a class from {kind.__name__}"
    require(isinstance(job.config, kind), said)
    right = maps_to(lambda each: isinstance(each, Study), job.studies)
    require(right, f"studies map the names of methods to Study(space=…), found {job.studies!r}")
    right = isinstance(job.name, str) and not set(job.name) & set("/:")
    require(right, f"its name is {job.name!r}; expected text without '/' and ':'")
    right = isinstance(job.comparisons, str) or maps_to(lambda each: isinstance(each, Comparison), job.comparisons)
    require(right, f"comparisons map the names of tables to Comparison(…), found {job.comparisons!r}")
    if isinstance(job, CustomJob):
        loop = "TrialLoop(evaluations, epochs, metrics)"
        require(isinstance(job.trials, TrialLoop | None), f"trials is {job.trials!r}; expected {loop}")
        what = "studies" if job.studies else "comparisons"
        lacking = bool(job.studies or job.comparisons) and job.trials is None
        require(not lacking, f"{what} need trials={loop} to train by")
        return
    right = job.measures is None or maps_to(callable, job.measures)
    require(right, f"measures map names to Measure(function, mode=…), found {job.measures!r}")
    said = f"evaluation is {job.evaluation!r}; expected EnvironmentEvaluation(function, modes={{…}}), or what makes one"
    own = job.evaluation
    require(own is None or callable(own), said)
    said = f"objective is of type {type(job.objective).__name__}; expected a function, see Job"
    require(job.objective is None or callable(job.objective), said)
    require(job.mode in ("max", "min", None), f"mode is {job.mode!r}; expected max or min")
