"""A job: the model, data and loss of a run. A user writes one Python file that defines it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.job_files import built_in_jobs, job_name
from concord.options import as_words, defaults_of, did_you_mean, options_of, path_of
from concord.record import Evaluation, Run
from concord.redaction import redact_words, without_secrets
from concord.source_file import read_source, run_source
from concord.space import Space, Value
from concord.storage import display_path, resolve
from concord.submitted import typed_command, typed_path
from concord.training.baseline import Baseline, Fit
from concord.training.callback import Callback
from concord.training.comparison import Comparison
from concord.training.declared_measures import EnvironmentEvaluation, Measure, Mode, PerExample
from concord.training.options import MODEL_NAMES, RunConfig, TrainConfig, is_model_name
from concord.training.rule_file import RuleFile, config_with_rule

# With PyTorch, which takes a second or two: help and a wrong option do without.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from concord.environments import Environments
    from concord.gradients.risk import Risk
    from concord.objectives import Objective
    from concord.training.context import RunContext

Config = TypeVar("Config", bound=RunConfig)


def _not_given(config: RunConfig) -> Any:  # noqa: ARG001
    """Stands for a missing part."""
    raise InputError("Job: a part is missing; only a job with a loop of its own can leave it out")


@dataclass(frozen=True)
class Job(Generic[Config]):
    """The definition of a run; a file with ``job = Job(...)`` is a job file.

    A loss is for batches ``(inputs, targets)``; for batches of another form give a risk, which calls the model itself::

        def risk(model, batch, step):
            return model(**batch).loss

        job = Job(environments, model, risk=risk)

    Attributes:
        environments: the data, from the configuration, but not from its objective, aggregation, optimizer or schedule:
            trials that differ in those share data. It is called in every worker.
        model: the network, from the configuration. Outputs are ``(batch, ...)``.
        loss: maps outputs and targets of a batch to a scalar, the mean over the batch.
        risk: in place of a loss, maps model, batch and step to a scalar, the mean over the batch, or to a sum and its
            weight, see :mod:`concord.gradients.risk`. It is reported as ``loss``, evaluated under ``torch.no_grad()``.
            With an ``objective`` and neither loss nor risk it is the objective's, so that it may depend on the options.
        objective: makes from the configuration an objective that replaces ``--objective``, see
            :class:`~concord.objectives.Objective`; it may have parameters, an optimizer and a schedule of its own.
        config: the options at their defaults, such as ``TrainConfig().with_options(lr=1e-2)``; derive from
            :class:`TrainConfig` to add some. A class means its defaults.
        measures: numbers to report, by name: ``{"absolute_error": Measure(function, mode="min")}``, where the function
            maps outputs and targets to one number an example ``(batch,)``, averaged over examples. A function alone
            suffices if the measure selects nothing. With a risk the function gets the model's output and the batch.
            None: ``accuracy``, with a loss and classes as targets.
        evaluation: the job's own evaluation of whole environments, at the same moments as the measures; or a function
            that makes it from the configuration, or None.
        criterion: the metric that compares versions of the model.
        mode: ``max`` or ``min`` for the criterion, unless its measure has a mode.
        required: the least values of metrics for a champion, from the configuration, where an untrained model may do
            well by the criterion.
        name: of the job and the registered model; None takes the file's.
        reproduces: the papers' results that the job is for, which ``concord jobs`` shows.
        figures: draws figures of a finished run: file name (without ending) to matplotlib figure, or to frames
            ``(length, channels, height, width)`` or a list of these, which become a moving picture.
        report: options (a dataclass with defaults) and the function behind ``concord report``.
        final_measures: further numbers of the trained model, at the end of a run: maps the options and the model (in
            evaluation mode, on its device) to numbers by name. They are unknown before a run, so none can be the
            criterion.
        data: options (a dataclass with defaults) and the function behind ``concord data``, for data that must be made.
        studies: the searches of ``concord tune``, by method; the first is the default. Without any, a space is derived
            from the configuration.
        comparisons: the tables of ``concord compare``, by name; or the Python file beside the job's own that has them,
            as ``comparisons = {…}``. Workers never read that file.
        loop: replaces the platform's loop, with environments, loss or risk; see :class:`Loop`.
        parameter_groups: maps the model and the configuration to groups of its parameters with options of their own, as
            :mod:`torch.optim` takes them: ``[{"params": biases, "weight_decay": 0.0}, {"params": others}]``. What a
            group does not give is the run's; schedules multiply the rate of every group. None: no groups.
        fit: maps the configuration to a function that sets the model's weights from all training examples, in place of
            steps, or to None to train by steps, see :mod:`concord.training.baseline`.
        baselines: configurations that ``concord compare JOB methods`` and ``leave-one-out`` compare with the methods.
        callbacks: called as every run of the job trains; a loop of the job's own calls no ``on_step``.
    """

    environments: Callable[[Config], Environments] = _not_given
    model: Callable[[Config], nn.Module] = _not_given
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    config: Config = field(default_factory=TrainConfig)  # type: ignore[assignment]
    measures: Mapping[str, Measure | PerExample] | None = None
    criterion: str | None = None
    mode: Mode | None = None
    required: Callable[[Config], Mapping[str, float]] | None = None
    name: str | None = None
    reproduces: str = ""
    figures: Callable[[Job[Config], Config, Run, nn.Module], Mapping[str, Any]] | None = None
    report: Report | None = None
    final_measures: Callable[[Config, nn.Module], Mapping[str, float]] | None = None
    data: Data | None = None
    studies: Mapping[str, Study] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] | str = field(default_factory=dict)
    risk: Risk | None = field(default=None, kw_only=True)
    objective: Callable[[Config], Objective] | None = field(default=None, kw_only=True)
    evaluation: EnvironmentEvaluation | Callable[[Config], EnvironmentEvaluation | None] | None = field(
        default=None, kw_only=True
    )
    loop: Loop[Config] | None = field(default=None, kw_only=True)
    parameter_groups: Callable[[nn.Module, Config], Sequence[Mapping[str, Any]] | None] | None = field(
        default=None, kw_only=True
    )
    fit: Callable[[Config], Fit | None] | None = field(default=None, kw_only=True)
    baselines: Mapping[str, Baseline] = field(default_factory=dict, kw_only=True)
    callbacks: Sequence[Callback] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.config, type) and issubclass(self.config, RunConfig):
            object.__setattr__(self, "config", defaults_of(self.config))
        if isinstance(self.config, RunConfig):
            options_of(type(self.config))  # refuses two options of one name
        if isinstance(self.config, TrainConfig) and self.objective is not None:
            object.__setattr__(self, "config", _with_aggregator(self.config, self.objective))
        if self.loop is not None:
            return
        own = self.objective is not None and self.loss is None
        if (self.loss is None) == (self.risk is None) and not own:
            raise InputError("Job: give a loss(outputs, targets) or a risk(model, batch, step), one of them")
        if callable(self.risk):
            from concord.gradients.risk import as_risk

            if as_risk(self.risk) is not self.risk:
                raise InputError("Job: risk: takes other arguments; expected a function of (model, batch, step)")

    @property
    def has_model(self) -> bool:
        """Whether the job has a model, which a job with a loop of its own may lack."""
        return self.model is not _not_given

    def risk_of(self, config: Config) -> Risk:
        """The risk of a batch: the job's, that of its loss of inputs and targets, or its objective's."""
        from concord.gradients.risk import Supervised

        if self.risk is not None:
            return self.risk
        if self.loss is not None:
            return Supervised(self.loss)
        assert self.objective is not None
        return self.objective(config).risk

    def environments_of(self, config: Config) -> Environments:
        """The data of this configuration: without the environments that ``--leave-out`` names, and with those that are
        held out whole apart."""
        from concord.environments import Environments

        environments = self.environments(config)
        if not isinstance(environments, Environments):
            raise InputError(f"job {self.name}: environments gave {type(environments).__name__}, expected Environments")
        if not isinstance(config, TrainConfig):
            return environments
        # Of all environments, so that a run without some of them holds out as a run on all does.
        whole, left_out = config.data.holds_out_whole(environments), config.data.left_out
        if left_out:
            environments = _without(environments, left_out, config)
        return environments.holding_out(config.data.held_out_environments, config.run.seed) if whole else environments

    def evaluation_of(self, config: Config) -> EnvironmentEvaluation | None:
        """The job's own evaluation, of this configuration."""
        if self.evaluation is None or isinstance(self.evaluation, EnvironmentEvaluation):
            return self.evaluation
        made = self.evaluation(config)
        if made is not None and not isinstance(made, EnvironmentEvaluation):
            raise InputError(f"job {self.name}: evaluation gave {type(made).__name__}, expected EnvironmentEvaluation")
        return made

    def fit_of(self, config: Config) -> Fit | None:
        """How the model is fitted at once; None if it is trained by steps."""
        return None if self.fit is None else self.fit(config)

    def parameters_of(self, model: nn.Module, config: Config) -> list[Any]:
        """The trained parameters of a model for an optimizer: in the job's groups, or one by one without any.

        Raises:
            InputError: a parameter that is trained is in no group, or in two.
        """
        from concord.gradients.layout import trainable

        known = trainable(model)
        given = None if self.parameter_groups is None else self.parameter_groups(model, config)
        if given is None:
            return list(known.values())
        groups = [{**group, "params": list(group["params"])} for group in given]
        found = Counter(id(parameter) for group in groups for parameter in group["params"])
        for name, parameter in known.items():
            if (number := found[id(parameter)]) != 1:
                raise InputError(
                    f"job {self.name}: parameter_groups: {name} is in {number or 'none'} of them; expected in one"
                )
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        return [group for group in groups if group["params"]]

    def compared_by(self, reported: Mapping[str, Mode | None], own: Iterable[str] = ()) -> tuple[str, Mode]:
        """The metric that compares models, and its mode: the criterion, else the first usual one that has a mode.

        ``reported`` are the metrics of a run with their modes, ``own`` the names of the job's own evaluation.
        """
        usual = (*(f"validation_{name}" for name in own), "validation_accuracy", "validation_loss", "train_loss")
        if self.criterion is not None:
            usual = (self.criterion,)
        elif self.loop is not None:
            usual = tuple(self.loop.metrics)
        for metric in usual:
            mode = reported.get(metric) or (self.mode if metric == self.criterion else None)
            if metric in reported and mode is not None:
                return metric, mode
        raise InputError(f"job {self.name}: reports none of {', '.join(usual)} with a mode; give criterion=…, mode=…")


def _without(environments: Environments, left_out: Sequence[str], config: TrainConfig) -> Environments:
    """The environments without these, to train on or held out whole (ArgumentError for others, or without a rest)."""
    known, several = environments.to_leave_out, len(left_out) > 1
    right = f"give {'some' if several else 'one'} of {', '.join(known)}"
    config.require("leave_out", set(left_out) <= set(known), right)
    none_left = (
        "are all training environments; leave one to train on" if several else "is the only training environment"
    )
    config.require("leave_out", not set(environments.train) <= set(left_out), none_left)
    return environments.leaving_out(*left_out)


@dataclass(frozen=True)
class Study:
    """The search of ``concord tune JOB --method NAME``.

    Attributes:
        space: the options that are varied, and those that make the method, fixed.
        stop_when: conditions such as ``train_accuracy>0.97``; a trial ends early when all hold.
        suggestions: points of the space that are tried first.
        selection: how trials are scored, unless ``--selection`` is given; None: by validation environments, or
            by held-out examples without any.
        metric: the measure of the score, unless ``--metric`` is given; None: accuracy, or the loss without one.
    """

    space: Space
    stop_when: tuple[str, ...] = ()
    suggestions: tuple[Mapping[str, Value], ...] = ()
    selection: Literal["held-out", "validation", "leave-one-out", "oracle"] | None = None
    metric: str | None = None


@dataclass(frozen=True)
class Report:
    """The command ``concord report JOB``.

    Attributes:
        options: a dataclass whose fields become the options.
        make: gets the options and a function that prints a line of progress; writes figures and returns a
            mapping, the JSON result.
    """

    options: type[Any]
    make: Callable[[Any, Callable[[str], None]], Mapping[str, Any]]


@dataclass(frozen=True)
class Data:
    """The command ``concord data JOB``.

    Attributes:
        options: a dataclass whose fields become the options.
        make: gets the options and a function that prints a line of progress; makes the missing data,
            and returns a mapping, the JSON result.
        prints_result: whether its lines are the result for readers; else the mapping is shown as a table.
    """

    options: type[Any]
    make: Callable[[Any, Callable[[str], None]], Mapping[str, Any]]
    prints_result: bool = False


@dataclass(frozen=True)
class Loop(Generic[Config]):
    """A loop of the job's own, in place of the platform's: an agent's, for one.

    It gets the options and a :class:`~concord.training.context.RunContext`. It yields every evaluation,
    begins at the context's ``start``, and logs metrics, writes checkpoints and keeps files through it. Where the job
    has a model, a checkpoint has its weights as ``model.safetensors``, and the last one's are registered.

    Attributes:
        run: the loop, a generator of evaluations.
        epochs: the epoch of the last evaluation, from the options.
        metrics: the metrics in the evaluations with their modes; None for a metric that selects nothing. The first one
            scores trials, unless ``--metric`` names another.
        check: refuses invalid options, missing files and the like before a run begins (InputError).
        check_trial: refuses options that do not fit a trial of a study (InputError).
        example: a few inputs of the job's model, for the registry.
        model_name: of the registered model, from the options; by default the job's name.
        opening: the first lines of a run, for example about the model, then about the data.
        uses_ray: whether a run of its own needs a Ray session.
    """

    run: Callable[[Config, RunContext], Iterator[Evaluation]]
    epochs: Callable[[Config], int]
    metrics: Mapping[str, Mode | None]
    check: Callable[[Config], None] | None = None
    check_trial: Callable[[Config], None] | None = None
    example: Callable[[Config], Tensor] | None = None
    model_name: Callable[[Config], str] | None = None
    opening: Callable[[Config], Sequence[str]] | None = None
    uses_ray: bool = False

    def __post_init__(self) -> None:
        if not self.metrics or next(iter(self.metrics.values())) not in ("max", "min"):
            raise InputError(f"Loop: metrics are {dict(self.metrics)}; the first has to be max or min")


def _with_aggregator(config: TrainConfig, objective: Callable[[Any], Objective]) -> TrainConfig:
    """The options with ``mean`` for ``auto``, where the job's own objective has one gradient of all environments."""
    if config.aggregation.aggregator != "auto":
        return config
    averaged = config.with_options(aggregator="mean")
    with contextlib.suppress(Exception):  # the job's own code; preflight reports its errors
        return averaged if objective(averaged).coupled else config
    return config


@dataclass(frozen=True)
class SentJob:
    """A job on its way to another process.

    Attributes:
        path, source: the job's file, from whose text the process makes it.
        rule: the user's own aggregator, if there is one.
        value: a job that no file defines; Ray sends what it consists of by value.
    """

    path: str
    # Ray keeps its configuration as text, so this leaves out long values and possible passwords.
    source: str = field(repr=False)
    rule: RuleFile | None = None
    value: Job[Any] | None = field(default=None, repr=False)

    def load(self) -> JobFile:
        """The job."""
        if self.value is None:
            return job_from_source(self.path, self.source, self.rule)
        file = JobFile(self.value, self.path, self.source, made_here=True)
        return file if self.rule is None else with_rule(file, self.rule)


@dataclass(frozen=True)
class JobFile:
    """A job and the text of its file, which is sent to the workers.

    Attributes:
        job: the job, with its name filled in.
        path, source: its file; of a job that is made in a notebook or program, that program and no text.
        rule: the user's own rule that --aggregator names; its fields are options of the job.
        made_here: whether a notebook or program has made it, in place of a file of its own.
        from_python: whether Python's interface was called with it, not a command.
    """

    job: Job[Any]
    path: str
    source: str
    rule: RuleFile | None = None
    made_here: bool = False
    from_python: bool = False

    @staticmethod
    def of(job: Job[Any] | JobFile | str | Path) -> JobFile:
        """The job of this name, in this file, or made in this program (InputError if it is none)."""
        if isinstance(job, JobFile):
            return job if job.job.name is not None else JobFile.of(job.job)
        if isinstance(job, str | Path):
            return replace(load_job(str(job)), from_python=True)
        if not isinstance(job, Job):
            raise InputError(f"job {job!r:.80}: is of type {type(job).__name__}; give a name, a Python file, or a Job")
        program = getattr(sys.modules["__main__"], "__file__", None)
        path = Path(program or "notebook").absolute()
        named = replace(job, name=job.name or job_name(path))
        _check_parts(named, str(path))
        return JobFile(named, str(path), "", made_here=True, from_python=True)

    @property
    def sent(self) -> SentJob:
        """The job, for another process."""
        return SentJob(self.path, self.source, self.rule, self.job if self.made_here else None)

    @property
    def name(self) -> str:
        """The job's name."""
        assert self.job.name is not None
        return self.job.name

    @property
    def reference(self) -> str:
        """The name of a built-in job, else the job's file, as in a command."""
        return next((name for name, file in built_in_jobs().items() if file.resolve() == Path(self.path)), self.path)

    def command(self, verb: str, *words: str, options: Mapping[str, Any] = MappingProxyType({})) -> str:
        """A command on this job, for a shell; on one that a program has made, the call of Python's interface.

        In a submission it is the command that the submitter can type.
        """
        if not self.made_here:
            return typed_command(command_line(verb, typed_path(self.reference), *words, options=options))
        return self._call(verb, words, options)

    def continuation(self, verb: str, *words: str, options: Mapping[str, Any] = MappingProxyType({})) -> str:
        """How to continue what was stopped, as it was begun: the command, or the call of Python's interface."""
        return self._call(verb, words, options) if self.from_python else self.command(verb, *words, options=options)

    def _call(self, verb: str, words: Sequence[str], options: Mapping[str, Any]) -> str:
        """The call of Python's interface."""
        given = ["job" if self.made_here else repr(typed_path(self.reference)), *map(repr, words)]
        given += [f"{name}={value!r}" for name, value in without_secrets(_shown(options)).items()]
        return f"concord.{verb}({', '.join(given)})"

    def for_command(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of options as a command on this machine takes them: the user's own rule by its file's path."""
        if self.rule is None or "aggregator" not in values:
            return dict(values)
        return {**values, "aggregator": f"{typed_path(self.rule.path)}:{self.rule.name}"}

    def epochs(self, config: Any) -> int:
        """The epoch of the last evaluation of a run or trial with these options."""
        epochs: int = config.schedule.epochs if self.job.loop is None else self.job.loop.epochs(config)
        return epochs

    def require_platform_loop(self, asked: str) -> None:
        """Refuse a request (InputError) that needs the platform's loop if the job has its own."""
        if self.job.loop is not None:
            raise InputError(f"{asked}: job {self.name} has a loop of its own; this needs the platform's")

    def model_name(self, config: Any) -> str:
        """The name of the registered model (InputError if it cannot be loaded by it)."""
        if config.run.model_name is not None:
            return str(config.run.model_name)
        if self.job.loop is None or self.job.loop.model_name is None:
            return self.name
        name = self.job.loop.model_name(config)
        require_model_name(name, f"job {self.name}: the name of its model")
        return name


def command_line(verb: str, job: str, *words: str, options: Mapping[str, Any] = MappingProxyType({})) -> str:
    """A command on a job, for a shell: words, then options without secrets; the default output folder is left out."""
    return shlex.join(["concord", verb, job, *redact_words([*words, *as_words(_shown(options))])])


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a command has them: folders as text, without the default output folder."""
    return {
        name: typed_path(display_path(value)) if isinstance(value, Path) else value
        for name, value in options.items()
        if name != "output" or value not in (DEFAULT_OUTPUT, resolve(DEFAULT_OUTPUT))
    }


def load_job(reference: str) -> JobFile:
    """The job of this name, or the job in this file."""
    known = built_in_jobs()
    if reference not in known and not reference.endswith(".py"):
        near = did_you_mean(reference, known) or f"; give one of {', '.join(known)}, or a Python file"
        raise InputError(f"job {reference}: there is no such job{near}")
    path = (known.get(reference) or path_of(reference)).resolve()
    source = read_source(path, lambda problem: InputError(f"job {reference}: {problem}"))
    return job_from_source(str(path), source)


def job_from_source(path: str, source: str, rule: RuleFile | None = None) -> JobFile:
    """The job that a file's text defines; the file itself may be on another node."""
    module = run_source(path, source, "job", lambda problem: InputError(f"job {path}: {problem}"))
    job = getattr(module, "job", None)
    if not isinstance(job, Job):
        raise InputError(f"job {path}: defines no job; add a line job = Job(environments=…, model=…, loss=…)")
    job = replace(job, name=job.name or job_name(Path(path)))
    _check_parts(job, path)
    file = JobFile(job, path, source)
    return file if rule is None else with_rule(file, rule)


def with_rule(file: JobFile, rule: RuleFile) -> JobFile:
    """The job with this rule as its aggregator, and the rule's fields among its options."""
    file.require_platform_loop(f"--aggregator {rule.reference}")
    config = config_with_rule(file.job.config, rule.load())
    return replace(file, job=replace(file.job, config=config), rule=rule)


def with_recorded_rule(file: JobFile, named: Any, sources: Mapping[str, str]) -> JobFile:
    """The job with the user's own rule that a record names, from the record's sources; the job itself without one."""
    if not RuleFile.is_reference(str(named)):
        return file
    path, rule = RuleFile.parts(named)
    return with_rule(file, RuleFile(path, sources[path], rule))


def require_model_name(name: Any, what: str) -> None:
    """Refuse the name of a model that MLflow or a command cannot load by ``models:/NAME@ALIAS`` (InputError)."""
    if not is_model_name(name):
        raise InputError(f"{what} is {name!r}; {MODEL_NAMES}")


def _parts_of(job: Job[Any]) -> tuple[str, ...]:
    """The names of the required parts."""
    if job.loop is not None:
        return ("model",) if job.has_model else ()
    of_batch = "risk" if job.risk else "loss" if job.loss else "objective"
    return ("environments", "model", of_batch)


def _is_network(value: Any) -> bool:
    """Whether this is a PyTorch module; without PyTorch there is none."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].nn.Module)


def _check_parts(job: Job[Any], path: str) -> None:
    """Refuse an invalid job (InputError), for example a network in place of a function that makes one."""

    def require(right: bool, problem: str) -> None:
        if not right:
            raise InputError(f"job {path}: {problem}")

    def maps_to(kind: Callable[[Any], bool], value: Any) -> bool:
        return isinstance(value, Mapping) and all(map(kind, value.values()))

    for part in _parts_of(job):
        value = getattr(job, part)
        right = callable(value) and value is not _not_given and not (part == "model" and _is_network(value))
        require(right, f"{part} is of type {type(value).__name__}; expected a function, see Job")
    require(isinstance(job.loop, Loop | None), f"loop is {job.loop!r}; expected Loop(run, epochs, metrics)")
    kind = TrainConfig if job.loop is None else RunConfig
    problem = f"config is {job.config!r}; expected an instance of a class from {kind.__name__}"
    require(isinstance(job.config, kind), problem)
    right = maps_to(lambda each: isinstance(each, Study), job.studies)
    require(right, f"studies map the names of methods to Study(space=…), found {job.studies!r}")
    require_model_name(job.name, f"job {path}: its name")
    right = isinstance(job.comparisons, str) or maps_to(lambda each: isinstance(each, Comparison), job.comparisons)
    require(right, f"comparisons map the names of tables to Comparison(…), found {job.comparisons!r}")
    right = job.measures is None or maps_to(callable, job.measures)
    require(right, f"measures map names to Measure(function, mode=…), found {job.measures!r}")
    problem = f"evaluation is {job.evaluation!r}; expected EnvironmentEvaluation(function, modes={{…}}), or its maker"
    own = job.evaluation
    require(own is None or callable(own), problem)
    problem = f"objective is of type {type(job.objective).__name__}; expected a function, see Job"
    require(job.objective is None or callable(job.objective), problem)
    problem = f"parameter_groups is of type {type(job.parameter_groups).__name__}; expected a function, see Job"
    require(job.parameter_groups is None or callable(job.parameter_groups), problem)
    problem = f"callbacks are {job.callbacks!r:.80}; expected a list of Callback objects"
    require(
        isinstance(job.callbacks, list | tuple) and all(isinstance(each, Callback) for each in job.callbacks), problem
    )
    require(job.mode in ("max", "min", None), f"mode is {job.mode!r}; expected max or min")
