"""Batches of environments from PyTorch's ``DataLoader``, for training loops that have one.

A dataset whose examples name their environment gives batches that :class:`~concord.gradients.StackedGradients` takes::

    loader = DataLoader(patients, batch_size=128, shuffle=True, collate_fn=StackEnvironments("hospital"))
    loader = DataLoader(
        patients, batch_sampler=EnvironmentSampler(hospitals, 32), collate_fn=StackEnvironments("hospital")
    )

In the first, a batch has as many examples of an environment as chance gives; weights say which rows count. In the
second, every batch has the same number of examples of every environment, and all weights are 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler, default_collate

from concord.environments.batches import BatchStream
from concord.environments.collection import Array, Environment
from concord.environments.datasets import places_by_group
from concord.environments.tree import Tree
from concord.errors import ArgumentError, InputError


class EnvironmentSampler(Sampler[list[int]]):
    """The places of a dataset's examples, with the same number of every environment in each batch.

    Give it to a ``DataLoader`` as ``batch_sampler``. An environment's examples at a step depend on the seed, the
    environment's name and the step alone, see :class:`BatchStream`. An epoch is one pass over the largest environment;
    smaller ones come again. Each iteration is the next epoch, unless :meth:`set_epoch` says which.

    Args:
        groups: the environment of each example, such as a column of the dataset.
        batch_size: examples of each environment in a batch.
        seed: of the order of examples.

    Raises:
        InputError: an example has no environment, or the batch size is not positive.
    """

    def __init__(self, groups: Sequence[Any] | Array, batch_size: int, seed: int = 0) -> None:
        given = groups.tolist() if hasattr(groups, "tolist") else list(groups)
        places = {name: torch.tensor(own) for name, own in places_by_group(given).items()}
        self._stream = BatchStream([Environment(name, own) for name, own in places.items()], batch_size, seed)
        self._epoch = 0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self._stream.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first, self._epoch = self._epoch * len(self), self._epoch + 1
        for step in range(first, first + len(self)):
            yield self._stream.batch(step).flatten().tolist()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of this epoch, counted from 0."""
        self._epoch = epoch


@dataclass(frozen=True)
class StackEnvironments:
    """Collates examples that name their environment, see :func:`stack_environments`: ``DataLoader(collate_fn=…)``.

    Attributes:
        environment: the key of the environment in an example that is a mapping, or its position in a tuple. The batch
            is without it.
        collate: makes one batch of the other parts of examples.
        weights: the key of the weights in a batch that is a mapping; they are the last part of any other batch. None
            leaves them out, for batches with the same number of examples of every environment.

    Raises:
        InputError: when called: an example has no environment, the batch is no tree of tensors, or environments have
            different numbers of examples and there are no weights.
    """

    environment: str | int
    collate: Callable[[list[Any]], Tree] = default_collate
    weights: str | None = "weights"

    def __call__(self, examples: Sequence[Any]) -> Tree:
        """The stacked batch with its weights."""
        mappings = isinstance(examples[0], Mapping)
        parts = [dict(each if mappings else enumerate(each)) for each in examples]
        if self.environment not in parts[0]:
            found = ", ".join(map(str, parts[0]))
            raise ArgumentError("environment", self.environment, f"examples have no such part; there are {found}")
        groups = [part.pop(self.environment) for part in parts]
        groups = [group.item() if isinstance(group, Tensor) else group for group in groups]
        batch, weights = stack_environments(
            self.collate(parts if mappings else [tuple(part.values()) for part in parts]), groups
        )
        if self.weights is not None:
            return {**batch, self.weights: weights} if mappings else (*batch, weights)
        if not bool(weights.all()):
            raise ArgumentError(
                "weights", None, "environments have different numbers of examples; draw them by EnvironmentSampler"
            )
        return batch


def stack_environments(batch: Tree, groups: Sequence[Any]) -> tuple[Tree, Tensor]:
    """Stack a batch of mixed environments: one row of examples for each environment that is in it.

    An environment with fewer examples than the largest one has some of them again, with a weight of 0. A risk
    multiplies each example's loss by its weight, and gives the sum and the weights' sum::

        def risk(model, batch, step):
            inputs, targets, weights = batch
            losses = cross_entropy(model(inputs), targets, reduction="none")
            return (losses * weights).sum(), weights.sum()

    Every environment then counts equally, however many examples it has; batch norm sees the repeated examples.

    Args:
        batch: a tree of tensors ``(examples, ...)``.
        groups: the environment of each example.

    Returns:
        The tree with leaves ``(environments, most, ...)``, the environments by name in sorted order, and the weights
        ``(environments, most)``, float32: 1 for each example of the batch, once, and 0 for its repetitions.

    Raises:
        InputError: the batch is no tree of tensors with as many examples as groups, or an example has no environment.
    """
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)  # a tokenizer's result, which torch does not treat as a tree
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != len(groups):
            found = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise InputError(f"batch: holds {found}; expected tensors of {len(groups)} examples, as there are groups")
    places = [torch.tensor(own) for own in places_by_group(groups).values()]
    positions = torch.arange(max(map(len, places)))
    rows = torch.stack([own[positions % len(own)] for own in places])
    weights = torch.stack([(positions < len(own)).float() for own in places])
    leaves = pytree.tree_leaves(batch)
    device = leaves[0].device if leaves else weights.device
    return pytree.tree_map(lambda leaf: leaf[rows.to(leaf.device)], batch), weights.to(device)
