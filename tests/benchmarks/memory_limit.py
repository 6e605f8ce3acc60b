"""Many stacked environments: the chunks that StackedGradients chooses by the cache against chunks of up to 1 GiB.

The alternatives are timed in turn in one process. Memory is the peak of a separate process.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask
from concord.benchmark import Row, interleaved
from concord.gradients import StackedGradients
from concord.models import MLP

BATCH, WIDTH = 128, 34
SETTINGS = (32, 512)  # environments
LARGE = 1 << 30


def step(environments: int, memory_limit: int | None) -> Callable[[], object]:
    """A step of the network of 3 × 256 units, in a process without Concord's settings, like a user's own loop."""
    torch.manual_seed(0)
    inputs = torch.randn(environments, BATCH, WIDTH)
    targets = torch.randint(0, 2, (environments, BATCH))
    gradients = StackedGradients(MLP(WIDTH, 2), cross_entropy, AndMask(0.8), memory_limit=memory_limit)
    return lambda: gradients(inputs, targets)


def rows() -> Iterator[Row]:
    """Time and memory of a step."""
    for environments in SETTINGS:
        chosen, large = step(environments, None), step(environments, LARGE)
        ours, theirs, ratio = interleaved(chosen, large, repeats=5 if environments > 100 else 20, warmup=2)
        peaks = [_peak(environments, limit) for limit in (None, LARGE)]
        name = f"AND-mask step, {environments} × {BATCH} examples, 3 × 256 MLP"
        yield Row(name, ours, "chunks of up to 1 GiB of gradients", theirs, ratio, "≤ 1", *peaks)


def _peak(environments: int, limit: int | None) -> float:
    """Peak memory of a process that makes three steps, in GiB, imports included."""
    words = [sys.executable, __file__, json.dumps([environments, limit])]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout) / 2**20


if __name__ == "__main__":
    repeated = step(*json.loads(sys.argv[1]))
    for _ in range(3):
        repeated()
    # Not getrusage, whose maximum a process inherits from its parent. In KiB; exists only on Linux.
    status = Path("/proc/self/status").read_text()
    print(status.partition("VmHWM:")[2].split()[0])
