"""Adaptive skips on frames of funnel board: the search against the model, a step against one batch of predictions."""

from collections.abc import Iterator

import torch
from torch import Tensor

from concord.benchmark import Row, interleaved
from concord.dynamics import CrossEntropy, SkipConfig, best_match, unroll
from concord.models import DynamicsNetwork
from concord.training.process import tune_process

TRAJECTORIES, LENGTH, HORIZON, KERNELS = 2, 24, 21, 32
SHAPE = (3, 126, 75)


def rows() -> Iterator[Row]:
    """The search for one prediction, and a whole step, on one core, with the narrowest network of the thesis."""
    tune_process(threads=1)
    torch.manual_seed(0)
    model, loss = DynamicsNetwork(3, KERNELS), CrossEntropy()
    frames = torch.randint(0, 256, (TRAJECTORIES, LENGTH, *SHAPE), dtype=torch.uint8)
    lengths = torch.full((TRAJECTORIES,), LENGTH)
    places = torch.arange(TRAJECTORIES)
    with torch.no_grad():
        outputs = model(frames[:, 0])

    def search() -> None:
        best_match(loss, outputs, frames, places, torch.ones_like(lengths), torch.full_like(lengths, HORIZON))

    def differentiated(inputs: Tensor, targets: Tensor) -> None:
        loss(model(inputs), targets).sum().backward()

    def prediction() -> None:
        differentiated(frames[:, 0].float() / 255, frames[:, 1].float() / 255)

    size = f"{SHAPE[1]} × {SHAPE[2]}, H = {HORIZON}, n = {KERNELS}"
    yield Row(f"skips: search, {size}", *_swapped(interleaved(search, prediction, 7, warmup=1)), "≤ 0.03")

    def step() -> None:
        unroll(model, frames, lengths, SkipConfig(HORIZON), sampling=0.0).losses.sum().backward()

    with torch.no_grad():
        times = unroll(model, frames, lengths, SkipConfig(HORIZON), sampling=0.0).times
    made = times[:, 1:] >= 0
    rows_of = places[:, None].expand_as(made)[made]
    inputs = frames[rows_of, times[:, :-1][made]].float() / 255
    targets = frames[rows_of, times[:, 1:][made]].float() / 255
    name = f"skips: a step of {len(inputs)} predictions, {size}"
    reference = "forward and backward in one batch"
    seconds, other, ratio = interleaved(step, lambda: differentiated(inputs, targets), 5, warmup=1)
    yield Row(name, seconds, reference, other, ratio, "≤ 1.25")

    draws = torch.rand(TRAJECTORIES, LENGTH, 3, dtype=torch.float64)

    def strided() -> None:
        unroll(model, frames, lengths, SkipConfig(stride=3), sampling=0.5, draws=draws).losses.sum().backward()

    times = torch.arange(0, LENGTH, 3)
    inputs, targets = (frames[:, part].flatten(0, 1).float() / 255 for part in (times[:-1], times[1:]))
    name = f"skips: a step of {len(inputs)} predictions, Δt = 3, ε = 0.5, {size}"
    seconds, other, ratio = interleaved(strided, lambda: differentiated(inputs, targets), 5, warmup=1)
    yield Row(name, seconds, reference, other, ratio, "≤ 1.25")


def _swapped(timed: tuple[float, float, float]) -> tuple[float, str, float, float]:
    seconds, reference, ratio = timed
    return seconds, "forward and backward", reference, ratio
