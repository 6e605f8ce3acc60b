"""Every example as an environment: sums from one backward pass against a float64 loop over examples."""

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import PeakMemory
from own_rules import assert_gradients
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from concord.aggregation import (
    GRADIENT,
    LOG_MAGNITUDE,
    SIGN,
    SQUARE,
    Aggregator,
    AndMask,
    GeometricMean,
    Mean,
    SandMask,
    Statistic,
    Statistics,
    Update,
    aggregate,
    sum_over_environments,
)
from concord.errors import InputError
from concord.gradients import NonFiniteGradientError, PerExample, PerExampleGradients, per_example
from concord.models import MLP, FastResNet

EXAMPLES = 7


@dataclass(frozen=True)
class EveryStatistic:
    """A rule that asks for every statistic that rules have; its update is their sums, to look at."""

    statistics: ClassVar[tuple[Statistic, ...]] = (
        GRADIENT,
        SIGN,
        SQUARE,
        LOG_MAGNITUDE,
        Statistic("clipped", lambda gradient: gradient.clamp(-0.01, 0.02)),
    )

    def finish(self, sums: Statistics, environments: int):
        raise AssertionError("its sums are looked at, and never finished")


@dataclass(frozen=True)
class Clipped:
    """The mean of clipped gradients, optionally only where at least half of the signs agree."""

    signs: bool = False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        clipped = Statistic("clipped", lambda gradient: gradient.clamp(-1e-3, 2e-3))
        return (GRADIENT, SIGN, clipped) if self.signs else (clipped,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        mean = sums["clipped"] / environments
        if self.signs:
            mean = mean + sums["gradient"] / environments * (sums["sign"].abs() >= 0.5 * environments)
        return Update(mean, torch.ones_like(mean))


@dataclass(frozen=True)
class MajorityVote:
    """signSGD: the sign that most examples have; the gradient is no statistic of it."""

    zone: float = 0.0

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        if not self.zone:
            return (SIGN,)
        return (Statistic("sign", lambda gradient: gradient.sign() * (gradient.abs() > self.zone), whole=1),)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["sign"].sign(), torch.ones(()).expand_as(sums["sign"]))


@dataclass(frozen=True)
class GradDrop:
    """Each component keeps one sign, drawn at random by how much of the gradient has it."""

    seed: int = 3
    statistics: ClassVar[tuple[Statistic, ...]] = (
        GRADIENT,
        Statistic("magnitude", torch.abs, "multiplicative", degree=1),
    )
    draws: ClassVar[tuple[str, ...]] = ("uniform",)

    def finish(self, sums: Statistics, environments: int) -> Update:
        positive = (1 + sums["gradient"] / sums["magnitude"].clamp(min=1e-300)) / 2 > sums["uniform"]
        kept = torch.where(positive, sums["magnitude"], -sums["magnitude"]) + sums["gradient"]
        return Update(kept / (2 * environments), positive.to(kept.dtype))


CLIPPED, EVERY_KIND = Clipped(), Clipped(signs=True)


def of_examples(model: nn.Module, inputs: Tensor, targets: Tensor, loss=cross_entropy) -> list[Tensor]:
    """The slow way: a backward pass for every example by itself; each parameter's are ``(examples, *shape)``."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    each = [
        torch.autograd.grad(loss(model(inputs[i : i + 1]), targets[i : i + 1]), parameters, materialize_grads=True)
        for i in range(len(inputs))
    ]
    return [torch.stack(of_one) for of_one in zip(*each, strict=True)]


def updates(rule: Aggregator, model: nn.Module, inputs: Tensor, targets: Tensor, loss=cross_entropy) -> list[Tensor]:
    """The rule's update of each parameter, the slow way."""
    return [aggregate(rule, gradients).value for gradients in of_examples(model, inputs, targets, loss)]


def stepped(examples: PerExample, model: nn.Module, inputs: Tensor, targets: Tensor, loss=cross_entropy):
    """A backward pass, and the rule on what it collected."""
    model.zero_grad()
    loss(model(inputs), targets).backward()
    return examples.aggregate()


def collected(model: nn.Module, rule: Aggregator, inputs: Tensor, targets: Tensor, loss=cross_entropy, **options):
    """The sums that hooks collect, with the gradient's from backward, for each parameter."""
    examples = PerExample(model, rule, **options)
    model.zero_grad()
    loss(model(inputs), targets).backward()
    assert examples.examples == len(inputs)
    sums = [examples.sums.part(index) for index in range(len(examples.sums.parameters))]
    for part, parameter in zip(sums, examples.sums.parameters.values(), strict=True):
        if parameter.grad is not None:
            part["gradient"].copy_(parameter.grad)
    result = [{name: total.clone() for name, total in part.items()} for part in sums]
    examples.remove()
    return result


class OverSequence(nn.Module):
    """Linear layers over a sequence of vectors, an embedding, and layer norm."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=padding)
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 5)
        self.rms = nn.RMSNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rms(torch.tanh(self.linear(self.norm(self.embedding(tokens))))).mean(1))


class Tied(nn.Module):
    """One weight used three times: as an embedding, twice by a layer that is called twice, and as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).mean(1)
        return self.head(torch.tanh(self.middle(torch.tanh(self.middle(hidden)))))


class Scale(nn.Module):
    """A module of the user's own, that no rule is known for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, inputs: Tensor, power: int = 1) -> Tensor:
        return inputs * self.scale**power


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        sequence = inputs if self.batch_first else inputs.transpose(0, 1)
        hidden, _ = self.attention(sequence, sequence, sequence)
        return self.head(hidden.mean(1 if self.batch_first else 0))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.recurrent(inputs)[0][:, -1])


class ClassToken(nn.Module):
    """A parameter of the model's own, beside its layers, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.cat([self.token.expand(len(inputs), -1, -1), inputs], 1) + self.positions
        return self.head(self.layer(hidden)[:, 0])


def vectors(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(EXAMPLES, *shape)


def tokens(count: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, count, (EXAMPLES, length))


def pooled(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: MLP(9, 3, 8, 2), vectors(9)),
    "one linear layer": (lambda: nn.Linear(4, 3), vectors(4)),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), vectors(4)),
    "sequence": (OverSequence, tokens(11, 5)),
    "padding": (lambda: OverSequence(padding=0), tokens(3, 5)),
    "tied": (Tied, tokens(5, 4)),
    "conv": (lambda: pooled(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True)), vectors(2, 6, 5)),
    "conv stride dilation": (lambda: pooled(nn.Conv2d(2, 4, (3, 2), stride=(2, 1), dilation=2)), vectors(2, 9, 8)),
    "conv groups": (lambda: pooled(nn.Conv2d(4, 6, 3, groups=2, padding="same")), vectors(4, 5, 5)),
    "conv depthwise": (lambda: pooled(nn.Conv2d(4, 4, 3, groups=4)), vectors(4, 5, 5)),
    "conv circular": (lambda: pooled(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")), vectors(2, 5, 5)),
    "conv 1d": (lambda: pooled(nn.Conv1d(2, 3, 3, padding=2)), vectors(2, 7)),
    "conv 3d": (lambda: pooled(nn.Conv3d(2, 3, 2)), vectors(2, 3, 4, 3)),
    "conv 1x1 on one pixel": (lambda: pooled(nn.Conv2d(3, 4, 1)), vectors(3, 1, 1)),
    "group norm": (lambda: pooled(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), vectors(2, 5, 5)),
    "batch norm, eval": (lambda: pooled(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).eval(), vectors(2, 5, 5)),
    "transposed conv (general way)": (lambda: pooled(nn.ConvTranspose2d(2, 3, 3)), vectors(2, 4, 4)),
    "own module (general way)": (lambda: nn.Sequential(nn.Linear(4, 6), Scale(6), nn.Linear(6, 3)), vectors(4)),
    "prelu (general way)": (lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 3)), vectors(4)),
    "attention": (lambda: Attention(batch_first=True), vectors(5, 6)),
    "attention, sequence first": (lambda: Attention(batch_first=False), vectors(5, 6)),
    "gru": (lambda: Recurrent(nn.GRU), vectors(5, 4)),
    "lstm": (lambda: Recurrent(nn.LSTM), vectors(5, 4)),
    "class token": (ClassToken, vectors(4, 6)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)),
        vectors(4),
    ),
    "frozen layer": (lambda: frozen(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))), vectors(4)),
    "checkpointed": (lambda: Checkpointed(), vectors(4)),
    "in place after a sequence": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3)),
        vectors(3, 5),
    ),
    "in place after attention": (lambda: InPlaceAfterAttention(), vectors(5, 6)),
    "old weight norm": (lambda: old_weight_norm(), vectors(4)),
    "keyword arguments": (lambda: Keywords(), vectors(2, 5, 5)),
    "a layer of a derived class before batch norm": (
        lambda: nn.Sequential(Derived(4, 6), nn.BatchNorm1d(6).eval(), nn.Tanh(), nn.Linear(6, 3)),
        vectors(4),
    ),
}


class InPlaceAfterAttention(Attention):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.attention(inputs, inputs, inputs)
        hidden += inputs
        return self.head(hidden.mean(1))

    def __init__(self) -> None:
        super().__init__(batch_first=True)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(27, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(input=self.conv(input=image).flatten(1))


class Derived(nn.Linear):
    pass


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))


def frozen(model: nn.Sequential) -> nn.Module:
    model[0].requires_grad_(False)
    return model


class Checkpointed(nn.Module):
    """Activations are computed again during backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.body, inputs, use_reentrant=False))


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    inputs = draw()
    model = make()
    with torch.no_grad():
        outputs = model(inputs)
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    return model.to(dtype), inputs, torch.randint(0, outputs.shape[1], (len(inputs),))


@pytest.mark.parametrize("name", MODELS)
def test_the_sums_are_those_of_a_loop_over_examples(name):
    model, inputs, targets = made(name)
    for own, gradients in zip(
        collected(model, EveryStatistic(), inputs, targets), of_examples(model, inputs, targets), strict=True
    ):
        # A gradient that is nothing but rounding has no sign worth comparing: such is a key's bias under attention.
        gradients = torch.where(gradients.abs() < 1e-15, 0, gradients)
        expected = {each.name: each.of(gradients).sum(0) for each in EveryStatistic.statistics}
        for statistic in ("gradient", "square"):
            torch.testing.assert_close(own[statistic], expected[statistic], rtol=1e-9, atol=1e-12)
        real = gradients.abs().amin(0) > 1e-14
        torch.testing.assert_close(own["sign"][real], expected["sign"][real], rtol=0, atol=0)
        torch.testing.assert_close(own["log_magnitude"][real], expected["log_magnitude"][real], rtol=1e-7, atol=1e-7)
        zero = (gradients == 0).all(0)
        assert not own["square"][zero].gt(1e-24).any()


@pytest.mark.parametrize("name", ["mlp", "sequence", "conv", "conv groups", "tied", "class token", "attention", "lstm"])
def test_in_float32_signs_differ_only_where_a_gradient_is_rounding(name):
    model, inputs, targets = made(name, torch.float32)
    double = copy.deepcopy(model).double()
    exact = of_examples(double, inputs.double() if inputs.is_floating_point() else inputs, targets)
    for own, gradients in zip(collected(model, AndMask(), inputs, targets), exact, strict=True):
        clear = ((gradients.abs() > 1e-6 * gradients.abs().max()) | (gradients == 0)).all(0)
        assert bool(clear.any()) or gradients.abs().max() < 1e-6
        torch.testing.assert_close(own["sign"][clear].double(), gradients.sign().sum(0)[clear], rtol=0, atol=0)


@pytest.mark.parametrize("rule", [Mean(), AndMask(0.4), GeometricMean(0.4), SandMask(0.2)], ids=str)
def test_a_plain_loop_ends_with_the_rule_of_stacked_gradients(rule):
    model, inputs, targets = made("mlp")
    expected = updates(rule, model, inputs, targets)
    examples = per_example(model, rule)
    finished = stepped(examples, model, inputs, targets)
    assert finished.environments == EXAMPLES
    assert finished.kept_fraction.shape == (len(expected),)
    assert_gradients(model, expected)


@pytest.mark.parametrize("name", MODELS)
def test_later_steps_which_are_not_verified_any_more_are_as_exact(name):
    """From the second step on convolutions hand their weights' gradients to backward."""
    model, inputs, targets = made(name)
    examples = per_example(model, SandMask(0.1))
    for _ in range(2):
        stepped(examples, model, inputs, targets)
    examples.remove()
    expected = updates(SandMask(0.1), model, inputs, targets)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = torch.cat([value.flatten() for value in expected]).norm()
    for parameter, value in zip(trainable, expected, strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=1e-6, atol=1e-9 * float(whole))


def test_rescaling_divides_a_layer_by_what_was_kept_of_it():
    model, inputs, targets = made("mlp")
    plain, rescaled = copy.deepcopy(model), copy.deepcopy(model)
    for network, rescale in ((plain, False), (rescaled, True)):
        examples = per_example(network, AndMask(0.4), rescale=rescale)
        kept = stepped(examples, network, inputs, targets).kept_fraction
    for ours, theirs, fraction in zip(rescaled.parameters(), plain.parameters(), kept, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad / (fraction.double() + 1e-10), rtol=1e-6, atol=0)


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=4), reduction=st.sampled_from(["mean", "sum"]))
def test_microbatches_of_any_sizes_make_the_same_step_as_one_batch(parts, reduction):
    count = sum(parts)
    if count < 2:
        return
    torch.manual_seed(1)
    model, inputs, targets = MLP(4, 3, 8, 1).double(), torch.randn(count, 4).double(), torch.randint(0, 3, (count,))
    expected = updates(AndMask(0.5), model, inputs, targets)
    examples = per_example(model, AndMask(0.5), reduction=reduction)
    for batch, labels in zip(inputs.split(parts), targets.split(parts), strict=True):
        cross_entropy(model(batch), labels, reduction=reduction).backward()
    assert examples.aggregate().environments == count
    assert_gradients(model, expected)


def test_two_forward_passes_before_one_backward_pass_are_one_batch():
    model, inputs, targets = made("mlp")
    expected = updates(AndMask(0.4), model, inputs, targets)
    examples = per_example(model, AndMask(0.4), reduction="sum")
    first, second = slice(0, 3), slice(3, EXAMPLES)
    losses = [cross_entropy(model(inputs[part]), targets[part], reduction="sum") for part in (first, second)]
    sum(losses).backward()
    assert examples.aggregate().environments == EXAMPLES
    assert_gradients(model, expected)


def layer_by_layer(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda inputs: functools.reduce(lambda hidden, layer: layer(hidden), model, inputs)


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize(
    ("name", "way"),
    [("mlp", layer_by_layer), pytest.param("mlp", compiled, marks=pytest.mark.slow), ("conv", compiled)],
)
def test_a_model_may_be_compiled_or_called_layer_by_layer(name, way):
    model, inputs, targets = made(name)
    expected = updates(AndMask(0.4), model, inputs, targets)
    examples = per_example(model, AndMask(0.4))
    cross_entropy(way(model)(inputs), targets).backward()
    examples.aggregate()
    assert_gradients(model, expected)


def test_removed_hooks_leave_the_model_as_it_was():
    model, inputs, targets = made("conv")
    cross_entropy(model(inputs), targets).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    with per_example(model, AndMask(0.4)):
        pass
    model.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    assert_gradients(model, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["conv", "tied"])
def test_a_copy_of_the_model_is_an_ordinary_model(name):
    model, inputs, targets = made(name)
    plain = copy.deepcopy(model)
    examples = per_example(model, AndMask(0.4))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # a copy that used the model's own weights would show it
    for network in (plain, other):
        cross_entropy(network(inputs), targets).backward()
    assert examples.examples == 0
    assert_gradients(other, [parameter.grad for parameter in plain.parameters()], rtol=0, atol=0)


def batch_norm_model() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    return model, torch.randn(EXAMPLES, 2, 5, 5).double(), torch.randint(0, 3, (EXAMPLES,))


def of_losses(losses: Tensor, model: nn.Module) -> list[Tensor]:
    """The gradients of the examples' losses, from one forward pass; each parameter's are ``(examples, *shape)``."""
    each = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    return [torch.stack(of_one) for of_one in zip(*each, strict=True)]


def by_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Each example's own loss, differentiated through what the examples share: statistics, or one dropout mask."""
    return of_losses(cross_entropy(model(inputs), targets, reduction="none"), model)


def by_contribution(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """What flows through each example's activations: every layer's output gradient, restricted to one example."""
    activations: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(module, arguments, output):
        output.retain_grad()
        activations.append((module, arguments[0].detach(), output))

    handles = [module.register_forward_hook(keep) for module in model if list(module.parameters(recurse=False))]
    (cross_entropy(model(inputs), targets) * len(inputs)).backward()
    for handle in handles:
        handle.remove()
    gradients = []
    for module, given_, output in activations:
        again = module(given_)  # batch norm with the same statistics, those of the whole batch
        for parameter in module.parameters(recurse=False):
            each = []
            for example in range(len(inputs)):
                restricted = torch.zeros_like(output)
                restricted[example] = output.grad[example]
                each.append(torch.autograd.grad(again, parameter, restricted, retain_graph=True)[0])
            gradients.append(torch.stack(each))
    return gradients


@pytest.mark.parametrize(("definition", "slow"), [("contribution", by_contribution), ("loss", by_loss)])
def test_under_batch_norm_both_definitions_are_what_they_say(definition, slow):
    model, inputs, targets = batch_norm_model()
    expected = [aggregate(AndMask(0.6), gradients).value for gradients in slow(copy.deepcopy(model), inputs, targets)]
    gradients = PerExampleGradients(model, cross_entropy, AndMask(0.6), definition=definition)
    gradients(inputs[None], targets[None])
    assert_gradients(model, expected, rtol=1e-9, atol=1e-12)


def test_under_batch_norm_both_definitions_sum_to_the_batch_gradient():
    model, inputs, targets = batch_norm_model()
    ours, theirs = by_loss(model, inputs, targets), by_contribution(copy.deepcopy(model), inputs, targets)
    model.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    for index, parameter in enumerate(model.parameters()):
        for gradients in (ours[index], theirs[index]):
            torch.testing.assert_close(gradients.mean(0), parameter.grad, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(ours[0], theirs[0], rtol=0.1)


def test_batch_norm_counts_the_batch_once():
    for definition in ("contribution", "loss"):
        model, inputs, targets = batch_norm_model()
        plain = copy.deepcopy(model)
        plain(inputs)
        PerExampleGradients(model, cross_entropy, AndMask(0.6), definition=definition)(inputs[None], targets[None])
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)


def test_fast_resnet_has_the_papers_number_of_parameters():
    model = FastResNet(channels=3, classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_573_120
    assert model(torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)).shape == (2, 10)


def test_fast_resnets_sums_are_those_of_its_contributions():
    torch.manual_seed(0)
    model = FastResNet(3, 10).double()
    inputs, targets = torch.rand(3, 3, 16, 16).double(), torch.randint(0, 10, (3,))
    sums = collected(model, AndMask(), inputs, targets)
    # The classifier and the convolution before it, whose gradients a short way leads to.
    activations: list[Tensor] = []
    handle = model.classifier.register_forward_hook(lambda module, given_, output: activations.append(given_[0]))
    logits = model(inputs)
    handle.remove()
    logit_gradients = (logits.softmax(1) - functional.one_hot(targets, 10)) * 0.125
    expected = torch.einsum("bi,bj->bij", logit_gradients, activations[0])
    assert torch.equal(sums[-1]["sign"], expected.sign().sum(0))
    torch.testing.assert_close(sums[-1]["gradient"], expected.mean(0) * len(inputs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("outputs", [1, 2])
def test_signs_of_few_outputs_and_sparse_inputs_are_counted_exactly(outputs):
    """PyTorch's products of bytes are wrong for a single row on CPUs that have instructions for them."""
    model = nn.Linear(5, outputs, bias=False)
    inputs = torch.cat([torch.eye(4), torch.full((4, 1), 0.1)], 1)
    targets = torch.full((4, outputs), 9.0)
    gradients = of_examples(model, inputs, targets, functional.mse_loss)
    PerExampleGradients(model, functional.mse_loss, AndMask(1.0))(inputs[None], targets[None])
    assert torch.count_nonzero(model.weight.grad) == outputs
    torch.testing.assert_close(model.weight.grad, aggregate(AndMask(1.0), gradients[0]).value)


def test_under_autocast_signs_are_those_of_the_products_that_were_computed():
    model, inputs, targets = made("conv", torch.float32)
    exact = [aggregate(AndMask(0.6), gradients) for gradients in of_examples(model, inputs, targets)]
    examples = per_example(model, AndMask(0.6))
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(inputs).float(), targets)
    loss.backward()
    examples.aggregate()
    for parameter, update in zip(model.parameters(), exact, strict=True):
        agreement = ((parameter.grad != 0) == (update.value != 0)).float().mean()
        assert agreement > 0.9
        assert (parameter.grad - update.value).norm() < 0.3 * update.value.norm() + 1e-6


def test_autocast_of_the_gradient_source_is_the_same_as_around_the_model():
    model, inputs, targets = made("conv", torch.float32)
    other = copy.deepcopy(model)
    PerExampleGradients(model, cross_entropy, AndMask(0.6), autocast=torch.bfloat16)(inputs[None], targets[None])
    examples = per_example(other, AndMask(0.6))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = other(inputs)
    cross_entropy(outputs.float(), targets).backward()
    examples.aggregate()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, theirs.grad)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, inputs):
        return self.attention(inputs, inputs, inputs)[0]


class _Recurrent(nn.LSTM):
    def forward(self, inputs):
        return super().forward(inputs)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.ConvTranspose1d(3, 3, 3, padding=1),
        nn.PReLU,
        _Attention,
        lambda: _Recurrent(6, 6, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    ],
    ids=["transposed", "prelu", "attention", "lstm", "weight norm"],
)
def test_layers_without_a_formula_are_differentiated_in_the_precision_of_their_pass(layer, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), layer(), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
    exact, inputs, targets = copy.deepcopy(model), torch.randn(8, 3, 6), torch.arange(8) % 3
    PerExampleGradients(model, cross_entropy, AndMask(0.0), autocast=dtype)(inputs[None], targets[None])
    PerExampleGradients(exact, cross_entropy, AndMask(0.0))(inputs[None], targets[None])
    for half, full in zip(model.parameters(), exact.parameters(), strict=True):
        assert half.grad.dtype == torch.float32
        assert (half.grad - full.grad).norm() < 0.05 * full.grad.norm() + 1e-4


@pytest.mark.parametrize("rule", [AndMask(0.4), GeometricMean(0.4), SandMask(0.2)], ids=str)
def test_a_scaled_loss_makes_a_scaled_update_under_the_same_mask(rule):
    model, inputs, targets = made("mlp")
    results = []
    for scale in (1.0, 1024.0):
        with per_example(model, rule) as examples:
            model.zero_grad()
            (cross_entropy(model(inputs), targets) * scale).backward()
            examples.aggregate(scale=scale)
            results.append([parameter.grad / scale for parameter in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_memory_and_blocks_do_not_change_the_sums():
    model, inputs, targets = made("conv groups")
    reference = collected(model, EveryStatistic(), inputs, targets)
    tiny = collected(model, EveryStatistic(), inputs, targets, memory_limit=1)
    for ours, theirs in zip(reference, tiny, strict=True):
        for statistic in ours:
            torch.testing.assert_close(ours[statistic], theirs[statistic])


# What all examples share


class Positions(nn.Module):
    """Tokens and their positions, which all examples share, in the ways that models write it."""

    def __init__(self, use: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.tokens, self.positions, self.head = nn.Embedding(9, 6), nn.Embedding(8, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(tokens) + self.use(self.positions, tokens)).mean(1))


def numbers(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1])


SHARED: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "a line of positions": lambda table, tokens: table(numbers(tokens)),
    "a row of positions": lambda table, tokens: table(numbers(tokens)[None]),
    "a row, then squeezed": lambda table, tokens: table(numbers(tokens)[None]).squeeze(0),
    "expanded positions": lambda table, tokens: table(numbers(tokens)[None]).expand(len(tokens), -1, -1),
    "positions of the batch": lambda table, tokens: table(numbers(tokens).expand(len(tokens), -1)),
    "a line, activated": lambda table, tokens: torch.relu(table(numbers(tokens))),
    "zeros of the batch": lambda table, tokens: table(torch.zeros_like(tokens)),
}


@pytest.mark.parametrize("length", [4, EXAMPLES])
@pytest.mark.parametrize("use", SHARED)
def test_shared_inputs_have_gradients_of_each_example(use, length):
    torch.manual_seed(0)
    model = Positions(SHARED[use]).double()
    data, targets = torch.randint(0, 9, (EXAMPLES, length)), torch.randint(0, 3, (EXAMPLES,))
    expected = updates(CLIPPED, model, data, targets)
    examples = per_example(model, CLIPPED)
    for _ in range(3):
        stepped(examples, model, data, targets)
    assert_gradients(model, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("length", [4, EXAMPLES])
@pytest.mark.parametrize(
    "use",
    [
        lambda table, tokens: table(numbers(tokens)[None])[0],
        lambda table, tokens: table(numbers(tokens)).unsqueeze(0),
        lambda table, tokens: functional.dropout(table(numbers(tokens)[None]), 0.5),
        lambda table, tokens: table(numbers(tokens)[None]).repeat(len(tokens), 1, 1),
    ],
    ids=["one example's", "another dimension", "random", "repeated"],
)
def test_shared_inputs_whose_use_cannot_be_followed_are_refused(use, length):
    model = Positions(use)
    per_example(model, AndMask(0.4))
    with pytest.raises(InputError, match="module positions: its output is the same for all examples, and"):
        model(torch.randint(0, 9, (EXAMPLES, length)))


@pytest.mark.parametrize("length", [5, 7])
def test_a_module_that_is_not_applied_to_each_example_is_named(length):
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.make, self.head = nn.Parameter(torch.randn(length, 4)), nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head((inputs + self.make(self.codes)).mean(1))

    model = Codes()
    per_example(model, AndMask(0.4))
    with pytest.raises(InputError, match=rf"module make: its output has shape \({length}, 6\)"):
        cross_entropy(model(torch.randn(7, length, 6)), torch.randint(0, 3, (7,))).backward()


def test_positions_of_a_part_that_is_called_by_itself_are_refused():
    model = Positions(SHARED["a line of positions"])
    per_example(model, AndMask(0.4))
    model.tokens(torch.randint(0, 9, (7, 7)))
    with pytest.raises(InputError, match="module positions: its input counts 0, 1, 2"):
        model.positions(torch.arange(7))


def test_one_token_an_example_is_no_line_of_positions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for inputs in (torch.arange(EXAMPLES), torch.randint(0, 9, (EXAMPLES,))):
        targets = torch.randint(0, 3, (EXAMPLES,))
        gradients = PerExampleGradients(model, cross_entropy, CLIPPED)
        gradients(inputs[None], targets[None])
        gradients.remove()
        expected = updates(CLIPPED, model, inputs, targets)
        assert_gradients(model, expected)


@pytest.mark.parametrize("length", [3, EXAMPLES])
@pytest.mark.parametrize("first", ["tokens", "row", "line"])
def test_inputs_given_by_keyword_come_in_any_order(first, length):
    class Given(Positions):
        def forward(self, tokens: Tensor, row: Tensor, line: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tokens(tokens) + self.positions(row) + self.positions(line)).mean(1))

    torch.manual_seed(0)
    model = Given(SHARED["a line of positions"]).double()
    plain = copy.deepcopy(model)
    line, data = torch.arange(length), torch.randint(0, 9, (EXAMPLES, length))
    targets = torch.randint(0, 3, (EXAMPLES,))
    of_all = {"tokens": data, "row": line[None], "line": line}
    given = {first: of_all[first], **of_all}
    each = of_losses(cross_entropy(plain(**given), targets, reduction="none"), plain)
    examples = per_example(model, CLIPPED)
    cross_entropy(model(**given), targets).backward()
    assert examples.aggregate().environments == EXAMPLES
    assert_gradients(model, [aggregate(CLIPPED, gradients).value for gradients in each])


# Rules of other kinds


def aggregated(rule: Aggregator, gradients: list[Tensor], step: int) -> list[Tensor]:
    """The rule on all parameters as one vector, so that draws are numbered over all of them."""
    whole = aggregate(rule, torch.cat([each.flatten(1) for each in gradients], 1), step).value
    parts = whole.split([each[0].numel() for each in gradients])
    return [part.reshape(each.shape[1:]) for part, each in zip(parts, gradients, strict=True)]


@pytest.mark.parametrize("rule", [MajorityVote(), MajorityVote(1e-3), GradDrop(), CLIPPED], ids=str)
@pytest.mark.parametrize("name", ["mlp", "conv", "sequence", "tied", "own module (general way)"])
def test_a_rule_may_do_without_the_gradient_or_draw_at_random(name, rule):
    model, inputs, targets = made(name)
    exact = of_examples(model, inputs, targets)
    examples = per_example(model, rule)
    for step in range(2):
        stepped(examples, model, inputs, targets)
        assert_gradients(model, aggregated(rule, exact, step))
    examples.remove()
    PerExampleGradients(model, cross_entropy, rule)(inputs[None], targets[None], step=5)
    assert_gradients(model, aggregated(rule, exact, 5))


@pytest.mark.parametrize("rule", [CLIPPED, MajorityVote(1e-3), GradDrop(), AndMask(0.4)], ids=str)
def test_a_scaler_scales_the_update_and_nothing_that_the_rule_sees(rule):
    model, inputs, targets = made("mlp")
    expected = aggregated(rule, of_examples(model, inputs, targets), 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    PerExampleGradients(model, cross_entropy, rule, scaler=scaler)(inputs[None], targets[None])
    assert_gradients(model, [1024 * value for value in expected])


@pytest.mark.parametrize("rule", [CLIPPED, MajorityVote(), AndMask(0.4)], ids=str)
def test_an_overflow_lowers_the_scale_and_takes_no_step(rule):
    model, inputs, targets = made("mlp", torch.float32)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients = PerExampleGradients(model, cross_entropy, rule, scaler=scaler)
    inputs[2, 0] = float("inf")
    gradients(inputs[None], targets[None])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


# Models of transformers


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 12, "max_position_embeddings": 8, "num_labels": 3, "pad_token_id": 0}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**small, **still))
    if kind == "distilbert":
        sizes = {"vocab_size": 19, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "num_labels": 3}
        still = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
        return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**sizes, **still))
    if kind == "gpt2":
        sizes = {"vocab_size": 19, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "bos_token_id": 1}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 1}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still))
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=1))
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.ViTConfig(**sizes, **still, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def transformer_risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
    """In the model's own precision, which the models' own losses are not; of a language model, of the last token."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return cross_entropy(logits if logits.ndim == 2 else logits[:, -1], batch["labels"])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("length", [4, EXAMPLES])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "llama", "vit"])
def test_models_of_transformers_are_taken_as_they_come(kind, length, checkpointing):
    torch.manual_seed(0)
    model = transformer(kind).double().train()
    if kind == "vit":
        batch = {"pixel_values": torch.randn(EXAMPLES, 3, 8, 8).double()}
    else:
        mask = torch.ones(EXAMPLES, length, dtype=torch.long)
        mask[1, 0] = 0
        batch = {"attention_mask": mask, "input_ids": torch.randint(1, 19, (EXAMPLES, length))}
    batch["labels"] = torch.randint(0, 3, (EXAMPLES,))
    plain = copy.deepcopy(model)
    parameters = list(plain.parameters())
    each = [
        torch.autograd.grad(
            transformer_risk(plain, {name: value[at : at + 1] for name, value in batch.items()}, 0),
            parameters,
            materialize_grads=True,
        )
        for at in range(EXAMPLES)
    ]
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients = PerExampleGradients(model, transformer_risk, EVERY_KIND)
    for step in range(2):
        gradients({name: value[None] for name, value in batch.items()}, step=step)
    # Llama's norm computes in float32 whatever its input; nothing's sign is compared where rounding is all there is.
    rounding = 1e-5 if kind == "llama" else 1e-12
    for parameter, of_each in zip(model.parameters(), zip(*each, strict=True), strict=True):
        stacked = torch.stack(of_each)
        clear = ((stacked.abs() > rounding) | (stacked == 0)).all(0)
        expected = aggregate(EVERY_KIND, stacked).value
        torch.testing.assert_close(parameter.grad[clear], expected[clear], rtol=1e-9, atol=rounding / 10)


class Dropping(Scale):
    def forward(self, inputs: Tensor, power: int = 1) -> Tensor:
        return functional.dropout(super().forward(inputs), 0.5, self.training)


class Mixing(Scale):
    def forward(self, inputs: Tensor, power: int = 1) -> Tensor:
        return super().forward(inputs) - super().forward(inputs).mean(0)


@pytest.mark.parametrize("kind", [Dropping, Mixing])
def test_an_own_module_that_draws_at_random_or_mixes_examples_is_refused(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), kind(6), nn.Linear(6, 3))
    examples = per_example(model, AndMask(0.4))
    cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
    with pytest.raises(InputError, match="module 1: its gradient is not the sum of its examples'"):
        examples.aggregate()


def test_an_input_that_was_written_to_is_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=True), nn.Linear(4, 3))
    model[1].weight.requires_grad_(False)  # then autograd itself does not need the input
    per_example(model, AndMask(0.4))
    inputs = torch.randn(5, 4)
    hidden = model[0](inputs)
    outputs = model[1](hidden)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(InputError, match="module 1: its input was written to in place"):
        cross_entropy(outputs, torch.randint(0, 3, (5,))).backward()


class HeadElsewhere(nn.Module):
    """The output layer uses the embedding's weight without calling the embedding's module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(5, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.middle(self.embedding(tokens).mean(1))) @ self.embedding.weight.T


class WeightElsewhere(nn.Module):
    """The head sees the first layer's weight without that layer's module."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.head(functional.linear(hidden, self.first.weight))


@pytest.mark.parametrize(("scale", "autocast", "steps"), [(1.0, False, 1), (1.0, True, 1), (0.0, False, 2)])
def test_neither_bfloat16_nor_a_head_that_begins_at_0_hides_a_weight_that_is_used_elsewhere(scale, autocast, steps):
    torch.manual_seed(0)
    model = WeightElsewhere(scale)
    examples = per_example(model, AndMask(0.3))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(torch.randn(16, 4))
        cross_entropy(outputs.float(), torch.randint(0, 3, (16,))).backward()
        examples.aggregate()
        optimizer.step()

    for _ in range(steps - 1):
        step()
    with pytest.raises(InputError, match="module first: its gradient is not the sum of its examples'"):
        step()


def test_a_first_step_that_overflows_hides_no_weight_that_is_used_elsewhere():
    torch.manual_seed(0)
    model = WeightElsewhere(1.0)
    examples = per_example(model, AndMask(0.3), nonfinite="propagate")
    for inputs in (torch.full((16, 4), torch.inf), torch.randn(16, 4)):
        model.zero_grad()
        cross_entropy(model(inputs), torch.randint(0, 3, (16,))).backward()
        if bool(inputs.isfinite().all()):
            with pytest.raises(InputError, match="module first: its gradient is not the sum of its examples'"):
                examples.aggregate()
        else:
            examples.aggregate()


@pytest.mark.parametrize("weight", [1e-4, 1e-2])
def test_a_penalty_on_the_weights_in_the_loss_is_refused(weight):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    examples = per_example(model, AndMask(0.4))
    penalty = sum(each.square().sum() for each in model.parameters())
    (cross_entropy(model(torch.randn(64, 20)), torch.randint(0, 3, (64,))) + weight * penalty).backward()
    with pytest.raises(InputError, match="as by a penalty on weights in the loss"):
        examples.aggregate()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(functional.linear(inputs, self.first.weight, self.first.bias)))


class Reentrant(Checkpointed):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.body, inputs.requires_grad_(), use_reentrant=True))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (HeadElsewhere, "module embedding: its gradient is not the sum of its examples' gradients"),
        (Functional, "parameter first.weight: it has a gradient, but its module was not called"),
        (Reentrant, r"parameter body.0.weight: it has a gradient, but .*take use_reentrant=False"),
    ],
)
def test_parameters_whose_examples_cannot_be_seen_are_refused(kind, said):
    torch.manual_seed(0)
    model = kind()
    inputs = torch.randint(0, 5, (8, 4)) if kind is HeadElsewhere else torch.randn(8, 4)
    examples = per_example(model, AndMask(0.4))
    cross_entropy(model(inputs), torch.randint(0, 3, (8,))).backward()
    with pytest.raises(InputError, match=said):
        examples.aggregate()


@pytest.mark.parametrize(
    "interrupted", ["evaluation", "skipped step", "abandoned", "input gradient", "parameter gradient", "error"]
)
def test_what_is_no_training_step_leaves_no_trace(interrupted):
    model, inputs, targets = made("conv")
    expected = updates(AndMask(0.4), model, inputs, targets)
    examples = per_example(model, AndMask(0.4))
    other = inputs[:5].clone().requires_grad_()
    with torch.set_grad_enabled(interrupted != "evaluation"):
        loss = cross_entropy(model(other), targets[:5])
    if interrupted == "skipped step":
        loss.backward()
    elif interrupted == "input gradient":
        torch.autograd.grad(loss, other)
    elif interrupted == "parameter gradient":
        torch.autograd.grad(loss, list(model.parameters()))
    elif interrupted == "error":
        handle = next(model.parameters()).register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    assert stepped(examples, model, inputs, targets).environments == EXAMPLES
    assert_gradients(model, expected)


def test_a_second_backward_pass_or_one_with_a_graph_is_refused():
    model, inputs, targets = made("mlp")
    examples = per_example(model, AndMask(0.4))
    loss = cross_entropy(model(inputs), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="a second backward pass reaches the same forward pass"):
        loss.backward()
    examples.discard()
    model.zero_grad()
    with pytest.raises(InputError, match="create_graph=True"):
        cross_entropy(model(inputs), targets).backward(create_graph=True)


def test_means_over_unequal_passes_in_one_backward_pass_are_refused():
    model, inputs, targets = made("mlp")
    per_example(model, AndMask(0.4))
    loss = cross_entropy(model(inputs[:2]), targets[:2]) + cross_entropy(model(inputs[2:]), targets[2:])
    with pytest.raises(InputError, match=r"passes of \d and \d examples in one backward pass"):
        loss.backward()


def test_a_model_whose_trainable_parameters_changed_is_refused():
    model, inputs, _ = made("mlp")
    per_example(model, AndMask(0.4))
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(InputError, match=r"parameter 0\.weight: it was frozen since its gradients were set up"):
        model(inputs)


def test_a_parameter_that_the_loss_does_not_use_keeps_no_gradient():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    examples = per_example(model, AndMask(0.4))
    cross_entropy(model["used"](torch.randn(6, 4)), torch.randint(0, 3, (6,))).backward()
    examples.aggregate()
    assert model["unused"].weight.grad is None
    assert model["used"].weight.grad is not None


@dataclass(frozen=True)
class Sum:
    """A rule whose update is a sum as it is."""

    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["gradient"], torch.ones(()).expand_as(sums["gradient"]))


def test_a_rule_may_give_back_a_sum_as_it_is():
    model, inputs, targets = made("mlp")
    expected = [gradients.sum(0) for gradients in of_examples(model, inputs, targets)]
    examples = per_example(model, Sum())
    cross_entropy(model(inputs), targets).backward()
    examples.aggregate()
    assert_gradients(model, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_without_zero_grad_is_refused(set_to_none):
    model, inputs, targets = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    examples = per_example(model, AndMask(0.4))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        cross_entropy(model(inputs), targets).backward()
        examples.aggregate()
        optimizer.step()
    with pytest.raises(InputError, match=r"zero_grad\(\) was not called"):
        cross_entropy(model(inputs), targets).backward()


def test_one_example_and_no_backward_pass_are_refused():
    model = MLP(4, 3, 8, 1)
    examples = per_example(model, AndMask(0.4))
    with pytest.raises(InputError, match="no backward pass"):
        examples.aggregate()
    cross_entropy(model(torch.randn(1, 4)), torch.tensor([0])).backward()
    with pytest.raises(InputError, match="one example alone"):
        examples.aggregate()


@pytest.mark.parametrize("within", [False, True])
def test_a_second_collection_is_refused_until_the_first_is_removed(within):
    first_model = MLP(4, 6, 8, 1)
    model = nn.Sequential(first_model, nn.Linear(6, 3)) if within else first_model
    first = per_example(first_model, AndMask())
    with pytest.raises(InputError, match=f"{'module 0: ' * within}its examples are collected already"):
        per_example(model, AndMask())
    first.remove()
    per_example(model, AndMask())


def test_a_model_without_parameters_and_a_wrong_reduction_are_refused():
    with pytest.raises(InputError, match="none of its parameters requires a gradient"):
        per_example(nn.ReLU(), AndMask())
    with pytest.raises(InputError, match="reduction=none: expected 'mean' or 'sum'"):
        per_example(MLP(4, 3, 8, 1), AndMask(), reduction="none")


@pytest.mark.parametrize("definition", ["contribution", "loss"])
def test_a_model_may_give_a_dictionary(definition):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, inputs):
            return {"logits": self.layer(inputs)}

    torch.manual_seed(0)
    model, inputs, targets = Named(), torch.randn(3, 5, 4), torch.randint(0, 3, (3, 5))

    def loss(outputs, y):
        return cross_entropy(outputs["logits"], y["label"])

    named = PerExampleGradients(model, loss, AndMask(), definition=definition)
    step = named((inputs, {"label": targets}))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    named.remove()
    plain = PerExampleGradients(model.layer, cross_entropy, AndMask(), definition=definition)(inputs, targets)
    assert torch.equal(step.losses, plain.losses)
    assert_gradients(model, found, rtol=0, atol=0)


def test_gradients_that_are_not_finite_are_named_or_left_out():
    torch.manual_seed(0)
    model, inputs, targets = MLP(4, 3, 8, 1).double(), torch.randn(6, 4).double(), torch.randint(0, 3, (6,))
    inputs[2, 1] = float("nan")
    with pytest.raises(NonFiniteGradientError, match=r"example 2 is not finite at step 5"):
        PerExampleGradients(copy.deepcopy(model), cross_entropy, AndMask(0.4))(inputs[None], targets[None], step=5)
    good = [0, 1, 3, 4, 5]
    expected = updates(AndMask(0.4), model, inputs[good], targets[good])
    gradients = PerExampleGradients(model, cross_entropy, AndMask(0.4), nonfinite="skip")
    step = gradients(inputs[None], targets[None])
    assert step.skipped == ("example 2",)
    assert_gradients(model, expected)


def test_dropout_draws_once_and_every_example_has_the_mask_that_was_used():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    inputs, targets = torch.randn(EXAMPLES, 4).double(), torch.randint(0, 3, (EXAMPLES,))
    torch.manual_seed(7)
    each = by_loss(model, inputs, targets)
    torch.manual_seed(7)
    PerExampleGradients(model, cross_entropy, AndMask(0.4))(inputs[None], targets[None])
    assert_gradients(model, [aggregate(AndMask(0.4), gradients).value for gradients in each])


def test_a_sum_over_environments_leaves_out_statistics_that_are_not_wanted():
    gradients = torch.randn(4, 3)
    wanted = {"sign": torch.zeros(3)}
    sum_over_environments(AndMask(), gradients, wanted)
    assert torch.equal(wanted["sign"], gradients.sign().sum(0))


class Float(nn.Module):
    """What autocast does to a norm's output on a GPU: it is float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.float().tanh() * 1.0


@pytest.mark.parametrize("linear", [nn.Linear, functools.partial(nn.Linear, bias=False)])
def test_bfloat16_keeps_no_float32_inputs_of_linear_layers(linear):
    layers = [nn.Linear(16, 64)]
    for _ in range(4):
        layers += [Float(), linear(64, 64), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(64, 3))
    inputs, targets = torch.randn(1, 512, 16), torch.randint(0, 3, (1, 512))
    peaks = {}
    for dtype in (None, torch.bfloat16):
        gradients = PerExampleGradients(model, cross_entropy, AndMask(0.4), autocast=dtype, memory_limit=1 << 18)
        for _ in range(2):  # the first one verifies
            with PeakMemory() as memory:
                gradients((inputs, targets))
        gradients.remove()
        peaks[dtype] = memory.peak
    assert peaks[torch.bfloat16] < 0.8 * peaks[None]


class Causal(nn.Module):
    """Attention of each position to those before it, by a mask that all examples share."""

    def __init__(self, length: int, *, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(6, 3)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs, src_mask=self.mask.to(inputs.dtype)).mean(1))


@pytest.mark.parametrize("length", [4, EXAMPLES])
def test_examples_share_a_mask_that_has_as_many_rows_as_there_are_examples(length):
    torch.manual_seed(0)
    model, inputs = Causal(length).double(), torch.randn(EXAMPLES, length, 6).double()
    targets = torch.randint(0, 3, (EXAMPLES,))
    expected = updates(AndMask(0.4), model, inputs, targets)
    stepped(per_example(model, AndMask(0.4)), model, inputs, targets)
    assert_gradients(model, expected, rtol=1e-9, atol=1e-12)


def test_layers_that_put_positions_before_examples_are_refused():
    with pytest.raises(InputError, match=r"module layer \(TransformerEncoderLayer\): .* give batch_first=True"):
        per_example(Causal(4, batch_first=False), AndMask(0.4))


class PositionsFirst(nn.Module):
    """Its layers get positions before examples, or examples first (``mixes`` positions as MLP-Mixer does)."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(9, 6), nn.Embedding(EXAMPLES, 6)
        self.mixer, self.layer, self.head = nn.Linear(EXAMPLES, EXAMPLES), nn.Linear(6, 6), nn.Linear(6, 3)
        self.mixes = mixes

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.positions(torch.arange(EXAMPLES))
        if self.mixes:
            hidden = torch.tanh(self.mixer(hidden.transpose(1, 2))).permute(0, 2, 1)
            return self.head(torch.tanh(self.layer(hidden)).mean(1))
        return self.head(torch.tanh(self.layer(torch.tanh(hidden.permute(1, 0, 2)))).mean(0))


def test_as_many_positions_as_examples_do_not_hide_that_positions_come_first():
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 9, (EXAMPLES, EXAMPLES)), torch.randint(0, 3, (EXAMPLES,))
    model = PositionsFirst(mixes=False)
    per_example(model, AndMask(0.4))
    with pytest.raises(InputError, match=r"module layer: its output has shape .* examples are not the first"):
        model(tokens)
    model = PositionsFirst(mixes=True).double()
    expected = updates(AndMask(0.4), model, tokens, targets)
    stepped(per_example(model, AndMask(0.4)), model, tokens, targets)
    assert_gradients(model, expected, rtol=1e-9, atol=1e-12)
