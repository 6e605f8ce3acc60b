"""One AND-mask step of the synthetic task's network: 32 environments × 128 examples, 3 × 256 MLP, one process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask
from concord.benchmark import Row, interleaved
from concord.gradients import StackedGradients
from concord.models import MLP
from concord.training.process import tune_process

ENVIRONMENTS, BATCH, WIDTH = 32, 128, 34


def rows() -> list[Row]:
    """The step against a plain pooled step, and against one backward pass an environment over a shared graph."""
    tune_process()
    torch.manual_seed(0)
    inputs = torch.randn(ENVIRONMENTS, BATCH, WIDTH)
    targets = torch.randint(0, 2, (ENVIRONMENTS, BATCH))

    def network() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MLP(WIDTH, 2)
        return model, torch.optim.Adam(model.parameters(), 1e-3)

    masked, masked_optimizer = network()
    gradients = StackedGradients(masked, cross_entropy, AndMask(0.8), rescale=True)

    def and_mask_step() -> None:
        gradients(inputs, targets)
        masked_optimizer.step()

    plain, plain_optimizer = network()

    def pooled_step() -> None:
        plain_optimizer.zero_grad()
        cross_entropy(plain(inputs.flatten(0, 1)), targets.flatten()).backward()
        plain_optimizer.step()

    separate, separate_optimizer = network()
    parameters = list(separate.parameters())

    def backward_passes_over_one_graph() -> None:
        losses = cross_entropy(separate(inputs.flatten(0, 1)), targets.flatten(), reduction="none")
        per_environment = [
            torch.autograd.grad(loss, parameters, retain_graph=True)
            for loss in losses.view(ENVIRONMENTS, BATCH).mean(1)
        ]
        for parameter, stacked in zip(parameters, zip(*per_environment, strict=True), strict=True):
            gradient = torch.stack(stacked)
            mask = gradient.sign().sum(0).abs() >= 0.8 * ENVIRONMENTS
            parameter.grad = gradient.mean(0) * mask / (mask.float().mean() + 1e-10)
        separate_optimizer.step()

    step, pooled, ratio = interleaved(and_mask_step, pooled_step, repeats=60, warmup=10)
    fast, slow, speed = interleaved(and_mask_step, backward_passes_over_one_graph, repeats=7, warmup=2)
    setting = f"{ENVIRONMENTS} × {BATCH} examples, 3 × 256 MLP"
    return [
        Row(f"AND-mask step, {setting}", step, "plain pooled step", pooled, ratio, "≤ 1.15"),
        Row(f"AND-mask step, {setting}", fast, "a backward pass an environment over one graph", slow, speed, "≤ 0.067"),
    ]
