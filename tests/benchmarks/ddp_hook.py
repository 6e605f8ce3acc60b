"""A DDP step with the AND-mask hook against the same model with plain DDP, and the hook with environments' momentum
against that without: 4 gloo processes, 6.5 million parameters."""

import functools
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import AndMask
from concord.benchmark import Row, interleaved
from concord.gradients import register_aggregation_hook
from concord.training.process import tune_process

PROCESSES, BATCH, WIDTH, LAYERS = 4, 128, 1024, 6


def _network() -> nn.Module:
    torch.manual_seed(0)
    hidden = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 200))


def _measure(rank: int, port: int, result: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    tune_process(threads=1)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(0, 200, (BATCH,))
    models = [DistributedDataParallel(_network()) for _ in range(3)]
    register_aggregation_hook(models[0], AndMask(0.8))
    register_aggregation_hook(models[2], AndMask(0.8), environment_momentum=0.9)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        cross_entropy(models[which](inputs), targets).backward()
        optimizers[which].step()

    steps = [functools.partial(step, which) for which in range(3)]
    measured = [
        interleaved(steps[one], steps[other], repeats=25, warmup=5, synchronize=dist.barrier)
        for one, other in ((0, 1), (2, 0))
    ]
    if rank == 0:
        torch.save(torch.tensor(measured), result)
    dist.destroy_process_group()


def rows() -> list[Row]:
    """The hook's rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "measured.pt")
        spawn(_measure, (port, result), nprocs=PROCESSES)
        (hooked, plain, ratio), momentum = torch.load(result, weights_only=True).tolist()
    parameters = sum(parameter.numel() for parameter in _network().parameters())
    name = f"DDP step with the AND-mask hook, {PROCESSES} gloo processes, {parameters / 1e6:.1f} M parameters"
    return [
        Row(name, hooked, "plain DDP step", plain, ratio, "≤ 1.10"),
        Row(f"{name}, with momentum", momentum[0], "without momentum", momentum[1], momentum[2], "≤ 1.05"),
    ]
