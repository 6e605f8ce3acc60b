"""The training loop: the same in one process and in each of several, with Ray or without."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.aggregation.families import masks
from concord.environments import BatchStream
from concord.environments.batches import names_of_batches
from concord.gradients import (
    AggregationHook,
    EnvironmentStep,
    HookedGradients,
    NonFiniteGradientError,
    StackedGradients,
)
from concord.gradients.layout import Layout, trainable
from concord.gradients.risk import take
from concord.gradients.stacked import Vectorize
from concord.objectives import ObjectiveGradients
from concord.options import option_values
from concord.record import Evaluation, Run
from concord.training.baseline import Fit
from concord.training.build import build_model, initialize_objective
from concord.training.callback import Callback
from concord.training.checkpoint import (
    TRAINED,
    Progress,
    read_checkpoint,
    read_momentum,
    read_weights,
    write_checkpoint,
)
from concord.training.context import ProcessContext, RunContext, StepsSoFar
from concord.training.gradient_source import gradient_source
from concord.training.job import Job
from concord.training.kept_weights import BestWeights, WeightAverage
from concord.training.left_out import PREDICTIONS
from concord.training.metric_names import (
    MODEL_EVALUATIONS,
    layer_metric,
)
from concord.training.optimization import Optimization
from concord.training.options import ResolvedTrainConfig, TrainConfig, spread
from concord.training.run_evaluation import RunEvaluation, check_all_targets, final_measures
from concord.training.whole_step import obstacle, whole_step
from concord.training.worker_data import WorkerData, on_all_ranks, prepare, share

# Longer runs do not log every step: no figure could show more, and logging would take longer than training.
_LOGGED_STEPS = 20_000
# A process that trains alone also writes a checkpoint after an epoch that ends this long after its last one. Several
# processes average batch norm's statistics for a checkpoint, so its moment must not depend on time.
_CHECKPOINT_SECONDS = 300.0
# The steps of an estimate of a training's time: before it is measured, and measured.
_WARM_UP, _TIMED = 3, 20
# The values of --vectorize, as StackedGradients takes them.
_VECTORIZE: dict[str, Vectorize | None] = {"auto": None, "vmap": True, "pooled": "pooled", "one-by-one": False}


def train(
    job: Job[Any],
    config: TrainConfig,
    process: ProcessContext,
    context: RunContext,
    resume_from: Path | None = None,
    so_far: StepsSoFar | None = None,
) -> Run:
    """Resolve the options, and train to the end, see :func:`training`."""
    resolved = config.resolve()
    evaluations = training(job, resolved, process, context, resume_from, so_far=so_far)
    return Run.of(evaluations, config.run.seed, option_values(resolved))


def training(
    job: Job[Any],
    config: ResolvedTrainConfig,
    process: ProcessContext,
    context: RunContext,
    resume_from: Path | None = None,
    load: Callable[[], WorkerData] | None = None,
    so_far: StepsSoFar | None = None,
    callbacks: Sequence[Callback] = (),
) -> Iterator[Evaluation]:
    """Train, and yield each evaluation before its checkpoint is written; several processes use the default group.

    Args:
        job: the job.
        config: the resolved options.
        process: this process.
        context: takes metrics and checkpoints.
        resume_from: the folder of a checkpoint to resume from; the result equals an undisturbed run's.
        load: returns the data of this process; None calls :func:`prepare`.
        so_far: updated at every step, for readers in other threads.
        callbacks: whose ``on_step`` is called.

    Raises:
        InputError: the data or the checkpoint do not fit, in every process; or a dataset raised it for an example, in
            the process that reads it.
        NonFiniteGradientError: see ``config.aggregation.nonfinite``; raised in every process.
    """
    prepared = on_all_ranks(load or (lambda: prepare(job, config, process)), process)
    run = _Run(job, config, process, prepared, so_far or StepsSoFar(), callbacks)
    with contextlib.closing(run.batches):
        if (fit := job.fit_of(config)) is not None:
            yield from _fitted(run, fit, context, resume_from)
        else:
            yield from _epochs(run, context, resume_from)


def _fitted(run: "_Run", fit: Fit, context: RunContext, resume_from: Path | None) -> Iterator[Evaluation]:
    """Fit the model at once, evaluate it, and write a checkpoint, as after the last epoch."""
    if resume_from is not None:  # its only checkpoint is the last
        return
    epochs = run.config.schedule.epochs
    step = epochs * run.steps_per_epoch
    parts = [data.take(slice(None)) for data in run.evaluation.training]
    examples = (torch.cat([each.cpu() for each in of_parts]) for of_parts in zip(*parts, strict=True))
    fit(run.model.cpu(), *examples)
    run.model.to(run.process.device)
    metrics = {"epoch": float(epochs)} | run.evaluate(step)
    if run.evaluation.left_out is not None:
        context.keep(PREDICTIONS, run.evaluation.left_out.write)
        metrics |= run.evaluation.within_environments(fit)
    run.so_far.evaluated(metrics)
    yield Evaluation(epochs, step, metrics)
    progress = Progress(epochs)
    context.checkpoint(functools.partial(run.write, progress=progress, stopping=None, momentum={}), step)


def _epochs(run: "_Run", context: RunContext, resume_from: Path | None) -> Iterator[Evaluation]:
    job, config, process, schedule = run.job, run.config, run.process, run.config.schedule
    progress = on_all_ranks(lambda: run.read(resume_from), process) if resume_from else Progress()
    stopping: BestWeights | None = None
    if schedule.stop_spread > 0:
        first = math.ceil(schedule.stop_from * schedule.epochs)
        stopping = BestWeights("held_out_spread", "min", schedule.stop_spread, first)
    elif schedule.keep != "last":
        stopping = BestWeights(*run.evaluation.best_by(), patience=schedule.patience)
    if resume_from and stopping is not None:
        stopping.read(resume_from)
    if resume_from and process.rank == 0:
        context.log(progress.resumed(process.world_size), progress.epoch * run.steps_per_epoch)
    every = math.ceil(schedule.epochs * run.steps_per_epoch / _LOGGED_STEPS)
    evaluate_after = schedule.evaluated_after
    checkpoint_after = spread(schedule.checkpoints, schedule.epochs)
    compare_after = _compared(schedule.consistency, evaluate_after)
    written = time.monotonic()
    while progress.epoch < schedule.epochs and not progress.ended:
        steps = run.epoch(progress.epoch)
        progress.epoch += 1
        run.average_weights(progress.epoch)
        progress.skipped += steps.skipped
        progress.model_evaluations += steps.weight
        metrics = steps.metrics | {"epoch": float(progress.epoch), "skipped_environments": float(progress.skipped)}
        if run.counts_evaluations:
            metrics[MODEL_EVALUATIONS] = progress.model_evaluations
        if config.parallel.min_workers is not None:  # then their number may change
            metrics["workers"] = float(process.world_size)
        step = progress.epoch * run.steps_per_epoch
        evaluated, last = progress.epoch in evaluate_after, progress.epoch == schedule.epochs
        due = process.world_size == 1 and time.monotonic() > written + _CHECKPOINT_SECONDS
        checkpointed = due or progress.epoch in checkpoint_after
        if evaluated or checkpointed:
            run.renew_batch_norm(progress.epoch)
        if evaluated:
            metrics |= run.evaluate(step)
            if stopping is not None:
                reached = stopping.see(metrics, progress.epoch, run.evaluated, last=last)
                progress.ended = reached or stopping.out_of_patience
                if (last or progress.ended) and not reached:
                    stopping.restore(run.evaluated)
                    metrics |= run.evaluate(step)
                metrics["kept_epoch"] = float(stopping.epoch)
                if schedule.stop_spread > 0:
                    metrics["spread_reached"] = float(reached)
                if schedule.patience > 0:
                    metrics["out_of_patience"] = float(progress.ended)
                last = last or progress.ended
            if progress.epoch in compare_after:
                metrics |= run.evaluation.consistency(run.evaluated)
            if last and job.final_measures is not None and process.rank == 0:
                metrics |= final_measures(job, config, run.evaluated.eval(), metrics)
            if not last:
                metrics = run.evaluation.without_many(metrics)
            run.so_far.evaluated(metrics)
        if process.rank == 0:
            for at, at_step in enumerate(steps.each, step - len(steps.each) + 1):
                if at % every == 0 or at == step == schedule.epochs * run.steps_per_epoch:
                    context.log(at_step, at)
            if not evaluated and step // every > (step - len(steps.each)) // every:
                context.log(metrics, step)
        if evaluated and last and run.evaluation.left_out is not None:
            context.keep(PREDICTIONS, run.evaluation.left_out.write)
        if evaluated:
            yield Evaluation(progress.epoch, step, metrics)
        if checkpointed or last:
            run.average_buffers()
            write = functools.partial(run.write, progress=progress, stopping=stopping, momentum=run.momentum())
            context.checkpoint(write, step)
            run.so_far.checkpointed = written = time.monotonic()


def estimated_seconds(job: Job[Any], config: ResolvedTrainConfig, process: ProcessContext) -> tuple[float, float]:
    """The fewest and the most seconds of a training in one process, from a few of its steps and one evaluation.

    The fewest are those of a training whose first evaluation stays the best, so that it ends with its patience.
    """
    run = _Run(job, config, process, prepare(job, config, process), StepsSoFar())
    with contextlib.closing(run.batches):
        run.epoch(0, _WARM_UP)
        started = time.perf_counter()
        steps = len(run.epoch(0, _TIMED).each)
        trained = time.perf_counter()
        run.evaluate()
        evaluated = time.perf_counter()
    schedule = config.schedule
    evaluations = min(schedule.evaluations, schedule.epochs)
    longest = schedule.epochs * run.steps_per_epoch * (trained - started) / steps + evaluations * (evaluated - trained)
    least = (schedule.patience + 1) / evaluations if schedule.patience > 0 else 1.0
    return min(least, 1.0) * longest, longest


@dataclass
class _EpochSteps:
    metrics: dict[str, float]
    each: list[dict[str, float]]
    skipped: int
    weight: float


class _Rows:
    """A small tensor of each step, kept in one block.

    If each lived for the epoch alone, it would divide the memory that a step frees on a CPU, which the next step could
    not use whole: with a convolutional network a process grew by 20 MB a step.
    """

    def __init__(self, steps: int) -> None:
        self._rows: Tensor = torch.empty(steps, 0)
        self._count = 0

    def append(self, row: Tensor) -> None:
        """Take the tensor of a step, of the first one's shape."""
        if self._count == 0:
            self._rows = row.new_empty(len(self._rows), *row.shape)
        self._rows[self._count] = row.detach()
        self._count += 1

    def stacked(self) -> Tensor:
        """The tensors of all steps, ``(steps, ...)``."""
        return self._rows[: self._count]


class _Run:
    """The parts of a run in one process."""

    def __init__(
        self,
        job: Job[Any],
        config: ResolvedTrainConfig,
        process: ProcessContext,
        prepared: WorkerData,
        so_far: StepsSoFar,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.callbacks = callbacks
        self.process = process
        self.config = config
        self.so_far = so_far
        self.environments = prepared.environments
        self.job = job
        training = [pair.training for pair in prepared.training]
        so_far.environments = tuple(environment.name for environment in training)
        places: Sequence[int] = range(config.data.batch_size)
        places = share(places, process) if config.aggregation.per_example else places
        part = slice(places[0], places[-1] + 1)
        together = config.data.environments_per_step // process.world_size or None
        batches_each = config.aggregation.steps_per_update
        largest = max(process.all_gather(max(map(len, training))))
        self.batches = BatchStream(
            training,
            config.data.batch_size,
            config.run.seed,
            process.device,
            part,
            together,
            batches_each,
            largest,
            config.data.readers,
            config.schedule.epoch_steps,
        )
        # This process's part of each batch.
        self._part = len(places) / config.data.batch_size
        self.steps_per_epoch = self.batches.steps_per_epoch
        steps = config.schedule.epochs * self.steps_per_epoch
        self.model = build_model(job, config)
        averaging = config.schedule.averaging
        self.average = None
        if averaging is not None:
            self.average = WeightAverage(self.model, *averaging, config.schedule.epochs)
        rows = [each.total_weight for each in training]
        if not config.aggregation.per_example:  # where each process has all of them
            rows = list(itertools.chain.from_iterable(process.all_gather(rows)))
        self.objective = initialize_objective(job, config, self.model, rows, steps)
        for module in [*self._modules, *([] if self.average is None else [self.average.averaged])]:
            module.to(process.device)
            if process.world_size > 1:
                _same_everywhere(module)
        if job.loss is not None and job.measures is None:
            on_all_ranks(lambda: check_all_targets(self.model, prepared, process.device), process)
        without_graph = obstacle(config, process, coupled=self.objective.coupled)
        self.optimization = Optimization(
            job.parameters_of(self.model, config), config, steps, self.objective, capturable=without_graph is None
        )
        lengths = set[float]().union(*process.all_gather({len(each) / config.data.batch_size for each in training}))
        same_every_epoch = together is None and batches_each == 1 and lengths == {float(self.steps_per_epoch)}
        period = self.steps_per_epoch if same_every_epoch else None
        self.objective.attach(self.batches.batch, self.optimization.optimizer, period)
        names = [environment.name for environment in training]
        if together is not None:  # which differ at every step
            names = [f"{index + 1} of process {process.rank}'s at this step" for index in range(together)]
        names = names_of_batches(names, batches_each)
        rule, scaler = config.rule(len(self.environments.train)), self.optimization.scaler
        self.gradients = gradient_source(
            self.model,
            self.objective,
            rule,
            names,
            dist.group.WORLD if process.world_size > 1 else None,
            first_batch=lambda: self.batches.batch(0),
            example_gradient=config.aggregation.example_gradient if config.aggregation.per_example else None,
            vectorize=_VECTORIZE[config.aggregation.vectorize],
            accumulate=config.aggregation.accumulate,
            compile=config.optimizer.compile,
            rescale=config.aggregation.rescale and masks(rule),
            environment_momentum=config.aggregation.environment_momentum,
            # What overflows by the scale alone ends no run, see epoch().
            nonfinite=None if scaler is not None and self._raises else config.aggregation.nonfinite,
            autocast=self.objective.autocast,
            scaler=scaler,
            clock=so_far.clock,
        )
        self.whole_step = whole_step(
            self.gradients, self.optimization, config, process.device, without_graph, self._not_finite
        )
        self.evaluation = RunEvaluation(job, config, process, prepared, self.model)
        self.layout = Layout.of(trainable(self.model))
        self._sizes = torch.tensor([shape.numel() for shape in self.layout.shapes], dtype=torch.float32)
        so_far.sizes, so_far.epochs = self._sizes, config.schedule.epochs

    @property
    def _modules(self) -> list[nn.Module]:
        """The trained modules: the model, and the objective's own."""
        return [self.model] if self.objective.module is None else [self.model, self.objective.module]

    def read(self, folder: Path) -> Progress:
        """Load a checkpoint."""
        progress = read_checkpoint(folder, self.model, self.optimization)
        if self.average is not None and progress.averaged > 0:
            read_weights(folder, self.average.averaged.module)
            self.average.averaged.n_averaged.fill_(progress.averaged)
            read_weights(folder, self.model, TRAINED)
        if self.evaluation.left_out is not None:
            self.evaluation.left_out.read_state(folder)
        if self._averaging is not None and self.config.aggregation.environment_momentum > 0:
            self._averaging.load_state_dict(read_momentum(folder, self._own_names()))
        return progress

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and kept: the average of the weights, once there is one."""
        average = self.average
        return self.model if average is None or average.count == 0 else average.averaged.module

    def evaluate(self, step: int = 0) -> dict[str, float]:
        """The metrics of the model on all parts of the data."""
        self.average_buffers()
        return self.evaluation.metrics(self.evaluated, step)

    def average_weights(self, epoch: int) -> None:
        """Add the weights after this many epochs to a mean over epochs."""
        if self.average is not None:
            self.average.after_epoch(self.model, epoch)

    def renew_batch_norm(self, epoch: int) -> None:
        """Compute batch norm's statistics of a mean over epochs from the batches of this epoch, counted from 1."""
        if self.average is None:
            return
        first = (epoch - 1) * self.steps_per_epoch
        _seed_step(self.config.run.seed, self.process.rank, first)
        each = (self.batches.batch(step) for step in range(first, first + self.steps_per_epoch))
        batches = (take(batch, place) for batch in each for place in range(len(pytree.tree_leaves(batch)[0])))
        self.average.renew_batch_norm(batches, self.evaluation.risk)

    def momentum(self) -> dict[str, Tensor]:
        """The averages of all environments' gradients, in the first process; called in every one."""
        state = {} if self._averaging is None else self._averaging.state_dict()
        if self.process.world_size == 1 or self.config.aggregation.environment_momentum == 0:
            return state
        parts: list[dict[str, Tensor]] = [{}] * self.process.world_size
        own = {name: value.cpu() for name, value in state.items()}
        dist.gather_object(own, parts if self.process.rank == 0 else None)
        return {name: value for part in parts for name, value in part.items()}

    @property
    def _averaging(self) -> StackedGradients | AggregationHook | None:
        """The part that keeps averages of environments' gradients, if there is one."""
        source = self.gradients.hook if isinstance(self.gradients, HookedGradients) else self.gradients
        return source if isinstance(source, StackedGradients | AggregationHook) else None

    def epoch(self, epoch: int, most: int | None = None) -> _EpochSteps:
        """The steps of one epoch, or at most this number of them."""
        for module in self._modules:
            module.train()
        steps = range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)[:most]
        losses, kept, weights, shares = (_Rows(len(steps)) for _ in range(4))
        rates, skipped = [], 0
        so_far, clock = self.so_far, self.so_far.clock
        started = time.perf_counter()
        for step in steps:
            clock.switch("gradients")
            _seed_step(self.config.run.seed, self.process.rank, step)
            if isinstance(self.gradients, StackedGradients | ObjectiveGradients) and self.process.world_size == 1:
                self.gradients.names = self.batches.names(step)
            rates.append(self.optimization.lr)
            result = self._step(step)
            if self.average is not None:
                self.average.after_step(self.model)
            losses.append(result.losses)
            kept.append(result.kept_fraction)
            weights.append(result.weights)
            if result.environment_weights is not None:
                shares.append(result.environment_weights)
            skipped += len(result.skipped)
            so_far.steps, so_far.epoch, so_far.latest = so_far.steps + 1, (step + 1) / self.steps_per_epoch, result
            clock.switch(None)
            for callback in self.callbacks:
                callback.on_step(step + 1, self.model, result)
        if self.whole_step is not None:
            self.whole_step.read_finite()
        seconds = time.perf_counter() - started
        means, worst = self._losses(losses.stacked(), weights.stacked())
        each = [
            {"step/loss": mean, "step/worst_loss": most, "step/lr": rate}
            for mean, most, rate in zip(means, worst, rates, strict=True)
        ]
        metrics = {"steps_per_second": len(each) / seconds} | self._weights(shares.stacked())
        fractions = kept.stacked().float().cpu()
        if fractions.numel() > 0:  # of a rule that drops components
            overall = ((fractions * self._sizes).sum(1) / self._sizes.sum()).tolist()
            for step_metrics, fraction in zip(each, overall, strict=True):
                step_metrics["step/kept_fraction"] = fraction
            metrics["kept_fraction"] = sum(overall) / len(overall)
            for name, fraction in zip(self.layout.names, fractions.mean(0).tolist(), strict=True):
                metrics[layer_metric("kept_fraction", name)] = fraction
        if self.optimization.scaler is not None:
            metrics["loss_scale"] = self.optimization.loss_scale
        metrics |= {f"objective/{name}": float(value) for name, value in self.objective.metrics().items()}
        return _EpochSteps(metrics, each, skipped, self._weight(weights.stacked()) if self.counts_evaluations else 0.0)

    def _step(self, step: int) -> EnvironmentStep:
        """The gradients of a step, and the update by them."""
        batch = self.batches.batch(step)
        if self.whole_step is not None:
            return self.whole_step(batch, step)
        result = self.gradients(batch, step)
        self.so_far.clock.switch("optimizer")
        applied = self.optimization.step(step)
        if not applied and self._raises and self.optimization.loss_scale < 1:
            raise NonFiniteGradientError(self._not_finite(result.losses, step), step)
        return result

    @property
    def _raises(self) -> bool:
        return self.config.aggregation.nonfinite == "raise"

    def _not_finite(self, losses: Tensor, step: int) -> Sequence[str]:
        """The environments of all processes whose loss is not finite; all if only their gradients are not."""
        finite, own = torch.isfinite(losses).tolist(), self.batches.names(step)
        found = self.process.all_gather([name for name, right in zip(own, finite, strict=True) if not right])
        return list(itertools.chain.from_iterable(found)) or self.environments.train

    def _weights(self, shares: Tensor) -> dict[str, float]:
        """The weight of each environment in a weighting, summed over its batches: the mean over steps."""
        if shares.numel() == 0 or self.config.data.environments_per_step:  # which differ at every step
            return {}
        means = shares.mean(0).unflatten(0, (-1, self.config.aggregation.steps_per_update)).sum(1).tolist()
        names = self.environments.train
        return {layer_metric("weight", name): weight for name, weight in zip(names, means, strict=True)}

    @property
    def counts_evaluations(self) -> bool:
        """Whether the weight of a batch is the number of the model's evaluations."""
        return bool(getattr(self.objective.risk, "counts_evaluations", False))

    def _weight(self, weights: Tensor) -> float:
        """The total weight of the batches of these steps, over all processes."""
        return float(self.process.all_reduce(weights.double().sum()))

    def _losses(self, losses: Tensor, weights: Tensor) -> tuple[list[float], list[float]]:
        """The mean loss over environments at each step, unweighted, and the worst loss."""
        losses, weights = losses.float(), weights.float()
        batches_each = self.config.aggregation.steps_per_update
        if batches_each > 1:  # the loss of an environment is over all its batches
            weights = weights.unflatten(1, (-1, batches_each))
            losses = (losses.view_as(weights) * weights).sum(2) / weights.sum(2)
        if self.config.aggregation.per_example and self.process.world_size > 1:
            # Every process has a part of each environment's batch, and its weight.
            sums, weights = self.process.all_reduce(torch.stack([losses * weights, weights]))
            losses = sums / weights
            return losses.mean(1).tolist(), losses.amax(1).tolist()
        sums, worst = self.process.all_reduce(losses.sum(1)), losses.amax(1)
        counts = losses.shape[1]
        if self.process.world_size > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            counts = self.config.data.environments_per_step or len(self.environments.train)
        return (sums / counts).tolist(), worst.tolist()

    def write(
        self, folder: Path, progress: Progress, stopping: BestWeights | None, momentum: Mapping[str, Tensor]
    ) -> None:
        """Write a checkpoint into an existing folder."""
        progress.averaged = 0 if self.average is None else self.average.count
        trained = self.model if progress.averaged > 0 else None
        if stopping is not None:
            stopping.write(folder)
        if self.evaluation.left_out is not None:
            self.evaluation.left_out.write_state(folder)
        write_checkpoint(folder, self.evaluated, self.optimization, progress, momentum, trained)  # checksums last

    def average_buffers(self) -> None:
        """Average batch norm's running statistics over all environments, in which they are linear.

        Values that are equal in all processes stay exactly as they are.
        """
        if self.process.world_size == 1:
            return
        own = len(self._own_names()) / len(self.environments.train)
        weight = self._part if self.config.aggregation.per_example else own
        averaged = [] if self.average is None else [self.average.averaged.module]
        for buffer in (each for module in [*self._modules, *averaged] for each in module.buffers()):
            if buffer.is_floating_point():
                lowest, highest, mean = buffer.clone(), buffer.clone(), buffer * weight
                dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
                dist.all_reduce(highest, op=dist.ReduceOp.MAX)
                buffer.copy_(torch.where(lowest == highest, buffer, self.process.all_reduce(mean)))

    def _own_names(self) -> list[str]:
        return share(self.environments.train, self.process)


def _same_everywhere(model: nn.Module) -> None:
    """Broadcast the weights of the first process to all."""
    for value in [*model.parameters(), *model.buffers()]:
        dist.broadcast(value.detach(), 0)


def _seed_step(seed: int, rank: int, step: int) -> None:
    """Seed the random numbers of a step (dropout) by seed, process and step, so that a resumed run draws the same."""
    drawn = int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])
    # Not torch.manual_seed: without CUDA it records the call stack, which takes a millisecond.
    torch.default_generator.manual_seed(drawn)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(drawn)


def _compared(times: int, evaluated: set[int]) -> set[int]:
    """This number of the evaluated epochs, evenly spread, with the last one."""
    if times == 0:
        return set()
    places = spread(times, len(evaluated))
    return {epoch for place, epoch in enumerate(sorted(evaluated), 1) if place in places}
