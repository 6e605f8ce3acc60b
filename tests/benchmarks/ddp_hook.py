"""Steps with a rule against plain steps, 4 gloo processes and 6.5 million parameters: DDP with the AND-mask hook, with
environments' momentum, and with PCGrad; FSDP2 with the AND-mask."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import AndMask, PCGrad
from concord.benchmark import Row, in_gloo_group, interleaved
from concord.gradients import register_aggregation, register_aggregation_hook

PROCESSES, BATCH, WIDTH, LAYERS = 4, 128, 1024, 6


def _network() -> nn.Module:
    torch.manual_seed(0)
    hidden = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 200))


def _sharded() -> nn.Module:
    """The network, each layer wrapped by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = _network()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def _measure() -> list[Any]:
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(0, 200, (BATCH,))
    replicas = [DistributedDataParallel(_network()) for _ in range(4)]
    register_aggregation_hook(replicas[0], AndMask(0.8))
    register_aggregation_hook(replicas[2], AndMask(0.8), environment_momentum=0.9)
    register_aggregation_hook(replicas[3], PCGrad())
    models = [*replicas, _sharded(), _sharded()]
    register_aggregation(models[4], AndMask(0.8))
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        cross_entropy(models[which](inputs), targets).backward()
        optimizers[which].step()

    steps = [functools.partial(step, which) for which in range(len(models))]
    return [
        interleaved(steps[one], steps[other], repeats=25, warmup=5, synchronize=dist.barrier)
        for one, other in ((0, 1), (2, 0), (3, 1), (4, 5))
    ]


def rows() -> list[Row]:
    """A row for each rule."""
    (hooked, plain, ratio), momentum, weighted, sharded = in_gloo_group(_measure, PROCESSES)
    parameters = sum(parameter.numel() for parameter in _network().parameters())
    setting = f"{PROCESSES} gloo processes, {parameters / 1e6:.1f} M parameters"
    name = f"DDP step with the AND-mask hook, {setting}"
    return [
        Row(name, hooked, "plain DDP step", plain, ratio, "≤ 1.10"),
        Row(f"{name}, with momentum", momentum[0], "without momentum", momentum[1], momentum[2], "≤ 1.05"),
        Row(f"DDP step with PCGrad, {setting}", weighted[0], "plain DDP step", weighted[1], weighted[2], "≤ 2.0"),
        Row(
            f"FSDP2 step with the AND-mask, {setting}", sharded[0], "plain FSDP2 step", sharded[1], sharded[2], "≤ 1.3"
        ),
    ]
