"""Where an environment's examples come from: memory, or a source of its own that reads what is asked for."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from concord.environments.tree import Tree, described, difference, merged, named_leaves
from concord.errors import ArgumentError, InputError


class ExampleSource(ABC):
    """The examples of one environment, in an order that does not change.

    Training and evaluation take a batch at a time. A loss of outputs and targets looks at all targets before the first
    step, so it needs :class:`InMemory`; a risk takes any source.
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


@dataclass(frozen=True)
class Part(ExampleSource):
    """Some of a source's examples.

    Attributes:
        whole: the source.
        places: where they are in it, int64 ``(examples,)``.
    """

    whole: ExampleSource
    places: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def take(self, examples: slice | Tensor) -> Tree:
        """Those of the whole source."""
        return self.whole.take(self.places[examples])


class Switching(ExampleSource):
    """Examples that others take the place of while they are trained on: data whose conditions change.

    :class:`~concord.environments.BatchStream` draws the batches of the first epochs from those before. Whoever else
    takes examples, an evaluation for instance, gets those after.

    Args:
        before: what is trained on at first.
        after: what is trained on then; as many, alike in structure, shape and type.
        epochs: of training on those before, at least 1.

    Raises:
        InputError: the number of epochs is below 1, a part is no :class:`ExampleSource`, or the two are not alike.
    """

    def __init__(self, before: ExampleSource, after: ExampleSource, epochs: int) -> None:
        if epochs < 1:
            raise ArgumentError("epochs", epochs, "must be at least 1")
        for name, source in (("before", before), ("after", after)):
            if not isinstance(source, ExampleSource):
                raise ArgumentError(name, type(source).__name__, "must be an ExampleSource, such as InMemory(examples)")
        if len(before) != len(after):
            raise InputError(f"{len(before)} examples before and {len(after)} after; the numbers must be equal")
        ours, theirs = (described(source.take(slice(0, 1))) for source in (before, after))
        if (found := difference("before", ours, "after", theirs)) is not None:
            raise InputError(found)
        self.before, self.after, self.epochs = before, after, epochs

    def __len__(self) -> int:
        return len(self.after)

    def take(self, examples: slice | Tensor) -> Tree:
        """Those after."""
        return self.after.take(examples)


class ConcatSource(ExampleSource):
    """The examples of several sources, which are read when they are asked for.

    Args:
        sources: which give alike examples, also of tensors that are as large as the largest of a batch.
        device: where they are wanted.
    """

    def __init__(self, sources: Sequence[ExampleSource], device: torch.device | str) -> None:
        self._sources, self._device = list(sources), device
        self._ends = torch.tensor([len(source) for source in sources]).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, examples: slice | Tensor) -> Tree:
        """Each source is asked once for all of its own."""
        places = torch.arange(len(self))[examples] if isinstance(examples, slice) else examples.cpu()
        flat = places.reshape(-1)
        of = torch.bucketize(flat, self._ends, right=True)
        asked = [(at, (of == at).nonzero().squeeze(1)) for at in of.unique().tolist()]
        starts = self._ends - torch.tensor([len(source) for source in self._sources])
        given = [self._sources[at].take(flat[rows] - starts[at]) for at, rows in asked]
        back = torch.cat([rows for _, rows in asked]).argsort()

        def in_order(leaves: list[Tensor]) -> Tensor:
            whole = leaves[0] if len(leaves) == 1 else torch.cat(leaves)[back]
            return whole.view(*places.shape, *whole.shape[1:]).to(self._device)

        return merged(given, in_order)


def end_to_end(sources: Sequence[ExampleSource], device: torch.device | str) -> ExampleSource:
    """One source of all examples, on a device; nothing is copied that lies there already, one after the other.

    Where some are not in memory, none is moved there before it is asked for.
    """
    in_memory = [source for source in sources if isinstance(source, InMemory)]
    if len(in_memory) < len(sources):
        return ConcatSource(sources, device)
    return InMemory(merged([source.data for source in in_memory], lambda leaves: joined(leaves).to(device)))


class ContiguousBuilder:
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
