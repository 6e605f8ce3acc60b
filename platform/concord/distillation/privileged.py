"""Privileged information beside the labels, where neither the model nor its registered version sees it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Batch, pair


def with_privileged(labels: Tensor, privileged: Tensor) -> Tensor:
    """Targets that hold a label and then x*, ``(examples, 1 + numbers)``, float32.

    Args:
        labels: ``(examples,)``.
        privileged: x*, ``(examples, ...)``; flattened. For test data, where x* is unknown, pass zeros.

    Raises:
        InputError: the shapes do not fit.
    """
    if labels.ndim != 1 or privileged.ndim < 2 or len(labels) != len(privileged):
        raise InputError(
            f"labels {tuple(labels.shape)} and privileged {tuple(privileged.shape)}: expected (examples,) and "
            "(examples, ...) of the same number"
        )
    return torch.cat([labels.float().unsqueeze(1), privileged.float().flatten(1)], 1)


def privileged_of(batch: Batch) -> Tensor:
    """x* of a batch whose targets are :func:`with_privileged`, ``(examples, numbers)``."""
    targets: Tensor = pair(batch)[1]
    return targets[:, 1:]


def of_labels(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a loss or measure of labels accept targets that are :func:`with_privileged`; it does not read x*."""

    def of_label(outputs: Tensor, targets: Tensor) -> Tensor:
        return function(outputs, targets[:, 0])

    return of_label


class Parts(NamedTuple):
    """Examples in two parts: the student learns from one, and the teacher is judged by the labels of the other."""

    inner: Any
    outer: Any


def inner_outer(data: Any, fraction: float, seed: int, batch_size: int = 1) -> Parts:
    """Split examples into two fixed parts, which depend only on the seed.

    Args:
        data: a tree of tensors ``(examples, ...)``.
        fraction: the fraction of the outer part.
        seed: draws the examples of the outer part.
        batch_size: the student's batch size; the inner part must hold at least one batch.

    Raises:
        InputError: the fraction is not between 0 and 1, a part is empty, or a batch is larger than the inner part.
    """
    if not 0 < fraction < 1:
        raise ArgumentError("validation_fraction", fraction, "must lie between 0 and 1")
    examples = len(pytree.tree_leaves(data)[0])
    outer = round(fraction * examples)
    if not 0 < outer < examples:
        raise ArgumentError("validation_fraction", fraction, f"leaves one part of the {examples} examples empty")
    if batch_size > examples - outer:
        raise ArgumentError(
            "batch_size", batch_size, f"more than the {examples - outer} examples that train the student"
        )
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    places = order[outer:].sort().values, order[:outer].sort().values
    return Parts(*(pytree.tree_map(lambda leaf, at=at: leaf[at], data) for at in places))
