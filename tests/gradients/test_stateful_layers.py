"""Layers whose forward changes their own state: computed again for each example, they are as they were."""

import copy
import warnings
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask, GeometricMean, Rule, aggregate
from concord.errors import InputError
from concord.gradients import PerExampleGradients, per_example

EXAMPLES, WIDTH = 12, 24


def old_spectral_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(layer)


class Counted(nn.Linear):
    """Scales by the number of its calls so far, an attribute."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs) / self.calls


class CountedInBuffer(nn.Linear):
    """Scales by a buffer that it writes to in place."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs) / self.calls


class Queued(nn.Linear):
    """Takes its scales from a queue in turn."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scales = deque([0.5, 2.0, 1.0])

    def forward(self, inputs: Tensor) -> Tensor:
        self.scales.rotate()
        return super().forward(inputs) * self.scales[0]


class Late(nn.Linear):
    """Makes a tensor at its first call, and changes it in place at each."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.shift = torch.zeros(self.out_features, dtype=inputs.dtype)
        self.shift += 0.3
        return torch.tanh(super().forward(inputs) + self.shift)


class Branching(CountedInBuffer):
    """``vmap`` cannot take it, so its examples are computed one after the other."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.abs().max() < 1e9 else inputs.sign())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm, three power iterations": lambda: nn.utils.parametrizations.spectral_norm(
        nn.Linear(WIDTH, WIDTH), n_power_iterations=3
    ),
    "old spectral norm": lambda: old_spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "counted": lambda: Counted(WIDTH, WIDTH),
    "counted in a buffer": lambda: CountedInBuffer(WIDTH, WIDTH),
    "queued": lambda: Queued(WIDTH, WIDTH),
    "late": lambda: Late(WIDTH, WIDTH),
    "one after the other": lambda: Branching(WIDTH, WIDTH),
}


def model_with(layer: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(LAYERS[layer](), nn.ReLU(), nn.Linear(WIDTH, 3)).double()


def state(module: nn.Module) -> list[object]:
    plain = (int, float, deque, Tensor)
    found = [
        (name, list(value) if isinstance(value, deque) else value)
        for each in module.modules()
        for name, value in vars(each).items()
        if isinstance(value, plain) and name not in ("training", "weight")
    ]
    return [
        (name, value.tolist() if isinstance(value, Tensor) else value) for name, value in [*found, *buffers_of(module)]
    ]


def buffers_of(module: nn.Module) -> list[tuple[str, object]]:
    return [(name, buffer) for name, buffer in module.named_buffers()]


def expected(model: nn.Module, inputs: Tensor, targets: Tensor, rule: Rule) -> list[Tensor]:
    """The rule on the examples' gradients through one forward pass."""
    parameters = list(model.parameters())
    losses = cross_entropy(model(inputs), targets, reduction="none")
    each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return [aggregate(rule, torch.stack(of_one)).value for of_one in zip(*each, strict=True)]


@pytest.mark.parametrize("rule", [AndMask(0.4), GeometricMean(0.4)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_each_example_sees_the_state_that_the_batch_began_with(layer, rule):
    model = model_with(layer)
    slow, examples = copy.deepcopy(model), per_example(model, rule)
    for _ in range(3):  # the state changes from step to step
        inputs, targets = torch.randn(EXAMPLES, WIDTH, dtype=torch.float64), torch.randint(0, 3, (EXAMPLES,))
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        examples.aggregate()
        for parameter, wanted in zip(model.parameters(), expected(slow, inputs, targets, rule), strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12)
        assert state(model) == state(slow)  # one pass forward changed it, not the computation of the gradients


@pytest.mark.parametrize("layer", ["spectral norm", "counted", "queued"])
def test_two_microbatches_have_a_state_each(layer):
    model = model_with(layer)
    slow, examples = copy.deepcopy(model), per_example(model, AndMask(0.4), reduction="sum")
    batches = [(torch.randn(EXAMPLES, WIDTH, dtype=torch.float64), torch.randint(0, 3, (EXAMPLES,))) for _ in range(2)]
    each: list[list[Tensor]] = [[] for _ in slow.parameters()]
    for inputs, targets in batches:
        for loss in cross_entropy(slow(inputs), targets, reduction="none"):
            gradients = torch.autograd.grad(loss, list(slow.parameters()), retain_graph=True)
            for found, gradient in zip(each, gradients, strict=True):
                found.append(gradient)
    losses = [cross_entropy(model(inputs), targets, reduction="sum") for inputs, targets in batches]
    for loss in losses:
        loss.backward()
    examples.aggregate()
    for parameter, of_each in zip(model.parameters(), each, strict=True):
        wanted = aggregate(AndMask(0.4), torch.stack(of_each)).value
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12)


def test_the_training_source_takes_spectral_norm_exactly():
    model = model_with("spectral norm")
    slow = copy.deepcopy(model)
    gradients = PerExampleGradients(model, cross_entropy, AndMask(0.4))
    inputs, targets = torch.randn(2, 8, WIDTH, dtype=torch.float64), torch.randint(0, 3, (2, 8))
    gradients((inputs, targets))
    wanted = expected(slow, inputs.flatten(0, 1), targets.flatten(), AndMask(0.4))
    for parameter, value in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=1e-9, atol=1e-12)


def test_a_copy_of_the_model_keeps_no_state_for_the_original():
    model = model_with("spectral norm")
    examples = per_example(model, AndMask(0.4))
    copied = copy.deepcopy(model)
    copied(torch.randn(EXAMPLES, WIDTH, dtype=torch.float64)).sum().backward()
    assert not examples.hooks._states


class Noisy(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1 + 0.02 * torch.randn(self.out_features))


def test_a_small_random_change_is_found_at_the_first_step():
    torch.manual_seed(0)
    model = nn.Sequential(Noisy(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    examples = per_example(model, AndMask(0.4))
    cross_entropy(model(torch.randn(EXAMPLES, WIDTH)), torch.randint(0, 3, (EXAMPLES,))).backward()
    with pytest.raises(InputError, match="module 0: its gradient is not the sum of its examples'"):
        examples.aggregate()
