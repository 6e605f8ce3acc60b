"""Agreement over time: against the formulas in a few lines, against Adam to the last bit, and misuse."""

import copy
import io
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from concord.aggregation import (
    GRADIENT,
    SIGN,
    Aggregator,
    AndMask,
    Mean,
    SandMask,
    Statistic,
    Statistics,
    TemporalAgreementAdam,
    TemporalAndMaskAdam,
    TMask,
    Update,
    XorMask,
    temporal_agreement,
)
from concord.aggregation.draws import uniform
from concord.errors import InputError

SHAPES = [(3, 4), (5,), (), (2, 3, 2, 2)]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(steps)]


def trained(optimizer: torch.optim.Optimizer, steps: int = 6, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for at_step in gradients(steps, dtype):
        for parameter, gradient in zip(owned, at_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in owned]


def algorithm_1(
    steps: int,
    lr: float,
    betas: tuple[float, float, float],
    threshold: float,
    eps: float,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    bias_correction: bool = False,
    maximize: bool = False,
) -> list[Tensor]:
    """The paper's lines, in double precision."""
    weights = [parameter.detach().clone() for parameter in parameters(torch.float64)]
    m, v, a = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    beta1, beta2, beta3 = betas
    for t, at_step in enumerate(gradients(steps, torch.float64), 1):
        for i, gradient in enumerate(at_step):
            g = -gradient if maximize else gradient
            g = g if decoupled else g + weight_decay * weights[i]
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            a[i] = beta3 * a[i] + (1 - beta3) * g.sign()
            b = (a[i].abs() >= threshold).double()
            c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
            weights[i] = weights[i] - lr * (m[i] / c1 * b) / ((v[i] / c2).sqrt() + eps)
            if decoupled:
                weights[i] = weights[i] * (1 - lr * weight_decay)
    return weights


@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_it_is_the_papers_algorithm(path: Any, decoupled: bool, bias_correction: bool, maximize: bool) -> None:
    options: dict[str, Any] = {
        "lr": 0.01, "betas": (0.6, 0.95, 0.7), "threshold": 0.45, "eps": 1e-8, "weight_decay": 0.1,
        "decoupled": decoupled, "bias_correction": bias_correction, "maximize": maximize,
    }  # fmt: skip
    ours = trained(TemporalAndMaskAdam(parameters(torch.float64), **options, **path), 8, torch.float64)
    for weight, expected in zip(ours, algorithm_1(8, **options), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [True, False])
def test_with_threshold_0_it_is_adam_to_the_last_bit(path: Any, weight_decay: float, maximize: bool) -> None:
    same: dict[str, Any] = {"lr": 3e-3, "weight_decay": weight_decay, "maximize": maximize, **path}
    adam = trained(torch.optim.Adam(parameters(), betas=(0.8, 0.99), **same), 20)
    ours = trained(TemporalAndMaskAdam(parameters(), betas=(0.8, 0.99, 0.9), threshold=0, decoupled=False, **same), 20)
    assert all(torch.equal(weight, expected) for weight, expected in zip(ours, adam, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pieces_of_a_large_tensor_are_updated_as_the_whole_is(
    fused: bool, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(block: int) -> Tensor:
        monkeypatch.setattr(temporal_agreement, "CPU_BLOCK", block)
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(8, 6, 5, 5).contiguous(memory_format=layout))
        optimizer = TemporalAndMaskAdam([weight], 0.01, (0.5, 0.9, 0.5), 0.3, fused=fused)
        for _ in range(5):
            weight.grad = torch.randn(8, 6, 5, 5).contiguous(memory_format=layout)
            optimizer.step()
        assert optimizer.state[weight]["step"] == 5
        return weight.detach()

    torch.testing.assert_close(update(64), update(1 << 20), rtol=1e-6, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(beta=st.floats(0.05, 0.95), threshold=st.floats(0.01, 0.99), sign=st.sampled_from([-1.0, 1.0]))
def test_a_weight_first_moves_when_its_gradients_have_agreed_long_enough(
    beta: float, threshold: float, sign: float
) -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = TemporalAndMaskAdam([weight], 0.1, (0.9, 0.999, beta), threshold)
    wanted = math.log1p(-threshold) / math.log(beta)
    moved = None
    for step in range(1, math.ceil(wanted) + 2):
        weight.grad = torch.full((1,), sign, dtype=torch.float64)
        optimizer.step()
        if moved is None and float(weight.detach()) != 1.0:
            moved = step
    assert moved is not None
    assert abs(moved - wanted) <= 1 + 1e-6


def test_what_the_mask_drops_stays_to_the_last_bit() -> None:
    weight = torch.nn.Parameter(torch.randn(1000))
    before = weight.detach().clone()
    optimizer = TemporalAndMaskAdam([weight], 0.5, (0.9, 0.999, 0.5), 0.7)
    signs = torch.ones(1000)
    signs[::2] = -1
    for step in range(10):  # the first half of the weights always agrees with itself, the second half never
        weight.grad = torch.where(torch.arange(1000) < 500, signs, signs * (-1) ** step)
        optimizer.step()
    assert torch.equal(weight[500:], before[500:])
    assert bool((weight[:500] != before[:500]).all())
    assert optimizer.agreement() == 0.5


def test_decoupled_weight_decay_also_shrinks_what_is_masked() -> None:
    weight = torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = TemporalAndMaskAdam([weight], 0.1, threshold=1.0, weight_decay=0.5)
    weight.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 2.0 * (1 - 0.1 * 0.5)))


def test_groups_have_options_of_their_own() -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = TemporalAndMaskAdam([{"params": [first], "threshold": 0.0}, {"params": [second]}], threshold=1.0)
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert bool((first != 1).all())
    assert bool((second == 1).all())


@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened(path: Any) -> None:
    def optimizer_for(weights: list[torch.nn.Parameter]) -> TemporalAndMaskAdam:
        return TemporalAndMaskAdam(weights, 0.01, (0.5, 0.9, 0.6), 0.3, **path)

    undisturbed = optimizer_for(parameters())
    trained(undisturbed, 5)
    state = copy.deepcopy(undisturbed.state_dict())
    weights = [torch.nn.Parameter(p.detach().clone()) for p in undisturbed.param_groups[0]["params"]]
    restored = optimizer_for(weights)
    restored.load_state_dict(state)
    for ours, expected in zip(trained(restored, 4), trained(undisturbed, 4), strict=True):
        assert torch.equal(ours, expected)


def test_parameters_without_a_gradient_stay_and_closures_are_called() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = TemporalAndMaskAdam([used, unused], threshold=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (used**2).sum()
        loss.backward()
        return float(loss)

    assert optimizer.step(closure) == 2.0
    assert bool((unused == 1).all())
    assert bool((used < 1).all())
    assert not optimizer.state[unused]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threshold": 1.5}, r"threshold=1\.5: the agreement threshold must lie in \[0, 1\]"),
        ({"threshold": -0.1}, "threshold"),
        ({"betas": (0.9, 0.999)}, "must be three"),
        ({"betas": (0.9, 0.999, 1.0)}, r"must be three in \[0, 1\)"),
        ({"lr": -1.0}, "lr=-1.0: must not be negative"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"lr": torch.tensor(0.1)}, "needs capturable"),
    ],
)
def test_wrong_options_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TemporalAndMaskAdam(parameters(), **options)


def test_sparse_and_complex_are_refused() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        TemporalAndMaskAdam(table.parameters()).step()
    with pytest.raises(ValueError, match="complex"):
        TemporalAndMaskAdam([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(RuntimeError, match="foreach and fused"):
        TemporalAndMaskAdam(parameters(), foreach=True, fused=True)


# Any rule


@dataclass(frozen=True)
class DeadZone:
    """Keeps what agrees among gradients that are not small, softly; a rule and a statistic of the test alone."""

    width: float

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (GRADIENT, Statistic("large_sign", lambda g: g.sign() * (g.abs() > self.width), whole=1))

    def finish(self, sums: Statistics, environments: int) -> Update:
        kept = (sums["large_sign"].abs() * (1 + sums["gradient"].abs())).clamp(max=1)
        return Update(sums["gradient"] * kept, kept)


@dataclass(frozen=True)
class Lottery:
    """Keeps a component where its number is below the agreement of signs."""

    statistics: ClassVar[tuple[Statistic, ...]] = (SIGN,)
    draws: ClassVar[tuple[str, ...]] = ("ticket",)
    seed: int = 3

    def finish(self, sums: Statistics, environments: int) -> Update:
        kept = sums["sign"].abs() > sums["ticket"]
        return Update(sums["sign"] * kept, kept)


def loop(rule: Aggregator, steps: int, lr: float, betas: tuple[float, float, float]) -> list[Tensor]:
    """Adam under the rule's mask, in double precision, one parameter after the other."""
    weights = [parameter.detach().clone() for parameter in parameters(torch.float64)]
    beta1, beta2, beta3 = betas
    first = 0
    for i, weight in enumerate(weights):
        m, v = torch.zeros_like(weight), torch.zeros_like(weight)
        averages = {each.name: torch.zeros_like(weight) for each in rule.statistics}
        numbers = torch.arange(first, first + weight.numel()).view(weight.shape)
        first += weight.numel()
        for t, at_step in enumerate(gradients(steps, torch.float64), 1):
            g = at_step[i]
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            for each in rule.statistics:
                averages[each.name] = beta3 * averages[each.name] + (1 - beta3) * each.of(g)
            seen = averages | ({"gradient": m} if GRADIENT in rule.statistics else {})
            seen |= {"ticket": uniform(numbers, f"3 {t} ticket")} if isinstance(rule, Lottery) else {}
            kept = rule.finish(seen, 1).kept.double()
            weight -= lr * kept * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
    return weights


PATHS: Any = [{}, {"foreach": True}, {"fused": True}]
RULES = st.one_of(
    st.floats(0, 2).map(DeadZone),
    st.floats(0, 1).map(XorMask),
    st.floats(0, 1).map(AndMask),
    st.builds(SandMask, st.floats(0, 0.9), st.floats(0.1, 10)),
    st.just(Lottery()),
    st.just(Mean()),
)


@settings(max_examples=60)
@given(rule=RULES, path=st.sampled_from(PATHS), betas=st.tuples(*[st.floats(0.1, 0.95)] * 3))
def test_any_rule_masks_adam_over_time(rule: Any, path: Any, betas: Any) -> None:
    ours = trained(TemporalAgreementAdam(parameters(torch.float64), rule, 0.01, betas, **path), 6, torch.float64)
    for weight, expected in zip(ours, loop(rule, 6, 0.01, betas), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("path", PATHS)
def test_the_and_mask_s_optimizer_is_the_general_one_with_this_rule(path: Any) -> None:
    general = trained(TemporalAgreementAdam(parameters(), AndMask(0.3), betas=(0.5, 0.9, 0.6), **path))
    ours = trained(TemporalAndMaskAdam(parameters(), betas=(0.5, 0.9, 0.6), threshold=0.3, **path))
    assert all(torch.equal(weight, expected) for weight, expected in zip(ours, general, strict=True))


def test_only_statistics_that_are_not_adams_own_are_kept() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    for rule, names in (
        (Mean(), set()),
        (AndMask(0.5), {"sign_avg"}),
        (SandMask(0.5), {"gradient_avg", "sign_avg", "square_avg"}),
    ):
        optimizer = TemporalAgreementAdam([weight], rule)
        optimizer.step()
        assert optimizer.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq"} | names
    assert optimizer.state[weight]["square_avg"].dtype == torch.float64


def test_a_copy_keeps_the_rule() -> None:
    optimizer = TemporalAgreementAdam(parameters(), XorMask(0.7))
    assert copy.deepcopy(optimizer).rule == XorMask(0.7)
    assert copy.deepcopy(TemporalAndMaskAdam(parameters(), threshold=0.2)).rule.threshold == 0.2


# Half precision


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_signs_are_averaged_in_single_precision(path: Any, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    optimizer = TemporalAndMaskAdam([weight], 0.1, threshold=0.9, **path)
    expected = torch.zeros(())
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        expected.lerp_(torch.ones(()), 1 - 0.9)
    average = optimizer.state[weight]["sign_avg"]
    assert average.dtype == torch.float32
    assert bool((average == expected).all())
    assert optimizer.agreement() == 1
    assert bool((weight < 1).all())


def test_a_checkpoint_keeps_averages_in_single_precision() -> None:
    def optimizer_for(weights: list[torch.nn.Parameter]) -> TemporalAndMaskAdam:
        return TemporalAndMaskAdam(weights, 0.01, (0.5, 0.9, 0.6), 0.3)

    undisturbed = optimizer_for(parameters(torch.bfloat16))
    trained(undisturbed, 5, torch.bfloat16)
    file = io.BytesIO()
    torch.save(undisturbed.state_dict(), file)
    file.seek(0)
    weights = [torch.nn.Parameter(p.detach().clone()) for p in undisturbed.param_groups[0]["params"]]
    restored = optimizer_for(weights)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for weight, original in zip(weights, undisturbed.param_groups[0]["params"], strict=True):
        ours, expected = restored.state[weight]["sign_avg"], undisturbed.state[original]["sign_avg"]
        assert ours is not expected
        assert ours.dtype == torch.float32
        assert torch.equal(ours, expected)
    later = zip(trained(restored, 4, torch.bfloat16), trained(undisturbed, 4, torch.bfloat16), strict=True)
    assert all(torch.equal(ours, expected) for ours, expected in later)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("decoupled", [True, False])
def test_training_goes_on_from_adams_state_to_the_last_bit(kind: Any, decoupled: bool) -> None:
    adam = kind(parameters(), lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1 if kind is torch.optim.Adam else 0.0)
    trained(adam, 5)
    weights = [torch.nn.Parameter(p.detach().clone()) for p in adam.param_groups[0]["params"]]
    ours = TemporalAndMaskAdam(weights, betas=(0.9, 0.999, 0.7), threshold=0, decoupled=decoupled)
    ours.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert ours.param_groups[0]["betas"] == (0.8, 0.99, 0.7)
    for found, expected in zip(trained(ours, 6), trained(adam, 6), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda weights: torch.optim.Adam(weights, amsgrad=True), "amsgrad"),
        (lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9), "lacks Adam's averages"),
        (lambda weights: torch.optim.RMSprop(weights), "lacks Adam's averages"),
    ],
)
def test_a_state_without_adams_averages_is_refused_and_changes_nothing(other: Any, said: str) -> None:
    theirs, ours = other(parameters()), TemporalAndMaskAdam(parameters())
    trained(theirs, 2)
    trained(ours, 2)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(InputError, match=said):
        ours.load_state_dict(theirs.state_dict())
    assert str(ours.state_dict()) == str(before)


def test_a_checkpoint_with_half_precision_or_no_averages_is_resumed() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    for average in ({"sign_avg": torch.full((3,), 0.5, dtype=torch.bfloat16)}, {}):
        optimizer = TemporalAndMaskAdam([weight], betas=(0.9, 0.999, 0.5))
        moments = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        state = {0: {"step": torch.tensor(4.0), **moments, **average}}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        optimizer.step()
        found = optimizer.state[weight]["sign_avg"]
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.full((3,), 0.75 if average else 0.5))


# What is refused, before anything moves


def test_an_error_in_the_last_group_leaves_the_first_as_it_was() -> None:
    first, table = torch.nn.Parameter(torch.ones(3)), torch.nn.Embedding(5, 2)
    optimizer = TemporalAndMaskAdam([{"params": [first]}, {"params": table.parameters()}], threshold=0.0)
    first.grad, table.weight.grad = torch.ones(3), torch.ones(5, 2)
    table.sparse = True

    def unmoved(said: str) -> None:
        before = copy.deepcopy((first, table.weight, optimizer.state_dict()["state"]))
        with pytest.raises((RuntimeError, ValueError), match=said):
            optimizer.step()
        torch.testing.assert_close((first, table.weight, optimizer.state_dict()["state"]), before, rtol=0, atol=0)

    def made_sparse() -> None:
        table.weight.grad = None
        table(torch.tensor([1, 3])).sum().backward()

    made_sparse()
    unmoved("sparse")
    assert not optimizer.state
    table.weight.grad = torch.ones(5, 2)
    optimizer.step()
    optimizer.param_groups[1]["threshold"] = 1.5
    unmoved("threshold=1.5")
    optimizer.param_groups[1]["threshold"] = 0.5
    optimizer.state[table.weight]["sign_avg"] = torch.zeros(2, 5)
    unmoved("shape")
    optimizer.state[table.weight]["sign_avg"] = torch.zeros(5, 2)
    made_sparse()
    unmoved("sparse")


@dataclass(frozen=True)
class Whole(AndMask):
    """Keeps all or nothing: no function of single components."""

    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["gradient"], sums["sign"].mean())


@dataclass(frozen=True)
class InPlace(AndMask):
    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["gradient"], sums["sign"].abs_())


@dataclass(frozen=True)
class Exponential(Mean):
    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, Statistic("exp", torch.exp))


@dataclass(frozen=True)
class Miscounted(Mean):
    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, replace(SIGN, degree=1))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Whole(), r"finish gives \(\) as the kept"),
        (InPlace(), "writes into the averages"),
        (Exponential(), "exp_avg, which is Adam's own"),
        (Miscounted(), "degree"),
        (torch.sign, "needs statistics"),
        (TMask(), "rule TMask: its test needs the number of environments"),
    ],
)
def test_rules_that_cannot_mask_are_refused(rule: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        TemporalAgreementAdam(parameters(), rule)


def test_a_rule_that_draws_is_refused_where_the_step_is_kept_on_the_gpu() -> None:
    with pytest.raises(RuntimeError, match="Lottery draws by the step's number"):
        TemporalAgreementAdam(parameters(), Lottery(), capturable=True)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = TemporalAndMaskAdam(parameters())
    with pytest.raises(ValueError, match="threshold=2"):
        optimizer.add_param_group({"params": parameters(), "threshold": 2})
    assert len(optimizer.param_groups) == 1
