"""The evaluations of a run: loss and further measures on every environment by name, over all workers."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.environments import Environment, Environments
from concord.environments.collection import generator_for
from concord.environments.readers import read_ahead
from concord.environments.source import InMemory
from concord.environments.tree import Tree
from concord.errors import InputError
from concord.gradients.risk import Batch, Loss, MeanRisk, Risk, Supervised, as_risk
from concord.training.context import ProcessContext
from concord.training.metric_names import environment_metric, names_by_split, split_metric

Split = str
"""``train``, ``held_out``, ``validation``, ``ood``, or the name of a monitored environment."""
PerExample = Callable[[Any, Any], Tensor]
"""Maps the model's outputs and the targets, or with a risk the outputs and the batch, to one number an example."""
Mode = Literal["max", "min"]
Values = np.ndarray[Any, Any]
_AT_ONCE = 256  # examples


@dataclass(frozen=True)
class Measure:
    """A number of every example, averaged over examples, with a direction: larger or smaller is better.

    Attributes:
        function: maps outputs and targets of a batch to one number an example, ``(batch,)``. Of a job with a risk it
            gets the output of the risk's first call of the model, and the batch:
            ``lambda outputs, batch: (outputs.logits.argmax(1) == batch["labels"]).float()``.
        mode: ``max`` if larger is better, ``min`` if smaller is; None if it does not matter: then there is no worst
            environment by this measure, and it selects nothing.

    Raises:
        InputError: the mode is not one of these.
    """

    function: PerExample
    mode: Mode | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min", None):
            raise InputError(f"Measure: mode={self.mode!r}: give max or min")

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The numbers of a batch's examples."""
        return self.function(outputs, targets)


@dataclass(frozen=True)
class EnvironmentEvaluation:
    """Numbers of whole environments that are no means over examples, such as the return of a game::

        def play(model, environment):
            return {"return": mean_return(model, level=environment.name)}

        job = Job(..., evaluation=EnvironmentEvaluation(play, {"return": "max"}), criterion="validation_return")

    They are reported like measures. In the mean over several environments each counts by its number of examples.

    Attributes:
        function: maps the model and one environment to numbers by name. The model is on its device, in evaluation mode;
            there are no gradients. PyTorch's random numbers depend on the run's seed, the environment and the step.
            A number may be None: undefined in this environment, which is then left out of the mean and the worst.
        modes: all names that the function gives: ``max`` if large is good, ``min`` if small is, or None, see
            :class:`Measure`.
        of_outputs: whether the function maps outputs and targets of all examples of an environment instead, on the CPU.
            They are those of the loss, so that it costs no further pass of the model.
        compares: whether its first number with a mode compares models unless the job has a criterion.

    Raises:
        InputError: a mode is not one of these.
    """

    function: Callable[..., Mapping[str, float | None]]
    modes: Mapping[str, Mode | None]
    of_outputs: bool = False
    compares: bool = True

    def __post_init__(self) -> None:
        for name, mode in self.modes.items():
            if mode not in ("max", "min", None):
                raise InputError(f"EnvironmentEvaluation: mode {mode!r} of {name}: give max or min")

    @property
    def criteria(self) -> tuple[str, ...]:
        """The names that may compare models unless the job has a criterion, the first one first."""
        return tuple(self.modes) if self.compares else ()

    def __call__(self, model: nn.Module, part: "EvaluatedPart", seed: int, step: int) -> dict[str, float | None]:
        """The numbers of a part of the data; empty if another worker has the part."""
        if part.data is None:
            return {}
        training = model.training
        torch.manual_seed(generator_for(seed, part.split, part.name, step).initial_seed())
        with torch.no_grad():
            model.eval()
            if self.of_outputs:
                given = self.function(*_outputs_and_targets(model, part.data))
            else:
                given = self.function(model, part.data)
        model.train(training)
        return self.checked(part.name, given)

    def checked(self, environment: str, given: Mapping[str, float | None]) -> dict[str, float | None]:
        """The numbers of an environment by name (InputError if they are not those of the modes)."""
        if not isinstance(given, Mapping) or given.keys() != self.modes.keys():
            found = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise InputError(
                f"evaluation of environment {environment}: gave {found or 'nothing'}; expected {', '.join(self.modes)}"
            )
        return {name: None if (value := given[name]) is None else float(value) for name in self.modes}


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


def area_under_roc(scores: Values, positive: Values) -> float | None:
    """The area under the ROC curve, from scores and truth ``(examples,)``; None where all examples are of one class.

    scikit-learn's takes a millisecond for any number of examples, too long for hundreds of environments.
    """
    pairs = int(positive.sum()) * int((~positive).sum())
    if pairs == 0:
        return None
    others = np.sort(scores[~positive])
    below, up_to = (int(np.searchsorted(others, scores[positive], side).sum()) for side in ("left", "right"))
    return (below + up_to) / (2 * pairs)


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
    wanted = batch[1] if isinstance(risk, Supervised) else batch
    values = {name: measure(seen[0], wanted) for name, measure in measures.items()}
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
    see: Callable[[EvaluatedPart, Tensor, Tensor], None] | None = None,
) -> dict[str, float]:
    """Evaluate all parts; every worker calls it with the same parts and its own data, and gets the same result.

    The result has for each measure (``loss``, the given ones, and the evaluation's) ``{split}_{measure}`` over all
    examples of the split, ``worst_{split}_{measure}`` of the split's worst environment if the measure has a mode, and
    ``{measure}/{split}/{environment}``. A risk with a weight of its own is averaged by that weight, not by examples.
    ``numbers`` are the evaluation's results for each part; without them an evaluation of outputs computes its own.
    ``see`` is called with each part of this process's, its outputs and its targets, if a loss has them.
    """
    known = as_measures(measures)
    risk = as_risk(loss)
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
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    batches = read_ahead(functools.partial(_piece, own, examples_at_once), pieces, readers, process.device)
    for (at, _), batch in zip(pieces, batches, strict=True):
        row, weight = sums[at], weights[at]
        evaluated = evaluate_batch(model, risk, known, batch, step)
        in_batch = float(evaluated.weight)
        if in_batch != 0:  # a batch of weight 0 has no mean
            row[0] += float(evaluated.risk) * in_batch
        weight[0] += in_batch
        for index, values in enumerate(evaluated.values.values(), start=1):
            row[index] += float(values.double().sum())
            weight[index] += len(values)
        if of_outputs or (see is not None and isinstance(risk, Supervised)):
            found.setdefault(at, []).append((evaluated.outputs.float().cpu(), batch[1].cpu()))
    model.train(training)
    joined = {at: tuple(map(torch.cat, zip(*each, strict=True))) for at, each in found.items()}
    if evaluation is not None and of_outputs:
        measured = {at: evaluation.checked(parts[at].name, evaluation.function(*pair)) for at, pair in joined.items()}
        numbers = [measured.get(at, {}) for at in range(len(parts))]
    if see is not None:
        for at, (outputs, targets) in joined.items():
            see(parts[at], outputs, targets)
    for row, weight, part, given in zip(sums, weights, parts, numbers, strict=False):
        for index, value in enumerate(given.values(), start=1 + len(known)):
            if value is not None:
                weight[index] = len(part.data or ())
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


def _outputs_and_targets(model: nn.Module, environment: Environment) -> tuple[Tensor, Tensor]:
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
