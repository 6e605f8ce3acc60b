"""Stacked environments: every way to compute the gradient equals a plain loop over environments."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from concord.aggregation import (
    AGGREGATORS,
    AndMask,
    Mean,
    Statistic,
    Statistics,
    TMask,
    Update,
    UPGrad,
    aggregate,
    aggregator,
)
from concord.errors import InputError
from concord.gradients import PerExampleGradients, register_aggregation_hook, stacked
from concord.gradients.nonfinite import NonFiniteGradientError
from concord.gradients.stacked import StackedGradients
from concord.machine import last_level_cache
from concord.models.mlp import MLP

ENVIRONMENTS, BATCH, CLASSES = 5, 4, 3

pytestmark = [
    pytest.mark.filterwarnings("error:environments are computed one by one"),
    pytest.mark.usefixtures("seeded"),
]


class Tied(nn.Module):
    """One matrix used twice, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(inputs)))) * self.temperature


class Embedded(nn.Module):
    """Words as integers; most rows of the table get no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.table(words)).mean(1))


class Branching(nn.Module):
    """Takes another path when the values ask for it, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(6, CLASSES)
        self.large = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.large(inputs) if inputs.sum() > 0 else self.small(inputs)


def partly_frozen() -> nn.Module:
    model = MLP(6, CLASSES, hidden_units=8, hidden_layers=2)
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ENVIRONMENTS, BATCH, *shape, dtype=dtype)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (MLP(6, CLASSES, hidden_units=8, hidden_layers=2), numbers(6)),
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, groups=2),
            nn.Tanh(),
            nn.Conv2d(8, 8, 2, groups=8, padding=1),
            nn.Flatten(),
            nn.Linear(8 * 4 * 4, CLASSES),
        ),
        numbers(4, 8, 8),
    ),
    "tied": lambda: (Tied(), numbers(6)),
    "embedded": lambda: (Embedded(), torch.randint(0, 30, (ENVIRONMENTS, BATCH, 3))),
    "partly frozen": lambda: (partly_frozen(), numbers(6)),
    "float64": lambda: (MLP(6, CLASSES, hidden_units=8).double(), numbers(6, dtype=torch.float64)),
}


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (ENVIRONMENTS, BATCH))


def looped(
    model: nn.Module, rule: Any, inputs: Tensor, targets: Tensor, *, rescale: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Gradients, kept masks and losses in float64, from one plain backward pass an environment."""
    gradients: dict[str, list[Tensor]] = {}
    losses = []
    for batch, target in zip(inputs, targets, strict=True):
        twin = copy.deepcopy(model).double()
        loss = cross_entropy(twin(batch.double() if batch.is_floating_point() else batch), target)
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.setdefault(name, []).append(gradient)
    value, kept = {}, {}
    for name, stack in gradients.items():
        value[name], kept[name] = aggregate(rule, torch.stack(stack))
        if rescale and kept[name].sum() > 0:
            value[name] = value[name] * kept[name].numel() / kept[name].sum()
    return value, kept, losses


def found(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rescale", [False, True], ids=["plain", "rescaled"])
@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("kind", MODELS)
def test_gradient_is_that_of_a_loop_over_environments(kind: str, name: Any, rescale: bool) -> None:
    model, inputs = MODELS[kind]()
    targets, rule = labels(), TMask(0.3) if name == "t-mask" else aggregator(name, 0.5)
    expected, kept, losses = looped(model, rule, inputs, targets, rescale=rescale)

    step = StackedGradients(model, cross_entropy, rule, rescale=rescale)(inputs, targets)

    tolerance = 1e-4 if kind != "float64" else 1e-6 if rescale else 1e-9  # the kept fraction is float32
    assert_close(found(model), expected, rtol=tolerance, atol=tolerance * 1e-2)
    assert_close(step.losses.double(), torch.tensor(losses, dtype=torch.float64), rtol=tolerance, atol=0)
    fractions = torch.tensor([float(mask.mean()) for mask in kept.values()])
    assert_close(step.kept_fraction, fractions, rtol=1e-4, atol=1e-5)
    assert step.kept_fraction.dtype == torch.float32
    assert step.skipped == ()
    if name != "mean":
        assert float(step.kept_fraction.mean()) not in (0, 1)  # else the mask would not have been tested


@pytest.mark.parametrize("name", AGGREGATORS)
def test_chunks_and_loop_give_the_gradient_of_one_vmap(name: Any) -> None:
    model, inputs = MODELS["convolutions"]()
    # In float64: float32 sums in another order differ by more on some processors.
    model, inputs = model.double(), inputs.double()
    targets, rule = labels(), aggregator(name, 0.6)
    one_environment = 8 * sum(parameter.numel() for parameter in model.parameters())
    results = []
    for options in ({}, {"memory_limit": 1}, {"memory_limit": 2 * one_environment}, {"vectorize": False}):
        step = StackedGradients(model, cross_entropy, rule, **options)(inputs, targets)
        results.append((found(model), step.losses, step.kept_fraction))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("cache", "environments", "together"),
    [(1 << 40, 40, {40}), (0, 40, {8}), (12, 40, {10}), (12, 11, {11}), (12, 13, {7, 6})],
    ids=["all fit", "eight at least", "what the cache holds", "and no less", "in pieces of one size"],
)
def test_how_many_environments_go_together_is_chosen_by_the_cache(
    monkeypatch: pytest.MonkeyPatch, cache: int, environments: int, together: set[int]
) -> None:
    """``cache`` is in gradients of one environment."""
    model = MLP(6, CLASSES, hidden_units=8)
    gradient = 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(stacked, "last_level_cache", lambda: cache * gradient)
    rule = Recording()
    inputs, targets = torch.randn(environments, BATCH, 6), torch.randint(0, CLASSES, (environments, BATCH))
    expected = looped(model, Mean(), inputs, targets)[0]
    StackedGradients(model, cross_entropy, rule, vectorize=True)(inputs, targets)
    assert {len(gradients) for gradients in rule.seen} == together
    assert_close(found(model), expected, rtol=1e-4, atol=1e-6)


def test_the_size_of_the_cache_is_what_the_system_says(tmp_path: Any) -> None:
    for index, (kind, size) in enumerate([("Data", "32K"), ("Instruction", "64M"), ("Unified", "1024K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "type").write_text(f"{kind}\n")
        (folder / "size").write_text(f"{size}\n")
    assert last_level_cache(tmp_path) == 1 << 20
    assert last_level_cache(tmp_path / "nowhere") == 32 << 20


def test_memory_limit_bounds_how_many_gradients_exist_at_once() -> None:
    model, inputs = MODELS["mlp"]()
    rule = Recording()
    one_environment = 4 * sum(parameter.numel() for parameter in model.parameters())
    StackedGradients(model, cross_entropy, rule, memory_limit=2 * one_environment, vectorize=True)(inputs, labels())
    assert sorted({len(gradients) for gradients in rule.seen}) == [1, 2]


class Recording(Mean):
    """The mean, remembering the per-environment gradients that it was given."""

    def __init__(self) -> None:
        object.__setattr__(self, "seen", [])

    @property
    def statistics(self) -> tuple[Statistic, ...]:  # type: ignore[override]
        def seen(gradient: Tensor) -> Tensor:
            if gradient.ndim == 2 and gradient.shape[1] > 3:  # the first two look at a few numbers
                self.seen.append(gradient.clone())  # type: ignore[attr-defined]
            return gradient

        return (Statistic("gradient", seen),)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return super().finish(sums, environments)


def test_grad_is_replaced_and_steps_do_not_disturb_each_other() -> None:
    model, inputs = MODELS["mlp"]()
    gradients = StackedGradients(model, cross_entropy, AndMask(0.6))
    targets = labels()
    gradients(inputs, targets)
    first = {name: gradient.clone() for name, gradient in found(model).items()}
    kept_of_caller = [parameter.grad for parameter in model.parameters()]
    before = [gradient.clone() for gradient in kept_of_caller]
    gradients(numbers(6), labels())
    assert_close(kept_of_caller, before, rtol=0, atol=0)
    gradients(inputs, targets)
    assert_close(found(model), first, rtol=0, atol=0)


class Direct(nn.Module):
    """Outputs whose gradient is the input itself: components 0-3 belong to ``b``, 4 and 5 to ``a``."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2, 2))
        self.a = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ torch.cat([self.b.flatten(), self.a])


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def test_sparse_gradients_of_a_table_are_those_of_a_dense_one() -> None:
    tokens, targets = torch.randint(0, 20, (3, 8, 5)), torch.randint(0, 4, (3, 8))
    found = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 6, sparse=sparse), nn.Flatten(), nn.Linear(30, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            StackedGradients(model, cross_entropy, AndMask(0.3))(tokens, targets)
        found[sparse] = [parameter.grad for parameter in model.parameters()]
    assert_close(found[True], found[False])


@pytest.mark.parametrize("vectorize", [True, False])
def test_kept_fractions_come_in_the_order_of_named_parameters(vectorize: bool) -> None:
    model = Direct()
    inputs = torch.tensor([[[1.0, -1, 2, 0, 3, -2]], [[1.0, 1, 2, 0, 1, -2]]])
    gradients = StackedGradients(model, mean_output, AndMask(1.0), rescale=True, vectorize=vectorize)
    step = gradients(inputs, torch.zeros(2, 1))
    assert [name for name, _ in model.named_parameters()] == ["b", "a"]
    assert step.kept_fraction.tolist() == [0.5, 1.0]
    assert_close(model.b.grad, torch.tensor([[2.0, 0.0], [4.0, 0.0]]))
    assert_close(model.a.grad, torch.tensor([2.0, -2.0]))


def test_layer_of_which_nothing_is_kept_stays_zero_when_rescaled() -> None:
    model = Direct()
    inputs = torch.tensor([[[1.0, -1, 2, 3, 3, -2]], [[-1.0, 1, -2, -3, 1, -2]]])
    step = StackedGradients(model, mean_output, AndMask(1.0), rescale=True)(inputs, torch.zeros(2, 1))
    assert step.kept_fraction.tolist() == [0, 1]
    assert model.b.grad.tolist() == [[0, 0], [0, 0]]


# Batch norm, dropout, other buffers


def normalized() -> nn.Module:
    # No bias before batch norm: its gradient is zero in exact arithmetic, so that its sign would be rounding.
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Dropout(0.0), nn.Linear(8, CLASSES)
    )


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1}, {"vectorize": False}], ids=["vmap", "chunks", "loop"])
def test_running_statistics_are_the_mean_over_environments(options: dict[str, Any]) -> None:
    model = normalized()
    model(torch.randn(7, 6))  # running statistics that are no longer 0 and 1
    inputs, targets = numbers(6), labels()
    expected, _, _ = looped(model, AndMask(0.6), inputs, targets)
    alone = []
    for batch in inputs:
        twin = copy.deepcopy(model)
        twin(batch)
        alone.append(twin[1])

    StackedGradients(model, cross_entropy, AndMask(0.6), **options)(inputs, targets)

    assert_close(found(model), expected, rtol=1e-4, atol=1e-6)
    for statistic in ("running_mean", "running_var"):
        each = torch.stack([getattr(norm, statistic) for norm in alone])
        assert each.std(0).min() > 0
        assert_close(getattr(model[1], statistic), each.mean(0))
    assert model[1].num_batches_tracked.item() == 2
    assert model[1].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("vectorize", [True, False])
def test_batch_norm_in_eval_mode_leaves_its_buffers_alone(vectorize: bool) -> None:
    model = normalized().eval()
    inputs, targets = numbers(6), labels()
    before = copy.deepcopy(dict(model.named_buffers()))
    expected, _, _ = looped(model, AndMask(0.6), inputs, targets)
    StackedGradients(model, cross_entropy, AndMask(0.6), vectorize=vectorize)(inputs, targets)
    assert_close(found(model), expected, rtol=1e-4, atol=1e-6)
    assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("vectorize", [True, False])
def test_batch_norm_alone_in_training_mode_takes_environments_alike(vectorize: bool) -> None:
    model, inputs = normalized().eval(), numbers(6)
    model[1].train()
    each = torch.stack([model[0](batch).mean(0) for batch in inputs]).detach()
    StackedGradients(model, cross_entropy, Mean(), vectorize=vectorize)(inputs, labels())
    assert_close(model[1].running_mean, 0.1 * each.mean(0))
    assert model[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize("vectorize", [True, False])
def test_buffers_that_the_model_only_reads_stay_exactly_as_they_are(vectorize: bool) -> None:
    """Averaging equal numbers rounds; frozen batch norm, position tables and large counts must not drift."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = normalized()
            self.register_buffer("table", torch.randn(6) * 1e-3)
            self.register_buffer("count", torch.tensor(2**40 + 1))
            self.register_buffer("turns", torch.polar(torch.ones(6), torch.randn(6)))
            self.register_buffer("mask", torch.tensor([True, False, True, True, True, True]))
            self.register_buffer("bias", torch.tensor([0.0, float("-inf")]))
            self.body[1].eval()
            self.body[1].running_mean.normal_()
            self.body[1].running_var.uniform_(0.5, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs * self.mask + self.table + 0 * self.turns.real)

    model = Reading()
    before = copy.deepcopy(dict(model.named_buffers()))
    gradients = StackedGradients(model, cross_entropy, Mean(), vectorize=vectorize)
    for _ in range(3):
        gradients(numbers(6), labels())
    assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


class Dropping(nn.Module):
    """The gradient of ``weight`` shows which components dropout left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2000))
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dropout(inputs * self.weight).sum(1)


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1}, {"vectorize": False}], ids=["vmap", "chunks", "loop"])
def test_dropout_draws_a_mask_for_each_environment_and_step(options: dict[str, Any]) -> None:
    rule, inputs = Recording(), torch.ones(4, 1, 2000)
    gradients = StackedGradients(Dropping(), mean_output, rule, **options)
    for _ in range(2):
        gradients(inputs, torch.zeros(4, 1))
    masks = torch.cat(rule.seen)[-8:] != 0  # type: ignore[attr-defined]  # before these the choice of a way
    assert masks.shape == (8, 2000)
    deviation = (0.7 * 0.3 / 2000) ** 0.5
    assert ((masks.double().mean(1) - 0.7).abs() < 5 * deviation).all()
    for one in range(8):
        for other in range(one):  # independent masks agree in .7² + .3² of the places
            assert float((masks[one] == masks[other]).double().mean()) == pytest.approx(0.58, abs=0.06)


# What vmap cannot do, and what the user did wrong


def test_control_flow_on_values_falls_back_with_one_warning_and_is_exact() -> None:
    model, inputs, targets = Branching(), numbers(6), labels()
    inputs = inputs.abs() * torch.tensor([1.0, -1, 1, 1, -1])[:, None, None]
    expected, _, losses = looped(model, AndMask(0.6), inputs, targets)
    gradients = StackedGradients(model, cross_entropy, AndMask(0.6))
    with pytest.warns(UserWarning, match="one by one") as caught:
        gradients(inputs, targets)
    assert [warning.filename for warning in caught] == [__file__]
    gradients(inputs, targets)  # a second warning would be an error in this file
    step = gradients(inputs, targets)
    assert_close(found(model), expected, rtol=1e-4, atol=1e-6)
    assert_close(step.losses.double(), torch.tensor(losses, dtype=torch.float64), rtol=1e-5, atol=0)


def test_batch_norm_without_vmap_falls_back_to_the_same_statistics() -> None:
    """momentum=None asks for the value of num_batches_tracked."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, CLASSES))
    inputs = numbers(6)
    each = torch.stack([model[0](batch).mean(0) for batch in inputs]).detach()
    with pytest.warns(UserWarning, match="one by one"):
        StackedGradients(model, cross_entropy, Mean())(inputs, labels())
    assert_close(model[1].running_mean, each.mean(0))
    assert model[1].num_batches_tracked.item() == 1


def test_a_mistake_in_the_users_loss_is_the_error_that_the_user_sees() -> None:
    model, inputs, targets = MLP(6, CLASSES, hidden_units=8), numbers(6), labels()

    def wrong(outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target).square().mean()  # (4, 3) and (4,)

    gradients = StackedGradients(model, wrong, Mean())
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\)") as caught:
        gradients(inputs, targets)
    assert "vmap" not in str(caught.value)

    gradients = StackedGradients(model, cross_entropy, Mean())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gradients(numbers(5), targets)
    gradients(inputs, targets)
    assert gradients.vectorize  # one mistake does not make all later steps slow


def test_a_loss_for_each_example_is_refused() -> None:
    model, inputs = MODELS["mlp"]()
    with pytest.raises(InputError, match=r"risk: gives \(4,\); expected a scalar"):
        StackedGradients(model, lambda out, y: cross_entropy(out, y, reduction="none"), Mean())(inputs, labels())


# Gradients that are not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("vectorize", [True, False])
def test_raise_names_environment_and_step_and_leaves_the_model_untouched(bad: float, vectorize: bool) -> None:
    model, targets = normalized(), labels()
    inputs = numbers(6)
    names = [f"hospital-{letter}" for letter in "abcde"]
    gradients = StackedGradients(model, cross_entropy, AndMask(0.6), names=names, vectorize=vectorize)
    gradients(inputs, targets)
    state = copy.deepcopy(model.state_dict())
    before = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    broken = inputs.clone()
    broken[1, 2, 3] = broken[3, 0, 0] = bad

    with pytest.raises(NonFiniteGradientError, match="hospital-b, hospital-d is not finite at step 1;") as caught:
        gradients(broken, targets)
    assert caught.value.environments == ("hospital-b", "hospital-d")
    assert caught.value.step == 1
    with pytest.raises(NonFiniteGradientError, match="step 77"):
        gradients(broken, targets, step=77)
    assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert_close([parameter.grad for parameter in model.parameters()], before, rtol=0, atol=0)

    gradients(inputs, targets)  # nothing of the broken step is left in the sums
    for parameter in model.parameters():
        assert bool(parameter.grad.isfinite().all())


def test_environments_without_names_are_named_by_their_number() -> None:
    model, inputs = MODELS["mlp"]()
    inputs[4] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="environment 4 is not finite at step 0"):
        StackedGradients(model, cross_entropy, Mean())(inputs, labels())


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1}, {"vectorize": False}], ids=["vmap", "chunks", "loop"])
@pytest.mark.parametrize("name", AGGREGATORS)
def test_skip_gives_the_gradient_over_the_others(name: Any, options: dict[str, Any]) -> None:
    # In float64: float32 sums in another order differ by more on some processors.
    model, inputs, targets = normalized().double(), numbers(6).double(), labels()
    rule, others = aggregator(name, 0.6), [0, 2, 4]
    twin = copy.deepcopy(model)
    inputs[1, 0, 0] = float("nan")
    inputs[3, 2, 1] = float("-inf")

    step = StackedGradients(model, cross_entropy, rule, nonfinite="skip", rescale=True, **options)(inputs, targets)
    plain = StackedGradients(twin, cross_entropy, rule, rescale=True, **options)(inputs[others], targets[others])

    assert step.skipped == ("environment 1", "environment 3")
    assert step.losses.shape == (5,)
    assert_close(step.losses[others], plain.losses)
    assert_close(step.kept_fraction, plain.kept_fraction)
    assert_close(found(model), found(twin), rtol=1e-6, atol=1e-8)
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert bool(model[1].running_var.isfinite().all())


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("name", AGGREGATORS)
def test_skip_with_no_environment_left_is_a_zero_gradient(name: Any, vectorize: bool) -> None:
    model, targets = normalized(), labels()
    rule, before = aggregator(name, 0.6), copy.deepcopy(dict(model.named_buffers()))
    gradients = StackedGradients(model, cross_entropy, rule, nonfinite="skip", rescale=True, vectorize=vectorize)
    step = gradients(torch.full((ENVIRONMENTS, BATCH, 6), float("nan")), targets)
    assert len(step.skipped) == ENVIRONMENTS
    assert step.kept_fraction.tolist() == [0.0] * 5
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape
        assert bool((parameter.grad == 0).all())
    assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)

    inputs = numbers(6)
    expected, _, _ = looped(model, rule, inputs, targets, rescale=True)
    assert gradients(inputs, targets).skipped == ()
    assert_close(found(model), expected, rtol=1e-4, atol=1e-6)


def test_a_sum_that_overflows_is_not_finite_although_every_environment_is() -> None:
    model = Direct()
    inputs = torch.full((4, 1, 6), 2e38)
    with pytest.raises(NonFiniteGradientError, match="environment 0, environment 1, environment 2, environment 3"):
        StackedGradients(model, mean_output, AndMask(0.0))(inputs, torch.zeros(4, 1))
    step = StackedGradients(model, mean_output, AndMask(0.0), nonfinite="skip")(inputs, torch.zeros(4, 1))
    assert len(step.skipped) == 4
    assert all(bool((parameter.grad == 0).all()) for parameter in model.parameters())


# What is refused


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [((3, 4, 6), (2, 4)), ((3, 4, 6), (3, 5)), ((0, 4, 6), (0, 4)), ((12, 6), (12,)), ((12,), (12,)), ((3, 4, 6), ())],
)
def test_shapes_that_do_not_fit_are_refused(inputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    gradients = StackedGradients(MLP(6, CLASSES), cross_entropy, Mean())
    with pytest.raises(InputError) as caught:
        gradients(torch.zeros(inputs), torch.zeros(targets, dtype=torch.int64))
    assert str(tuple(inputs)) in str(caught.value)
    assert str(tuple(targets)) in str(caught.value)


def test_names_that_are_not_as_many_as_the_environments_are_refused() -> None:
    gradients = StackedGradients(MLP(6, CLASSES), cross_entropy, Mean(), names=["a", "b"])
    with pytest.raises(InputError, match="3 environments, expected 2"):
        gradients(torch.zeros(3, 4, 6), torch.zeros(3, 4, dtype=torch.int64))


def test_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="none of its parameters"):
        StackedGradients(MLP(6, CLASSES).requires_grad_(False), cross_entropy, Mean())


def test_an_overflow_under_a_dropout_mask_is_named_or_left_out() -> None:
    """The search for what is not finite must see the masks that were drawn, not new ones."""

    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.dropout = nn.Dropout(0.5)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(self.dropout(inputs)) * self.dropout(torch.ones(1)) * 3e38

    inputs, targets = torch.full((6, 1, 2), 1e-30), torch.zeros(6, 1, 2)
    inputs[3:] = 1.0
    raised = 0
    for seed in range(20):
        for nonfinite in ("raise", "skip"):
            model = Overflowing()
            gradients = StackedGradients(model, nn.functional.mse_loss, Mean(), nonfinite=nonfinite)
            torch.manual_seed(seed)
            try:
                gradients(inputs, targets)
            except NonFiniteGradientError:
                raised += 1
                continue
            assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert raised > 0


@pytest.mark.parametrize("vectorize", [True, False])
def test_under_autocast_layers_compute_in_bfloat16_and_the_loss_in_float32(vectorize: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3))
    inputs, targets = torch.randn(3, 5, 1, 8, 8), torch.randint(0, 3, (3, 5))
    seen: list[torch.dtype] = []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return nn.functional.cross_entropy(outputs, labels)

    exact = StackedGradients(copy.deepcopy(model), loss, Mean())
    rounded = StackedGradients(model, loss, Mean(), vectorize=vectorize, autocast=torch.bfloat16)
    expected, got = exact(inputs, targets), rounded(inputs, targets)
    assert set(seen) == {torch.float32}
    assert rounded.vectorize == vectorize
    torch.testing.assert_close(got.losses, expected.losses, rtol=2e-2, atol=2e-2)
    assert not torch.equal(got.losses, expected.losses)
    for ours, theirs in zip(rounded.model.parameters(), exact.model.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.1, atol=2e-2)


def test_pooled_is_chosen_where_exact_else_vmap_else_one_by_one() -> None:
    layers = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, CLASSES, 6), nn.Flatten()
    for model, expected in (
        (nn.Linear(6, CLASSES), "pooled"),
        (nn.Sequential(*layers), "pooled"),
        (nn.Sequential(*layers, nn.BatchNorm1d(CLASSES)), True),
        (nn.Sequential(*layers, nn.Dropout(0.5)), True),
        (nn.Sequential(nn.Linear(6, CLASSES), nn.BatchNorm1d(CLASSES, momentum=None)), False),
    ):
        chosen = StackedGradients(model, cross_entropy, AndMask(0.6))
        assert chosen.vectorize is None
        torch.manual_seed(3)
        with contextlib.nullcontext() if expected else pytest.warns(UserWarning, match="one by one"):
            losses = chosen(numbers(6), labels()).losses
        assert chosen.vectorize == expected
        first = found(model)
        asked = StackedGradients(model, cross_entropy, AndMask(0.6), vectorize=expected)
        torch.manual_seed(3)
        assert torch.equal(asked(numbers(6), labels()).losses, losses)
        assert_close(found(model), first, rtol=0, atol=0)


class UsedElsewhere(nn.Module):
    """The head sees the first layer's weight, which the pass of that layer's module does not tell."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        outputs: Tensor = self.head(nn.functional.linear(hidden, self.first.weight))
        return outputs


@pytest.mark.parametrize("rule", [Mean(), AndMask(0.6), UPGrad()], ids=["mean", "and-mask", "upgrad"])
@pytest.mark.parametrize("scale", [1.0, 0.03, 0.0])
def test_a_small_or_missing_gradient_does_not_hide_a_parameter_that_is_used_elsewhere(scale: float, rule: Any) -> None:
    model = UsedElsewhere(scale)
    twin = copy.deepcopy(model)
    ours = StackedGradients(model, cross_entropy, rule)
    theirs = StackedGradients(twin, cross_entropy, rule, vectorize=False)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (model, twin)]
    for _ in range(3):
        inputs, targets = numbers(6), labels()
        ours(inputs, targets)
        theirs(inputs, targets)
        assert_close(found(model), found(twin), rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert ours.vectorize is True


@pytest.mark.parametrize("vectorize", [None, "pooled", True])
@pytest.mark.parametrize("begins", [0, 2])
def test_a_penalty_on_the_weights_in_the_loss_is_a_part_of_the_gradient(vectorize: Any, begins: int) -> None:
    model, weight = MLP(6, CLASSES, 8, 2), 0.0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + weight * sum(each.square().sum() for each in model.parameters())

    ours = StackedGradients(model, loss, Mean(), vectorize=vectorize)
    theirs = StackedGradients(model, loss, Mean(), vectorize=False)
    for step in range(4):
        weight = 1e-4 if step >= begins else 0.0  # less than two ways may differ by
        inputs, targets = numbers(6), labels()
        ours(inputs, targets)
        gradients = found(model)
        theirs(inputs, targets)
        assert_close(gradients, found(model), rtol=1e-4, atol=1e-8)


class Centred(nn.Sequential):
    """Writes to its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.sub_(0.5).mul_(2)
        return super().forward(inputs)


@pytest.mark.parametrize("vectorize", [None, "pooled", True, False])
def test_a_model_may_write_to_its_input(vectorize: Any) -> None:
    model, inputs, targets = Centred(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)), numbers(6), labels()
    expected, _, losses = looped(model, Mean(), inputs.clone(), targets)
    step = StackedGradients(model, cross_entropy, Mean(), vectorize=vectorize)(inputs, targets)
    assert_close(found(model), expected, rtol=1e-4, atol=1e-6)
    assert_close(step.losses.tolist(), losses, rtol=1e-5, atol=1e-6)


def test_a_step_is_not_computed_again_from_a_batch_that_the_model_has_written_to() -> None:
    model, inputs = Centred(nn.Linear(6, CLASSES)), numbers(6)
    inputs[1, 0] = torch.inf
    gradients = StackedGradients(model, cross_entropy, Mean(), vectorize=False, nonfinite="skip")
    with pytest.raises(InputError, match="batch: the model writes to its input in place"):
        gradients(inputs, labels())


class Checkpointed(nn.Module):
    """The middle layer is under activation checkpointing, behind a layer that is not trained."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.first.requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).requires_grad_()
        outputs: Tensor = self.last(checkpoint(self.middle, hidden, use_reentrant=self.reentrant))
        return outputs


@pytest.mark.parametrize("vectorize", [None, "pooled", False])
def test_layers_under_reentrant_checkpointing_are_refused_and_others_trained(vectorize: Any) -> None:
    model, inputs, targets = Checkpointed(reentrant=False), numbers(6), labels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap cannot take them
        StackedGradients(model, cross_entropy, Mean(), vectorize=vectorize)(inputs, targets)
        expected, _, _ = looped(model, Mean(), inputs, targets)
        assert_close(found(model), expected, rtol=1e-4, atol=1e-6)
        model = Checkpointed(reentrant=True)
        gradients = StackedGradients(model, cross_entropy, Mean(), vectorize=vectorize)
        with pytest.raises(InputError, match=r"parameter middle.weight: .*; take use_reentrant=False"):
            gradients(inputs, targets)


@pytest.mark.parametrize("source", [StackedGradients, PerExampleGradients])
def test_gradients_are_computed_also_where_the_caller_has_disabled_them(source: Any) -> None:
    model, inputs, targets = MLP(6, CLASSES, 8, 2), numbers(6), labels()
    gradients = source(model, cross_entropy, AndMask(0.2))
    gradients(inputs, targets)
    expected = found(model)
    with torch.no_grad():
        gradients(inputs, targets)
    assert_close(found(model), expected, rtol=0, atol=0)


def test_a_head_that_begins_at_0_does_not_keep_a_model_from_being_pooled() -> None:
    model = MLP(6, CLASSES, 8, 2)
    head = list(model.parameters())[-2:]
    with torch.no_grad():
        for parameter in head:
            parameter.zero_()
    before = copy.deepcopy(model.state_dict())
    gradients = StackedGradients(model, cross_entropy, AndMask(0.6))
    gradients.choose((numbers(6), labels()))
    assert gradients.vectorize == "pooled"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Contiguous(nn.Module):
    """Asks for a form in memory, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, CLASSES, (2, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        outputs: Tensor = self.layer(images).flatten(1)
        return outputs


def test_a_model_that_vmap_cannot_take_is_pooled_without_a_warning() -> None:
    model, inputs, targets = Contiguous(), numbers(6), labels()
    gradients = StackedGradients(model, cross_entropy, AndMask(0.6))
    gradients(inputs, targets)
    assert gradients.vectorize == "pooled"
    pooled = found(model)
    StackedGradients(model, cross_entropy, AndMask(0.6), vectorize=False)(inputs, targets)
    assert_close(found(model), pooled, rtol=1e-4, atol=1e-6)


def test_the_choice_leaves_gradients_buffers_and_draws_unchanged() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    batch = numbers(6), labels()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    StackedGradients(model, cross_entropy, AndMask(0.6)).choose(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


class Normalizing(nn.Module):
    """Normalizes over the batch in training only, without being a batch norm of PyTorch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - inputs.mean(0)) / (inputs.var(0) + 1e-3).sqrt() if self.training else inputs


def test_the_way_is_chosen_again_when_the_model_changes_its_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), Normalizing(), nn.Tanh(), nn.Linear(8, CLASSES)).eval()
    ours = StackedGradients(model, cross_entropy, AndMask(0.3))
    ours(numbers(6), labels())
    assert ours.vectorize == "pooled"
    model.train()
    inputs, targets = numbers(6), labels()
    ours(inputs, targets)
    assert ours.vectorize is True
    found = [parameter.grad for parameter in model.parameters()]
    StackedGradients(model, cross_entropy, AndMask(0.3), vectorize=False)(inputs, targets)
    assert_close(found, [parameter.grad for parameter in model.parameters()])


def test_a_risk_without_a_graph_is_refused() -> None:
    model, given = nn.Linear(6, CLASSES), (numbers(6), labels())
    with pytest.raises(InputError, match="risk: does not depend on the model's parameters"):
        StackedGradients(model, lambda model, batch, step: cross_entropy(model(batch[0]).detach(), batch[1]), Mean())(
            given
        )


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda m: StackedGradients(m, cross_entropy, Mean(), vectorize="one-by-one"), "vectorize=one-by-one: must be"),
        (
            lambda m: StackedGradients(m, cross_entropy, Mean(), names=["a", "a"], environment_momentum=0.9),
            "names=a, a: two environments have one name",
        ),
        (lambda m: PerExampleGradients(m, cross_entropy, Mean(), definition="losses"), "definition=losses: must be"),
        (lambda m: StackedGradients(m, cross_entropy, AndMask), "rule AndMask: is a class; give an instance"),
        (lambda m: aggregate(UPGrad(), torch.randn(4, 5)), "rule UPGrad: compares whole gradients"),
        (lambda m: register_aggregation_hook(m, Mean()), "model: Linear, expected a model in DistributedDataParallel"),
        (
            lambda m: StackedGradients(m, cross_entropy, Mean())(numbers(6), (labels(), labels())),
            "step: tuple, expected a number; give inputs and targets as one pair",
        ),
    ],
)
def test_what_would_be_misunderstood_is_refused_by_name(make: Callable[[nn.Module], Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make(nn.Linear(6, CLASSES))


class _OfNoNumbers(nn.Module):
    """A layer without inputs, as of a table without numbers, beside one with inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.some = nn.Linear(0, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        answer: Tensor = self.none(inputs[:, :0]) + self.some(inputs)
        return answer


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("rescale", [False, True])
def test_a_parameter_without_components_leaves_the_step_finite(rescale: bool) -> None:
    model = _OfNoNumbers()
    inputs, targets = torch.randn(4, 8, 3), torch.randint(2, (4, 8))
    step = StackedGradients(model, cross_entropy, AndMask(0.5), rescale=rescale)(inputs, targets)
    assert step.kept_fraction.isfinite().all()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
