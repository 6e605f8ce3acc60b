"""Reads batches ahead of training, in other processes."""

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from concord.environments.tree import Tree
from concord.errors import InputError, picklable

Key = TypeVar("Key")


def read_ahead(
    read: Callable[[Key], Tree], keys: Iterable[Key], readers: int, device: torch.device | str
) -> Iterator[Tree]:
    """``read(key)`` of each key in order, on the device.

    Args:
        read: reads in any process, and gives the same in each.
        keys: of the batches; may have no end.
        readers: processes, each at most two batches ahead. With 0 this process reads when the batch is asked for.
        device: of the batches; for a GPU they are pinned.

    Raises:
        InputError: an example cannot be read.
    """
    device = torch.device(device)
    batches: Iterable[_Batch | InputError] = map(_Reads(read).__getitem__, keys)
    if readers > 0:
        batches = DataLoader(
            _Reads(read),
            batch_size=None,
            sampler=keys,
            num_workers=readers,
            collate_fn=_as_read,
            multiprocessing_context="fork",  # a job file's functions cannot be pickled
            worker_init_fn=_end_with_parent,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # the default one is the model's
        )
    for batch in batches:
        if isinstance(batch, InputError):
            raise batch
        yield pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch.tree)


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


@dataclass(frozen=True)
class _Batch:
    """Examples in a form that DataLoader leaves alone: it would turn tuples into lists."""

    tree: Tree

    def pin_memory(self) -> "_Batch":
        return _Batch(pytree.tree_map(lambda leaf: leaf.pin_memory(), self.tree))


class _Reads(Dataset[Any]):
    def __init__(self, read: Callable[[Any], Tree]) -> None:
        self._read = read

    def __getitem__(self, key: Any) -> _Batch | InputError:
        """The batch, or the error, to which DataLoader would add a traceback."""
        try:
            return _Batch(self._read(key))
        except InputError as error:
            return picklable(error)


def _as_read(batch: Any) -> Any:
    return batch


def _end_with_parent(_: int) -> None:
    """End at once when the parent is killed: until then this process would hold the lock of the parent's run."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
