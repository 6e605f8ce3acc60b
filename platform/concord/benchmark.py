"""Ratios measured in one run, interleaved, so that a machine whose speed drifts drifts for both sides.

A benchmark is a file that names its rows: ``rows() -> list[Row]``. ``concord bench`` runs those of the project.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the benchmark table.

    Attributes:
        name: what was measured.
        seconds: its median time.
        reference: what it is compared with.
        reference_seconds: the reference's median time.
        ratio: the median of the ratios of neighbouring measurements (not the ratio of the medians).
        target: the ratio that the project asks of itself, for the reader; nothing fails by it.
    """

    name: str
    seconds: float
    reference: str
    reference_seconds: float
    ratio: float
    target: str


def interleaved(
    measured: Callable[[], object],
    reference: Callable[[], object],
    repeats: int,
    warmup: int = 3,
    synchronize: Callable[[], object] = lambda: None,
) -> tuple[float, float, float]:
    """Time two functions in turn, ``repeats`` times after ``warmup`` uncounted turns.

    Args:
        synchronize: called before each reading of the clock: waits for a device, or for other processes.

    Returns:
        The median seconds of both, and the median of the pairwise ratios ``measured / reference``.
    """

    def seconds(function: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        return time.perf_counter() - start

    pairs = [(seconds(measured), seconds(reference)) for _ in range(warmup + repeats)][warmup:]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio
