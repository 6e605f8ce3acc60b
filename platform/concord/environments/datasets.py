"""Environments from any dataset that gives an example by its place: of PyTorch, of Hugging Face, of one's own."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from concord.environments.collection import Array, Environments, as_tensor, without_numbers
from concord.environments.purposes import purposes_of
from concord.environments.readers import empty
from concord.environments.source import ExampleSource
from concord.environments.tree import Tree, is_pair, leaf_name
from concord.errors import ArgumentError, InputError

Transform = Callable[[Any], Any]
_MISSING = {"None", "nan", "NaT", "<NA>"}  # as text: comparisons of pandas' missing values have no truth value


@dataclass(frozen=True)
class DatasetSource(ExampleSource):
    """The examples of one group of a dataset, read when they are asked for.

    PyTorch's, NumPy's and Python's random numbers are seeded for each example by its ``draw``, in evaluation by its
    place, so that it is the same in every process. The caller's random numbers stay as they are. A dataset and a
    transform whose attribute ``draws`` is False draw none; then nothing is seeded.

    Attributes:
        name: of the group.
        dataset: has ``len(dataset)`` and ``dataset[place]``.
        places: of the group's examples, int64.
        known: their targets; None reads the examples for them.
        transform, train_transform: of an example, in evaluation and in training.
    """

    name: str
    dataset: Any
    places: Tensor
    known: Tensor | None
    transform: Transform | None
    train_transform: Transform | None

    def __len__(self) -> int:
        return len(self.places)

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Tree:
        """Read the examples one after the other."""
        places = self.places[examples]
        seeds = (places if draw is None else draw).reshape(-1).tolist()
        prepare = self.transform if draw is None else self.train_transform
        parts = [part for part in (self.dataset, prepare) if part is not None]
        draws = any(getattr(part, "draws", None) is not False for part in parts)
        batch = _BatchBuilder(self.name, places.numel())
        with _random_numbers_kept() if draws else nullcontext():
            for place, seed in zip(places.reshape(-1).tolist(), seeds, strict=True):
                if draws:
                    torch.default_generator.manual_seed(seed)
                    np.random.seed(seed % 2**32)
                    random.seed(seed)
                example = self.dataset[place]
                batch.add(place, example if prepare is None else prepare(example))
        found = pytree.tree_map(lambda leaf: leaf.view(*places.shape, *leaf.shape[1:]), batch.tree())
        if is_pair(found) and not found[1].is_floating_point():
            return found[0], found[1].long()
        return found

    @cached_property
    def targets(self) -> Tensor:
        """The given ones, or those of the examples."""
        return super().targets if self.known is None else self.known


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@dataclass
class _Leaf:
    """A leaf of the batch: its tensor, and its memory as NumPy's, into which small copies are fast."""

    shape: tuple[int, ...]
    dtype: Any
    tensor: Tensor
    rows: Any
    image: bool


class _BatchBuilder:
    """Puts examples into the tensors of a batch as they come: many at once would take new memory each time."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size, self._filled = name, size, 0
        self._leaves: list[_Leaf] = []
        self._structure: pytree.TreeSpec | None = None
        self._types: tuple[type, ...] | None = None

    def add(self, place: int, example: Any) -> None:
        if type(example) is tuple and tuple(map(type, example)) == self._types:
            parts, structure = list(example), self._structure
        else:
            parts, structure = pytree.tree_flatten(example, is_leaf=_is_list)
        if (kind := next(filter(None, map(without_numbers, parts)), None)) is not None:
            raise InputError(f"environment {self._name}: example {place} is {kind}")
        arrays = [part.detach() if isinstance(part, Tensor) else _array(part) for part in parts]
        if self._filled == 0:
            self._structure = structure
            if type(example) is tuple and list(map(id, parts)) == list(map(id, example)):
                self._types = tuple(map(type, example))  # of leaves; to flatten every example takes longer
            paths = [path for path, _ in pytree.tree_flatten_with_path(example, is_leaf=_is_list)[0]]
            self._leaves = [self._leaf(place, *each) for each in zip(paths, parts, arrays, strict=True)]
        if structure != self._structure:
            raise InputError(f"environment {self._name}: example {place} has other parts than the first of its batch")
        for leaf, array in zip(self._leaves, arrays, strict=True):
            if array.shape != leaf.shape or array.dtype != leaf.dtype:
                forms = f"{_form(leaf.shape, leaf.dtype)} and {_form(array.shape, array.dtype)}"
                raise InputError(f"environment {self._name}: examples of {forms}; transform them to one form")
            leaf.rows[self._filled] = array
        self._filled += 1

    def _leaf(self, place: int, path: Sequence[Any], part: Any, array: Any) -> _Leaf:
        first = as_tensor(f"{self._name}, example {place}", leaf_name(path), array)
        tensor = empty((self._size, *first.shape), first.dtype)
        rows = tensor if isinstance(array, Tensor) else tensor.numpy()
        return _Leaf(array.shape, array.dtype, tensor, rows, hasattr(part, "getbands"))

    def tree(self) -> Tree:
        """The batch; channels of images come first, and last in memory."""
        assert self._structure is not None
        tensors = [_channels_first(leaf.tensor) if leaf.image else leaf.tensor for leaf in self._leaves]
        return pytree.tree_unflatten(tensors, self._structure)


def _channels_first(images: Tensor) -> Tensor:
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)


def _is_list(part: Any) -> bool:
    return isinstance(part, list)


def _array(part: Any) -> Any:
    if hasattr(part, "getbands") and part.mode.startswith("P"):  # its numbers are places in a palette
        part = part.convert("RGBA").convert("RGB")
    try:
        return np.asarray(part)
    except ValueError:  # rows of different lengths, refused by their type
        return np.asarray(part, dtype=object)


def _form(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def from_dataset(
    dataset: Any,
    groups: str | Sequence[Any] | Array,
    *,
    targets: str | Sequence[Any] | Array | None = None,
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    transform: Transform | None = None,
    train_transform: Transform | None = None,
) -> Environments:
    """Environments from a dataset, of PyTorch (map-style) or Hugging Face, whose examples each name their group.

    Examples are read a batch at a time. ``transform`` makes numbers of one: arrays, tensors, images of Pillow (which
    become uint8, channels first), alone or in tuples and dictionaries. Random augmentation belongs into
    ``train_transform``, which may draw from PyTorch, NumPy and ``random``: their numbers depend on the run's seed, the
    environment, the step and the example's place in its batch alone.

    Args:
        dataset: has ``len(dataset)`` and ``dataset[place]``.
        groups: the group of each example; of a Hugging Face dataset also the name of a column.
        targets: the target of each example, or a column. Without them a job with a loss reads all examples first.
        validation, test: names of these groups; all others train.
        transform: of each example.
        train_transform: of each example in training; None: ``transform``.

    Raises:
        InputError: an argument does not fit the dataset.
    """
    if isinstance(dataset, Mapping):
        raise ArgumentError("dataset", ", ".join(map(str, dataset)), "has several parts; give one of them")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ArgumentError("dataset", type(dataset).__name__, "has no length or no places; give a map-style dataset")
    places = places_by_group(_column(dataset, "groups", groups))
    purposes = purposes_of(places, validation, test)
    if len(purposes["train"]) < 2:
        found = ", ".join(purposes["train"]) or "none"
        raise ArgumentError("groups", ", ".join(places), f"two training environments are needed; found {found}")
    known = None if targets is None else as_tensor("of the dataset", "targets", _column(dataset, "targets", targets))

    def load(name: str) -> DatasetSource:
        own = torch.tensor(places[name])
        own_targets = None if known is None else known[own]
        return DatasetSource(name, dataset, own, own_targets, transform, train_transform or transform)

    return Environments(load, **purposes, version=_version(dataset, places, known))


def places_by_group(groups: Sequence[Any]) -> dict[str, list[int]]:
    """The places of each group's examples, by the group's name in sorted order (InputError if an example has none)."""
    labels = [str(each).strip() for each in groups]
    for place, label in enumerate(labels):
        if not label or (label in _MISSING and not isinstance(groups[place], str)):
            raise ArgumentError("groups", f"{len(labels)} labels", f"example {place} has none")
    places: dict[str, list[int]] = {name: [] for name in sorted(set(labels))}
    for place, label in enumerate(labels):
        places[label].append(place)
    return places


def _version(dataset: Any, places: Mapping[str, list[int]], targets: Tensor | None) -> str | None:
    """Text that differs when the examples, their groups or their targets do; None if the dataset does not identify
    itself, as those of Hugging Face do.
    """
    fingerprint = getattr(dataset, "_fingerprint", None)
    if fingerprint is None:
        return None
    digest = hashlib.sha256(str(fingerprint).encode())
    for name, own in places.items():
        digest.update(f" {name} ".encode() + np.array(own).tobytes())
    digest.update(b"" if targets is None else targets.numpy().tobytes())
    return digest.hexdigest()[:16]


def _column(dataset: Any, argument: str, given: Any) -> list[Any]:
    """A value for each example."""
    if isinstance(given, str):
        names = getattr(dataset, "column_names", None) or []
        if given not in names:
            raise ArgumentError(argument, given, f"no such column; there are {', '.join(names) or 'none'}")
        given = dataset[given]
    if (kind := without_numbers(given)) is not None:
        raise ArgumentError(argument, type(given).__name__, f"is {kind}")
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    if len(values) != len(dataset):
        raise ArgumentError(argument, f"{len(values)} values", f"the dataset has {len(dataset)} examples")
    return values
