"""Every gradient source writes ``parameter.grad`` with the parameter's strides, and refuses invalid input."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.aggregation import AndMask, Mean, TemporalAndMaskAdam, aggregate
from concord.errors import InputError
from concord.gradients import PerExampleGradients, StackedGradients, per_example
from concord.objectives import IRMv1, ObjectiveGradients, PenaltyWeight

ENVIRONMENTS, BATCH, CLASSES, STEPS = 4, 3, 3, 3


pytestmark = pytest.mark.usefixtures("seeded")


class Network(nn.Module):
    """Convolutions, one of them grouped, a norm with weights of its own, a linear layer: in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv2d(8, 6, 2, groups=2), nn.Tanh()
        )
        self.last = nn.Linear(6 * 3 * 3, CLASSES)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.features(images).flatten(1))


def contiguous(model: nn.Module) -> nn.Module:
    return model


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


def transposed(model: nn.Module) -> nn.Module:
    """Every weight lies in memory with its first two dimensions exchanged."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)
    return model


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(STEPS):
        yield torch.randn(ENVIRONMENTS, BATCH, 3, 4, 4).double(), torch.randint(CLASSES, (ENVIRONMENTS, BATCH))


def looped(model: nn.Module, rule: Any, environments: Iterator[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The rule's updates from one plain backward pass an environment, parameter by parameter."""
    gradients = [
        torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))
        for inputs, targets in environments
    ]
    return [aggregate(rule, torch.stack(stack)).value for stack in zip(*gradients, strict=True)]


def by_environment(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(inputs, targets, strict=True)


def by_example(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for each, target in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True):
        yield each[None], target[None]


RULE = AndMask(0.5)


def stacked(model: nn.Module, **options: Any) -> Callable[[Tensor, Tensor], object]:
    return StackedGradients(model, cross_entropy, RULE, **options)


def hooked_examples(model: nn.Module) -> Callable[[Tensor, Tensor], object]:
    examples = per_example(model, RULE)

    def step(inputs: Tensor, targets: Tensor) -> None:
        model.zero_grad()
        cross_entropy(model(inputs.flatten(0, 1)), targets.flatten()).backward()
        examples.aggregate()

    return step


def irm(model: nn.Module) -> Callable[[Tensor, Tensor], object]:
    names = [str(index) for index in range(ENVIRONMENTS)]
    source = ObjectiveGradients(model, IRMv1(cross_entropy, PenaltyWeight(0.0)), names)
    return lambda inputs, targets: source(inputs, targets, 0)


# Each source, what it takes for an environment, and the rule that it is to have applied.
SOURCES: dict[str, tuple[Callable[[nn.Module], Callable[[Tensor, Tensor], object]], Any, Any]] = {
    "vectorized": (lambda model: stacked(model, vectorize=True), by_environment, RULE),
    "pooled": (lambda model: stacked(model, vectorize="pooled"), by_environment, RULE),
    "in chunks": (lambda model: stacked(model, vectorize=True, memory_limit=1), by_environment, RULE),
    "one by one": (lambda model: stacked(model, vectorize=False), by_environment, RULE),
    "examples, hooked": (hooked_examples, by_example, RULE),
    "examples, contribution": (lambda model: PerExampleGradients(model, cross_entropy, RULE), by_example, RULE),
    "examples, loss": (
        lambda model: PerExampleGradients(model, cross_entropy, RULE, definition="loss"),
        by_example,
        RULE,
    ),
    "objective": (irm, by_environment, Mean()),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-2, foreach=False),
    "adam foreach": lambda parameters: torch.optim.Adam(parameters, 1e-2, foreach=True),
    "adam fused": lambda parameters: torch.optim.Adam(parameters, 1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-1, momentum=0.9, foreach=False),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, 1e-1, momentum=0.9, foreach=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, 1e-1, momentum=0.9, fused=True),
    "temporal": lambda parameters: TemporalAndMaskAdam(parameters, 1e-2, threshold=0.1),
    "temporal fused": lambda parameters: TemporalAndMaskAdam(parameters, 1e-2, threshold=0.1, fused=True),
}


LAYOUTS = [contiguous, channels_last, transposed]


@pytest.mark.parametrize(
    ("source", "layout", "optimizer"),
    [(source, layout, "adam fused") for source in SOURCES for layout in LAYOUTS]
    + [
        ("vectorized", layout, optimizer) for layout in LAYOUTS for optimizer in OPTIMIZERS if optimizer != "adam fused"
    ],
)
def test_training_does_not_depend_on_how_parameters_lie_in_memory(
    source: str, layout: Callable[[nn.Module], nn.Module], optimizer: str
) -> None:
    make, environments, rule = SOURCES[source]
    plain = Network()
    model = layout(copy.deepcopy(plain))
    gradients, data = make(model), list(batches())
    slow = OPTIMIZERS[optimizer.removesuffix(" fused").removesuffix(" foreach")](plain.parameters())
    tried = OPTIMIZERS[optimizer](model.parameters())
    for inputs, targets in data:
        for parameter, update in zip(
            plain.parameters(), looped(plain, rule, environments(inputs, targets)), strict=True
        ):
            parameter.grad = update
        slow.step()
        gradients(inputs, targets)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride(), name
        tried.step()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("fused", [False, True])
def test_temporal_and_mask_adam_resumes_in_another_memory_format(fused: bool) -> None:
    data = list(batches())
    plain = Network()
    reference = TemporalAndMaskAdam(plain.parameters(), 1e-2, threshold=0.1)
    model = channels_last(copy.deepcopy(plain))
    optimizer = TemporalAndMaskAdam(model.parameters(), 1e-2, threshold=0.1, fused=fused)
    for step, (inputs, targets) in enumerate(data):
        if step == 1:
            model.load_state_dict(plain.state_dict())
            optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
            optimizer.param_groups[0]["fused"] = fused
        for network, update in ((plain, reference), (model, optimizer)):
            for parameter in network.parameters():
                parameter.grad = None
            cross_entropy(network(inputs[0]), targets[0]).backward()
            update.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("fused", [False, True])
def test_temporal_and_mask_adam_leaves_gaps_between_components_alone(fused: bool) -> None:
    rows = torch.randn(4, 6)
    before = rows.clone()
    parameter, dense = nn.Parameter(rows[:, ::2]), nn.Parameter(rows[:, ::2].clone())
    for each in (parameter, dense):
        optimizer = TemporalAndMaskAdam([each], threshold=0.1, fused=fused)
        for _ in range(3):
            each.grad = torch.ones(4, 3)
            optimizer.step()
    assert torch.equal(parameter, dense)
    assert bool((rows[:, ::2] != before[:, ::2]).all())
    assert torch.equal(rows[:, 1::2], before[:, 1::2])


# What changes after a source was made


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(ENVIRONMENTS, BATCH, 5), torch.randint(2, (ENVIRONMENTS, BATCH))


SMALL: dict[str, Callable[[nn.Module], Callable[[Tensor, Tensor], object]]] = {
    name: SOURCES[name][0] for name in ("vectorized", "pooled", "one by one", "examples, hooked", "objective")
}


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def added(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.bias.requires_grad_(False), "frozen"),
        (lambda model: model.weight.requires_grad_(True), "unfrozen"),
        (assigned, "another one"),
        (added, "added"),
    ],
    ids=["frozen", "unfrozen", "assigned", "added"],
)
@pytest.mark.parametrize("source", SMALL)
def test_parameters_that_change_later_are_noticed(source: str, change: Callable[[nn.Module], None], said: str) -> None:
    model = nn.Linear(5, 2)
    model.weight.requires_grad_(said != "unfrozen")
    gradients = SMALL[source](model)
    gradients(*pair())
    change(model)
    with pytest.raises(InputError, match=said):
        gradients(*pair())
    SMALL[source](nn.Linear(5, 2))(*pair())


class Averaging(nn.Module):
    """Keeps an average in a buffer that every forward pass assigns anew, and a count that it writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.average = 0.5 * self.average + 0.5 * inputs.mean(0)
            self.count += 1
        return self.layer(inputs - self.average)


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1}, {"vectorize": False}])
def test_buffers_that_a_forward_pass_assigns_are_kept(options: dict[str, Any]) -> None:
    model = Averaging()
    gradients, expected = StackedGradients(model, cross_entropy, RULE, **options), torch.zeros(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            inputs, targets = pair()
            gradients(inputs, targets)
            expected = 0.5 * expected + 0.5 * inputs.mean((0, 1))
    torch.testing.assert_close(model.average, expected)
    assert not model.average.requires_grad
    assert int(model.count) == 2


@pytest.mark.parametrize("vectorize", [None, False])
def test_a_parameters_gradient_hook_sees_the_gradient_of_each_environment(vectorize: bool | None) -> None:
    inputs, targets = pair()
    model, plain = nn.Linear(5, 2), nn.Linear(5, 2)
    model.load_state_dict(plain.state_dict())
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-0.05, 0.05))
    gradients = StackedGradients(model, cross_entropy, RULE, vectorize=vectorize)
    if vectorize is None:
        with pytest.warns(UserWarning, match="the gradient hook of parameter weight has to see each of them"):
            gradients(inputs, targets)
    else:
        gradients(inputs, targets)
    clamped = [
        torch.autograd.grad(cross_entropy(plain(each), target), plain.weight)[0].clamp(-0.05, 0.05)
        for each, target in by_environment(inputs, targets)
    ]
    assert len(seen) == ENVIRONMENTS
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, aggregate(RULE, torch.stack(clamped)).value)


@pytest.mark.parametrize("source", ["vectorized", "one by one", "examples, hooked", "objective"])
def test_a_hook_after_accumulation_is_refused_since_it_would_not_run(source: str) -> None:
    model = nn.Linear(5, 2)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())
    with pytest.raises(InputError, match="parameter weight: its post-accumulate-grad hook cannot run"):
        SMALL[source](model)(*pair())


def test_a_gradient_hook_that_would_see_the_examples_sum_alone_is_refused() -> None:
    model = nn.Linear(5, 2)
    handle = model.weight.register_hook(lambda gradient: 2 * gradient)
    gradients = hooked_examples(model)
    with pytest.raises(InputError, match="parameter weight: its gradient hook would see the sum"):
        gradients(*pair())
    handle.remove()
    gradients(*pair())


class Hungry(nn.Linear):
    """Asks for more memory than any machine has when it sees more than one environment at once."""

    def forward(self, inputs: Tensor) -> Tensor:
        if torch._C._functorch.maybe_get_level(inputs) >= 0:
            torch.empty(1 << 50)
        return super().forward(inputs)


def test_running_out_of_memory_is_said_as_that() -> None:
    with pytest.warns(UserWarning, match=r"memory does not suffice for 4 at once \(give a smaller memory_limit\)"):
        StackedGradients(Hungry(5, 2), cross_entropy, RULE)(*pair())
