"""The exchange by NCCL, one GPU a process: the same updates as on the CPU, and no wait of the host.

It needs two GPUs, so that no test runs it::

    torchrun --nproc-per-node 2 tests/gradients/two_gpus.py
    torchrun --nproc-per-node 2 tests/gradients/two_gpus.py cpu    # the same program by gloo
"""

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import AndMask, GeometricMean, Mean, Median, UPGrad
from concord.gradients import StackedGradients, register_aggregation_hook

RULES: dict[str, Any] = {
    "mean": Mean(),
    "and-mask": AndMask(0.5),
    "geometric mean": GeometricMean(),
    "median": Median(),
    "upgrad": UPGrad(),
}
EACH, STEPS = 3, 5  # environments of a process with several


def main(kind: str) -> None:
    """Every rule by the hook and by the two-level form."""
    rank = int(os.environ["RANK"])
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    for name, rule in RULES.items():
        for form, each in (("hook", 1), ("two-level", EACH)):
            torch.manual_seed(0)
            here = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)).double()
            there = copy.deepcopy(here).to(device)
            everything = StackedGradients(here, cross_entropy, rule)
            step = hooked(there, rule) if form == "hook" else stacked(there, rule, rank)
            for at in range(STEPS):
                torch.manual_seed(at)
                inputs = torch.randn(each * dist.get_world_size(), 16, 20, dtype=torch.float64)
                targets = inputs[..., :5].argmax(-1)
                own = slice(rank * each, (rank + 1) * each)
                batch = inputs[own].to(device), targets[own].to(device)
                # A weighting reads the inner products, and the first steps choose a way and lay out buckets.
                if kind == "cuda" and at > 1 and name != "upgrad":
                    torch.cuda.set_sync_debug_mode("error")
                step(*batch)
                if kind == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
                everything(inputs, targets)
                for found, expected in zip(there.parameters(), here.parameters(), strict=True):
                    torch.testing.assert_close(found.grad.cpu(), expected.grad, rtol=1e-7, atol=1e-10)
            if rank == 0:
                print(f"{name}, {form}: as on the CPU", flush=True)
    dist.destroy_process_group()


def hooked(model: nn.Module, rule: Any) -> Callable[[Tensor, Tensor], object]:
    """A step of one environment."""
    devices = [next(model.parameters()).device] if next(model.parameters()).is_cuda else None
    wrapped = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=0.01)
    register_aggregation_hook(wrapped, rule, nonfinite="propagate")

    def step(inputs: Tensor, targets: Tensor) -> None:
        wrapped.zero_grad()
        cross_entropy(wrapped(inputs[0]), targets[0]).backward()

    return step


def stacked(model: nn.Module, rule: Any, rank: int) -> Callable[[Tensor, Tensor], object]:
    """A step of several environments."""
    names = [f"{rank}.{each}" for each in range(EACH)]
    return StackedGradients(model, cross_entropy, rule, names=names, group=dist.group.WORLD, nonfinite="propagate")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
