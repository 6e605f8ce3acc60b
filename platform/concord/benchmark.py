"""Ratios measured in one run, interleaved, so that a machine whose speed drifts drifts for both sides.

A benchmark is a file that names its rows: ``rows() -> list[Row]``. ``concord bench`` runs those of the project.
"""

import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import concord
from concord.errors import InputError


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
        memory, reference_memory: the peak memory of both in GiB, where it was measured.
    """

    name: str
    seconds: float
    reference: str
    reference_seconds: float
    ratio: float
    target: str
    memory: float | None = None
    reference_memory: float | None = None


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


def benchmarks_folder() -> Path:
    """Where the benchmarks are: inside an installed package, or under ``tests/`` in a source tree."""
    package = Path(concord.__file__).parent
    inside = package / "benchmarks"
    return inside if inside.is_dir() else package.parent.parent / "tests" / "benchmarks"


def run_benchmarks(only: str, say: Callable[[str], None]) -> list[Row]:
    """The rows of every benchmark whose file name contains ``only``.

    Raises:
        InputError: there is none, or the only one needs what is not installed.
    """
    files = [path for path in sorted(benchmarks_folder().glob("*.py")) if only in path.stem]
    if not files:
        raise InputError(f"--only {only}: no benchmark of this name in {benchmarks_folder()}")
    rows: list[Row] = []
    # Some benchmarks start processes, which import the file by its name.
    sys.path.insert(0, str(benchmarks_folder()))
    for path in files:
        say(f"measuring {path.stem}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                rows += importlib.import_module(path.stem).rows()
            except InputError as error:  # what it measures is not installed
                if len(files) == 1:
                    raise
                say(f"left out: {error}")
    return rows
