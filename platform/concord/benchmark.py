"""Ratios measured in one run, interleaved, so that a machine whose speed drifts drifts for both sides.

A benchmark is a file with a function ``rows() -> Iterable[Row]``, best a generator, so that each row is shown when it
is measured. ``concord bench`` runs those of the project; the slow ones (minutes each) are in a folder ``long``.
"""

import importlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import concord
from concord.errors import InputError

_LONG = "long"
_MEASURED = "measured.json"


@dataclass(frozen=True)
class Row:
    """One line of the benchmark table.

    Attributes:
        name: the measured operation.
        seconds: its median time.
        reference: the name of the reference.
        reference_seconds: the reference's median time.
        ratio: the median of the ratios of neighbouring measurements (not the ratio of the medians).
        target: the project's target for the ratio, for the reader; no check fails by it.
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
        synchronize: called before each reading of the clock, to wait for a device or other processes.

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
    seconds_measured, seconds_of_reference = zip(*pairs, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    return statistics.median(seconds_measured), statistics.median(seconds_of_reference), ratio


def in_gloo_group(measure: Callable[[], list[Any]], processes: int) -> list[Any]:
    """The first process's result, nested lists of numbers, of a function called in every process of a gloo group."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(_in_process, (processes, Path(folder), measure), nprocs=processes)
        measured: list[Any] = json.loads((Path(folder) / _MEASURED).read_text())
        return measured


def _in_process(rank: int, processes: int, folder: Path, measure: Callable[[], list[Any]]) -> None:
    import torch.distributed as dist

    from concord.training.process import tune_process

    tune_process(threads=1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    measured = measure()
    if rank == 0:
        (folder / _MEASURED).write_text(json.dumps(measured))
    dist.destroy_process_group()


def benchmarks_folder() -> Path:
    """The folder of the benchmarks: inside an installed package, or under ``tests/`` in a source tree."""
    package = Path(concord.__file__).parent
    inside = package / "benchmarks"
    return inside if inside.is_dir() else package.parent.parent / "tests" / "benchmarks"


def benchmark_files(only: str = "", everything: bool = False) -> list[Path]:
    """The benchmarks whose file name contains ``only``: with neither argument, the fast ones."""
    folder = benchmarks_folder()
    wanted = [*folder.glob("*.py"), *(folder / _LONG).glob("*.py")] if only or everything else [*folder.glob("*.py")]
    files = sorted((path for path in wanted if only in path.stem), key=lambda path: path.stem)
    if not files:
        raise InputError(f"--only {only}: no benchmark of this name in {folder}")
    return files


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of a benchmark, each as soon as it is measured; InputError where a package that it needs is missing."""
    # Some benchmarks start processes, which import the file by its name.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield from importlib.import_module(file.stem).rows()
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if find_spec(package) is not None:  # it has no such module
                raise
            raise InputError(f"{file.stem} needs the package {package}, which is not installed") from error
