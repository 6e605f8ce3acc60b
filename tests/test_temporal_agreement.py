"""Temporal AND-mask Adam: the paper's algorithm in a few lines against ours, Adam to the last bit, and misuse."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from concord.optim import TemporalAgreementAdam, TemporalAndMaskAdam, temporal_agreement

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
        monkeypatch.setattr(temporal_agreement, "_CPU_BLOCK", block)
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
        ({"betas": (0.9, 0.999, 1.0)}, r"must lie in \[0, 1\)"),
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
