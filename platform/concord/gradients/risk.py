"""A batch of any form, and a model's risk on it.

A batch is a tree of tensors (tuples, lists, dictionaries) that all begin with the examples. Its risk is a function of
the model, the batch and the step that returns the mean over the batch, or a sum and its weight::

    def risk(model, batch, step):
        return model(**batch).loss

If a risk's weight is its number of evaluations of the model, set ``counts_evaluations = True``; a run then reports this
number as ``model_evaluations``. A risk of batches of another form may have ``risk.example(batch)``, which returns the
model's input tensor: the trained model can then be registered.

A loss, a function of outputs and targets, can take the place of a risk; batches are then pairs ``(inputs, targets)``.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.utils import _pytree as pytree

from concord.errors import InputError
from concord.weighted import Weighted

Batch = Any
"""A tree of tensors. What a gradient source gets begins with ``(environments, examples, ...)`` in all of its leaves,
what a risk gets with ``(examples, ...)``."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs ``(examples, ...)`` and targets ``(examples, ...)`` to a scalar, the mean over the examples."""

Risk = Callable[[nn.Module, Batch, int], Tensor | tuple[Tensor, Tensor]]
"""``risk(model, batch, step)``: a scalar, the mean over the batch, or two, a sum and its weight (above 0)."""


@dataclass(frozen=True)
class Supervised:
    """The risk of a batch ``(inputs, targets)``: ``loss(model(inputs), targets)``.

    Of a :class:`~concord.weighted.Weighted` batch it is the sum of each example's loss times its weight, and
    the sum of the weights. Under autocast the layers compute in the lower precision, and the loss gets float32.
    """

    loss: Loss
    counts: bool = False
    """Whether PyTorch's losses of classes give their sum and its weight in place of their mean. The weight sums the
    targets' class weights, without ignored targets, so that the means of a batch's pieces add up to its mean."""
    of_outputs: ClassVar[bool] = True
    """It calls the model once, with the inputs, and all else is a function of outputs and targets."""

    def __call__(self, model: nn.Module, batch: Batch, step: int) -> Tensor | tuple[Tensor, Tensor]:
        """The loss, a scalar; of weighted examples the sum and its weight."""
        outputs = model(inputs_of(batch))
        if isinstance(outputs, Tensor) and torch.is_autocast_enabled(outputs.device.type):
            with torch.autocast(outputs.device.type, enabled=False):
                return self.value(outputs.float(), batch)
        return self.value(outputs, batch)

    def value(self, outputs: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of these outputs, in place of the model's."""
        weighted = isinstance(batch, Weighted)
        parts = _parts(self.loss, outputs, batch[1]) if weighted or self.counts else None
        if parts is not None:
            losses, counts = parts if not weighted else (part * batch.weights for part in parts)
            return losses.sum(), counts.sum()
        if not weighted:
            return self.loss(outputs, batch[1])

        def alone(output: Any, target: Tensor) -> Tensor:
            return self.loss(pytree.tree_map(lambda leaf: leaf[None], output), target[None])

        losses = vmap(alone)(outputs, batch.targets)
        return (losses * batch.weights).sum(), batch.weights.sum()


# Of classes, numbers and bits.
_OWN: tuple[Loss, ...] = (
    functional.cross_entropy,
    functional.mse_loss,
    functional.binary_cross_entropy_with_logits,
)
_IGNORED = -100  # a class that PyTorch leaves out of the mean


def is_own(loss: Loss) -> bool:
    """Whether :func:`loss_by_group` knows the loss."""
    return loss in _OWN


def loss_by_group(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each group, ``(groups,)``, of outputs and targets ``(groups, examples, ...)``.

    Some of PyTorch's losses are computed in one call without a mean, which takes fewer operations than vmap.
    """
    if not is_own(loss):
        losses: Tensor = vmap(loss)(outputs, targets)
        return losses
    single: Any = loss
    each: Tensor = (
        single(outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none")
        .unflatten(0, outputs.shape[:2])
        .flatten(1)
    )
    if targets.is_floating_point():
        return each.mean(1)
    return each.sum(1) / (targets != _IGNORED).flatten(1).sum(1)


def _parts(loss: Loss, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    """What each example adds to the loss's sum and to its weight, both ``(examples,)``; None as :func:`weights_of`."""
    counts, found = weights_of(loss, targets), _of_classes(loss)
    if counts is None or found is None:
        return None
    function, options = found
    each = function(outputs, targets, **options, reduction="none")
    return each.reshape(len(each), -1).sum(1), counts.to(each).reshape(len(each), -1).sum(1)


def weights_of(loss: Loss, targets: Tensor) -> Tensor | None:
    """What each target counts in the mean of PyTorch's losses of classes: the weight of its class, 0 if it is ignored.

    None if the loss is another one, or the targets are no classes: each example counts once.
    """
    found = _of_classes(loss)
    if found is None or targets.is_floating_point():
        return None
    ignored = targets == found[1].get("ignore_index", _IGNORED)
    weight: Tensor | None = found[1].get("weight")
    counts = (
        torch.ones_like(targets, dtype=torch.float32) if weight is None else weight[targets.masked_fill(ignored, 0)]
    )
    return counts.masked_fill(ignored, 0)


def weighs_classes(loss: Loss) -> bool:
    """Whether the loss is one of PyTorch's with class weights."""
    found = _of_classes(loss)
    return found is not None and found[1].get("weight") is not None


def _of_classes(loss: Loss) -> tuple[Callable[..., Tensor], dict[str, Any]] | None:
    """PyTorch's function of classes that the loss is, and its options; None if it is another one, or no mean."""
    options: dict[str, Any]
    function, options = loss, {}
    if isinstance(loss, partial) and not loss.args:
        function, options = loss.func, dict(loss.keywords)
    elif type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        module: Any = loss
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        options = {name: getattr(module, name) for name in names if hasattr(module, name)}
        function = functional.cross_entropy if isinstance(loss, nn.CrossEntropyLoss) else functional.nll_loss
    known = function in (functional.cross_entropy, functional.nll_loss)
    if not known or options.pop("reduction", "mean") != "mean" or {"size_average", "reduce"} & options.keys():
        return None
    return function, options


def as_risk(loss_or_risk: Any, counts: bool = False) -> Risk:
    """Return a risk unchanged, and a loss as the risk of pairs; for ``counts`` see :class:`Supervised`.

    A function with three positional parameters without a default is a risk, any other function a loss.
    """
    if isinstance(loss_or_risk, Supervised):
        return replace(loss_or_risk, counts=True) if counts else loss_or_risk
    try:
        parameters = inspect.signature(loss_or_risk).parameters.values()
    except (TypeError, ValueError):  # of a function written in C nothing is known
        parameters = ()  # type: ignore[assignment]
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in places and each.default is each.empty]
    if len(required) == 3:
        risk: Risk = loss_or_risk
        return risk
    return Supervised(loss_or_risk, counts)


def inputs_of(batch: Batch) -> Any:
    """The inputs of a pair, weighted or not."""
    return batch.inputs if isinstance(batch, Weighted) else pair(batch)[0]


def with_outputs(batch: Batch, outputs: Any) -> Batch:
    """A pair, weighted or not, with a model's outputs in place of its inputs."""
    return batch._replace(inputs=outputs) if isinstance(batch, Weighted) else (outputs, batch[1])


def pair(batch: Batch) -> tuple[Any, Any]:
    """Inputs and targets."""
    if isinstance(batch, Weighted):
        raise InputError("weight: this objective, gradient or measurement takes no weights of examples; leave them out")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError(
            f"batch of type {type(batch).__name__}: a loss needs (inputs, targets); for batches of another form give a "
            "function risk(model, batch, step)"
        )
    return batch[0], batch[1]


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Layers compute in this dtype while the context lasts; with None they compute in their own."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class MeanRisk(nn.Module):
    """A model and its risk as one module, so that ``torch.func`` can replace the model's parameters.

    Args:
        model: the model that the risk calls.
        risk: the risk of a batch.
        autocast: the dtype in which layers compute; None disables autocast.
        device: the device of the batches.
    """

    def __init__(self, model: nn.Module, risk: Risk, autocast: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        self.model, self.risk, self.autocast, self.device = model, risk, autocast, device
        self.weighted = False  # whether the data or the user's risk decide the weight, known after the first call

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The mean risk of one environment's batch, float32 or float64, and its weight: two scalars."""
        with autocast_to(self.device, self.autocast):
            result = self.risk(self.model, batch, step)
        parts: tuple[Tensor, ...] = result if isinstance(result, tuple) else (result,)
        if len(parts) > 2 or not all(isinstance(part, Tensor) and part.ndim == 0 for part in parts):
            found = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
            raise InputError(
                f"risk: gives {found}; expected a scalar, the mean over the batch, or a sum and its weight"
            )
        counted = isinstance(self.risk, Supervised) and self.risk.counts and not isinstance(batch, Weighted)
        self.weighted = len(parts) == 2 and not counted
        if len(parts) == 1:
            examples = len(pytree.tree_leaves(batch)[0])
            return parts[0], torch.full_like(parts[0].detach(), examples, dtype=torch.float32)
        total, weight = parts[0], parts[1].detach()
        return total / divisor(weight), weight.float()


def divisor(weight: Tensor) -> Tensor:
    """The weight, as a divisor: of no weight, as a piece of examples that do not count has, 1."""
    return torch.where(weight == 0, 1, weight)


def check_weights(weights: Tensor) -> None:
    """Refuse weights that are not positive (InputError); weights that are not finite are handled elsewhere."""
    if bool((weights <= 0).any()):
        raise InputError(f"risk: its weight is {float(weights.min()):g}; a sum needs a weight above 0")


class Calls:
    """The calls of a gradient source: its batches, whose structure the first one decides, and its steps."""

    def __init__(self, steps: int = 0) -> None:
        self._structure: pytree.TreeSpec | None = None
        self._steps = steps

    def take(
        self, batch: Batch, more: Sequence[Any], step: int | None, names: Sequence[str] | None = None
    ) -> tuple[Batch, tuple[int, int], int]:
        """The batch, its numbers of environments and examples, and the step of a call.

        A call is ``source(batch, step)``, or ``source(inputs, targets, step)`` for a pair; steps are counted from 0.
        """
        given = list(more)
        if given and isinstance(given[0], Tensor):
            batch = (batch, given.pop(0))
        at = given[0] if given else step
        at = self._steps if at is None else at
        if isinstance(at, tuple | list | Mapping):
            raise InputError(
                f"step: {type(at).__name__}, expected a number; give inputs and targets as one pair, (inputs, targets)"
            )
        batch, sizes = self.check(batch, names)
        self._steps = at + 1
        return batch, sizes, at

    def check(self, batch: Batch, names: Sequence[str] | None = None) -> tuple[Batch, tuple[int, int]]:
        """The batch, and the numbers of environments and examples that all of its leaves begin with."""
        if isinstance(batch, Mapping) and not isinstance(batch, dict):
            batch = dict(batch)  # a tokenizer's result, which torch does not know as a tree
        leaves, structure = pytree.tree_flatten(batch)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)}))
            raise InputError(f"batch: holds {kinds or 'nothing'}; expected a tree of tensors")
        if any(leaf.is_nested for leaf in leaves):
            raise InputError("batch: holds a nested tensor; expected padded ones, with a mask beside them")
        shapes = [tuple(leaf.shape) for leaf in leaves]
        if min(map(len, shapes)) < 2 or len({shape[:2] for shape in shapes}) > 1 or 0 in shapes[0][:2]:
            found = ", ".join(f"{self._place(batch, index)} {shape}" for index, shape in enumerate(shapes))
            raise InputError(
                f"batch: {found}; all must begin with the same (environments, examples), at least one of each"
            )
        if self._structure is not None and structure != self._structure:
            before, now = (" ".join(str(each).split()) for each in (self._structure, structure))
            raise InputError(f"batch: its structure was {before}, and is now {now}")
        self._structure = structure
        if names is not None and len(names) != shapes[0][0]:
            raise InputError(f"batch: {shapes[0][0]} environments, expected {len(names)} ({names[0]} …)")
        return batch, (shapes[0][0], shapes[0][1])

    @staticmethod
    def _place(batch: Batch, index: int) -> str:
        if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(each, Tensor) for each in batch):
            return ("inputs", "targets")[index]
        path = pytree.tree_flatten_with_path(batch)[0][index][0]
        return pytree.keystr(path) or "tensor"


def take(batch: Batch, environments: Any) -> Batch:
    """The part of a batch of some environments, or of one."""
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):  # most are; a tree takes 7 µs longer
        return tuple(leaf[environments] for leaf in batch)
    return pytree.tree_map(lambda leaf: leaf[environments], batch)
