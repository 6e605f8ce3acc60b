"""Objectives equal the few lines of their papers, in value and gradient, in every placement."""

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import Kept, without_time
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from concord.aggregation import AGGREGATORS, AndMask, Mean, aggregate, aggregator
from concord.environments import Environments
from concord.errors import ArgumentError, InputError
from concord.gradients import NonFiniteGradientError, StackedGradients
from concord.gradients.risk import MeanRisk
from concord.models.table_network import TableNetwork
from concord.objectives import (
    CORAL,
    DANN,
    EQRM,
    ERM,
    IGA,
    MMD,
    OBJECTIVES,
    DomainClassifier,
    Fishr,
    GroupDRO,
    IRMv1,
    MetaIRM,
    Mixup,
    MMREx,
    Objective,
    ObjectiveGradients,
    PenaltyWeight,
    SpectralDecoupling,
    VREx,
    irm_penalty,
    objective,
    objective_type,
    reverse_gradient,
)
from concord.training import Job, ProcessContext, TrainConfig, build_model, train
from concord.training.build import initialize_objective
from concord.training.context import Silent

ENVIRONMENTS, BATCH, CLASSES = 3, 12, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def batches(environments: int = ENVIRONMENTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(environments, BATCH, 6, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, CLASSES, (environments, BATCH), generator=generator)


def gradient(value: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(model.parameters()), materialize_grads=True))


def mean_risk(ours: Objective, model: nn.Module, batch: Any) -> Tensor:
    """The risk that gradient sources take, of one environment."""
    risk: Tensor = MeanRisk(model, ours.risk, None, torch.device("cpu"))(batch, 0)[0]
    return risk


# The papers, in a few lines each


def risks(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    return [cross_entropy(model(x), y) for x, y in zip(inputs, targets, strict=True)]


def erm(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return sum(risks(model, inputs, targets)) / len(inputs)


def irm_penalties(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Arjovsky et al., appendix D, with one batch squared."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(inputs, targets, strict=True):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        total = total + torch.autograd.grad(cross_entropy(model(x) * w, y), w, create_graph=True)[0] ** 2
    return total / len(inputs)


def irm_half_penalties(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Arjovsky et al., appendix D, to the letter."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(inputs, targets, strict=True):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        losses = cross_entropy(model(x) * w, y, reduction="none")
        g1 = torch.autograd.grad(losses[0::2].mean(), w, create_graph=True)[0]
        g2 = torch.autograd.grad(losses[1::2].mean(), w, create_graph=True)[0]
        total = total + g1 * g2
    return total / len(inputs)


def variance(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    each = risks(model, inputs, targets)
    mean = sum(each) / len(each)
    return sum((risk - mean) ** 2 for risk in each) / len(each)


def worst_combination(model: nn.Module, inputs: Tensor, targets: Tensor, least: float) -> Tensor:
    """Krueger et al., eq. 7: the maximum over its corners, where all coefficients but one are the least."""
    each = risks(model, inputs, targets)
    corners = [
        sum((1 - (len(each) - 1) * least if other == chosen else least) * risk for other, risk in enumerate(each))
        for chosen in range(len(each))
    ]
    return torch.stack(corners).max()


def meta_losses(
    model: nn.Sequential, inputs: Tensor, targets: Tensor, rate: float, steps: int, *, same: bool, first_order: bool
) -> list[Tensor]:
    """Bae et al., algorithm 1, by hand for this network."""

    def forward(weights: list[Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]

    losses = []
    for i in range(len(inputs)):
        weights = list(model.parameters())
        for _ in range(steps):
            slopes = torch.autograd.grad(
                cross_entropy(forward(weights, inputs[i]), targets[i]), weights, create_graph=not first_order
            )
            weights = [weight - rate * slope for weight, slope in zip(weights, slopes, strict=True)]
        for j in range(len(inputs)):
            if (j == i) == same:
                losses.append(cross_entropy(forward(weights, inputs[j]), targets[j]))
    return losses


def meta(
    steps: int = 1, weight: float = 0.0, *, same: bool = False, first_order: bool = False
) -> Callable[..., Tensor]:
    def value(model: nn.Sequential, inputs: Tensor, targets: Tensor) -> Tensor:
        losses = torch.stack(meta_losses(model, inputs, targets, 0.5, steps, same=same, first_order=first_order))
        return losses.mean() + weight * ((losses - losses.mean()) ** 2).mean().sqrt()

    return value


def group_dro(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Sagawa et al., algorithm 1, the first step: equal weights, then exponentiated by the losses."""
    each = torch.stack(risks(model, inputs, targets))
    weights = torch.full((len(each),), 1 / len(each), dtype=torch.float64) * torch.exp(0.3 * each.detach())
    return (weights / weights.sum() * each).sum()


def quantile_of_risks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Eastwood et al., section 4: the root of the kernel estimate, its derivative that of the implicit function."""
    each = torch.stack(risks(model, inputs, targets))
    at, d = each.detach().numpy(), len(each)
    spread = at.std(ddof=1)
    width = 1.06 * spread * d**-0.2
    root = brentq(lambda r: norm.cdf((r - at) / width).mean() - 0.75, at.min() - 9 * width, at.max() + 9 * width)
    density, z = norm.pdf((root - at) / width), (root - at) / width
    widths = 1.06 * d**-0.2 * (at - at.mean()) / ((d - 1) * spread)  # dh / dR_e
    slopes = torch.from_numpy((density + (density * z).sum() * widths) / density.sum())
    return (slopes * (each - each.detach())).sum() + root


def head_variances(model: nn.Sequential, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Rame et al.: the variance over examples of their gradients at the head, one example at a time."""
    variances = []
    for x, y in zip(inputs, targets, strict=True):
        each = [cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
        grads = [torch.autograd.grad(loss, list(model[-1].parameters()), create_graph=True) for loss in each]
        flat = torch.stack([torch.cat([grad.flatten() for grad in parts]) for parts in grads])
        variances.append(((flat - flat.mean(0)) ** 2).mean(0))
    return variances


def distance_to_mean(vectors: list[Tensor]) -> Tensor:
    mean = sum(vectors) / len(vectors)
    return sum(((vector - mean) ** 2).sum() for vector in vectors) / len(vectors)


def fishr(*all_: Any) -> Tensor:
    return erm(*all_) + 0.7 * distance_to_mean(head_variances(*all_))


def iga(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Koyama and Yamaguchi: the trace of the variance of the environments' gradients."""
    grads = [
        torch.cat([part.flatten() for part in torch.autograd.grad(risk, list(model.parameters()), create_graph=True)])
        for risk in risks(model, inputs, targets)
    ]
    return erm(model, inputs, targets) + 0.7 * distance_to_mean(grads)


def over_pairs(distance: Callable[[Tensor, Tensor], Tensor], model: nn.Sequential, inputs: Tensor) -> Tensor:
    features = model[:-1](inputs)
    return torch.stack([distance(one, other) for one, other in itertools.combinations(features, 2)]).mean()


def moments(one: Tensor, other: Tensor) -> Tensor:
    """DomainBed's CORAL."""
    return ((one.mean(0) - other.mean(0)) ** 2).mean() + ((torch.cov(one.T) - torch.cov(other.T)) ** 2).mean()


def discrepancy(one: Tensor, other: Tensor) -> Tensor:
    """DomainBed's MMD."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squares = ((x[:, None] - y[None]) ** 2).sum(2)
        return sum(torch.exp(-(10.0**power) * squares) for power in range(-3, 4)).mean()

    return kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)


def coral(*all_: Any) -> Tensor:
    return erm(*all_) + 0.7 * over_pairs(moments, *all_[:2])


def mmd(*all_: Any) -> Tensor:
    return erm(*all_) + 0.7 * over_pairs(discrepancy, *all_[:2])


def mixup(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """DomainBed's Mixup, with draws from the seed that the objective takes from torch."""
    draws = random.Random(int(torch.randint(2**31, ())))
    circle = draws.sample(range(len(inputs)), len(inputs))
    shares = [draws.betavariate(0.4, 0.4) for _ in circle]
    total = torch.zeros((), dtype=torch.float64)
    for at, one in enumerate(circle):
        other, share = circle[(at + 1) % len(circle)], shares[one]
        outputs = model(share * inputs[one] + (1 - share) * inputs[other])
        total = total + share * cross_entropy(outputs, targets[one])
        total = total + (1 - share) * cross_entropy(outputs, targets[other])
    return total / len(inputs)


def spectral_decoupling(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return erm(model, inputs, targets) + 0.7 * (model(inputs) ** 2).mean()


CASES: dict[str, tuple[Objective, Callable[..., Tensor]]] = {
    "erm": (ERM(cross_entropy), erm),
    "irm": (IRMv1(cross_entropy, PenaltyWeight(0.7)), lambda *all_: erm(*all_) + 0.7 * irm_penalties(*all_)),
    "irm, large weight": (
        IRMv1(cross_entropy, PenaltyWeight(50.0)),
        lambda *all_: erm(*all_) / 50 + irm_penalties(*all_),
    ),
    "irm, halves": (
        IRMv1(cross_entropy, PenaltyWeight(0.7), "halves"),
        lambda *all_: erm(*all_) + 0.7 * irm_half_penalties(*all_),
    ),
    "vrex": (VREx(cross_entropy, PenaltyWeight(0.7)), lambda *all_: erm(*all_) + 0.7 * variance(*all_)),
    "vrex, large weight": (VREx(cross_entropy, PenaltyWeight(50.0)), lambda *all_: erm(*all_) / 50 + variance(*all_)),
    "mm-rex": (MMREx(cross_entropy, PenaltyWeight(0.7)), lambda *all_: worst_combination(*all_, least=-0.7)),
    "mm-rex, large weight": (
        MMREx(cross_entropy, PenaltyWeight(4.0)),
        lambda *all_: worst_combination(*all_, least=-4.0) / 4,
    ),
    "mm-rex, worst": (MMREx(cross_entropy, PenaltyWeight(0.0)), lambda *all_: torch.stack(risks(*all_)).max()),
    "group-dro": (GroupDRO(cross_entropy, 0.3), group_dro),
    "eqrm": (EQRM(cross_entropy, 0.75), quantile_of_risks),
    "fishr": (Fishr(cross_entropy, PenaltyWeight(0.7), momentum=0.0), fishr),
    "fishr, large weight": (
        Fishr(cross_entropy, PenaltyWeight(50.0), momentum=0.9),  # of the first step, whose average is its own
        lambda *all_: erm(*all_) / 50 + distance_to_mean(head_variances(*all_)),
    ),
    "iga": (IGA(cross_entropy, PenaltyWeight(0.7)), iga),
    "coral": (CORAL(cross_entropy, PenaltyWeight(0.7)), coral),
    "mmd": (MMD(cross_entropy, PenaltyWeight(0.7)), mmd),
    "mixup": (Mixup(cross_entropy, 0.4), mixup),
    "sd": (SpectralDecoupling(cross_entropy, PenaltyWeight(0.7)), spectral_decoupling),
    "meta-irm": (MetaIRM(cross_entropy, 0.5), meta()),
    "meta-irm, spread": (MetaIRM(cross_entropy, 0.5, weight=PenaltyWeight(0.3)), meta(weight=0.3)),
    "meta-irm, three steps": (MetaIRM(cross_entropy, 0.5, 3), meta(3)),
    "meta-irm, first order": (MetaIRM(cross_entropy, 0.5, 2, first_order=True), meta(2, first_order=True)),
    "meta-irm, same environment": (MetaIRM(cross_entropy, 0.5, same_environment=True), meta(same=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_objective_is_the_few_lines_of_its_paper(case: str) -> None:
    ours, reference = CASES[case]
    model, (inputs, targets) = network(), batches()
    ours.begin(model, ENVIRONMENTS, 1)
    torch.manual_seed(1)
    value = ours(model, inputs, targets)
    torch.manual_seed(1)
    expected = reference(model, inputs, targets)
    assert_close(value, expected, rtol=1e-10, atol=1e-12)
    assert_close(gradient(value, model), gradient(expected, model), rtol=1e-10, atol=1e-10)


def test_examples_beyond_a_part_of_mmds_kernel_count_alike() -> None:
    ours, reference = CASES["mmd"]
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(4, 173, 6, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, CLASSES, (4, 173), generator=generator)
    model = network()
    value, expected = ours(model, inputs, targets), reference(model, inputs, targets)
    assert_close(value, expected, rtol=1e-10, atol=1e-12)
    assert_close(gradient(value, model), gradient(expected, model), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if case != "eqrm"])
def test_a_second_derivative_is_right_or_refused(case: str) -> None:
    ours, reference = CASES[case]
    model, (inputs, targets) = network(), batches()

    def second_derivative(objective: Callable[..., Tensor]) -> Sequence[Tensor]:
        torch.manual_seed(1)
        slopes = torch.autograd.grad(objective(model, inputs, targets), list(model.parameters()), create_graph=True)
        return gradient(torch.stack([slope.square().sum() for slope in slopes]).sum(), model)

    ours.begin(model, ENVIRONMENTS, 1)
    if case == "mmd":
        with pytest.raises(InputError, match="objective mmd: it has no second derivative"):
            second_derivative(ours)
    else:
        assert_close(second_derivative(ours), second_derivative(reference), rtol=1e-8, atol=1e-8)


def test_eqrms_second_derivative_is_that_of_the_quantile() -> None:
    risks_of_five = torch.tensor([0.3, 1.1, 0.7, 2.0, 0.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(EQRM(cross_entropy, 0.75).combine, risks_of_five)


@pytest.mark.parametrize("case", ["eqrm", "coral"])
def test_torch_func_differentiates_an_objective(case: str) -> None:
    ours, reference = CASES[case]
    model, (inputs, targets) = network(), batches()

    class Value(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return ours(self.model, inputs, targets)

    value = Value()
    found = torch.func.grad(lambda parameters: torch.func.functional_call(value, parameters, ()))(
        {name: each.detach() for name, each in value.named_parameters()}
    )
    assert_close(list(found.values()), gradient(reference(model, inputs, targets), model), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_source_leaves_the_gradient_of_the_objective(case: str) -> None:
    ours, _ = CASES[case]
    model, (inputs, targets) = network(), batches()
    ours.begin(model, ENVIRONMENTS, 1)
    torch.manual_seed(1)
    expected = gradient(ours(model, inputs, targets), model)
    ours.begin(model, ENVIRONMENTS, 1)
    torch.manual_seed(1)
    step = ObjectiveGradients(model, ours, ["a", "b", "c"])(inputs, targets, 0)
    assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-10, atol=1e-12)
    assert step.losses.shape == (ENVIRONMENTS,)
    assert step.kept_fraction.tolist() == [1.0] * 4


def test_sparse_gradients_of_a_table_are_those_of_a_dense_one() -> None:
    words, targets = torch.randint(0, 20, (ENVIRONMENTS, BATCH, 5)), batches()[1]
    found = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 6, sparse=sparse), nn.Flatten(), nn.Linear(30, CLASSES))
        ObjectiveGradients(model, VREx(cross_entropy, PenaltyWeight(3.0)), ["a", "b", "c"])(words, targets, 0)
        found[sparse] = [parameter.grad for parameter in model.parameters()]
    assert_close(found[True], found[False])


class Reentrant(nn.Module):
    """The first layer is under activation checkpointing, and nothing that it gets is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(checkpoint(self.first, inputs.detach().requires_grad_(), use_reentrant=True))
        return outputs


def test_layers_under_reentrant_checkpointing_are_refused() -> None:
    model = Reentrant().double()
    gradients = ObjectiveGradients(model, VREx(cross_entropy, PenaltyWeight(3.0)), ["a", "b", "c"])
    with pytest.raises(InputError, match=r"parameter first.weight: .*; take use_reentrant=False"):
        gradients(*batches(), 0)


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("case", ["irm, large weight", "irm, halves", "sd"])
def test_every_aggregator_takes_uncoupled_terms(name: Any, case: str) -> None:
    model, (inputs, targets) = network(), batches()
    ours, _ = CASES[case]
    rule = aggregator(name, 0.5)
    each = [gradient(mean_risk(ours, model, (x, y)), model) for x, y in zip(inputs, targets, strict=True)]
    expected = [aggregate(rule, torch.stack(slopes))[0] for slopes in zip(*each, strict=True)]
    for vectorize in (True, False):
        StackedGradients(model, ours.risk, rule, vectorize=vectorize)(inputs, targets)
        assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-6, atol=1e-9)


def test_irms_penalty_is_known_for_a_squared_error() -> None:
    # R(w f) = mean (w f - y)², so dR/dw at 1 is 2 mean f (f - y).
    outputs, targets = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    slopes = 2 * outputs * (outputs - targets)
    assert_close(irm_penalty(mse_loss, outputs, targets), slopes.mean() ** 2)
    halves = irm_penalty(mse_loss, outputs, targets, "halves")
    assert_close(halves, slopes[::2].mean() * slopes[1::2].mean())


def test_halves_without_weight_are_the_mean_risk_also_where_targets_are_ignored() -> None:
    model, (inputs, targets) = network(), batches()
    targets[:, :3] = -100
    value = IRMv1(cross_entropy, PenaltyWeight(0.0), "halves")(model, inputs, targets)
    assert_close(value, sum(risks(model, inputs, targets)) / len(inputs))


def test_the_product_of_halves_may_be_negative_and_is_right_on_average() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(40_000, 16, 1), torch.randn(40_000, 16, 1) * 3
    slope = 2 * (outputs * (outputs - targets)).mean()  # of all that could be drawn: E f² = 1
    halves = torch.func.vmap(lambda o, t: irm_penalty(mse_loss, o, t, "halves"))(outputs, targets)
    squared = torch.func.vmap(lambda o, t: irm_penalty(mse_loss, o, t))(outputs, targets)
    assert halves.min() < 0
    assert abs(halves.mean() - slope**2) < 0.1
    assert squared.mean() > slope**2 + 1  # noise alone


def test_the_penalty_waits_for_its_warmup() -> None:
    weight = PenaltyWeight(1e4, warmup=10)
    assert [weight.at(step) for step in (0, 9, 10, 50)] == [1.0, 1.0, 1e4, 1e4]
    assert PenaltyWeight(0.3, warmup=10).at(0) == 0.3
    model, (inputs, targets) = network(), batches()
    for ours in (MMREx(cross_entropy, weight), MetaIRM(cross_entropy, 0.5, weight=weight)):
        terms, _ = ours.terms(model, (inputs, targets), 3)
        assert_close(ours.combine(terms, 3), terms.mean())
        assert not torch.isclose(ours.combine(terms, 10), terms.mean())


@pytest.mark.parametrize("name", ["irm", "vrex", "mm-rex", "eqrm", "fishr", "iga", "coral", "mmd", "dann", "sd"])
def test_every_objective_with_a_warmup_changes_at_its_end_and_not_before(name: Any) -> None:
    """By the size of the model's gradient."""

    def size(warmup: int, step: int) -> float:
        torch.manual_seed(0)
        model, (inputs, targets) = network().float(), batches()
        ours = objective(name, cross_entropy, warmup_steps=warmup, penalty_weight=50.0)
        ours.begin(model, len(inputs), 20)
        slopes = gradient(ours(model, inputs.float(), targets, step=step), model)
        return sum(float(slope.square().sum()) for slope in slopes) ** 0.5

    assert size(10, 3) == size(10, 9) == size(20, 9)
    assert size(10, 10) == size(0, 10) == size(10, 19)
    assert size(10, 10) != pytest.approx(size(10, 9), rel=1e-6)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=6), st.floats(0, 5))
def test_risk_extrapolation_agrees_with_the_mean_only_where_risks_do(values: list[float], weight: float) -> None:
    terms = torch.tensor(values, dtype=torch.float64)
    for ours in (VREx(cross_entropy, PenaltyWeight(weight)), MMREx(cross_entropy, PenaltyWeight(weight))):
        combined = ours.combine(terms) * max(1.0, weight)
        assert combined >= terms.mean() - 1e-9
        if terms.max() - terms.min() > 1e-3 and weight > 1e-3:
            assert combined > terms.mean() + 1e-11
        alike = ours.combine(torch.full_like(terms, 2.0)) * max(1.0, weight)
        assert_close(alike, torch.tensor(2.0, dtype=torch.float64))
        shuffled = ours.combine(terms.flip(0)) * max(1.0, weight)
        assert_close(combined, shuffled)


def test_equal_meta_losses_have_a_gradient() -> None:
    model, (inputs, targets) = network(), batches(1)
    inputs, targets = inputs.expand(2, -1, -1), targets.expand(2, -1)
    value = MetaIRM(cross_entropy, 0.5, weight=PenaltyWeight(1.0))(model, inputs, targets)
    assert all(torch.isfinite(slope).all() for slope in gradient(value, model))


def test_drop_grad_multiplies_inner_gradients_by_noise_of_its_variance() -> None:
    model, (inputs, targets) = network(), batches()
    ours = MetaIRM(cross_entropy, 0.5, drop_grad=0.2)
    plain = MetaIRM(cross_entropy, 0.5).adapted(model, (inputs[0], targets[0]))
    torch.manual_seed(0)
    drawn = [ours.adapted(model, (inputs[0], targets[0])) for _ in range(2000)]
    for name, parameter in model.named_parameters():
        factors = torch.stack([(each[name] - parameter).detach() for each in drawn]) / (plain[name] - parameter)
        assert_close(factors.mean(0), torch.ones_like(factors[0]), rtol=0, atol=0.05)
        assert_close(factors.var(0), torch.full_like(factors[0], 0.25), rtol=0, atol=0.05)


def test_judges_are_drawn_among_the_others() -> None:
    def number(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0 * outputs.sum() + targets.mean()

    def judges(outer: int, environments: int) -> list[float]:
        batch = torch.zeros(environments, 2, 6).double(), torch.arange(environments)[:, None].expand(-1, 2).double()
        losses: list[float] = MetaIRM(number, 0.5, outer=outer).terms(model, batch, own=[1])[0].tolist()
        return losses

    model = network()
    drawn = [judges(2, 5) for _ in range(100)]
    assert all(len(set(each)) == 2 and 1 not in each for each in drawn)
    assert {judge for each in drawn for judge in each} == {0, 2, 3, 4}
    assert judges(9, 3) == [0, 2]


def test_the_domain_classifier_learns_what_the_representation_unlearns() -> None:
    model, (inputs, targets) = network(), batches()
    ours = DANN(cross_entropy, PenaltyWeight(0.4), hidden_units=5)
    classifier = initialized(ours, model)
    both = nn.ModuleList([model, classifier])
    slopes = gradient(ours(model, inputs, targets), both)
    # By hand: two losses, each with its own gradient.
    features = torch.tanh(model[0](inputs))
    risk = sum(cross_entropy(model[2](f), y) for f, y in zip(features, targets, strict=True)) / ENVIRONMENTS
    told = [cross_entropy(classifier(f), torch.full((BATCH,), e)) for e, f in enumerate(features)]
    of_risk = torch.autograd.grad(risk, list(both.parameters()), retain_graph=True, materialize_grads=True)
    of_domain = torch.autograd.grad(torch.stack(told).mean(), list(both.parameters()), materialize_grads=True)
    for (name, _), slope, one, other in zip(both.named_parameters(), slopes, of_risk, of_domain, strict=True):
        assert_close(slope, one + (1.0 if name.startswith("1.") else -0.4) * other, rtol=1e-8, atol=1e-10)


def initialized(ours: DANN, model: nn.Module, environments: int = ENVIRONMENTS) -> DomainClassifier:
    """Its domain classifier, as exact as the models here."""
    ours.begin(model, environments, 1)
    assert isinstance(ours.module, DomainClassifier)
    return ours.module.double()


def test_a_reversed_gradient_is_reversed_and_the_features_stay() -> None:
    features = torch.randn(3, 2, requires_grad=True)
    out = reverse_gradient(features, 0.5)
    assert torch.equal(out, features)
    out.sum().backward()
    assert_close(features.grad, torch.full((3, 2), -0.5))


def test_the_representation_is_the_input_of_the_named_layer() -> None:
    model, (inputs, targets) = network(), batches()
    _, _, features, outputs = CORAL(cross_entropy, PenaltyWeight(1.0), layer="0").represented(
        model, (inputs, targets), 0
    )
    assert torch.equal(features, inputs)
    assert torch.equal(outputs[0], model[0](inputs.flatten(0, 1)))


@pytest.mark.parametrize("name", ["dann", "fishr", "coral", "mmd"])
def test_a_representation_that_is_not_there_names_those_that_are(name: Any) -> None:
    with pytest.raises(InputError, match=r"representation=1: no linear layer; there are 0, 2"):
        objective(name, cross_entropy, representation="1").begin(network(), 2, 1)
    with pytest.raises(InputError, match="no linear layer whose input"):
        objective(name, cross_entropy).begin(nn.Flatten(), 2, 1)


def frozen() -> nn.Sequential:
    """A network of which only the last layer is trained."""
    model = network()
    model[0].requires_grad_(False)
    return model


def linear() -> nn.Linear:
    return nn.Linear(6, CLASSES).double()


@pytest.mark.parametrize("name", ["dann", "coral", "mmd"])
@pytest.mark.parametrize(("make", "head"), [(linear, "the model"), (frozen, "layer 2")])
def test_a_representation_that_no_parameter_changes_is_warned_of(
    name: Any, make: Callable[[], nn.Module], head: str
) -> None:
    model, ours = make(), objective(name, cross_entropy)
    ours.begin(model, ENVIRONMENTS, 1)
    if ours.module is not None:
        ours.module.double()
    with pytest.warns(UserWarning, match=f"changes nothing: no parameter changes the input of {head}, which is the"):
        ours.terms(model, batches())


@pytest.mark.parametrize(
    ("name", "make"), [("dann", network), ("coral", network), ("mmd", network), ("fishr", network), ("fishr", linear)]
)
def test_no_warning_where_the_penalty_changes_the_model(
    name: Any, make: Callable[[], nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    model, ours = make(), objective(name, cross_entropy)
    ours.begin(model, ENVIRONMENTS, 1)
    ours.terms(model, batches())
    assert not recwarn


@pytest.mark.parametrize("name", ["dann", "fishr", "group-dro"])
def test_an_objective_that_keeps_something_has_to_begin(name: Any) -> None:
    with pytest.raises(InputError, match="yet; call begin with the model first"):
        objective(name, cross_entropy)(network(), *batches())


# Any batch, any risk


def bert() -> nn.Module:
    """A Hugging Face classifier; attention is the plain one, which has second derivatives."""
    from transformers import BertConfig, BertForSequenceClassification  # seconds, in every process that reads this file

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config).double()


def texts(environments: int = 7, examples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 20, (environments, examples, 6), generator=generator)
    mask = torch.ones_like(words)
    mask[:, 1, 4:] = 0
    labels = torch.randint(0, CLASSES, (environments, examples), generator=generator)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def of_logits(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
    words = {name: leaf for name, leaf in batch.items() if name != "labels"}
    return cross_entropy(model(**words).logits, batch["labels"])


def weighted(model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
    examples = torch.tensor(len(batch["labels"]) * 2.5)
    return of_logits(model, batch, step) * examples, examples


def its_own_loss(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def text_risks(model: nn.Module, batch: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> list[Tensor]:
    """One plain forward pass an environment, with these weights or the model's own."""
    parts = [{name: leaf[e] for name, leaf in batch.items()} for e in range(len(batch["labels"]))]
    return [torch.func.functional_call(model, weights or {}, (), part).loss for part in parts]


class Logits(nn.Module):
    """The classifier on words and mask in one tensor, ``(examples, 2, words)``, for the papers' few lines above."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, texts: Tensor) -> Tensor:
        words, mask = texts.unbind(1)
        logits: Tensor = self.classifier(words, mask).logits
        return logits


def as_text(reference: Callable[..., Tensor]) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    def value(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return reference(Logits(model), torch.stack([batch["input_ids"], batch["attention_mask"]], 2), batch["labels"])

    return value


def text_meta(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    own = dict(model.named_parameters())
    losses: list[Tensor] = []
    for i, risk in enumerate(text_risks(model, batch)):
        slopes = torch.autograd.grad(risk, list(own.values()), create_graph=True)
        adapted = {name: value - 0.1 * slope for (name, value), slope in zip(own.items(), slopes, strict=True)}
        losses += [judge for j, judge in enumerate(text_risks(model, batch, adapted)) if j != i]
    everyones = torch.stack(losses)
    return everyones.mean() + 0.7 * ((everyones - everyones.mean()) ** 2).mean().sqrt()


def text_coral(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    words = list(batch.values())
    pooled = [model.bert(w, m).pooler_output for w, m in zip(words[0], words[1], strict=True)]
    distance = torch.stack([moments(one, other) for one, other in itertools.combinations(pooled, 2)]).mean()
    return torch.stack(text_risks(model, batch)).mean() + 0.7 * distance


TEXT_CASES: dict[str, tuple[Callable[[Any], Objective], Callable[[nn.Module, dict[str, Tensor]], Tensor]]] = {
    "erm": (ERM, as_text(CASES["erm"][1])),
    "irm": (lambda risk: IRMv1(risk, PenaltyWeight(0.7)), as_text(CASES["irm"][1])),
    "irm, halves": (lambda risk: IRMv1(risk, PenaltyWeight(0.7), "halves"), as_text(CASES["irm, halves"][1])),
    "vrex": (lambda risk: VREx(risk, PenaltyWeight(0.7)), as_text(CASES["vrex"][1])),
    "mm-rex": (lambda risk: MMREx(risk, PenaltyWeight(0.7)), as_text(CASES["mm-rex"][1])),
    "group-dro": (lambda risk: GroupDRO(risk, 0.3), as_text(CASES["group-dro"][1])),
    "coral": (lambda risk: CORAL(risk, PenaltyWeight(0.7)), text_coral),
    "meta-irm": (lambda risk: MetaIRM(risk, 0.1, weight=PenaltyWeight(0.7)), text_meta),
}


@pytest.mark.parametrize("case", TEXT_CASES)
def test_objectives_of_a_hugging_face_classifier_follow_their_papers(case: str) -> None:
    made, reference = TEXT_CASES[case]
    model, batch = bert(), texts()
    expected = reference(model, batch)
    slopes = gradient(expected, model)
    for risk in (of_logits, weighted) if case.startswith("irm") else (of_logits, weighted, its_own_loss):
        one, other = made(risk), made(risk)
        for each in (one, other):
            each.begin(model, 7, 1)
        assert_close(one(model, batch), expected, rtol=1e-9, atol=1e-12)
        step = ObjectiveGradients(model, other, list("abcdefg"))(batch)
        assert_close([parameter.grad for parameter in model.parameters()], slopes, rtol=1e-7, atol=1e-9)
        assert step.losses.shape == (7,)
        assert step.weights.tolist() == [10.0 if risk is weighted else 4.0] * 7
        assert (step.environments, step.skipped) == (7, ())


def test_dann_of_a_hugging_face_classifier_reverses_its_representation() -> None:
    model, batch = bert(), texts()
    ours = DANN(its_own_loss, PenaltyWeight(0.4), hidden_units=5)
    classifier = initialized(ours, model, 7)
    both = nn.ModuleList([model, classifier])
    slopes = gradient(ours(model, batch), both)
    risk = torch.stack(text_risks(model, batch)).mean()
    pooled = [model.bert(words, mask).pooler_output for words, mask, _ in zip(*batch.values(), strict=True)]
    told = [cross_entropy(classifier(each), torch.full((4,), e)) for e, each in enumerate(pooled)]
    of_risk = torch.autograd.grad(risk, list(both.parameters()), materialize_grads=True)
    of_domain = torch.autograd.grad(torch.stack(told).mean(), list(both.parameters()), materialize_grads=True)
    for (name, _), slope, one, other in zip(both.named_parameters(), slopes, of_risk, of_domain, strict=True):
        assert_close(slope, one + (1.0 if name.startswith("1.") else -0.4) * other, rtol=1e-7, atol=1e-9)


def test_a_representation_of_words_is_none_of_examples() -> None:
    model = bert()
    ours = DANN(its_own_loss, PenaltyWeight(0.4), layer="bert.encoder.layer.0.intermediate.dense")
    ours.begin(model, 7, 1)
    with pytest.raises(InputError, match=r"intermediate.dense gets \(4, 6, 8\).* expected a representation \(4, 8\)"):
        ours(model, texts())


@pytest.mark.parametrize("estimator", ["squared", "halves"])
@given(seed=st.integers(0, 1000), examples=st.integers(4, 9), classes=st.integers(2, 6))
def test_a_vector_has_the_slope_by_a_factor_of_each_output(
    estimator: Any, seed: int, examples: int, classes: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(examples, classes, dtype=torch.double, generator=generator)
    targets = torch.randint(classes, (examples,), generator=generator)

    def slopes(of: slice) -> Tensor:
        factors = torch.ones(classes, dtype=torch.double, requires_grad=True)
        mean = nn.functional.cross_entropy(outputs[of] * factors, targets[of])
        return torch.autograd.grad(mean, factors)[0]

    parts = [slice(None)] * 2 if estimator == "squared" else [slice(0, None, 2), slice(1, None, 2)]
    expected = (slopes(parts[0]) * slopes(parts[1])).sum()
    assert_close(irm_penalty(nn.functional.cross_entropy, outputs, targets, estimator, "vector"), expected)


def test_a_vector_needs_one_output_tensor_with_a_factor_for_each_column() -> None:
    with pytest.raises(ArgumentError, match=r"irm_classifier=vector: needs outputs \(examples, outputs\)"):
        irm_penalty(nn.functional.mse_loss, torch.randn(4), torch.randn(4), classifier="vector")

    def risk(model: nn.Module, batch: Any, step: int) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    objective = IRMv1(risk, PenaltyWeight(1.0), classifier="vector")
    with pytest.raises(ArgumentError, match="irm_classifier=vector: needs a loss of outputs and targets alone"):
        objective.risk(nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2)), 0)


@pytest.mark.filterwarnings("error")  # none falls back to another way
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("estimator", ["squared", "halves"])
def test_every_gradient_source_takes_irms_risk(vectorize: bool, estimator: Any) -> None:
    def risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        losses = cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
        return (losses * batch["counts"]).sum(), batch["counts"].sum()

    model, (inputs, targets) = network(), batches()
    batch = {"inputs": inputs, "targets": targets, "counts": inputs[:, :, 0].exp()}
    ours = IRMv1(risk, PenaltyWeight(0.7), estimator)
    expected = gradient(ours(model, batch), model)
    step = StackedGradients(model, ours.risk, Mean(), vectorize=vectorize)(batch)
    assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-9, atol=1e-12)
    assert_close(step.weights, batch["counts"].sum(1).float())


def test_irm_refuses_risks_whose_outputs_it_cannot_scale() -> None:
    model, batch = bert(), texts()
    for risk, said in (
        (its_own_loss, "gives a loss of its own.* from the logits"),
        (
            lambda model, batch, step: model.bert(batch["input_ids"])[0].mean() * (step + 1),
            "never calls the model itself",
        ),
    ):
        with pytest.raises(InputError, match=said):
            IRMv1(risk, PenaltyWeight(1.0))(model, batch)
    assert not model._forward_hooks


def test_irms_penalty_can_be_measured_without_a_graph() -> None:
    model, batch = bert(), texts()
    ours = IRMv1(of_logits, PenaltyWeight(0.7))
    with torch.no_grad():
        value = ours(model, batch)
    assert not value.requires_grad
    assert_close(value, ours(model, batch).detach())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_measured_without_a_graph(name: str) -> None:
    model, batch = network(), batches()
    ours = objective(name, cross_entropy, penalty_weight=0.5)
    ours.begin(model, ENVIRONMENTS, 1)
    kept = copy.deepcopy(ours.module)
    torch.manual_seed(1)
    with torch.no_grad():
        value = ours(model, batch, 0)
    assert not value.requires_grad
    if kept is not None and ours.module is not None:
        assert_close(ours.module.state_dict(), kept.state_dict(), rtol=0, atol=0)
    torch.manual_seed(1)
    assert_close(value, ours(model, batch, 0).detach())


def test_a_risk_knows_its_step() -> None:
    model, (inputs, targets) = network(), batches()
    ours = VREx(lambda model, batch, step: cross_entropy(model(batch[0]), batch[1]) * (step + 1), PenaltyWeight(0.0))
    once = ours(model, (inputs, targets), 0)
    assert_close(ours(model, inputs, targets, 4), 5 * once)
    assert_close(ours(model, (inputs, targets), step=4), 5 * once)


def test_steps_that_are_not_given_are_counted_and_evaluations_are_none() -> None:
    model, (inputs, targets) = network(), batches()
    warm = VREx(cross_entropy, PenaltyWeight(100.0, warmup=2))
    expected = [float(VREx(cross_entropy, PenaltyWeight(weight))(model, inputs, targets)) for weight in (1.0, 100.0)]
    with torch.no_grad():
        warm(model, inputs, targets)
    found = [warm(model, inputs, targets).item() for _ in range(4)]
    assert found == pytest.approx([expected[0], expected[0], expected[1], expected[1]])


@pytest.mark.parametrize("name", ["group-dro", "fishr", "dann"])
def test_an_objective_that_keeps_values_of_each_environment_needs_all_of_them(name: Any) -> None:
    model, (inputs, targets) = network(), batches()
    ours = objective(name, cross_entropy)
    ours.begin(model, len(inputs), 10)
    ours(model, inputs, targets)  # of a network in float64
    with pytest.raises(
        InputError, match=f"{len(inputs) - 1} environments; {name} keeps values of each of {len(inputs)}"
    ):
        ours(model, inputs[1:], targets[1:])


def test_a_normalization_without_running_statistics_sees_one_environment_at_a_time() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False, dtype=torch.float64), network()).eval()
    inputs, targets = batches()
    inputs = inputs * torch.arange(1, len(inputs) + 1)[:, None, None]
    expected = torch.stack([cross_entropy(model(one), two) for one, two in zip(inputs, targets, strict=True)]).mean()
    assert_close(objective("erm", cross_entropy)(model, inputs, targets), expected)


def test_a_weight_that_is_a_number_is_refused() -> None:
    with pytest.raises(InputError, match=r"weight=100\.0: must be a PenaltyWeight"):
        VREx(cross_entropy, 100.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"mixup"}))  # which takes no risk
def test_under_autocast_a_loss_and_the_same_risk_agree(name: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    inputs, targets = batches()
    batch = inputs.float(), targets
    seen = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return cross_entropy(outputs, targets)

    def risk(model: nn.Module, batch: Any, step: int) -> Tensor:
        return cross_entropy(model(batch[0]).float(), batch[1])

    one, other = (objective(name, each, penalty_weight=0.5, autocast=torch.bfloat16) for each in (loss, risk))
    one.begin(model, ENVIRONMENTS, 1)
    other.module = copy.deepcopy(one.module)
    assert_close(one(model, batch), other(model, batch), rtol=1e-2, atol=1e-3)
    assert set(seen) == {torch.float32}


def test_batch_norm_normalizes_each_environment_by_itself() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()
    inputs, targets = batches()
    expected = torch.stack(risks(model, inputs, targets))
    assert_close(VREx(cross_entropy, PenaltyWeight(0.0)).terms(model, (inputs, targets))[0], expected)


@pytest.mark.parametrize("name", ["vrex", "irm", "coral"])
def test_running_statistics_are_those_of_all_environments_in_any_order(name: str) -> None:
    inputs, targets = batches()
    inputs = inputs + torch.arange(float(len(inputs)))[:, None, None]
    models = []
    for order in ([0, 1, 2], [2, 0, 1]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
        ObjectiveGradients(model, objective(name, cross_entropy), ["a", "b", "c"])(inputs[order], targets[order])
        models.append(model)
    one, other = (model[0] for model in models)
    assert_close([one.running_mean, one.running_var], [other.running_mean, other.running_var])
    passes = int(one.num_batches_tracked)  # of each environment
    whole = inputs.mean(1).mean(0)
    assert_close(one.running_mean, whole * (1 - 0.9**passes))


def test_what_is_not_finite_stays_in_for_a_scaler() -> None:
    model, (inputs, targets) = network(), batches()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    source = ObjectiveGradients(model, objective("vrex", cross_entropy), ["a", "b", "c"], scaler=scaler)
    source(inputs, targets)
    expected = gradient(8.0 * objective("vrex", cross_entropy)(model, inputs, targets), model)
    assert_close([parameter.grad for parameter in model.parameters()], expected)
    inputs[1] = math.nan
    assert source(inputs, targets).skipped == ()
    assert all(not torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_options_that_a_coupled_gradient_cannot_have_are_refused() -> None:
    model = network()
    for options, said in (
        ({"nonfinite": "skip"}, "nonfinite=skip: an objective couples environments; give raise or propagate"),
        ({"autocast": torch.bfloat16}, "autocast=torch.bfloat16: an objective has its own"),
    ):
        with pytest.raises(InputError, match=said):
            ObjectiveGradients(model, objective("vrex", cross_entropy), ["a"], **options)
    source = ObjectiveGradients(model, VREx(weighted_by_nothing, PenaltyWeight(1.0)), ["a", "b", "c"])
    with pytest.raises(InputError, match="a sum needs a weight above 0"):
        source(*batches())


def weighted_by_nothing(model: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
    return cross_entropy(model(batch[0]), batch[1]), torch.zeros(())


# Objectives that keep something, draw something, or refuse something


def test_group_dros_weights_grow_where_the_risk_is_large() -> None:
    model, (inputs, targets) = network(), batches()
    ours = GroupDRO(cross_entropy, 0.3)
    ours.begin(model, ENVIRONMENTS, 1)
    each = torch.stack(risks(model, inputs, targets)).detach()
    for _ in range(3):
        value = ours(model, inputs, targets)
    assert ours.module is not None
    weights = torch.exp(0.3 * 3 * each) / torch.exp(0.3 * 3 * each).sum()
    assert_close(ours.module.state_dict()["logarithms"].exp(), weights)
    assert_close(value, (weights * each).sum())
    with torch.no_grad():
        ours(model, inputs, targets)  # only measured
    assert_close(ours.module.state_dict()["logarithms"].exp(), weights)


@given(st.lists(st.lists(st.floats(0, 300), min_size=3, max_size=3), min_size=1, max_size=12), st.floats(0.01, 2))
def test_group_dros_weights_are_those_of_the_sum_of_all_risks(steps: list[list[float]], rate: float) -> None:
    """Also where a weight is too small for a number and grows again."""
    ours = GroupDRO(cross_entropy, rate)
    ours.begin(network(), 3, len(steps))
    for terms in steps:
        value = ours.combine(torch.tensor(terms, dtype=torch.float64))
    total = rate * torch.tensor(steps, dtype=torch.float64).sum(0)
    expected = (total.softmax(0) * torch.tensor(steps[-1], dtype=torch.float64)).sum()
    assert_close(value, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["group-dro", "fishr"])
def test_a_step_that_is_not_finite_leaves_what_an_objective_keeps(name: str) -> None:
    model, (inputs, targets) = network(), batches()
    ours = objective(name, cross_entropy)
    ours.begin(model, ENVIRONMENTS, 3)
    ours(model, inputs, targets)
    assert ours.module is not None
    (before,) = (value.clone() for value in ours.module.state_dict().values())
    ours(model, inputs.index_fill(1, torch.tensor([0]), float("inf")), targets)
    assert torch.equal(*ours.module.state_dict().values(), before)
    assert torch.isfinite(ours(model, inputs, targets))


def test_weights_of_group_dro_that_are_no_logarithms_are_refused() -> None:
    """A checkpoint of an earlier version has the weights themselves."""
    ours = GroupDRO(cross_entropy)
    ours.begin(network(), ENVIRONMENTS, 1)
    assert ours.module is not None
    with pytest.raises(RuntimeError, match=r"Missing key.*logarithms"):
        ours.module.load_state_dict({"values": torch.ones(ENVIRONMENTS) / ENVIRONMENTS})


def test_halves_of_one_example_are_refused_by_name() -> None:
    model, (inputs, targets) = network(), batches()
    halves = IRMv1(cross_entropy, PenaltyWeight(1.0), "halves")
    with pytest.raises(ArgumentError, match="penalty_estimator=halves: needs at least 2 examples of each environment"):
        halves(model, inputs[:, :1], targets[:, :1])


def test_fishr_compares_averages_over_steps() -> None:
    model = network()
    ours = Fishr(cross_entropy, PenaltyWeight(0.7), momentum=0.8)
    ours.begin(model, ENVIRONMENTS, 2)
    (one, other), targets = batches()[0].repeat(2, 1, 1, 1), batches()[1]
    other = other + torch.arange(3.0)[:, None, None]
    ours(model, one, targets)
    value = ours(model, other, targets)
    before, now = (head_variances(model, inputs, targets) for inputs in (one, other))
    averages = [0.8 * past.detach() + new for past, new in zip(before, now, strict=True)]  # over 1 - γ = .2
    expected = erm(model, other, targets) + 0.7 * distance_to_mean(averages)
    assert_close(value, expected, rtol=1e-10, atol=1e-12)
    assert_close(gradient(value, model), gradient(expected, model), rtol=1e-10, atol=1e-10)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=6), st.floats(0.01, 0.99), st.floats(-5, 5), st.floats(0.1, 9))
def test_a_quantile_moves_with_its_risks(values: list[float], quantile: float, shift: float, factor: float) -> None:
    terms, ours = torch.tensor(values, dtype=torch.float64), EQRM(cross_entropy, quantile)
    found = ours.combine(terms)
    spread = float(terms.std())
    assert_close(ours.combine(factor * terms + shift), factor * found + shift, rtol=1e-6, atol=1e-6 * (1 + spread))
    assert_close(found, EQRM(cross_entropy, 0.5).combine(terms)) if spread == 0 else None
    assert EQRM(cross_entropy, quantile / 2).combine(terms) <= found + 1e-9


def test_a_mixed_example_lies_between_two_environments() -> None:
    """A model that shows its inputs, and a loss that shows its classes: all are mixed by the same share."""
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(outputs: Tensor, classes: Tensor) -> Tensor:
        seen.append((outputs.detach()[:, 0], classes))
        return outputs.sum() * 0 + classes.double().mean()

    model = nn.Linear(1, 1).double()
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    inputs = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)[:, None, None].expand(3, 4, 1)
    classes = torch.tensor([1, 10, 100])[:, None].expand(3, 4)
    ours = Mixup(loss, 0.7)
    torch.manual_seed(0)
    shares = []
    for _ in range(300):
        seen.clear()
        terms, _ = ours.terms(model, (inputs, classes))
        assert sorted(int(each[0]) for _, each in seen[::2]) == sorted(int(each[0]) for _, each in seen[1::2])
        for index, ((x, first), (_, second)) in enumerate(zip(seen[::2], seen[1::2], strict=True)):
            share = (x[0] - second[0]) / (first[0] - second[0])
            assert first[0] != second[0]
            assert x.unique().numel() == 1
            assert_close(terms[index].detach(), share * first[0] + (1 - share) * second[0], rtol=1e-10, atol=1e-10)
            shares.append(float(share))
    drawn = torch.tensor(shares)
    assert_close(drawn.mean(), torch.tensor(0.5), rtol=0, atol=0.05)
    assert_close(drawn.var(), torch.tensor(1 / (4 * 2.4)), rtol=0.1, atol=0)  # of Beta(.7, .7)


def test_mixed_bytes_are_bytes() -> None:
    seen = []

    class Reading(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return super().forward(images.float())

    images = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None].expand(2, 3, 2)
    Mixup(cross_entropy, 5.0)(Reading(2, 2), images, torch.zeros(2, 3, dtype=torch.long))
    assert seen[0].dtype == torch.uint8
    assert {0, 255}.isdisjoint(seen[0].flatten().tolist())


def test_a_mixed_row_of_a_table_has_the_code_of_one_of_two() -> None:
    seen = []
    network = TableNetwork(1, [12, 12], 2)
    network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    numbers = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 500, 1)
    codes = torch.tensor([[2.0, 4.0], [11.0, 9.0]])[:, None].expand(2, 500, 2)
    objective = Mixup(cross_entropy, 5.0)
    objective.begin(network, 2, 1)
    objective(network, torch.cat([numbers, codes], 2), torch.zeros(2, 500, dtype=torch.long))
    for rows in torch.cat(seen).reshape(2, 500, 3):
        of_second = rows[0, 0]
        assert 0 < of_second < 1
        for place, (first, second) in enumerate(((2, 11), (4, 9)), 1):
            assert {*rows[:, place].tolist()} == {first, second}
            assert_close((rows[:, place] == second).float().mean(), of_second, rtol=0, atol=0.1)
        assert float((rows[:, 1] == 2)[rows[:, 2] == 9].float().mean()) > 0  # columns are chosen by themselves


def test_mixup_says_what_it_takes() -> None:
    inputs = torch.randn(2, 4, 6)
    for batch in ((inputs, torch.randn(2, 4)), (inputs.long(), torch.zeros(2, 4, dtype=torch.long))):
        with pytest.raises(InputError, match=r"mixup: takes floating-point or byte inputs and classes \(integers\)"):
            Mixup(mse_loss)(nn.Linear(6, 1), *batch)
    with pytest.raises(InputError, match="mixup: mixes inputs and classes; it takes a loss of them, not a risk"):
        Mixup(of_logits)


def test_iga_estimates_its_memory_and_refuses_large_networks() -> None:
    large = nn.Linear(10_000, 6_000, device="meta")
    with pytest.raises(
        InputError, match=r"3 environments, 60,006,000 numbers each, in 4 copies: an estimated 2\.7 GiB"
    ):
        IGA(cross_entropy, PenaltyWeight(1.0)).begin(large, 3, 1)


def test_spectral_decoupling_needs_no_second_environment() -> None:
    for changes in ({}, {"per_example": True, "aggregator": "mean"}):
        outcome = train(job(("a",)), config(objective="sd", epochs=30, **changes), ProcessContext(), Silent())
        assert outcome.metrics["train_loss"] < math.log(3)


def test_spectral_decoupling_takes_a_risks_outputs() -> None:
    model, batch = bert(), texts()
    for risk in (of_logits, weighted, its_own_loss):
        logits = torch.stack([model(w, m).logits for w, m, _ in zip(*batch.values(), strict=True)])
        expected = torch.stack(text_risks(model, batch)).mean() + 0.7 * logits.square().mean()
        assert_close(SpectralDecoupling(risk, PenaltyWeight(0.7))(model, batch), expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="sd: the risk never calls the model itself"):
        SpectralDecoupling(lambda model, batch, step: model.bert(batch["input_ids"])[0].mean(), PenaltyWeight(1.0))(
            model, batch
        )


# In the training loop


def blobs(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    targets = torch.randint(0, 3, (60,), generator=generator)
    inputs = torch.randn(60, 6, generator=generator)
    inputs[:, 0] += 2.0 * targets
    inputs[:, 4] += targets * torch.randn((), generator=generator)
    return inputs, targets


def job(train_on: tuple[str, ...] = ("a", "b", "c", "d")) -> Job[TrainConfig]:
    return Job(
        environments=lambda _: Environments(blobs, train=train_on, validation=["v"], test=["t"]),
        model=lambda _: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)),
        loss=cross_entropy,
        name="blobs",
    )


def config(**changes: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"epochs": 6, "batch_size": 16, "lr": 1e-2, "evaluations": 3, "penalty_weight": 1.0}
    return TrainConfig().with_options(**{**defaults, **changes})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains(name: Any) -> None:
    settings = config(objective=name, epochs=30)
    settings.check()
    outcome = train(job(), settings, ProcessContext(), Silent())
    assert outcome.metrics["ood_accuracy"] > 0.5
    assert outcome.metrics["train_loss"] < math.log(3)


def test_auto_is_the_mean() -> None:
    assert TrainConfig().resolve().aggregation.aggregator == "mean"
    assert TrainConfig().with_options(objective="irm").resolve().aggregation.aggregator == "mean"
    assert TrainConfig().with_options(objective="irm").resolve().objective.penalty_weight == 1e4
    assert TrainConfig().resolve().objective.penalty_weight is None
    assert TrainConfig().with_options(objective="irm", aggregator="and-mask").resolve().method == "irm-and-mask"
    assert TrainConfig().with_options(objective="vrex").resolve().method == "vrex"
    assert TrainConfig().resolve().method == "mean"


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if objective_type(name).coupled])
def test_what_couples_environments_refuses_other_aggregators(name: Any) -> None:
    for changes, said in (
        ({"aggregator": "and-mask"}, "--aggregator and-mask: --objective .* so there is one gradient; give mean"),
        ({"nonfinite": "skip"}, "--nonfinite skip: .* and no environment can be left out; give raise or propagate"),
    ):
        with pytest.raises(InputError, match=said):
            config(objective=name, **changes).check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"penalty_weight": -1.0, "objective": "irm"}, "penalty_weight=-1.0: must be a finite number, not below 0"),
        ({"penalty_weight": math.nan, "objective": "vrex"}, "penalty_weight=nan"),
        ({"penalty_warmup": 1.0}, r"--penalty-warmup 1.0: must be a fraction of the run, in \[0, 1\)"),
        ({"objective": "meta-irm", "inner_lr": 0.0}, "inner_lr=0.0: must be above 0"),
        ({"objective": "meta-irm", "inner_steps": 0}, "inner_steps=0: must be at least 1"),
        ({"objective": "meta-irm", "drop_grad": 1.0}, r"drop_grad=1.0: must lie in \[0, 1\)"),
        ({"objective": "meta-irm", "outer_environments": -1}, "--outer-environments -1: must not be negative"),
        ({"objective": "irm", "per_example": True}, "--objective irm: compares environments; with --per-example"),
        (
            {"objective": "dann", "environments_per_step": 2},
            "--environments-per-step 2: --objective dann keeps all environments; give 0",
        ),
        ({"objective": "group-dro", "group_rate": 0.0}, "group_rate=0.0: must be above 0"),
        ({"objective": "eqrm", "quantile": 1.0}, r"quantile=1.0: must lie in \(0, 1\)"),
        ({"objective": "fishr", "variance_momentum": 1.0}, r"variance_momentum=1.0: must lie in \[0, 1\)"),
        ({"objective": "mixup", "mixup_alpha": 0.0}, "mixup_alpha=0.0: must be above 0"),
        ({"stop_spread": -0.1}, "--stop-spread -0.1: must not be negative"),
        ({"stop_spread": 0.1, "held_out": 0.0}, "--stop-spread 0.1: needs held-out examples"),
        ({"objective": "best"}, "objective=best: must be one of erm, irm"),
    ],
)
def test_what_cannot_be_meant_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        config(**changes).check()


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if objective_type(name).compares])
def test_one_environment_is_too_few(name: Any) -> None:
    with pytest.raises(InputError, match=f"--objective {name}: compares training environments, and the job has only a"):
        train(job(("a",)), config(objective=name), ProcessContext(), Silent())
    ours = objective(name, cross_entropy)
    if name not in {"irm", "dann"}:
        ours.begin(network(), 1, 1)
        with pytest.raises(InputError, match="give at least 2"):
            ours(network(), *batches(1))


@pytest.mark.parametrize("name", ["vrex", "meta-irm"])
def test_a_loss_that_is_not_finite_names_its_environment(name: Any) -> None:
    model, (inputs, targets) = network(), batches()
    inputs[1] = math.nan
    source = ObjectiveGradients(model, objective(name, cross_entropy), ["a", "b", "c"])
    with pytest.raises(NonFiniteGradientError, match="b") as caught:
        source(inputs, targets, 7)
    assert caught.value.step == 7
    if name == "vrex":
        assert caught.value.environments == ("b",)


@pytest.mark.parametrize("name", ["irm", "dann", "meta-irm", "group-dro", "fishr", "mixup"])
def test_a_resumed_run_ends_as_an_undisturbed_one(name: Any, tmp_path: Path) -> None:
    settings = config(objective=name, checkpoints=3, penalty_warmup=0.5, drop_grad=0.1)
    whole, rest = Kept(tmp_path / "whole"), Kept(tmp_path / "rest")
    undisturbed = train(job(), settings, ProcessContext(), whole)
    resumed = train(job(), settings, ProcessContext(), rest, resume_from=whole.checkpoints[0])
    assert without_time(resumed.metrics) == without_time(undisturbed.metrics)
    for kept in ("model.safetensors", "optimizer.pt"):
        assert (rest.checkpoints[-1] / kept).read_bytes() == (whole.checkpoints[-1] / kept).read_bytes()


def test_a_run_ends_when_held_out_losses_are_alike() -> None:
    settings = config(epochs=20, evaluations=20, stop_spread=100.0, stop_from=0.25)
    outcome = train(job(), settings, ProcessContext(), Silent())
    assert outcome.history[-1].epoch == 5
    assert outcome.steps == 5 * 4
    assert outcome.metrics["spread_reached"] == 1.0


def test_where_they_never_are_the_most_alike_model_is_kept(tmp_path: Path) -> None:
    settings = config(
        epochs=12, evaluations=12, checkpoints=1, stop_spread=1e-12, stop_from=0.2, lr=0.1, aggregator="and-mask"
    )
    keeping = Kept(tmp_path)
    outcome = train(job(), settings, ProcessContext(), keeping)
    assert len(outcome.history) == 12
    assert outcome.metrics["spread_reached"] == 0.0
    seen = {evaluation.epoch: evaluation.metrics["held_out_spread"] for evaluation in outcome.history[:-1]}
    kept = int(outcome.metrics["kept_epoch"])
    least = min((spread, epoch) for epoch, spread in seen.items() if epoch >= 3)
    assert kept == least[1] < 12
    assert outcome.metrics["held_out_spread"] == pytest.approx(least[0])


def test_a_domain_classifier_is_drawn_from_the_seed() -> None:
    made = []
    for seed in (0, 0, 1):
        settings = config(objective="dann", domain_units=5, seed=seed).resolve()
        module = initialize_objective(job(), settings, build_model(job(), settings), [1.0] * 4, 1).module
        assert module is not None
        made.append(dict(module.state_dict()))
    one, again, other = made
    assert one["4.weight"].shape == (4, 5)
    assert_close(one, again)
    assert not torch.equal(one["4.weight"], other["4.weight"])


def test_masks_work_with_irm_in_the_loop() -> None:
    settings = config(objective="irm", aggregator="and-mask", threshold=1.0)
    settings.check()
    assert train(job(), settings, ProcessContext(), Silent()).metrics["kept_fraction"] < 0.9
    averaged = settings.with_options(aggregator="mean")
    assert train(job(), averaged, ProcessContext(), Silent()).metrics["kept_fraction"] == 1.0


def test_the_and_mask_of_irms_terms_is_the_hand_made_one() -> None:
    model, (inputs, targets) = network(), batches()
    ours = IRMv1(cross_entropy, PenaltyWeight(3.0))
    StackedGradients(model, ours.risk, AndMask(1.0))(inputs, targets)
    each = [gradient(mean_risk(ours, model, (x, y)), model) for x, y in zip(inputs, targets, strict=True)]
    for parameter, slopes in zip(model.parameters(), zip(*each, strict=True), strict=True):
        stacked = torch.stack(slopes)
        agree = (stacked.sign().sum(0).abs() == ENVIRONMENTS).double()
        assert_close(parameter.grad, stacked.mean(0) * agree)
