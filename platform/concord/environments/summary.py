"""What is known of an environment's data without the data: how many examples, of which shape, and a digest of them."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from concord.environments.collection import Environment
from concord.environments.source import InMemory, Switching
from concord.environments.tree import Tree, is_pair, merged, named_leaves

# Of larger tensors evenly spaced examples are looked at, as many as make so much: some milliseconds, however large.
_DIGESTED_BYTES = 4 * 1024**2
# So many examples, or up to twice as many, are read of what is not in memory.
_READ = 16
PURPOSES = ("train", "held-out", "validation", "ood", "observed")


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
        examples: how many there are.
        leaves: what the examples are made of, ``inputs`` and ``targets`` if they are pairs.
        digest: 16 hexadecimal digits; two parts with different examples have different ones, but for changes in large
            parts that no example shows that was looked at.
    """

    name: str
    purpose: str
    examples: int
    leaves: tuple[Leaf, ...]
    digest: str


def summarize(environment: Environment, purpose: str) -> DataSummary:
    """Summarize an environment's data; they are neither copied as a whole nor changed."""
    digest = hashlib.sha256()
    data = _looked_at(environment)
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


def _looked_at(environment: Environment) -> Tree:
    """The examples; of those that are not in memory some, evenly spaced."""
    if isinstance(environment.source, InMemory):
        return environment.data
    some = torch.arange(0, len(environment), max(1, len(environment) // _READ))
    source = environment.source
    # What is trained on first counts, too; both have the same form.
    parts = [source.after, source.before] if isinstance(source, Switching) else [source]
    return merged([part.take(some) for part in parts], torch.cat)


def _sample(values: Tensor) -> bytes:
    stride = -(-values.numel() * values.element_size() // _DIGESTED_BYTES)
    sampled = values.detach()[:: max(stride, 1)].cpu().contiguous()
    return sampled.flatten().view(torch.uint8).numpy().tobytes()
