"""The evaluations of a run: its model on all parts of its data, by the measures of its job."""

import functools
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.environments import Environment
from concord.environments.collection import some_examples
from concord.gradients.risk import Supervised, with_outputs
from concord.source_file import reason
from concord.training.baseline import Fit
from concord.training.build import build_model
from concord.training.context import ProcessContext
from concord.training.declared_measures import Measure, Mode, PerExample
from concord.training.evaluation import (
    EvaluatedPart,
    as_measures,
    check_targets,
    default_measures,
    evaluate,
    evaluate_batch,
    modes,
    reads_outputs,
    reported_metrics,
)
from concord.training.job import Job
from concord.training.kept_weights import best_by
from concord.training.left_out import USUAL_CUTOFF, LeftOutPredictions
from concord.training.measures import mean_of
from concord.training.metric_names import environment_metric, names_by_split, without_clashes
from concord.training.options import ResolvedTrainConfig
from concord.training.within_environment import ITSELF, cross_validated
from concord.training.worker_data import WorkerData, on_all_ranks, share
from concord.weighted import Weighted

# Of more numbers of single environments by a job's own evaluation, only those of the last evaluation are kept.
_MOST_OF_ENVIRONMENTS = 400


class RunEvaluation:
    """What is measured of a run's model in one process.

    Args:
        job: the job.
        config: the resolved options.
        process: this process; all evaluate together.
        prepared: the data of this process.
        model: the model before its first step, whose outputs decide which measures fit.

    Attributes:
        risk: of the job.
        own: the job's own evaluation, if it has one.
        measures: of each example, by name.
        parts: one for every part of the data, the same list in every process.
        left_out: takes the predictions for environments that are left out; None in all processes but the first, and
            where none are.
    """

    def __init__(
        self,
        job: Job[Any],
        config: ResolvedTrainConfig,
        process: ProcessContext,
        prepared: WorkerData,
        model: nn.Module,
    ) -> None:
        self._job, self._config, self._process = job, config, process
        self._environments = prepared.environments
        self.risk, self.own = job.risk_of(config), job.evaluation_of(config)
        self.parts = self._parts(prepared)
        self.measures = as_measures(_measures(job, model, prepared.training[0].training, process.device))
        self.left_out = None
        if config.data.left_out and process.rank == 0 and isinstance(self.risk, Supervised):
            asked = self.own is not None and {"recall", "specificity"} & self.own.modes.keys()
            cutoff = self.own.cutoff if self.own is not None and asked else USUAL_CUTOFF
            self.left_out = LeftOutPredictions(self._environments, cutoff)

    @property
    def training(self) -> list[Environment]:
        """The training examples that this process evaluates."""
        return [part.data for part in self.parts if part.split == "train" and part.data is not None]

    def metrics(self, model: nn.Module, step: int) -> dict[str, float]:
        """Metrics on all environments; without validation environments the held-out parts are ``validation``."""
        own, data, process = self.own, self._config.data, self._process
        together = data.environments_per_step // process.world_size or len(share(self._environments.train, process))
        numbers: list[dict[str, float | None]] = []
        if own is not None and not reads_outputs(self.risk, own):
            numbers = on_all_ranks(
                lambda: [own(model, part, self._config.run.seed, step) for part in self.parts], process
            )
        metrics = evaluate(
            model,
            self.risk,
            self.measures,
            self.parts,
            process,
            # As many examples as a training step, so that evaluation needs no more memory.
            examples_at_once=data.batch_size * max(together, 1) // self._config.aggregation.accumulate,
            step=step,
            evaluation=own,
            numbers=numbers,
            readers=data.readers,
            see=None if self.left_out is None else functools.partial(self._see, step),
        )
        if data.held_out > 0:
            losses = [metrics[f"loss/held_out/{name}"] for name in names_by_split(self._environments)["held_out"]]
            metrics["held_out_spread"] = float(np.std(losses))
        if not self._environments.validation:
            for measure in modes(self.measures, own):
                for prefix in ("", "worst_"):
                    if f"{prefix}held_out_{measure}" in metrics:
                        metrics[f"{prefix}validation_{measure}"] = metrics[f"{prefix}held_out_{measure}"]
        return metrics

    def _see(
        self, step: int, part: EvaluatedPart, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> None:
        """Take the outputs for an environment that is left out; no others are for validation."""
        if part.split == "validation" and self.left_out is not None:
            self.left_out.add(step, part.name, outputs, targets, weights)

    def within_environments(self, fit: Fit) -> dict[str, float]:
        """The measures of a baseline fitted in each left-out environment itself, where there are rows enough."""
        assert isinstance(self.risk, Supervised)
        found: dict[str, float] = {}
        for part in self.parts:
            if part.split != "validation" or part.data is None:
                continue
            batch = pytree.tree_map(lambda leaf: leaf.cpu(), part.data.take(slice(None)))
            weights = batch.weights if isinstance(batch, Weighted) else None
            build, units = functools.partial(build_model, self._job, self._config), self._environments.clusters
            inputs, targets = batch[:2]
            seed, of_rows = self._config.run.seed, units.get(part.name)
            outputs = cross_validated(build, fit, inputs, targets, seed, weights=weights, units=of_rows)
            if outputs is None:
                continue
            evaluated = evaluate_batch(nn.Identity(), self.risk, self.measures, with_outputs(batch, outputs))
            numbers: dict[str, float | None] = {"loss": float(evaluated.risk)}
            numbers |= {name: float(mean_of(each.double(), weights)) for name, each in evaluated.values.items()}
            if self.own is not None and reads_outputs(self.risk, self.own):
                numbers |= self.own.function(outputs, *batch[1:])
            known = {name: value for name, value in numbers.items() if value is not None}
            found |= {environment_metric(name, ITSELF, part.name): value for name, value in known.items()}
        return found

    def without_many(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics without the evaluation's of single environments if they are many: to keep them takes longer.

        Those of environments that are left out are kept, since which evaluation counts is decided later.
        """
        measures = () if self.own is None else tuple(self.own.modes)
        if len(measures) * len(self.parts) <= _MOST_OF_ENVIRONMENTS:
            return metrics
        left_out = "validation" if self._config.data.left_out else None
        others = [part for part in self.parts if part.split != left_out]
        many = {environment_metric(name, part.split, part.name) for name in measures for part in others}
        return {name: value for name, value in metrics.items() if name not in many}

    def consistency(self, model: nn.Module) -> dict[str, float]:
        """The agreement of the training environments, see :func:`consistency_metrics`, and the seconds it took."""
        # Imports SciPy, which few runs need.
        from concord.analysis.consistency.monitoring import EXAMPLES, consistency_metrics

        started = time.perf_counter()
        seed = self._config.run.seed
        batches = {each.name: some_examples(each, EXAMPLES, seed, "consistency") for each in self.training}
        count = len(self._environments.train)
        found = consistency_metrics(model, self.risk, batches, count, self._process.all_reduce)
        return found | {"consistency/seconds": time.perf_counter() - started}

    def best_by(self) -> tuple[str, Mode]:
        """The metric of ``--keep`` and its mode."""
        measures = modes(self.measures, self.own)
        reported = reported_metrics(self._environments, measures, self._config.data.held_out > 0)
        return best_by(self._job, self._config, reported, () if self.own is None else self.own.criteria)

    def _parts(self, prepared: WorkerData) -> list[EvaluatedPart]:
        """One row for every part of the data, the same list in every process."""
        own = {
            pair.training.name: pair
            for pair in prepared.training
            if pair.training.name in share(self._environments.train, self._process)
        }
        data = {("train", name): pair.training for name, pair in own.items()}
        data |= {("held_out", name): pair.held_out for name, pair in own.items() if pair.held_out is not None}
        others = dict(prepared.eval_only)
        by_split = names_by_split(self._environments, self._config.data.held_out > 0)
        by_split["validation"] = self._environments.validation  # else a copy of the held-out numbers, see evaluate
        return [
            EvaluatedPart(split, name, data.get((split, name), others.get(name)))
            for split, names in by_split.items()
            for name in names
        ]


def final_measures(
    job: Job[Any], config: ResolvedTrainConfig, model: nn.Module, reported: Iterable[str]
) -> dict[str, float]:
    """The job's final measures; if they fail, training and reported metrics are kept."""
    assert job.final_measures is not None
    try:
        with torch.no_grad():
            numbers = {name: float(value) for name, value in job.final_measures(config, model).items()}
        measured, left_out = without_clashes(numbers, reported)
    except Exception as error:
        warnings.warn(f"the job's final measures are missing: {reason(error)}", stacklevel=2)
        return {}
    if left_out:
        shown = ", ".join(map(repr, left_out))
        warnings.warn(f"final measures {shown}: left out, other metrics have these names; rename them", stacklevel=2)
    return measured


def check_all_targets(model: nn.Module, prepared: WorkerData, device: torch.device) -> None:
    """Refuse targets of any part that do not fit the model's outputs (InputError)."""
    training = [part for pair in prepared.training for part in pair if part is not None]
    for part in [*training, *(environment for _, environment in prepared.eval_only)]:
        check_targets(part, _outputs(model, part, device))


def _measures(
    job: Job[Any], model: nn.Module, environment: Environment, device: torch.device
) -> Mapping[str, Measure | PerExample]:
    if job.measures is not None:
        return job.measures
    if job.loss is None:
        return {}
    return default_measures(_outputs(model, environment, device), environment.targets)


def _outputs(model: nn.Module, environment: Environment, device: torch.device) -> Tensor:
    training = model.training
    with torch.no_grad():
        outputs: Tensor = model.eval()(environment.pairs(slice(0, 1))[0].to(device))
    model.train(training)
    return outputs
