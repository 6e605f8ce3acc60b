"""Sources of an environment's examples: memory, or a class that reads them on demand."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from concord.environments.tree import Tree, described, difference, merged, named_leaves
from concord.errors import ArgumentError, InputError

_BLOCK = 256  # examples that are read at once for their targets


class ExampleSource(ABC):
    """The examples of one environment, in a fixed order.

    Training and evaluation take a batch at a time, in this process or in others (``--readers``).
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of examples."""

    @abstractmethod
    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:
        """Some examples, a tree: ``(examples, ...)`` for a slice, ``(*positions.shape, ...)`` for int64 positions.

        ``draw`` has the randomness of each example, an int64 for each position, which depends on (seed, environment,
        step) alone: the seed of its augmentation. None in evaluation.
        """

    @functools.cached_property
    def targets(self) -> Tensor:
        """All targets of pairs, which a loss checks before the first step; override it to read no inputs for them."""
        blocks = (self.take(slice(at, at + _BLOCK)) for at in range(0, len(self), _BLOCK))
        return torch.cat([targets for _, targets in blocks])


@dataclass(frozen=True)
class InMemory(ExampleSource):
    """Examples in memory.

    Attributes:
        data: a tree of tensors, each ``(examples, ...)``.
    """

    data: Tree

    def __len__(self) -> int:
        return len(pytree.tree_leaves(self.data)[0])

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:
        """A view for a slice; a copy for positions."""
        if isinstance(examples, slice):
            return pytree.tree_map(lambda leaf: leaf[examples], self.data)
        return pytree.tree_map(lambda leaf: _rows(leaf, examples), self.data)

    @functools.cached_property
    def targets(self) -> Tensor:
        """The second of the pair."""
        targets: Tensor = self.data[1]
        return targets


@dataclass(frozen=True)
class Part(ExampleSource):
    """Some of a source's examples, by their positions in it, int64 ``(examples,)``."""

    whole: ExampleSource
    places: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:
        """Take the examples from the whole source."""
        return self.whole.take(self.places[examples], draw)

    @functools.cached_property
    def targets(self) -> Tensor:
        """Their part of the whole source's."""
        return self.whole.targets[self.places]


class Switching(ExampleSource):
    """Examples that are replaced by others during training: data whose conditions change.

    :class:`~concord.environments.BatchStream` draws the batches of the first epochs from ``before``. All other
    callers, such as an evaluation, get ``after``.

    Args:
        before: the examples of the first epochs.
        after: the later examples, of equal number, structure, shape and type.
        epochs: the number of epochs with ``before``, at least 1.

    Raises:
        InputError: the number of epochs is below 1, a part is not an :class:`ExampleSource`, or the two differ in form.
    """

    def __init__(self, before: ExampleSource, after: ExampleSource, epochs: int) -> None:
        if epochs < 1:
            raise ArgumentError("epochs", epochs, "must be at least 1")
        for name, source in (("before", before), ("after", after)):
            if not isinstance(source, ExampleSource):
                raise ArgumentError(name, type(source).__name__, "must be an ExampleSource, such as InMemory(examples)")
        if len(before) != len(after):
            raise InputError(f"{len(before)} examples before and {len(after)} after; the numbers must be equal")
        first, second = (described(source.take(slice(0, 1))) for source in (before, after))
        if (problem := difference("before", first, "after", second)) is not None:
            raise InputError(problem)
        self.before, self.after, self.epochs = before, after, epochs

    def __len__(self) -> int:
        return len(self.after)

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:
        """Take the later examples."""
        return self.after.take(examples, draw)

    @functools.cached_property
    def targets(self) -> Tensor:
        """The later ones."""
        return self.after.targets


class ConcatSource(ExampleSource):
    """The concatenated examples of several sources, read on demand; those of all sources have one shape."""

    def __init__(self, sources: Sequence[ExampleSource]) -> None:
        self._sources = list(sources)
        self._ends = torch.tensor([len(source) for source in sources]).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:
        """Read each source once."""
        places = torch.arange(len(self))[examples] if isinstance(examples, slice) else examples.cpu()
        flat = places.reshape(-1)
        of = torch.bucketize(flat, self._ends, right=True)
        asked = [(at, (of == at).nonzero().squeeze(1)) for at in of.unique().tolist()]
        starts = self._ends - torch.tensor([len(source) for source in self._sources])
        seeds = None if draw is None else draw.reshape(-1)
        given = [
            self._sources[at].take(flat[rows] - starts[at], None if seeds is None else seeds[rows])
            for at, rows in asked
        ]
        order = torch.cat([rows for _, rows in asked])
        back = None if torch.equal(order, torch.arange(len(order))) else order.argsort()

        def in_order(leaves: list[Tensor]) -> Tensor:
            if len(shapes := {leaf.shape[1:] for leaf in leaves}) > 1:
                shown = " and ".join(sorted(map(str, map(tuple, shapes))))
                raise InputError(f"a step's examples have different shapes, {shown}; pad them to one")
            whole = leaves[0] if len(leaves) == 1 else torch.cat(leaves)
            whole = whole if back is None else whole[back]
            return whole.view(*places.shape, *whole.shape[1:])

        return merged(given, in_order)

    @functools.cached_property
    def targets(self) -> Tensor:
        """Those of all sources."""
        return torch.cat([source.targets for source in self._sources])


def end_to_end(sources: Sequence[ExampleSource], device: torch.device | str) -> ExampleSource:
    """One source of all examples, on a device, without a copy if they are contiguous there.

    If some are not in memory, all are read on demand, into the memory of the process that reads them.
    """
    in_memory = [source for source in sources if isinstance(source, InMemory)]
    if len(in_memory) < len(sources):
        return ConcatSource(sources)
    return InMemory(merged([source.data for source in in_memory], lambda leaves: joined(leaves).to(device)))


class ContiguousBuilder:
    """Concatenates parts of examples as they come, in one tensor a leaf, so that each is in memory once.

    If the parts have one size, no tensor is reallocated.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._sizes: list[int] = []
        self._structure: pytree.TreeSpec | None = None
        self._tables: dict[str, Tensor] = {}

    def add(self, source: InMemory, places: Tensor | None) -> None:
        """Copy the examples at these positions (None: all), of the same form as earlier ones."""
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
        """The parts as views of tensors on this device; the builder is then empty."""
        assert self._structure is not None
        total, names = sum(self._sizes), list(self._tables)
        leaves = [self._tables.pop(name)[:total].to(device).split(self._sizes) for name in names]
        return [pytree.tree_unflatten(each, self._structure) for each in zip(*leaves, strict=True)]


def _reserved(leaf: Tensor, size: int, parts: int) -> Tensor:
    """Memory for this number of parts, which the system allocates on writing."""
    try:
        return leaf.new_empty((size * parts, *leaf.shape[1:]))
    except RuntimeError:  # the others may be smaller
        return leaf.new_empty((size, *leaf.shape[1:]))


# Types as wide as a row: to gather rows as single numbers is several times as fast.
_AS_ONE_NUMBER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _rows(table: Tensor, places: Tensor) -> Tensor:
    """These rows of ``(rows, ...)``, in the shape of their positions."""
    flat, shape = places.reshape(-1), (*places.shape, *table.shape[1:])
    width = table.element_size() * math.prod(table.shape[1:])
    if table.ndim > 1 and width in _AS_ONE_NUMBER and table.is_contiguous() and table.data_ptr() % width == 0:
        numbers = table.view(len(table), -1).view(_AS_ONE_NUMBER[width]).view(-1)
        return numbers.index_select(0, flat).view(-1, 1).view(table.dtype).view(shape)
    return table.index_select(0, flat).view(shape)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts joined into one tensor; without a copy if they are contiguous, as in a study."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.storage_offset() == end and part.dtype == first.dtype):
            return torch.cat(list(parts))
        end += part.numel()
    shape = (sum(map(len, parts)), *first.shape[1:])
    return first.as_strided(shape, torch.empty(shape, device="meta").stride(), first.storage_offset())
