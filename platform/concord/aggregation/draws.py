"""Random numbers of a rule, which depend only on its seed, the step and the component.

A rule that draws at random, such as GradDrop, must draw the same whether its sums are finished in one piece, in blocks,
or in slices by several processes. So it has no generator: it names its draws, and finds the numbers beside the sums::

    class GradDrop:
        statistics = (GRADIENT, Statistic("magnitude", torch.abs, "multiplicative", degree=1))
        draws = ("uniform",)
        seed: int = 0

        def finish(self, sums, environments):
            keep_positive = (1 + sums["gradient"] / sums["magnitude"]) / 2 > sums["uniform"]
            …
"""

import hashlib
from collections.abc import Callable
from typing import Any, SupportsInt

import torch
from torch import Tensor

from concord.aggregation.statistic import Statistics

# The constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as signed
# numbers: products of int64 wrap around as those of unsigned numbers do.
GAMMA, _FIRST, _SECOND = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def with_draws(rule: Any, sums: Statistics, step: SupportsInt, components: Callable[[], Tensor]) -> Statistics:
    """The sums, with the rule's random numbers beside them.

    Args:
        rule: a rule with the attributes ``draws`` (names) and ``seed``; for any other rule the sums are returned.
        sums: of components of any shape.
        step: the step's number.
        components: gives the components' numbers among all of the model, int64, shaped as the sums.
    """
    names = getattr(rule, "draws", ())
    if not names:
        return sums
    numbers = components()
    return sums | {name: uniform(numbers, f"{getattr(rule, 'seed', 0)} {int(step)} {name}") for name in names}


def uniform(components: Tensor, key: str) -> Tensor:
    """Numbers in [0, 1), float32 with 24 random bits: a hash of each component's number (int64) and the key."""
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
    return shifted(mixed(components * GAMMA + start), 40).to(torch.float32) * 2**-24


def mixed(words: Tensor) -> Tensor:
    """SplitMix64's hash of 64-bit words (int64)."""
    words = (words ^ shifted(words, 30)) * _FIRST
    words = (words ^ shifted(words, 27)) * _SECOND
    return words ^ shifted(words, 31)


def shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right, as of unsigned numbers."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
