"""Reads batches ahead of training, in other processes."""

import itertools
import math
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from concord.environments.tree import Tree
from concord.errors import InputError, picklable

Key = TypeVar("Key")

_SLOT = 2**30  # bytes of addresses; only those that are written take memory
_ALIGNMENT = 64  # of PyTorch's own tensors


def read_ahead(
    read: Callable[[Key], Tree], keys: Iterable[Key], readers: int, device: torch.device | str
) -> Iterator[Tree]:
    """``read(key)`` of each key in order, on the device.

    Args:
        read: reads in any process, and gives the same in each.
        keys: of the batches; may have no end.
        readers: processes, each at most two batches ahead. With 0, and on macOS, this process reads when the batch is
            asked for.
        device: of the batches; for a GPU they are pinned.

    Raises:
        InputError: an example cannot be read.
    """
    device = torch.device(device)
    if sys.platform == "darwin":
        readers = 0  # the libraries of macOS may crash in a forked process
    # For the batches ahead, the caller's, and the one before it.
    slots = _slots(2 * readers + 2) if readers > 0 else []
    asked = ((key, _lend(slots)) for key in keys)
    batches: Iterable[_Batch | InputError] = map(_Reads(read).__getitem__, asked)
    if readers > 0:
        batches = DataLoader(
            _Reads(read),
            batch_size=None,
            sampler=asked,
            num_workers=readers,
            collate_fn=_as_read,
            worker_init_fn=_end_at_sigterm,
            multiprocessing_context="fork",  # a job file's functions cannot be pickled
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # the default one is the model's
        )
    for batch in batches:
        if isinstance(batch, InputError):
            raise batch
        yield pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch.tree())


class StepReader:
    """The batch of any step; from the second of two successive steps on, it is read ahead.

    Args:
        read: the batch of a step.
        readers, device: see :func:`read_ahead`.
    """

    def __init__(self, read: Callable[[int], Tree], readers: int, device: torch.device) -> None:
        self._read, self._readers, self._device = read, readers, device
        self._ahead: Iterator[Tree] = iter(())
        self._last = self._next = -2  # no step's

    def batch(self, step: int) -> Tree:
        """The batch of a step, on the device."""
        follows, self._last = step == self._last + 1, step
        if step != self._next and follows:
            self._ahead = read_ahead(self._read, itertools.count(step), self._readers, self._device)
            self._next = step
        if step != self._next:
            return next(read_ahead(self._read, [step], 0, self._device))
        self._next += 1
        return next(self._ahead)

    def close(self) -> None:
        """End the reading processes."""
        self._ahead, self._next = iter(()), -2


class _Slot:
    """Memory shared with readers, for one batch at a time: the system takes long to provide new memory.

    DataLoader's own way of sending batches takes 1.2 to 1.3 times the CPU time for images.

    Pickling between these processes gives the same slot.

    Attributes:
        lent: whether a batch is read into it, or a tensor of that batch is alive.
    """

    def __init__(self) -> None:
        self._bytes = np.frombuffer(mmap.mmap(-1, _SLOT), np.uint8)
        self.lent = False
        _SLOTS[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _slot, (id(self),)

    def fill(self, read: Callable[[], Tree]) -> "_Batch":
        """Read a batch into it; tensors without room are sent by DataLoader."""
        global _filled
        self._memory, self._end, _filled = self._bytes[:], 0, self
        try:
            tree = read()
        finally:
            _filled = None
        if not self._referenced():  # parts that were joined elsewhere
            self._end = 0
        places = pytree.tree_map(self._place, tree)
        del tree
        if self._referenced():  # the source keeps tensors of the batch, so this slot stays lent
            return _Batch(_tensors(places, self._memory))
        return _Batch(places, self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A tensor after those already allocated; None without room."""
        count, start = math.prod(shape), self._end
        end = start + -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not start < end <= _SLOT:
            return None
        self._end = end
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(tuple(shape))

    def tree(self, places: Tree) -> Tree:
        """The batch; the slot is free when its last tensor is gone."""
        memory = self._bytes[:]
        weakref.finalize(memory, setattr, self, "lent", False)
        return _tensors(places, memory)

    def _referenced(self) -> bool:
        return sys.getrefcount(self._memory) > 2  # the attribute, the argument

    def _place(self, leaf: Tensor) -> "Tensor | _Place":
        start = leaf.data_ptr() - self._bytes.ctypes.data
        if 0 <= start < _SLOT:
            return _Place(start, leaf.shape, leaf.stride(), leaf.dtype)
        dense = torch.empty_like(leaf, device="meta").stride() == leaf.stride()
        copy = self.empty(leaf.shape, leaf.dtype) if dense else None
        return leaf if copy is None else self._place(copy.as_strided(leaf.shape, leaf.stride()).copy_(leaf))


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in a slot."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


_SLOTS: weakref.WeakValueDictionary[int, _Slot] = weakref.WeakValueDictionary()
_filled: _Slot | None = None  # in a reader: the slot of the batch that it reads


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor for a part of a batch: in a reader it is in shared memory, so that it is not copied."""
    found = None if _filled is None else _filled.empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype) if found is None else found


def _tensors(places: Tree, memory: Any) -> Tree:
    def tensor(place: Tensor | _Place) -> Tensor:
        if isinstance(place, Tensor):
            return place
        count = 1 + sum((size - 1) * stride for size, stride in zip(place.shape, place.stride, strict=True))
        flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start)
        return flat.as_strided(place.shape, place.stride)

    return pytree.tree_map(tensor, places)


def _slots(count: int) -> list[_Slot]:
    """Slots, or none on a machine that does not promise more memory than it has: DataLoader sends all batches there."""
    try:
        return [_Slot() for _ in range(count)]
    except OSError:
        return []


def _lend(slots: list[_Slot]) -> _Slot | None:
    for slot in slots:
        if not slot.lent:
            slot.lent = True
            return slot
    return None  # the caller keeps many batches: DataLoader sends this one


def _slot(number: int) -> _Slot:
    return _SLOTS[number]


@dataclass(frozen=True)
class _Batch:
    """Examples in a form that DataLoader leaves alone: it would turn tuples into lists."""

    read: Tree
    slot: _Slot | None = None

    def tree(self) -> Tree:
        """The tensors, once."""
        return self.read if self.slot is None else self.slot.tree(self.read)

    def pin_memory(self) -> "_Batch":
        return _Batch(pytree.tree_map(lambda leaf: leaf.pin_memory(), self.tree()))


class _Reads(Dataset[Any]):
    def __init__(self, read: Callable[[Any], Tree]) -> None:
        self._read = read

    def __getitem__(self, asked: "tuple[Any, _Slot | None]") -> _Batch | InputError:
        """The batch, or the error, to which DataLoader would add a traceback."""
        key, slot = asked
        try:
            return _Batch(self._read(key)) if slot is None else slot.fill(lambda: self._read(key))
        except InputError as error:
            return picklable(error)


def _as_read(batch: Any) -> Any:
    return batch


def _end_at_sigterm(_: int) -> None:
    """End this reader without an error at SIGTERM, which a whole job receives: DataLoader would raise the error of a
    killed reader wherever the training process is, and print it with a traceback."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
