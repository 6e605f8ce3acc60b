"""Images read from a folder while training, against the same images in memory, and against Pillow alone.

The alternatives are timed in turn. ``python tests/benchmarks/image_folder.py`` prints the CPU time of all processes,
which is the same on a busy machine, and the peak memory of a pass over data four times as large as its limit.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask
from concord.benchmark import Row, interleaved
from concord.environments import BatchStream, Environment, Environments, from_image_folder
from concord.environments.readers import read_ahead
from concord.gradients import StackedGradients
from concord.models import ResNet18
from concord.training.process import tune_process

DOMAINS, BATCH, READERS, STEPS = 3, 32, 2, 4


def write_images(folder: Path, each: int, size: int) -> Path:
    """Write smooth pictures with some noise: JPEG files as large as photographs of this size."""
    draw = np.random.default_rng(0)
    for domain in range(DOMAINS):
        for name in ("a", "b"):
            (folder / f"domain{domain}" / name).mkdir(parents=True)
            for at in range(each):
                coarse = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((size, size))
                noisy = np.asarray(coarse, dtype=np.int16) + draw.integers(-12, 13, (size, size, 3))
                image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
                image.save(folder / f"domain{domain}" / name / f"{at:05}.jpg", quality=90)
    return folder


def training(environments: list[Environment], readers: int) -> Callable[[], None]:
    """Steps of a ResNet-18, as in a run."""
    torch.manual_seed(0)
    batches = BatchStream(environments, BATCH, seed=0, readers=readers)
    gradients = StackedGradients(ResNet18(classes=2).train(), cross_entropy, AndMask(0.8), vectorize=False)
    step = iter(range(sys.maxsize))

    def some() -> None:
        for _ in range(STEPS):
            gradients(batches.batch(next(step)))

    return some


def reading(environments: Environments, size: int) -> Callable[[], None]:
    """Let the readers read all images of the first domain, batch by batch."""
    domain = environments[environments.train[0]]
    keys = [slice(start, start + size) for start in range(0, len(domain), size)]

    def read() -> None:
        for _ in read_ahead(domain.take, keys, READERS, "cpu"):
            pass

    return read


def decode(file: Path) -> int:
    """The pixels of one file, by Pillow."""
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB")).shape[0]


def decoding(files: list[Path], size: int) -> Callable[[], None]:
    """Read the same images with Pillow alone, in the same number of processes."""

    def read() -> None:
        with get_context("fork").Pool(READERS) as pool:
            pool.map(decode, files, chunksize=size)
            pool.close()
            pool.join()

    return read


def pairs(folder: Path) -> Iterator[tuple[str, Callable[[], None], str, Callable[[], None], str]]:
    """The comparisons: names, functions, and the target for the ratio of times."""
    small = from_image_folder(write_images(folder / "64", 200, 64))
    lazy = [small[name] for name in small.names]
    in_memory = [Environment(each.name, each.take(slice(None))) for each in lazy]
    steps = f"{STEPS} steps, ResNet-18, {DOMAINS} × {BATCH} images of 64 × 64"
    yield f"{steps}, {READERS} readers", training(lazy, READERS), "in memory", training(in_memory, 0), "≤ 1.1"
    for size, each in ((64, 2000), (227, 400), (500, 200)):
        environments = from_image_folder(write_images(folder / f"read {size}", each, size))
        files = sorted((folder / f"read {size}" / environments.train[0]).rglob("*.jpg"))
        name = f"{len(files)} images of {size} × {size}, {READERS} readers"
        yield name, reading(environments, BATCH), f"Pillow, {READERS} processes", decoding(files, BATCH), "≤ 1.18"


def rows() -> Iterator[Row]:
    """Training and reading."""
    tune_process(threads=1)
    with tempfile.TemporaryDirectory() as folder:
        for name, measured, reference_name, reference, target in pairs(Path(folder)):
            ours, theirs, ratio = interleaved(measured, reference, repeats=7, warmup=1)
            yield Row(name, ours, reference_name, theirs, ratio, target)


def cpu_seconds() -> float:
    """CPU time of this process and of the ended processes that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def cpu_of(function: Callable[[], None]) -> float:
    """The CPU time of a call."""
    started = cpu_seconds()
    function()
    return cpu_seconds() - started


if __name__ == "__main__":
    tune_process(threads=1)
    with tempfile.TemporaryDirectory() as made:
        for label, ahead, against, plain, _ in pairs(Path(made)):
            both = [(cpu_of(ahead), cpu_of(plain)) for _ in range(9)]
            first, second = map(min, zip(*both, strict=True))
            print(f"{label}: {first:.3f} s of CPU; {against}: {second:.3f} s; ratio {first / second:.2f}", flush=True)
        large = write_images(Path(made) / "large", 700, 227)
        gigabytes = 2 * DOMAINS * 700 * 3 * 227**2 / 2**30
        domains = from_image_folder(large)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stream = BatchStream([domains[name] for name in domains.names], BATCH, seed=0, readers=READERS)
        started = time.perf_counter()
        for step in range(stream.steps_per_epoch):
            stream.batch(step)
        seconds, peak = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{gigabytes:.2f} GiB of pixels in {seconds:.1f} s: {(peak - before) / 2**20:.3f} GiB more at the peak")
