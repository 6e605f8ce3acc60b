"""On a GPU a step starts few operations, and reads nothing on the host; and gives what the way of a CPU gives.

The budgets are numbers of operations beside those of a plain forward and backward pass.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import Operations, of_host
from own_rules import OWN_RULES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, relu

from concord.aggregation import AGGREGATORS, RULES, AndMask, aggregator
from concord.aggregation.asynchronous import as_asynchronous
from concord.gradients import PerExampleGradients, StackedGradients, per_example, rows
from concord.models import MLP

ENVIRONMENTS, EXAMPLES = 8, 4
Step = Callable[[], object]


class Residual(nn.Module):
    """A ResNet-18 of few channels: 62 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        before, blocks = 4, []
        for width in (4, 5, 6, 7):
            blocks += [Block(before, width), Block(width, width)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(self.blocks(self.pool(self.stem(images))).mean((2, 3)))
        return logits


class Block(nn.Module):
    """Two convolutions, and a shortcut."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Sequential(nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Identity() if stride == 1 else shortcut

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of both."""
        return relu(self.second(self.first(inputs)) + self.shortcut(inputs))


def rule(name: str) -> Any:
    return aggregator(name, 0.5) if name in AGGREGATORS else RULES[name]()


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    size, made = ((32,), MLP(32, 10, 256, 3)) if name == "mlp" else ((3, 32, 32), Residual())
    return made, torch.rand(ENVIRONMENTS, EXAMPLES, *size)


def plain(model: nn.Module, inputs: Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        cross_entropy(model(inputs.flatten(0, 1)), TARGETS.flatten()).backward()

    return step


def counted(name: str, make: Callable[[nn.Module, Tensor], Step]) -> Operations:
    """The operations of the third step: the first ones choose a way, and verify it."""
    with as_asynchronous():
        step = make(*network(name))
        step(), step()
        with Operations() as operations:
            step()
    return operations


@pytest.fixture
def host_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a weighting makes of inner products is not counted: the host has them."""
    monkeypatch.setattr(rows, "weights_of", of_host(rows.weights_of))


TARGETS = torch.arange(ENVIRONMENTS * EXAMPLES).reshape(ENVIRONMENTS, EXAMPLES) % 10
PLAIN: dict[str, int] = {}
# Of the MLP and the residual network, where environments are stacked.
BUDGET = 40
# The reads for which a step waits: the flag of ``nonfinite="raise"``, and for a weighting the inner products, which
# show that, too.
WEIGHTINGS = {name for name, kind in RULES.items() if hasattr(kind, "weights")}


def beside_plain(name: str, make: Callable[[nn.Module, Tensor], Step], most: int) -> Operations:
    """Count a step, and require that it starts at most this number of operations more than a plain one."""
    if name not in PLAIN:
        PLAIN[name] = counted(name, plain).started.total()
    found = counted(name, make)
    more = found.started.total() - PLAIN[name]
    assert more <= most, f"{PLAIN[name]} operations and {more} more: {found.started.most_common()}"
    return found


@pytest.mark.usefixtures("host_weighs")
@pytest.mark.parametrize("model", ["mlp", "resnet"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_over_stacked_environments_starts_few_operations(name: str, model: str) -> None:
    def step(model: nn.Module, inputs: Tensor) -> Step:
        gradients = StackedGradients(model, cross_entropy, rule(name))
        return lambda: gradients((inputs, TARGETS))

    found = beside_plain(model, step, BUDGET)
    assert found.reads.total() <= 1


@pytest.mark.usefixtures("host_weighs")
@pytest.mark.parametrize("name", RULES)
def test_a_step_that_propagates_reads_nothing_on_the_host(name: str) -> None:
    def step(model: nn.Module, inputs: Tensor) -> Step:
        gradients = StackedGradients(model, cross_entropy, rule(name), nonfinite="propagate")
        return lambda: gradients((inputs, TARGETS))

    found = counted("mlp", step)
    assert dict(found.reads) == ({"cpu": 1} if name in WEIGHTINGS else {})


def test_the_and_mask_of_a_multilayer_perceptron_starts_at_most_60_operations() -> None:
    def step(model: nn.Module, inputs: Tensor) -> Step:
        gradients = StackedGradients(model, cross_entropy, AndMask(0.8))
        return lambda: gradients((inputs, TARGETS))

    assert counted("mlp", step).started.total() <= 60


# Where the sums of a rule come from: the budget for the AND-mask, and whether the model is the residual one.
PLACEMENTS: dict[str, tuple[str, int, Callable[[nn.Module], Any]]] = {
    "vmap": ("mlp", 46, lambda model: StackedGradients(model, cross_entropy, AndMask(0.8), vectorize=True)),
    "rescaled": ("mlp", 40, lambda model: StackedGradients(model, cross_entropy, AndMask(0.8), rescale=True)),
    "examples": ("mlp", 45, lambda model: PerExampleGradients(model, cross_entropy, AndMask(0.8))),
    "examples of images": ("resnet", 190, lambda model: PerExampleGradients(model, cross_entropy, AndMask(0.8))),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_placement_starts_few_operations(placement: str) -> None:
    name, most, source = PLACEMENTS[placement]

    def step(model: nn.Module, inputs: Tensor) -> Step:
        gradients = source(model)
        return lambda: gradients((inputs, TARGETS))

    assert beside_plain(name, step, most).reads.total() <= 1


def test_environments_one_by_one_each_cost_a_plain_pass_and_few_operations() -> None:
    def step(model: nn.Module, inputs: Tensor) -> Step:
        gradients = StackedGradients(model, cross_entropy, AndMask(0.8), vectorize=False)
        return lambda: gradients((inputs, TARGETS))

    found = beside_plain("mlp", step, 10_000)
    assert found.started.total() <= ENVIRONMENTS * (PLAIN["mlp"] + 8) + 16
    assert found.reads.total() <= 1


def test_examples_in_a_loop_of_ones_own_cost_few_operations() -> None:
    def step(model: nn.Module, inputs: Tensor) -> Step:
        examples, backward = per_example(model, AndMask(0.8)), plain(model, inputs)

        def whole() -> None:
            backward()
            examples.aggregate()

        return whole

    assert beside_plain("mlp", step, 36).reads.total() <= 1


def of_both_ways(
    make: Callable[[], nn.Module], source: Callable[[nn.Module], Any], batch: Any, steps: int = 2
) -> list[tuple[nn.Module, Any]]:
    """The model after steps in the way of a CPU, and of a GPU, and each one's last step."""
    found = []
    for way in (False, True):
        torch.manual_seed(0)
        model = make()
        with as_asynchronous() if way else torch.enable_grad():
            gradients = source(model)
            for _ in range(steps):
                last = gradients(batch)
        found.append((model, last))
    return found


def assert_same(found: list[tuple[nn.Module, Any]]) -> None:
    (here, expected), (there, step) = found
    for (name, parameter), other in zip(here.named_parameters(), there.parameters(), strict=True):
        # MGDA's update of 100 environments is 0, up to the rounding of their weights.
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-8, atol=1e-9, equal_nan=True, msg=name)
    for buffer, other in zip(here.buffers(), there.buffers(), strict=True):
        torch.testing.assert_close(other, buffer, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(step.kept_fraction, expected.kept_fraction)
    torch.testing.assert_close(step.losses, expected.losses, equal_nan=True)
    assert step.skipped == expected.skipped
    assert step.environments == expected.environments


class Uneven(nn.Module):
    """Parameters of several shapes: one that is used twice, some that are not used, in one or two dtypes."""

    def __init__(self, width: int, *, half: bool, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        self.first, self.norm = nn.Linear(3, width), nn.LayerNorm(width)
        self.shared, self.unused = nn.Linear(width, width, bias=False), nn.Linear(2, 1)
        self.last, self.scale = nn.Linear(width, 1), nn.Parameter(torch.tensor(1.5))
        self.double()
        if half:
            self.unused.float()

    def forward(self, inputs: Tensor) -> Tensor:
        """One number an example."""
        seen = self.shared(torch.tanh(self.norm(self.first(inputs))))
        outputs: Tensor = self.last(torch.tanh(self.shared(seen))).squeeze(-1)
        return outputs * self.scale if self.scaled else outputs


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([*RULES, *OWN_RULES]),
    environments=st.sampled_from([2, 4, 7, 7, 100]),
    width=st.integers(1, 6),
    vectorize=st.sampled_from(["pooled", True, False]),
    policy=st.sampled_from(["skip", "propagate"]),
    broken=st.booleans(),
    half=st.booleans(),
    chunked=st.booleans(),
    scaled=st.booleans(),
)
def test_the_way_of_a_gpu_gives_what_the_way_of_a_cpu_gives(
    name: str,
    environments: int,
    width: int,
    vectorize: Any,
    policy: Any,
    broken: bool,
    half: bool,
    chunked: bool,
    scaled: bool,
) -> None:
    if name == "krum":
        environments = max(environments, 5)
    generator = torch.Generator().manual_seed(width)
    inputs = torch.randn(environments, 3, 3, generator=generator, dtype=torch.float64)
    targets = inputs.sum(-1) + 0.5 * torch.randn(environments, 3, generator=generator)
    if broken:
        inputs[0] = torch.inf
    of_rule = OWN_RULES.get(name) or rule(name)
    limit = (
        4 * 8 * sum(each.numel() for each in Uneven(width, half=half, scaled=scaled).parameters()) if chunked else None
    )
    if chunked and not hasattr(of_rule, "finish"):
        limit = None
    options: dict[str, Any] = {"vectorize": vectorize, "nonfinite": policy, "memory_limit": limit}
    options["rescale"] = hasattr(of_rule, "finish")
    assert_same(
        of_both_ways(
            lambda: Uneven(width, half=half, scaled=scaled),
            lambda model: StackedGradients(model, mse_loss, of_rule, **options),
            (inputs, targets),
        )
    )
