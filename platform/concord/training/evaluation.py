"""Loss and further measures on every environment by name, over all workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from concord.environments import Environment
from concord.errors import InputError

Split = str
"""``train``, ``held_out``, ``validation``, ``ood``, or the name of an observed environment."""
PerExample = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets of a batch to one number an example, ``(batch,)``."""
Mode = Literal["max", "min"]


@dataclass(frozen=True)
class Measure:
    """A number of every example, averaged over examples, which says whether large or small is good.

    Attributes:
        function: maps outputs and targets of a batch to one number an example, ``(batch,)``.
        mode: ``max`` if large is good, ``min`` if small is; None where nobody needs to know: then there is no worst
            environment by this measure, and nothing is chosen by it.

    Raises:
        InputError: the mode is none.
    """

    function: PerExample
    mode: Mode | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min", None):
            raise InputError(f"Measure: mode {self.mode!r}: give max or min")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The numbers of a batch's examples."""
        return self.function(outputs, targets)


@dataclass(frozen=True)
class EvaluatedPart:
    """A part of the data with a row of its own in the metrics.

    Attributes:
        split: what it is for.
        name: the environment.
        data: the examples, in the worker that evaluates it; None elsewhere.
    """

    split: Split
    name: str
    data: Environment | None


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the outputs ``(batch, classes)`` is at the target, else 0."""
    return (outputs.argmax(1) == targets).float()


ACCURACY = Measure(correct, "max")


def default_measures(outputs: Tensor, targets: Tensor) -> dict[str, Measure]:
    """``accuracy`` for integer targets ``(examples,)`` and outputs of several classes, nothing otherwise."""
    classes = not targets.is_floating_point() and targets.ndim == 1 and outputs.ndim == 2 and outputs.shape[1] > 1
    return {"accuracy": ACCURACY} if classes else {}


def as_measures(given: Mapping[str, Measure | PerExample]) -> dict[str, Measure]:
    """Measures for what a job gives: of a bare function only an accuracy's mode is known."""
    return {
        name: each
        if isinstance(each, Measure)
        else Measure(each, "max" if name == "accuracy" or each is correct else None)
        for name, each in given.items()
    }


def modes(measures: Mapping[str, Measure]) -> dict[str, Mode | None]:
    """Whether large or small is good, by measure, of the loss too; None where a measure does not say."""
    return {"loss": "min", **{name: measure.mode for name, measure in measures.items()}}


def worst(values: Iterable[float], mode: Mode) -> float:
    """The worst of them."""
    return max(values) if mode == "min" else min(values)


def check_targets(environment: Environment, outputs: Tensor) -> None:
    """Refuse class targets that the outputs ``(batch, classes)`` have no place for (InputError)."""
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


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    measures: Mapping[str, Measure | PerExample],
    parts: Sequence[EvaluatedPart],
    device: torch.device,
    distributed: bool,
    examples_at_once: int = 4096,
) -> dict[str, float]:
    """Evaluate all parts; every worker calls it with the same parts and its own data.

    Returns:
        For each measure (``loss`` and the given ones) ``{split}_{measure}`` over all examples of the split,
        ``worst_{split}_{measure}`` of the split's worst environment where it is known whether large or small is good,
        and ``{measure}/{split}/{environment}``.
        The same in every worker.
    """
    known = as_measures(measures)
    mode_of = modes(known)
    names = ["loss", *known]
    totals = torch.zeros(len(parts), 1 + len(names), dtype=torch.float64)
    training = model.training
    model.eval()
    for row, part in zip(totals, parts, strict=True):
        if part.data is None:
            continue
        for start in range(0, len(part.data), examples_at_once):
            inputs = part.data.inputs[start : start + examples_at_once].to(device)
            targets = part.data.targets[start : start + examples_at_once].to(device)
            outputs = model(inputs)
            row[0] += len(inputs)
            row[1] += float(loss(outputs, targets)) * len(inputs)
            for index, measure in enumerate(known.values()):
                row[2 + index] += float(measure(outputs, targets).double().sum())
    model.train(training)
    if distributed:
        totals = totals.to(device)
        dist.all_reduce(totals)
        totals = totals.cpu()
    metrics: dict[str, float] = {}
    for index, measure_name in enumerate(names):
        for split in dict.fromkeys(part.split for part in parts):
            rows = [at for at, part in enumerate(parts) if part.split == split]
            means = totals[rows, 1 + index] / totals[rows, 0]
            metrics[f"{split}_{measure_name}"] = float(totals[rows, 1 + index].sum() / totals[rows, 0].sum())
            if (mode := mode_of[measure_name]) is not None:
                metrics[f"worst_{split}_{measure_name}"] = float(means.max() if mode == "min" else means.min())
            for at, value in zip(rows, means.tolist(), strict=True):
                metrics[f"{measure_name}/{split}/{parts[at].name}"] = value
    return metrics
