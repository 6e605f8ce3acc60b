"""The evaluations of a run: loss and further measures on every environment by name, over all workers."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.environments import Environment, Environments
from concord.environments.readers import read_ahead
from concord.environments.source import InMemory
from concord.environments.tree import Tree
from concord.errors import InputError
from concord.gradients.risk import Batch, Loss, MeanRisk, Risk, Supervised, as_risk
from concord.training.context import ProcessContext
from concord.training.declared_measures import EnvironmentEvaluation, Measure, Mode, PerExample
from concord.training.metric_names import environment_metric, names_by_split, split_metric
from concord.weighted import Weighted

Split = str
"""``train``, ``held_out``, ``validation``, ``ood``, or the name of a monitored environment."""
Values = np.ndarray[Any, Any]
_AT_ONCE = 256  # examples


@dataclass(frozen=True)
class EvaluatedPart:
    """A part of the data with a row of its own in the metrics.

    Attributes:
        split: the purpose of the part.
        data: the examples, in the worker that evaluates it; None elsewhere.
    """

    split: Split
    name: str
    data: Environment | None


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the outputs ``(batch, classes)`` is at the target, else 0."""
    return (outputs.argmax(1) == targets).float()


ACCURACY = Measure(correct, "max")


def area_under_roc(scores: Values, positive: Values, weights: Values | None = None) -> float | None:
    """The area under the ROC curve, from scores, truth and weights ``(examples,)``; None where all are of one class.

    scikit-learn's takes a millisecond for any number of examples, too long for hundreds of environments.
    """
    pairs = int(positive.sum()) * int((~positive).sum())
    if pairs == 0:
        return None
    if weights is not None:
        return _weighted_area(scores, positive, weights)
    others = np.sort(scores[~positive])
    below, up_to = (int(np.searchsorted(others, scores[positive], side).sum()) for side in ("left", "right"))
    return (below + up_to) / (2 * pairs)


def _weighted_area(scores: Values, positive: Values, weights: Values) -> float:
    order = np.argsort(scores[~positive])
    others = scores[~positive][order]
    summed = np.append(0.0, np.cumsum(weights[~positive][order]))
    below, up_to = (summed[np.searchsorted(others, scores[positive], side)] for side in ("left", "right"))
    own = weights[positive]
    return float((own * (below + up_to)).sum() / (2 * own.sum() * summed[-1]))


def auc(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """The area under the ROC curve of two classes; 0.5, as by chance, where an environment has one class."""
    area = area_under_roc(outputs.nan_to_num().double().diff(dim=1).squeeze(1).numpy(), targets.bool().numpy())
    return {"auc": 0.5 if area is None else area}


AUC = EnvironmentEvaluation(auc, {"auc": "max"}, of_outputs=True)


def default_measures(outputs: Tensor, targets: Tensor) -> dict[str, Measure]:
    """``accuracy`` for integer targets ``(examples,)`` and outputs of several classes, nothing otherwise."""
    classes = not targets.is_floating_point() and targets.ndim == 1 and outputs.ndim == 2 and outputs.shape[1] > 1
    return {"accuracy": ACCURACY} if classes else {}


def as_measures(given: Mapping[str, Measure | PerExample]) -> dict[str, Measure]:
    """Turn a job's measures into :class:`Measure`; of a bare function only the mode of an accuracy is known."""
    return {
        name: each
        if isinstance(each, Measure)
        else Measure(each, "max" if name == "accuracy" or each is correct else None)
        for name, each in given.items()
    }


def modes(measures: Mapping[str, Measure], evaluation: EnvironmentEvaluation | None = None) -> dict[str, Mode | None]:
    """The mode of the loss, of each measure, and of each number of an evaluation, by name."""
    found: dict[str, Mode | None] = {"loss": "min", **{name: measure.mode for name, measure in measures.items()}}
    for name, mode in ({} if evaluation is None else evaluation.modes).items():
        if name in found:
            raise InputError(
                f"evaluation: {name} is also the name of {'a measure' if name in measures else 'the loss'}"
            )
        found[name] = mode
    return found


def reported_metrics(
    environments: Environments, measures: Mapping[str, Mode | None], held_out: bool
) -> dict[str, Mode | None]:
    """The metrics of evaluations over environments, with their modes, from the measures'."""
    splits = [split for split, names in names_by_split(environments, held_out).items() if names]
    reported = {split_metric(split, measure): mode for split in splits for measure, mode in measures.items()}
    ranked = {measure: mode for measure, mode in measures.items() if mode is not None}
    worst = {split_metric(split, name, worst=True): mode for split in splits for name, mode in ranked.items()}
    return {**reported, **worst, **({"held_out_spread": "min"} if held_out else {})}


def worst(values: Iterable[float], mode: Mode) -> float:
    """The worst of the values; NaN if one of them is, which Python's ``max`` and ``min`` may pass over."""
    return float((np.max if mode == "min" else np.min)(list(values)))


def check_targets(environment: Environment, outputs: Tensor) -> None:
    """Refuse class targets outside of the outputs ``(batch, classes)`` (InputError)."""
    targets = environment.targets
    if not default_measures(outputs, targets):
        return
    least, most, classes = int(targets.min()), int(targets.max()), outputs.shape[1]
    if least < 0 or most >= classes:
        wrong = least if least < 0 else most
        raise InputError(
            f"environment {environment.name}: target {wrong} is out of range; the model has {classes} outputs, "
            f"so targets go from 0 to {classes - 1}"
        )


@dataclass(frozen=True)
class EvaluatedBatch:
    """The evaluation of one batch.

    Attributes:
        risk: the mean over the batch.
        weight: its weight in a mean over batches: the number of examples, or the risk's own weight.
        values: the measures by name, one number an example.
        outputs: of the risk's first call of the model; None if it calls none.
    """

    risk: Tensor
    weight: Tensor
    values: Mapping[str, Tensor]
    outputs: Any


def evaluate_batch(
    model: nn.Module, risk: Risk, measures: Mapping[str, PerExample], batch: Batch, step: int = 0
) -> EvaluatedBatch:
    """Risk and measures of one batch, by one forward pass."""
    device = pytree.tree_leaves(batch)[0].device
    seen: list[Any] = []

    def see(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if not seen:  # the first call's
            seen.append(outputs)

    with model.register_forward_hook(see):
        mean, weight = MeanRisk(model, risk, None, device)(batch, step)
    if measures and not seen:
        raise InputError(f"measure {next(iter(measures))}: the risk does not call the model, so there are no outputs")
    wanted = batch[1] if isinstance(risk, Supervised) else batch  # also of weighted pairs
    values = {name: torch.as_tensor(measure(seen[0], wanted)) for name, measure in measures.items()}
    return EvaluatedBatch(mean, weight, values, seen[0] if seen else None)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Loss | Risk,
    measures: Mapping[str, Measure | PerExample],
    parts: Sequence[EvaluatedPart],
    process: ProcessContext,
    examples_at_once: int = 4096,
    step: int = 0,
    evaluation: EnvironmentEvaluation | None = None,
    numbers: Sequence[Mapping[str, float | None]] = (),
    readers: int = 0,
    see: Callable[..., None] | None = None,
) -> dict[str, float]:
    """Evaluate all parts; every worker calls it with the same parts and its own data, and gets the same result.

    The result has for each measure (``loss``, the given ones, and the evaluation's) ``{split}_{measure}`` over all
    examples of the split, ``worst_{split}_{measure}`` of the split's worst environment if the measure has a mode, and
    ``{measure}/{split}/{environment}``. A risk with a weight of its own is averaged by that weight, not by examples.
    ``numbers`` are the evaluation's results for each part; without them an evaluation of outputs computes its own.
    ``see`` is called with each part of this process's, its outputs, its targets, and weights if there are some, if a
    loss has them. Weighted examples count by their weights everywhere.
    """
    known = as_measures(measures)
    risk = as_risk(loss, counts=True)
    mode_of = modes(known, evaluation)
    names = list(mode_of)
    sums = torch.zeros(len(parts), len(names), dtype=torch.float64)
    weights = torch.zeros_like(sums)
    training = model.training
    model.eval()
    own = {at: part.data for at, part in enumerate(parts) if part.data is not None}
    pieces = [(at, start) for at, data in own.items() for start in range(0, len(data), examples_at_once)]
    readers = 0 if all(isinstance(data.source, InMemory) for data in own.values()) else readers
    of_outputs = evaluation is not None and not numbers and reads_outputs(risk, evaluation)
    found: dict[int, list[tuple[Tensor, ...]]] = {}
    batches = read_ahead(functools.partial(_piece, own, examples_at_once), pieces, readers, process.device)
    for (at, _), batch in zip(pieces, batches, strict=True):
        row, weight = sums[at], weights[at]
        evaluated = evaluate_batch(model, risk, known, batch, step)
        in_batch = float(evaluated.weight)
        if in_batch != 0:  # a batch of weight 0 has no mean
            row[0] += float(evaluated.risk) * in_batch
        weight[0] += in_batch
        for index, values in enumerate(evaluated.values.values(), start=1):
            if isinstance(batch, Weighted):
                row[index] += float((values.double() * batch.weights).sum())
                weight[index] += float(batch.weights.double().sum())
                continue
            row[index] += float(values.double().sum())
            weight[index] += len(values)
        if of_outputs or (see is not None and isinstance(risk, Supervised)):
            found.setdefault(at, []).append((evaluated.outputs.float().cpu(), *(each.cpu() for each in batch[1:])))
    model.train(training)
    joined = {at: tuple(map(torch.cat, zip(*each, strict=True))) for at, each in found.items()}
    if evaluation is not None and of_outputs:
        measured = {at: evaluation.checked(parts[at].name, evaluation.function(*each)) for at, each in joined.items()}
        numbers = [measured.get(at, {}) for at in range(len(parts))]
    if see is not None:
        for at, each in joined.items():
            see(parts[at], *each)
    for at, given in enumerate(numbers):
        row, weight, examples = sums[at], weights[at], float(len(parts[at].data or ()))
        if at in joined and len(joined[at]) == 3:
            examples = float(joined[at][2].double().sum())
        for index, value in enumerate(given.values(), start=1 + len(known)):
            if value is not None:
                weight[index] = examples
                row[index] = value * weight[index]
    if process.world_size > 1:
        sums, weights = process.all_reduce(torch.stack([sums, weights]).to(process.device)).cpu().unbind()
    metrics: dict[str, float] = {}
    for index, measure_name in enumerate(names):
        for split in dict.fromkeys(part.split for part in parts):
            rows = [at for at, part in enumerate(parts) if part.split == split]
            means = sums[rows, index] / weights[rows, index]
            metrics[split_metric(split, measure_name)] = float(sums[rows, index].sum() / weights[rows, index].sum())
            if (mode := mode_of[measure_name]) is not None:
                defined = means[weights[rows, index] > 0].tolist()
                metrics[split_metric(split, measure_name, worst=True)] = worst(defined, mode) if defined else math.nan
            for at, value in zip(rows, means.tolist(), strict=True):
                metrics[environment_metric(measure_name, split, parts[at].name)] = value
    return metrics


def reads_outputs(risk: Risk, evaluation: EnvironmentEvaluation) -> bool:
    """Whether the evaluation takes the outputs of the loss, which a risk of another form does not have."""
    return evaluation.of_outputs and isinstance(risk, Supervised)


def outputs_and_targets(model: nn.Module, environment: Environment) -> tuple[Tensor, Tensor]:
    """The model's outputs and the targets, on the CPU."""
    first = next(model.parameters(), None)
    found = []
    for start in range(0, len(environment), _AT_ONCE):
        inputs, targets = environment.pairs(slice(start, start + _AT_ONCE))
        outputs = model(inputs if first is None else inputs.to(first.device))
        found.append((outputs.float().cpu(), targets.cpu()))
    outputs, targets = (torch.cat(each) for each in zip(*found, strict=True))
    return outputs, targets


def _piece(own: Mapping[int, Environment], size: int, piece: tuple[int, int]) -> Tree:
    at, start = piece
    return own[at].take(slice(start, start + size))
