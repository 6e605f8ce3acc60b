"""An AND-mask step with every example as an environment, against a plain step and other per-example gradients.

The alternatives are timed in turn in one process. Memory is the peak of a separate process, minus the memory before the
model was made. Opacus (``pip install opacus``) is compared if it is installed.
"""

import importlib.util
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask, aggregate
from concord.benchmark import Row, interleaved
from concord.gradients import PerExampleGradients
from concord.models import MLP, FastResNet
from concord.training.process import tune_process

RULE = AndMask(threshold=0.2)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Setting:
    """A network and a batch."""

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    repeats: int

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        torch.manual_seed(0)
        inputs, targets = torch.rand(self.shape), torch.randint(0, 10, self.shape[:1])
        return inputs.to(DEVICE), targets.to(DEVICE)


def with_group_norm() -> nn.Module:
    """FastResNet with group norm in place of batch norm, which Opacus and vmap refuse."""
    model = FastResNet()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(32, child.num_features))
    return model


SETTINGS = {
    "resnet": Setting("FastResNet, 80 examples", FastResNet, (80, 3, 32, 32), 7),
    "group-norm": Setting("FastResNet with group norm, 80 examples", with_group_norm, (80, 3, 32, 32), 3),
    "mlp": Setting("3 × 256 MLP, 1024 examples", lambda: MLP(784, 10), (1024, 784), 60),
}


def step(kind: str, setting: Setting) -> Callable[[], None]:
    """A function that takes one training step of this kind."""
    inputs, targets = setting.batch()
    model = setting.network().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    parameters = list(model.parameters())

    def plain() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def one_by_one() -> None:
        losses = cross_entropy(model(inputs), targets, reduction="none")
        signs = [torch.zeros_like(parameter) for parameter in parameters]
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for loss in losses:
            for total, sign, gradient in zip(
                sums, signs, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True
            ):
                total += gradient
                sign += gradient.sign()
        for parameter, total, sign in zip(parameters, sums, signs, strict=True):
            parameter.grad = RULE.finish({"gradient": total, "sign": sign}, len(losses)).value
        optimizer.step()

    def stacked(gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = aggregate(RULE, gradient).value
        optimizer.step()

    if kind == "plain":
        return plain
    if kind == "a backward pass an example":
        return one_by_one
    if kind == "vmap of grad":
        names = [name for name, _ in model.named_parameters()]

        def loss_of_one(values: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(functional_call(model, values, (example[None],)), target[None])

        of_examples = vmap(grad(loss_of_one), (None, 0, 0))

        def by_vmap() -> None:
            values = {name: parameter.detach() for name, parameter in model.named_parameters()}
            found = of_examples(values, inputs, targets)
            stacked([found[name] for name in names])

        return by_vmap
    if kind == "Opacus":
        from opacus import GradSampleModule

        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False  # Opacus' hooks refuse inplace operations
        wrapped = GradSampleModule(model)

        def by_opacus() -> None:
            optimizer.zero_grad()
            cross_entropy(wrapped(inputs), targets).backward()
            stacked([parameter.grad_sample for parameter in parameters])  # type: ignore[attr-defined]
            for parameter in parameters:
                parameter.grad_sample = None  # type: ignore[attr-defined]

        return by_opacus
    gradients = PerExampleGradients(model, cross_entropy, RULE)

    def ours() -> None:
        gradients(inputs[None], targets[None])
        optimizer.step()

    return ours


def rows() -> Iterator[Row]:
    """Concord against a plain step, one backward pass for each example, vmap and Opacus, in time and memory."""
    tune_process()
    comparisons = [
        ("resnet", "plain", "≤ 1.6, memory ≤ 1.5" if DEVICE.type == "cpu" else "≤ 1.5"),
        ("resnet", "a backward pass an example", "< 1"),
        ("mlp", "plain", "≤ 1.4"),
        ("mlp", "vmap of grad", "< 1"),
        ("group-norm", "vmap of grad", "< 1"),
    ]
    if importlib.util.find_spec("opacus"):
        comparisons += [("mlp", "Opacus", "< 1"), ("group-norm", "Opacus", "< 1")]
    for name, other, target in comparisons:
        setting = SETTINGS[name]
        slow = other == "a backward pass an example"
        ours, theirs, ratio = interleaved(
            step("ours", setting),
            step(other, setting),
            repeats=1 if slow else setting.repeats,
            warmup=0 if slow else 2,
            synchronize=torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None,
        )
        yield Row(
            f"per-example AND-mask step, {setting.name}",
            ours,
            {"plain": "plain step"}.get(other, other),
            theirs,
            ratio,
            target,
            memory=memory("ours", name),
            reference_memory=memory(other, name),
        )


def memory(kind: str, name: str) -> float:
    """GiB at the peak of three steps."""
    with tempfile.NamedTemporaryFile() as result:
        subprocess.run([sys.executable, __file__, kind, name, result.name], check=True, stderr=subprocess.DEVNULL)
        return float(json.loads(Path(result.name).read_text())) / 2**30


def _peak() -> float:
    if DEVICE.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.exists():  # Linux' getrusage includes the parent process
        return 1024.0 * int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0])
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    tune_process()
    before = _peak()
    repeated = step(sys.argv[1], SETTINGS[sys.argv[2]])
    for _ in range(1 if sys.argv[1].startswith("a backward") else 3):
        repeated()
    Path(sys.argv[3]).write_text(json.dumps(_peak() - before))
