"""One step of temporal AND-mask Adam on ResNet-18's weights against PyTorch's Adam."""

from collections.abc import Callable, Iterator

import torch

from concord.aggregation import TemporalAndMaskAdam
from concord.benchmark import Row, interleaved
from concord.models import ResNet18
from concord.training.process import tune_process

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step(make: Callable[..., torch.optim.Optimizer], **options: object) -> Callable[[], object]:
    """A step on constant gradients."""
    torch.manual_seed(0)
    model = ResNet18().to(DEVICE)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return make(model.parameters(), lr=1e-3, **options).step


def rows() -> Iterator[Row]:
    """A row for the default path, and one for the fused path."""
    tune_process()
    target = "≤ 1.3" if DEVICE.type == "cuda" else "≤ 1.5"
    synchronize = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    for name, options, other in (
        ("", {}, {"foreach": True}),
        (", fused", {"fused": True}, {"foreach": True}),
        (", fused", {"fused": True}, {"fused": True}),
    ):
        ours, theirs, ratio = interleaved(
            step(TemporalAndMaskAdam, threshold=0.4, **options),
            step(torch.optim.Adam, **other),
            repeats=40,
            warmup=5,
            synchronize=synchronize,
        )
        kind = next(iter(other))
        goal = target if kind == "foreach" else "no target"
        yield Row(f"temporal AND-mask Adam{name}, ResNet-18", ours, f"Adam, {kind}", theirs, ratio, goal)
