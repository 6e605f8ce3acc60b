"""What is tried before anything of a run is written or started: wrong input is found here, within a second or so."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from concord.aggregation import SandMask
from concord.environments import Environment, Environments, split_held_out
from concord.environments.tree import is_pair, named_leaves
from concord.errors import InputError
from concord.gradients import Batch
from concord.gradients.layout import trainable
from concord.objectives import Objective
from concord.runs.champion import required
from concord.runs.resources import check_gpus
from concord.source_file import reason
from concord.training.evaluation import (
    Measure,
    Mode,
    as_measures,
    check_targets,
    default_measures,
    evaluate_batch,
    modes,
)
from concord.training.job import JobFile
from concord.training.loop import begun_objective, build_model, check_environments
from concord.training.metric_names import check_metric_names, split_metric
from concord.training.optimization import Optimization
from concord.training.options import TrainConfig


@dataclass(frozen=True)
class Checked:
    """What was found out about a job before anything of it runs.

    Attributes:
        environments: the data.
        example: a few inputs; None where batches are no pairs of inputs and targets, and the risk has no ``example``.
        reported: the metrics of a run, without those of single environments: whether large or small is good, by name;
            None where that is not known.
        measures: the same of the measures that they are of, ``loss`` and ``accuracy`` for example.
    """

    environments: Environments
    example: torch.Tensor | None
    reported: Mapping[str, Mode | None]
    measures: Mapping[str, Mode | None]


def preflight(job: JobFile, config: Any) -> Checked:
    """Try data, model, loss and measures on one environment here, before anything is written or started.

    Of a job with a loop of its own only the options are checked.

    Raises:
        InputError: they cannot be used, or there are not the GPUs that are asked for.
    """
    config = config.resolved()
    if (loop := job.job.loop) is not None:
        with _blamed(job, "its options cannot be used"):
            if loop.check is not None:
                loop.check(config)
            example = loop.example(config) if loop.example is not None else None
        _check_criterion(job, loop.metrics)
        return Checked(Environments.none(), example, dict(loop.metrics), dict(loop.metrics))
    check_gpus(config)
    with _blamed(job, "its environments cannot be made"):
        environments = job.job.environments(config)
    if not isinstance(environments, Environments):
        raise InputError(f"job {job.name}: environments gave {type(environments).__name__}, expected Environments")
    environments = environments.fitted(config.data.held_out, config.run.seed)
    check_environments(config, environments)
    rule = config.rule(len(environments.train))
    nothing = isinstance(rule, SandMask) and rule.threshold == 1
    config.require("threshold", not nothing, "nothing ever passes the SAND-mask at 1; choose less")
    name = environments.train[0]
    with _blamed(job, f"environment {name} cannot be loaded"):
        first = environments[name]
    trained = split_held_out(first, config.data.held_out, config.run.seed).training
    with _blamed(job, "its model cannot be made"):
        model = build_model(job.job, config)
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"job {job.name}: model gave {type(model).__name__}, expected a torch.nn.Module")
    with _blamed(job, "its objective cannot be made"):
        objective = begun_objective(job.job, config, model, len(environments.train), 1)
    given = _check_batch(job, config, objective, model.eval(), first)
    if job.job.objective is not None:
        _check_objective(job, objective, model, first, len(environments.train))
        optimizer = Optimization(list(trainable(model).values()), config, 1, objective).optimizer
        steps, rest = divmod(len(trained), config.data.batch_size)
        whole = rest == 0 and config.data.environments_per_step == 0  # as far as the first environment says
        objective.attach(lambda _: trained.take(slice(2)), optimizer, steps if whole else None)
    with _blamed(job, "its evaluation cannot be made"):
        evaluation = job.job.evaluation_of(config)
    measures = modes(given, evaluation)
    with _blamed(job, "its metrics cannot be told apart"):
        own = () if evaluation is None else evaluation.modes
        check_metric_names(environments, [*given, *own], trainable(model))
    reported = _reported(config, environments, measures)
    _check_criterion(job, reported)
    _check_required(job, config, reported)
    example = _example(job, config, first)
    return Checked(environments, example, reported, measures)


def _example(job: JobFile, config: TrainConfig, first: Environment) -> torch.Tensor | None:
    """A few inputs of the model, where it takes one tensor and the data or the risk say which; else None."""
    some = first.take(slice(4))
    if is_pair(some):
        inputs: torch.Tensor = some[0]
        return inputs
    of_batch = getattr(job.job.risk_of(config), "example", None)
    if of_batch is None:
        return None
    example: torch.Tensor = of_batch(some)
    return example


def _check_criterion(job: JobFile, reported: Mapping[str, Mode | None]) -> None:
    """Refuse a criterion that is not reported, or by which nobody knows what is better (InputError)."""
    criterion, mode = job.job.criterion, job.job.mode
    if criterion is None:
        return
    if criterion not in reported:
        shown = ", ".join(name for name in reported if not name.startswith("worst_"))
        raise InputError(f"job {job.name}: criterion {criterion} is not reported; there are {shown}")
    known = reported[criterion]
    if known is None and mode is None:
        raise InputError(
            f"job {job.name}: criterion {criterion} does not say whether large or small is good; give Job(mode=…), or "
            "its measure as Measure(function, mode=…)"
        )
    if None not in (known, mode) and known != mode:
        raise InputError(f"job {job.name}: mode {mode} of criterion {criterion}, whose measure says {known}")


def _check_required(job: JobFile, config: TrainConfig, reported: Collection[str]) -> None:
    """Refuse what is required of a champion, if it is not reported (InputError)."""
    with _blamed(job, "what it requires of a champion cannot be found out"):
        names = required(job.job, config)
    for metric in names:
        if metric not in reported:
            raise InputError(f"job {job.name}: it requires {metric} of a champion, which is not reported")


def _check_objective(
    job: JobFile, objective: Objective, model: torch.nn.Module, first: Environment, environments: int
) -> None:
    """Try the job's own objective on the same two examples in every environment."""
    batch = pytree.tree_map(lambda leaf: torch.stack([leaf] * environments), first.take(slice(2)))
    with _blamed(job, "its objective cannot be computed"):
        value = objective(model, batch)
    if not isinstance(value, torch.Tensor) or value.ndim != 0 or not value.requires_grad:
        raise InputError(f"job {job.name}: its objective gives {value!r}; expected a scalar with a gradient")


def _check_batch(
    job: JobFile, config: TrainConfig, objective: Objective, model: torch.nn.Module, first: Environment
) -> dict[str, Measure]:
    """Try model, loss or risk, and measures on two examples; gives the measures."""
    batch = first.take(slice(2))
    if job.job.loss is None:
        shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in named_leaves(batch).items())
        return _check_risk(job, config, objective, model, batch, f"a batch of environment {first.name}, {shapes}")
    inputs, targets = first.inputs[:2], first.targets[:2]
    shapes = f"a batch of environment {first.name}, inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}"
    with _blamed(job, f"model and loss cannot take {shapes}"):
        outputs = model(inputs)
        if not isinstance(outputs, torch.Tensor):
            raise InputError(f"job {job.name}: the model's outputs are {type(outputs).__name__}, expected a tensor")
        if job.job.measures is None:
            check_targets(first, outputs)
        if targets.is_floating_point() and outputs.numel() == targets.numel() and outputs.shape != targets.shape:
            raise InputError(
                f"job {job.name}: outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}; "
                "a loss would pair every output with every target, so give both the same shape"
            )
        loss = job.job.loss(outputs, targets)
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"job {job.name}: the loss is of type {type(loss).__name__}, expected a scalar tensor")
    if loss.ndim != 0:
        raise InputError(f"job {job.name}: the loss has shape {tuple(loss.shape)}, expected a scalar")
    if not loss.requires_grad:
        raise InputError(f"job {job.name}: the loss has no gradient; no parameter of the model changes it")
    measures = as_measures(job.job.measures if job.job.measures is not None else default_measures(outputs, targets))
    for name, measure in measures.items():
        with _blamed(job, f"measure {name} cannot take outputs {tuple(outputs.shape)} of {shapes}"):
            shape = tuple(measure(outputs.detach(), targets).shape)
        _require_one_each(job, name, shape, len(inputs))
    return measures


def _check_risk(
    job: JobFile, config: TrainConfig, objective: Objective, model: torch.nn.Module, batch: Batch, shapes: str
) -> dict[str, Measure]:
    measures = as_measures(job.job.measures or {})
    with _blamed(job, f"model and risk cannot take {shapes}"):
        of_batch = job.job.risk_of(config)
        risk = evaluate_batch(model, of_batch, {}, batch).risk
        if not objective.coupled:
            evaluate_batch(model, objective.risk, {}, batch)
    if not risk.requires_grad:
        raise InputError(f"job {job.name}: the risk has no gradient; no parameter of the model changes it")
    examples = len(next(iter(named_leaves(batch).values())))
    for name, measure in measures.items():
        with _blamed(job, f"measure {name} cannot take what the model gives for {shapes}"), torch.no_grad():
            values = evaluate_batch(model, of_batch, {name: measure}, batch).values
        _require_one_each(job, name, tuple(values[name].shape), examples)
    return measures


def _require_one_each(job: JobFile, measure: str, shape: tuple[int, ...], examples: int) -> None:
    if shape != (examples,):
        raise InputError(f"job {job.name}: measure {measure} gave shape {shape}, expected {(examples,)}")


def _reported(
    config: TrainConfig, environments: Environments, measures: Mapping[str, Mode | None]
) -> dict[str, Mode | None]:
    """What training will report, and whether large or small is good."""
    held_out = ["held_out", "validation"] if config.data.held_out > 0 else []
    validation, ood = ["validation"] if environments.validation else [], ["ood"] if environments.test else []
    splits = dict.fromkeys(["train", *held_out, *validation, *ood, *environments.observed])
    reported = {split_metric(split, measure): mode for split in splits for measure, mode in measures.items()}
    spread: dict[str, Mode | None] = {"held_out_spread": "min"} if config.data.held_out > 0 else {}
    ranked = {measure: mode for measure, mode in measures.items() if mode is not None}
    worst = {split_metric(split, name, worst=True): mode for split in splits for name, mode in ranked.items()}
    return {**reported, **worst, **spread, "kept_fraction": None}


@contextlib.contextmanager
def _blamed(job: JobFile, what: str) -> Iterator[None]:
    """Whatever the job's own functions raise is wrong input, said in one line."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"job {job.name}: {what} ({reason(error, job.path)})") from error
