"""Rules with 32 environments, from the gradients to the optimizer's step, against a plain step, and UPGrad against
TorchJD: 3 × 256 MLP, one process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.aggregation import (
    MGDA,
    AndMask,
    CAGrad,
    Clipping,
    Krum,
    Mean,
    Median,
    PCGrad,
    TrimmedMean,
    UPGrad,
)
from concord.benchmark import Row, interleaved
from concord.gradients import StackedGradients
from concord.training.process import tune_process

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENVIRONMENTS, BATCH, WIDTH, HIDDEN = 32, 128, 34, 256
SETTING = f"{ENVIRONMENTS} × {BATCH} examples, 3 × {HIDDEN} MLP"
WAYS = ("concord", "concord, layer by layer", "backward", "autogram")
RULES = (
    Mean(), AndMask(0.8), Krum(), PCGrad(), Clipping(), MGDA(), UPGrad(), CAGrad(), Median(), TrimmedMean(),
)  # fmt: skip


def _network() -> tuple[nn.Sequential, torch.optim.Optimizer, Tensor, Tensor]:
    """The model, its optimizer, and a batch of each environment."""
    torch.manual_seed(0)
    inputs = torch.randn(ENVIRONMENTS, BATCH, WIDTH)
    targets = torch.randint(0, 2, (ENVIRONMENTS, BATCH))
    layers = [each for width in (WIDTH, HIDDEN, HIDDEN) for each in (nn.Linear(width, HIDDEN), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN, 2)).to(DEVICE)
    return model, torch.optim.Adam(model.parameters(), 1e-3), inputs.to(DEVICE), targets.to(DEVICE)


def _rule_step(rule: Any, limit: int | None = None) -> Callable[[], None]:
    """A function that makes one step with this rule."""
    model, optimizer, inputs, targets = _network()
    gradients = StackedGradients(model, cross_entropy, rule, memory_limit=limit)

    def step() -> None:
        gradients(inputs, targets)
        optimizer.step()

    return step


def _plain_step() -> Callable[[], None]:
    """A function that makes one step of the mean risk, without a rule."""
    model, optimizer, inputs, targets = _network()

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs.flatten(0, 1)), targets.flatten()).backward()
        optimizer.step()

    return step


def _step(way: str) -> Callable[[], None]:
    """A function that makes one step."""
    if way.startswith("concord"):
        return _rule_step(UPGrad(), 0 if way == WAYS[1] else None)
    model, optimizer, inputs, targets = _network()
    from torchjd.aggregation import UPGrad as Theirs
    from torchjd.aggregation import UPGradWeighting
    from torchjd.autogram import Engine
    from torchjd.autojac import backward, jac_to_grad

    def losses() -> Tensor:
        outputs = model(inputs)  # the engine needs a dimension of environments
        return cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).mean(1)

    engine = Engine(model, batch_dim=0) if way == "autogram" else None
    weighting, aggregator = UPGradWeighting(), Theirs()

    def theirs() -> None:
        optimizer.zero_grad()
        values = losses()
        if engine is None:
            backward(list(values))
            jac_to_grad(model.parameters(), aggregator)
        else:
            values.backward(weighting(engine.compute_gramian(values)))
        optimizer.step()

    return theirs


def _peak(way: str) -> float:
    """The peak memory of a process that makes five steps, minus that of a process that makes none, in GiB."""
    folder = str(Path(__file__).parent)
    script = (
        f"import sys; sys.path.insert(0, {folder!r}); import weightings; weightings.measure({way!r}, int(sys.argv[1]))"
    )
    before, after = (
        int(subprocess.run([sys.executable, "-c", script, steps], check=True, capture_output=True, text=True).stdout)
        for steps in ("0", "5")
    )
    return (after - before) / (1 << 20)


def measure(way: str, steps: int) -> None:
    """Print the peak memory of this process after this number of steps, or what it allocated on the GPU, in KiB.

    ``ru_maxrss`` would be at least that of the parent, which the child shares until it starts its program.
    """
    tune_process()
    step = _step(way)
    for _ in range(steps):
        step()
    if DEVICE.type == "cuda":
        print(torch.cuda.max_memory_allocated() >> 10)
        return
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(peak.split()[1])


def rows() -> Iterator[Row]:
    """Every rule against a plain step; then both ways of UPGrad against both of TorchJD."""
    tune_process()
    synchronize = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    for rule in RULES:
        seconds, reference, ratio = interleaved(_rule_step(rule), _plain_step(), 9, 2, synchronize)
        yield Row(f"{type(rule).__name__} step, {SETTING}", seconds, "a plain step", reference, ratio, "")
    steps, peaks = {way: _step(way) for way in WAYS}, {way: _peak(way) for way in WAYS}
    for ours in WAYS[:2]:
        for theirs in WAYS[2:]:
            seconds, reference, ratio = interleaved(steps[ours], steps[theirs], 9, 2, synchronize)
            name = f"UPGrad step, {SETTING}" + ours.removeprefix("concord")
            target = "≤ 0.5 of the faster, and its memory"
            yield Row(name, seconds, f"TorchJD's {theirs}", reference, ratio, target, peaks[ours], peaks[theirs])
