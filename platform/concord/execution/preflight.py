"""Checks before anything of a run is written or started: invalid input is found here, within about a second."""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from concord.aggregation import SandMask, Weighting, weights_of
from concord.environments import Environment, Environments, split_held_out
from concord.environments.tree import is_pair, named_leaves
from concord.errors import InputError
from concord.execution.patience import wait_for_answer
from concord.execution.session import check_gpus
from concord.gradients import Batch
from concord.gradients.layout import require_real_values, trainable
from concord.objectives import Objective
from concord.source_file import refusing
from concord.tracking.model_call import ModelCall, first_call
from concord.training.build import build_model, initialize_objective
from concord.training.declared_measures import Measure, Mode
from concord.training.evaluation import (
    as_measures,
    check_targets,
    default_measures,
    evaluate_batch,
    modes,
    reported_metrics,
)
from concord.training.job import Job, JobFile
from concord.training.kept_weights import best_by
from concord.training.metric_names import check_metric_names
from concord.training.optimization import Optimization
from concord.training.options import ResolvedConfig, ResolvedTrainConfig, RunConfig
from concord.training.worker_data import check_environments
from concord.weighted import Weighted


@dataclass(frozen=True)
class PreflightResult:
    """The findings of the checks.

    Attributes:
        config: the options, resolved.
        example: a few inputs, or the risk's call of the model; None if it calls none.
        reported: the mode of each metric of a run, without those of single environments; None if unknown.
        measures: the mode of each measure, such as ``loss`` and ``accuracy``.
        criterion: the metric that compares models, and its mode.
        objective: the class of the job's own objective; None if the job has none.
    """

    config: ResolvedConfig
    environments: Environments
    example: torch.Tensor | ModelCall | None
    reported: Mapping[str, Mode | None]
    measures: Mapping[str, Mode | None]
    criterion: tuple[str, Mode]
    objective: str | None = None


def preflight(job: JobFile, config: Any) -> PreflightResult:
    """Try data, model, loss and measures on one environment, before anything is written or started.

    For a job with a loop of its own only the options are checked. A storage of data that does not answer is waited for.
    """
    config = config.resolve()
    return wait_for_answer(partial(_checked, job, config), config.run.tracking_patience)


def _checked(job: JobFile, config: Any) -> PreflightResult:
    if (loop := job.job.loop) is not None:
        with as_input_error(job, "its options cannot be used"):
            if loop.check is not None:
                loop.check(config)
            inputs = loop.example(config) if loop.example is not None else None
            job.model_name(config)
        _check_criterion(job, loop.metrics)
        metrics = dict(loop.metrics)
        return PreflightResult(config, Environments.none(), inputs, metrics, metrics, job.job.compared_by(metrics))
    check_gpus(config)
    with as_input_error(job, "its environments cannot be made"):
        environments = job.job.environments_of(config)
    environments = environments.fitted(config.data.held_out, config.run.seed)
    check_environments(config, environments)
    rule = config.rule(len(environments.train))
    nothing = isinstance(rule, SandMask) and rule.threshold == 1
    if job.job.fit_of(config) is not None:
        fitted = "the model is fitted to all examples at once"
        config.require("workers", config.parallel.workers == 1, f"{fitted}, by one worker; give 1")
        config.require("objective", config.objective.objective == "erm", f"{fitted}, by a loss of its own; give erm")
        averaged = config.aggregation.aggregator == "mean"
        config.require("aggregator", averaged, f"{fitted}, and no gradients are aggregated; leave it out")
    config.require("threshold", not nothing, "no component ever passes the SAND-mask at 1; give less")
    if isinstance(rule, Weighting):  # Krum needs some number of environments
        weights_of(rule, torch.eye(config.num_gradients(len(environments.train))))
    name = environments.train[0]
    with as_input_error(job, f"environment {name} cannot be loaded"):
        first = environments[name]
    held_out = environments.fraction_of_examples(config.data.held_out)
    trained = split_held_out(first, held_out, config.run.seed, environments.units(name)).training
    with as_input_error(job, "its model cannot be made"):
        model = build_model(job.job, config)
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"job {job.name}: model gave {type(model).__name__}, expected a torch.nn.Module")
    require_real_values(trainable(model))
    with as_input_error(job, "its objective cannot be made"):
        objective = initialize_objective(job.job, config, model, [1.0] * len(environments.train), 1)
    given = _check_batch(job, config, objective, model.eval(), first)
    if objective.coupled:
        _check_objective(job, objective, model, first, len(environments.train))
    if job.job.objective is not None or job.job.parameter_groups is not None:
        with as_input_error(job, "its parameter groups cannot be made"):
            optimizer = Optimization(job.job.parameters_of(model, config), config, 1, objective).optimizer
    if job.job.objective is not None:
        steps, rest = divmod(len(trained), config.data.batch_size)
        full_batches = rest == 0 and config.data.environments_per_step == 0  # judged by the first environment
        objective.attach(lambda _: trained.take(slice(2)), optimizer, steps if full_batches else None)
    with as_input_error(job, "its evaluation cannot be made"):
        evaluation = job.job.evaluation_of(config)
    measures, own = modes(given, evaluation), () if evaluation is None else evaluation.criteria
    with as_input_error(job, "its metrics cannot be told apart"):
        check_metric_names(environments, [*given, *(() if evaluation is None else evaluation.modes)], trainable(model))
    reported = reported_metrics(environments, measures, config.data.held_out > 0)
    if not config.aggregation.compares:
        reported["kept_fraction"] = None
    if config.schedule.stop_spread > 0:
        reported["spread_reached"] = None
    if config.schedule.patience > 0:
        reported["out_of_patience"] = None
    _check_criterion(job, reported)
    if config.schedule.keep != "last":
        best_by(job.job, config, reported, own)
    _check_required(job, config, reported)
    example = _example(job, config, model, first)
    own_objective = None if job.job.objective is None else type(objective).__name__
    criterion = job.job.compared_by(reported, own)
    return PreflightResult(config, environments, example, reported, measures, criterion, own_objective)


def _example(
    job: JobFile, config: ResolvedTrainConfig, model: torch.nn.Module, first: Environment
) -> torch.Tensor | ModelCall | None:
    """A few inputs of the model, or the first call of it by the risk; None if the risk does not call it."""
    few = first.take(slice(4))
    if is_pair(few) or isinstance(few, Weighted):
        inputs: torch.Tensor = few[0]
        return inputs
    risk = job.job.risk_of(config)
    example_of = getattr(risk, "example", None)
    if example_of is None:
        return first_call(model, risk, few)
    example: torch.Tensor = example_of(few)
    return example


def _check_criterion(job: JobFile, reported: Mapping[str, Mode | None]) -> None:
    """Refuse a criterion that is not reported or has no mode (InputError)."""
    criterion, mode = job.job.criterion, job.job.mode
    if criterion is None:
        return
    if criterion not in reported:
        shown = ", ".join(name for name in reported if not name.startswith("worst_"))
        raise InputError(f"job {job.name}: criterion {criterion} is not reported; give one of {shown}")
    known = reported[criterion]
    if known is None and mode is None:
        raise InputError(
            f"job {job.name}: criterion {criterion} has no mode; give Job(mode=…), or "
            "its measure as Measure(function, mode=…)"
        )
    if None not in (known, mode) and known != mode:
        raise InputError(f"job {job.name}: mode {mode} of criterion {criterion}: its measure has {known}; leave it out")


def required(job: Job[Any], config: RunConfig) -> Mapping[str, float]:
    """The least values of metrics with which a version of the job's model can be the champion."""
    return job.required(config) if job.required is not None else {}


def _check_required(job: JobFile, config: ResolvedTrainConfig, reported: Collection[str]) -> None:
    """Refuse a requirement for the champion on a metric that is not reported (InputError)."""
    with as_input_error(job, "its requirement for a champion cannot be computed"):
        names = required(job.job, config)
    for metric in names:
        if metric not in reported:
            raise InputError(f"job {job.name}: it requires {metric} of a champion, which is not reported")


def _check_objective(
    job: JobFile, objective: Objective, model: torch.nn.Module, first: Environment, environments: int
) -> None:
    """Try the objective on the same two examples in every environment."""
    batch = pytree.tree_map(lambda leaf: torch.stack([leaf] * environments), first.take(slice(2)))
    with as_input_error(job, "its objective cannot be computed"):
        value = objective(model, batch)
    if not isinstance(value, torch.Tensor) or value.ndim != 0 or not value.requires_grad:
        raise InputError(f"job {job.name}: its objective gives {value!r}; expected a scalar with a gradient")


def _check_batch(
    job: JobFile, config: ResolvedTrainConfig, objective: Objective, model: torch.nn.Module, first: Environment
) -> dict[str, Measure]:
    """Try model, loss or risk, and measures on two examples; return the measures."""
    batch = first.take(slice(2))
    if isinstance(batch, Weighted):
        config.require("per_example", not config.aggregation.per_example, "examples have weights; leave it out")
        config.require("consistency", config.schedule.consistency == 0, "examples have weights; give 0")
    if job.job.loss is None:
        shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in named_leaves(batch).items())
        return _check_risk(job, config, objective, model, batch, f"a batch of environment {first.name}, {shapes}")
    inputs, targets = first.pairs(slice(2))
    shapes = f"a batch of environment {first.name}, inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}"
    with as_input_error(job, f"model and loss cannot take {shapes}"):
        outputs = model(inputs)
        if not isinstance(outputs, torch.Tensor):
            raise InputError(f"job {job.name}: the model's outputs are {type(outputs).__name__}, expected a tensor")
        if job.job.measures is None:
            check_targets(first, outputs)
        if targets.is_floating_point() and outputs.numel() == targets.numel() and outputs.shape != targets.shape:
            raise InputError(
                f"job {job.name}: outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}; "
                "a loss would broadcast them; give both the same shape"
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
        with as_input_error(job, f"measure {name} cannot take outputs {tuple(outputs.shape)} of {shapes}"):
            shape = tuple(measure(outputs.detach(), targets).shape)
        _require_one_each(job, name, shape, len(inputs))
    return measures


def _check_risk(
    job: JobFile, config: ResolvedTrainConfig, objective: Objective, model: torch.nn.Module, batch: Batch, shapes: str
) -> dict[str, Measure]:
    measures = as_measures(job.job.measures or {})
    with as_input_error(job, f"model and risk cannot take {shapes}"):
        risk_of_batch = job.job.risk_of(config)
        risk = evaluate_batch(model, risk_of_batch, {}, batch).risk
        if not objective.coupled:
            evaluate_batch(model, objective.risk, {}, batch)
    if not risk.requires_grad:
        raise InputError(f"job {job.name}: the risk has no gradient; no parameter of the model changes it")
    examples = len(next(iter(named_leaves(batch).values())))
    for name, measure in measures.items():
        with as_input_error(job, f"measure {name} cannot take the model's output for {shapes}"), torch.no_grad():
            values = evaluate_batch(model, risk_of_batch, {name: measure}, batch).values
        _require_one_each(job, name, tuple(values[name].shape), examples)
    return measures


def _require_one_each(job: JobFile, measure: str, shape: tuple[int, ...], examples: int) -> None:
    if shape != (examples,):
        raise InputError(f"job {job.name}: measure {measure} gave shape {shape}, expected {(examples,)}")


def as_input_error(job: JobFile, what: str) -> contextlib.AbstractContextManager[None]:
    """Turn any exception of the job's own functions into a one-line InputError."""
    return refusing(what, job.path, lambda problem: InputError(f"job {job.name}: {problem}"))
