"""The rows of a GPU, in one call of at most six minutes: steps with a rule against plain ones, with and without graphs.

``concord bench --only gpu --json`` prints each row when it is measured, as a line of JSON. A row whose
package is missing is left out with a line, and so are the last ones if time runs out.
"""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask, UPGrad
from concord.benchmark import Row, interleaved
from concord.errors import InputError
from concord.gradients import PerExampleGradients, StackedGradients
from concord.gradients.step_graph import capture
from concord.logs import info
from concord.models import MLP, FastResNet
from concord.training import TrainConfig
from concord.training.optimization import Optimization
from concord.training.process import tune_process
from concord.training.whole_step import WholeStep

MOST_SECONDS = 330.0  # of the measurements; the last one that begins may still take some


@dataclass(frozen=True)
class Sizes:
    """How much is computed; the defaults are those of docs/performance.md."""

    environments: int = 32
    batch: int = 128
    hidden: int = 256
    images: int = 80
    examples: int = 1024
    wide: int = 1024
    wide_batch: int = 512
    repeats: int = 40


Step = Callable[[], object]


def rows() -> Iterator[Row]:
    """Every row, on the GPU."""
    if not torch.cuda.is_available():
        raise InputError("gpu: there is no GPU on this machine")
    tune_process()
    yield from measured(Sizes(), torch.device("cuda"))


def measured(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Every row, on this device."""
    end = time.monotonic() + MOST_SECONDS
    for of in (_and_mask, _examples_of_a_perceptron, _examples_of_images, _upgrad, _memory_in_bfloat16):
        if time.monotonic() > end:
            info(f"left out: {of.__name__.strip('_')}, since {MOST_SECONDS:g} s have passed")
            continue
        try:
            yield from of(sizes, device)
        except ModuleNotFoundError as error:
            info(f"left out: {of.__name__.strip('_')} needs the package {error.name}, which is not installed")


def _and_mask(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    inputs = torch.randn(sizes.environments, sizes.batch, 34, device=device)
    targets = torch.randint(0, 2, inputs.shape[:2], device=device)
    name = f"AND-mask step, {sizes.environments} × {sizes.batch} examples, 3 × {sizes.hidden} MLP"
    yield from _against_plain(
        name,
        lambda: MLP(34, 2, sizes.hidden, 3),
        (inputs, targets),
        lambda model: StackedGradients(model, cross_entropy, AndMask(0.8)),
        sizes,
        ("≤ 1.5", "≤ 1.2"),
    )


def _examples_of_a_perceptron(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    inputs = torch.rand(1, sizes.examples, 784, device=device)
    batch = inputs, torch.randint(0, 10, inputs.shape[:2], device=device)
    name = f"every example an environment: 3 × {sizes.hidden} MLP, {sizes.examples} examples"
    yield from _of_examples(name, lambda: MLP(784, 10, sizes.hidden, 3), batch, sizes, "≤ 1.5")


def _examples_of_images(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    name = f"every example an environment: FastResNet, {sizes.images} examples"
    yield from _of_examples(name, FastResNet, _images(sizes, device), sizes, "≤ 1.8")


def _upgrad(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    from torchjd.aggregation import UPGradWeighting
    from torchjd.autogram import Engine

    inputs = torch.randn(sizes.environments, sizes.wide_batch, 34, device=device)
    targets = torch.randint(0, 2, inputs.shape[:2], device=device)
    ours, theirs = (_network(lambda: MLP(34, 2, sizes.wide, 3), device) for _ in range(2))
    gradients = StackedGradients(ours[0], cross_entropy, UPGrad())
    engine, weighting = Engine(theirs[0], batch_dim=0), UPGradWeighting()

    def step() -> None:
        gradients(inputs, targets)
        ours[1].step()

    def autogram() -> None:
        theirs[1].zero_grad()
        outputs = theirs[0](inputs)
        each = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        losses = each.view_as(targets).mean(1)
        losses.backward(weighting(engine.compute_gramian(losses)))
        theirs[1].step()

    name = f"UPGrad step, {sizes.environments} × {sizes.wide_batch} examples, 3 × {sizes.wide} MLP"
    yield _row(name, step, "TorchJD's autogram", autogram, sizes, device, "≤ 0.8")


def _memory_in_bfloat16(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    found = {}
    for dtype in (torch.bfloat16, None):
        model, optimizer = _network(FastResNet, device)
        gradients = PerExampleGradients(model, cross_entropy, AndMask(0.2), autocast=dtype)
        found[dtype] = _seconds_and_peak(gradients, optimizer, _images(sizes, device), device)
        gradients.remove()
    (seconds, memory), (reference, whole) = found[torch.bfloat16], found[None]
    name = f"memory of every example an environment, bfloat16: FastResNet, {sizes.images} examples"
    yield Row(name, seconds, "float32", reference, memory / whole, "≤ 0.7", memory, whole)


def _of_examples(
    name: str, network: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], sizes: Sizes, target: str
) -> Iterator[Row]:
    def source(model: nn.Module) -> PerExampleGradients:
        return PerExampleGradients(model, cross_entropy, AndMask(0.2))

    yield from _against_plain(name, network, batch, source, sizes, (target, target))


def _against_plain(
    name: str,
    network: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    source: Callable[[nn.Module], Any],
    sizes: Sizes,
    targets: tuple[str, str],
) -> Iterator[Row]:
    """Two rows: both without a graph, and both with one."""
    device = batch[0].device
    pooled = [leaf.flatten(0, 1) for leaf in batch]
    model, optimizer = _network(network, device)
    plain_model, plain_optimizer = _network(network, device)
    gradients = source(model)

    def step() -> None:
        gradients(batch)
        optimizer.step()

    def plain() -> None:
        plain_optimizer.zero_grad()
        cross_entropy(plain_model(pooled[0]), pooled[1]).backward()
        plain_optimizer.step()

    yield _row(name, step, "a plain step", plain, sizes, device, targets[0])
    graphed, other = _network(network, device)[0], _network(network, device, capturable=device.type == "cuda")
    config = TrainConfig().with_options(lr=1e-4, schedule="constant").resolve()
    optimization = Optimization(list(graphed.parameters()), config, 1, capturable=device.type == "cuda")
    whole = WholeStep(source(graphed), optimization, device, raises=True, name=lambda losses, at: ())

    def by_graph() -> None:
        whole(batch, 0)

    def plain_work() -> None:
        other[1].zero_grad()
        cross_entropy(other[0](pooled[0]), pooled[1]).backward()
        other[1].step()

    plain_work()
    if device.type == "cuda":
        plain_by_graph, _ = capture(plain_work, device)
    else:
        plain_by_graph = plain_work
    yield _row(f"{name}, one graph", by_graph, "a plain step, one graph", plain_by_graph, sizes, device, targets[1])


def _network(
    network: Callable[[], nn.Module], device: torch.device, *, capturable: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = network().to(device)
    return model, torch.optim.Adam(model.parameters(), 1e-4, capturable=capturable)


def _images(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.rand(1, sizes.images, 3, 32, 32, device=device), torch.randint(0, 10, (1, sizes.images), device=device)


def _row(name: str, step: Step, reference: str, other: Step, sizes: Sizes, device: torch.device, target: str) -> Row:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds, reference_seconds, ratio = interleaved(step, other, sizes.repeats, 8, synchronize)
    return Row(name, seconds, reference, reference_seconds, ratio, target)


def _seconds_and_peak(
    gradients: PerExampleGradients, optimizer: torch.optim.Optimizer, batch: Any, device: torch.device
) -> tuple[float, float]:
    """The time of the last step, and the peak memory in GiB of three: on a CPU that of the process."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = 0.0
    for _ in range(3):
        start = time.perf_counter()
        gradients(batch)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    on_cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else on_cpu
    return seconds, peak / (1 << 30)
