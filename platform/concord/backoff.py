"""Pauses between tries: longer each time, and random, so that those who wait for one server do not come at once."""

import random
from collections.abc import Iterator

_random = random.SystemRandom()  # training draws from Python's own generator


def pauses(first: float, longest: float) -> Iterator[float]:
    """Pauses in seconds, without end: each between half of a length and all of it, which doubles up to the longest."""
    length = first
    while True:
        yield _random.uniform(length / 2, length)
        length = min(2 * length, longest)
