"""One product with an environment's Gauss-Newton matrix against a forward and a backward pass on the same examples."""

from collections.abc import Iterator

import torch
from torch import nn

from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.benchmark import Row, interleaved
from concord.models import MLP, ResNet18
from concord.training.process import tune_process

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows() -> Iterator[Row]:
    """The synthetic task's MLP, and a network of millions of parameters."""
    tune_process()
    draw = torch.Generator().manual_seed(0)
    networks: tuple[tuple[str, nn.Module, torch.Size], ...] = (
        ("3 × 256 MLP, 256 examples", MLP(34, 2, hidden_units=256, hidden_layers=3), torch.Size((256, 34))),
        ("ResNet-18, 32 examples", ResNet18(), torch.Size((32, 3, 32, 32))),
    )
    for name, model, shape in networks:
        model.to(DEVICE).eval()
        inputs, targets = torch.randn(shape, generator=draw), torch.randint(0, 2, shape[:1], generator=draw)
        losses = EnvironmentLosses(model, nn.functional.cross_entropy, {"one": (inputs, targets)})
        vector = torch.randn(losses.size, generator=draw).to(DEVICE)
        inputs, targets = inputs.to(DEVICE), targets.to(DEVICE)

        def passes(
            model: nn.Module = model, inputs: torch.Tensor = inputs, targets: torch.Tensor = targets
        ) -> tuple[torch.Tensor, ...]:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            return torch.autograd.grad(loss, list(model.parameters()))

        def product(losses: EnvironmentLosses = losses, vector: torch.Tensor = vector) -> torch.Tensor:
            return losses.product("one", vector)

        synchronize = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
        ours, theirs, ratio = interleaved(product, passes, repeats=25, synchronize=synchronize)
        yield Row(f"Gauss-Newton product, {name}", ours, "forward and backward pass", theirs, ratio, "≤ 3")
