"""Summaries of data: the number of examples, their shapes, and a digest."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from concord.environments.collection import Environment
from concord.environments.source import InMemory, Switching
from concord.environments.tree import Tree, is_pair, merged, named_leaves

# Bytes to hash of a larger tensor, from evenly spaced examples: some milliseconds for any size.
_DIGESTED_BYTES = 4 * 1024**2
# The number of examples to read (up to twice as many) of a source that is not in memory.
_READ = 16
PURPOSES = ("train", "held-out", "validation", "ood", "monitored")


class Leaf(NamedTuple):
    """One example of a leaf: ``Leaf("inputs", (2, 14, 14), "uint8")``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class DataSummary:
    """A part of the data, summarized.

    Attributes:
        name: of the environment.
        purpose: one of ``PURPOSES``.
        examples: their number.
        leaves: the parts of an example, ``inputs`` and ``targets`` for pairs.
        digest: 16 hexadecimal digits, different for different examples, except for changes in large parts outside of
            the hashed examples.
    """

    name: str
    purpose: str
    examples: int
    leaves: tuple[Leaf, ...]
    digest: str

    @staticmethod
    def read(fields: Mapping[str, Any]) -> "DataSummary":
        """The summary from a record."""
        leaves = (Leaf(name, tuple(shape), dtype) for name, shape, dtype in fields["leaves"])
        return DataSummary(**{**fields, "leaves": tuple(leaves)})


def summarize(environment: Environment, purpose: str) -> DataSummary:
    """Summarize an environment's data; without a copy of all."""
    digest = hashlib.sha256()
    data = _hashed_examples(environment)
    leaves = named_leaves(data)
    for name, values in leaves.items():
        named = "" if is_pair(data) else f"{name} "
        digest.update(f"{named}{tuple(values.shape)} {values.dtype} ".encode())
        digest.update(_sample(values))
    return DataSummary(
        environment.name,
        purpose,
        len(environment),
        tuple(Leaf(name, (*part.shape[1:],), str(part.dtype).removeprefix("torch.")) for name, part in leaves.items()),
        digest.hexdigest()[:16],
    )


def _hashed_examples(environment: Environment) -> Tree:
    """The examples to hash; evenly spaced ones of a source that is not in memory."""
    if isinstance(environment.source, InMemory):
        return environment.data
    some = torch.arange(0, len(environment), max(1, len(environment) // _READ))
    source = environment.source
    # Include the examples before the switch, of the same form.
    parts = [source.after, source.before] if isinstance(source, Switching) else [source]
    return merged([part.take(some) for part in parts], torch.cat)


def _sample(values: Tensor) -> bytes:
    stride = -(-values.numel() * values.element_size() // _DIGESTED_BYTES)
    sampled = values.detach()[:: max(stride, 1)].cpu().contiguous()
    return sampled.flatten().view(torch.uint8).numpy().tobytes()
