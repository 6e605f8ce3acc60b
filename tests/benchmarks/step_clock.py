"""The cost of timing the parts of a step: steps of a small network, with and without the clock."""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask
from concord.benchmark import Row, interleaved
from concord.execution.live_metrics import RunSamples
from concord.gradients import StackedGradients, StepClock
from concord.gradients.step_clock import Part
from concord.models import MLP
from concord.training.context import StepsSoFar
from concord.training.process import tune_process

ENVIRONMENTS, BATCH, WIDTH, UNITS, STEPS = 4, 32, 34, 64, 20


class _Stopped(StepClock):
    """A clock that measures nothing."""

    def switch(self, part: Part | None) -> Part | None:
        return part


def rows() -> list[Row]:
    """Steps as in the training loop, with the clock read at its interval, against the same steps without it."""
    tune_process(threads=1)
    inputs = torch.randn(ENVIRONMENTS, BATCH, WIDTH)
    targets = torch.randint(0, 2, (ENVIRONMENTS, BATCH))

    def steps(clock: StepClock) -> tuple[StepsSoFar, Callable[[], None]]:
        torch.manual_seed(0)
        model = MLP(WIDTH, 2, UNITS, 1)
        gradients = StackedGradients(model, cross_entropy, AndMask(0.8), clock=clock)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        sizes = torch.tensor([float(parameter.numel()) for parameter in model.parameters()])
        so_far = StepsSoFar(clock, epochs=1, sizes=sizes)

        def some() -> None:
            for _ in range(STEPS):
                clock.switch("gradients")
                result = gradients(inputs, targets)
                clock.switch("optimizer")
                optimizer.step()
                so_far.steps, so_far.epoch, so_far.latest = so_far.steps + 1, 0.5, result
                clock.switch(None)

        return so_far, some

    so_far, measured = steps(StepClock())
    samples = RunSamples(so_far, first=True)
    _, plain = steps(_Stopped())

    def measured_and_read() -> None:
        measured()
        samples()

    seconds, reference, ratio = interleaved(measured_and_read, plain, repeats=300, warmup=20)
    name = f"{STEPS} measured AND-mask steps, {ENVIRONMENTS} × {BATCH} examples, {UNITS} hidden units, read once"
    return [Row(name, seconds, "the same, unmeasured", reference, ratio, "≤ 1.01")]
