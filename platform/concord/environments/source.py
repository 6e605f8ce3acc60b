"""Where an environment's examples come from. Today that is memory; what does not fit there will be another source."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from concord.environments.tree import Tree, merged, named_leaves


class ExampleSource(ABC):
    """The examples of one environment, in an order that does not change.

    Evaluation takes examples of any source. Training takes those in memory alone: :func:`end_to_end` is where another
    kind will be read.
    """

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def take(self, examples: slice | Tensor) -> Tree:
        """Some of them, a tree of tensors: ``(examples, ...)`` of a slice, ``(*places.shape, ...)`` of int64 places."""


@dataclass(frozen=True)
class InMemory(ExampleSource):
    """Examples in memory.

    Attributes:
        data: a tree of tensors, each ``(examples, ...)``.
    """

    data: Tree

    def __len__(self) -> int:
        return len(pytree.tree_leaves(self.data)[0])

    def take(self, examples: slice | Tensor) -> Tree:
        """A view of a slice; a copy of the examples at these places."""
        if isinstance(examples, slice):
            return pytree.tree_map(lambda leaf: leaf[examples], self.data)
        return pytree.tree_map(lambda leaf: _rows(leaf, examples), self.data)


def end_to_end(sources: Sequence[InMemory], device: torch.device | str) -> InMemory:
    """One source of all examples, on a device; nothing is copied that lies there already, one after the other."""
    return InMemory(merged([source.data for source in sources], lambda leaves: joined(leaves).to(device)))


class EndToEnd:
    """Lays examples one after the other in one tensor a leaf, as they come, so that they are in memory once.

    Args:
        parts: how many parts are going to come; where they are of one size, no tensor is made twice.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._sizes: list[int] = []
        self._structure: pytree.TreeSpec | None = None
        self._tables: dict[str, Tensor] = {}

    def add(self, source: InMemory, places: Tensor | None) -> None:
        """Copy the examples at these places; None: all. They have the form of those before."""
        leaves = named_leaves(source.data)
        size = len(source) if places is None else len(places)
        start = sum(self._sizes)
        if self._structure is None:
            self._structure = pytree.tree_structure(source.data)
            self._tables = {name: _reserved(leaf, size, self._parts) for name, leaf in leaves.items()}
        self._sizes.append(size)
        for name, leaf in leaves.items():
            table = self._tables[name]
            if start + size > len(table):
                larger = table.new_empty((max(start + size, 2 * len(table)), *table.shape[1:]))
                larger[:start] = table[:start]
                table = self._tables[name] = larger
            target = table[start : start + size]
            if places is None:
                target.copy_(leaf)
            else:
                torch.index_select(leaf, 0, places, out=target)

    def moved(self, device: torch.device | str) -> list[Tree]:
        """The parts as views of tensors on this device; nothing is kept here."""
        assert self._structure is not None
        total, names = sum(self._sizes), list(self._tables)
        leaves = [self._tables.pop(name)[:total].to(device).split(self._sizes) for name in names]
        return [pytree.tree_unflatten(each, self._structure) for each in zip(*leaves, strict=True)]


def _reserved(leaf: Tensor, size: int, parts: int) -> Tensor:
    """Memory for so many parts of this size. The system gives none before it is written to."""
    try:
        return leaf.new_empty((size * parts, *leaf.shape[1:]))
    except RuntimeError:  # the others may be smaller
        return leaf.new_empty((size, *leaf.shape[1:]))


# What is as wide as a row, to gather rows as single numbers: several times as fast.
_AS_ONE_NUMBER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _rows(table: Tensor, places: Tensor) -> Tensor:
    """These rows of ``(rows, ...)``, laid out as their places are."""
    flat, shape = places.reshape(-1), (*places.shape, *table.shape[1:])
    width = table.element_size() * math.prod(table.shape[1:])
    if table.ndim > 1 and width in _AS_ONE_NUMBER and table.is_contiguous() and table.data_ptr() % width == 0:
        numbers = table.view(len(table), -1).view(_AS_ONE_NUMBER[width]).view(-1)
        return numbers.index_select(0, flat).view(-1, 1).view(table.dtype).view(shape)
    return table.index_select(0, flat).view(shape)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts joined into one tensor; without a copy where they lie so in memory, as in a study."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.storage_offset() == end and part.dtype == first.dtype):
            return torch.cat(list(parts))
        end += part.numel()
    shape = (sum(map(len, parts)), *first.shape[1:])
    return first.as_strided(shape, torch.empty(shape, device="meta").stride(), first.storage_offset())
