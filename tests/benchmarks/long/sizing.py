"""Time and memory of a step as environments and parameters grow, for each family of rules: what a run needs.

Each setting has a process of its own. The reference is the same step with the fewest environments; the ratio compares
times for an environment, so 1 is linear growth. A setting that a rule refuses, since its environments' gradients do not
fit the memory limit, has a line in place of a row.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask, Median, Rule, UPGrad
from concord.benchmark import Row
from concord.errors import InputError
from concord.gradients import StackedGradients
from concord.logs import info
from concord.models import MLP
from concord.training.process import tune_process

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES, WIDTH, WARMUP, REPEATS = 16, 34, 1, 3
ENVIRONMENTS = (8, 32, 128, 512)
# Hidden units of the 3 layers, by the number of parameters.
HIDDEN = {"0.1 M": 216, "10 M": 2220} | ({"100 M": 7060} if DEVICE.type == "cuda" else {})
RULES: dict[str, Rule] = {"AND-mask (sums)": AndMask(0.8), "UPGrad (weights)": UPGrad(), "median (columns)": Median()}


def rows() -> Iterator[Row]:
    """Every rule's family, with more and more parameters and environments."""
    for rule in RULES:
        for parameters in HIDDEN:
            first: tuple[float, float] | None = None
            for environments in ENVIRONMENTS:
                words = [sys.executable, __file__, json.dumps([rule, parameters, environments])]
                found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
                name = f"{rule}, {environments} environments, {parameters} parameters"
                if isinstance(found, str):
                    info(f"{name}: {found}")
                    continue
                seconds, memory = found
                first = first or (seconds, memory)
                ratio = seconds / first[0] * ENVIRONMENTS[0] / environments
                yield Row(name, seconds, f"{ENVIRONMENTS[0]} environments", first[0], ratio, "≤ 1", memory, first[1])


def measure(rule: str, parameters: str, environments: int) -> tuple[float, float] | str:
    """The median seconds of a step and the GiB that steps need beside the data; or why the rule refuses them."""
    tune_process()
    torch.manual_seed(0)
    model = MLP(WIDTH, 2, hidden_units=HIDDEN[parameters]).to(DEVICE)
    inputs = torch.randn(environments, EXAMPLES, WIDTH, device=DEVICE)
    targets = torch.randint(0, 2, (environments, EXAMPLES), device=DEVICE)
    gradients = StackedGradients(model, cross_entropy, RULES[rule])
    before, seconds = _memory("VmRSS"), []
    if DEVICE.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    try:
        for _ in range(WARMUP + REPEATS):
            start = time.perf_counter()
            gradients(inputs, targets)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except InputError as error:
        return str(error)
    return statistics.median(seconds[WARMUP:]), (_memory("VmHWM") - before) / 2**30


def _memory(kind: str) -> int:
    """Bytes of this process now (VmRSS) or at most (VmHWM), or those that PyTorch has on the GPU."""
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated() if kind == "VmRSS" else torch.cuda.max_memory_allocated()
    return int(Path("/proc/self/status").read_text().partition(f"{kind}:")[2].split()[0]) << 10


if __name__ == "__main__":
    print(json.dumps(measure(*json.loads(sys.argv[1]))))
