"""Weightings: the properties that their papers state, and TorchJD's results for the same gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor
from torch.testing import assert_close

from concord.aggregation import (
    MGDA,
    RULES,
    CAGrad,
    Clipping,
    Krum,
    Median,
    PCGrad,
    TrimmedMean,
    UPGrad,
    Weighting,
    weights_of,
)
from concord.aggregation.column_rule import ordered
from concord.aggregation.draws import uniform
from concord.aggregation.families import as_rule
from concord.aggregation.nonnegative import minimum_norm, nonnegative_minimum
from concord.aggregation.weighting import gram_of
from concord.errors import ArgumentError, InputError

claim = settings(max_examples=60, deadline=None)
WEIGHTINGS: list[Weighting] = [
    rule for rule in (each() for each in RULES.values()) if isinstance(rule, Weighting) and not isinstance(rule, Krum)
]


@st.composite
def matrices(draw: st.DrawFn, most: int = 32) -> Tensor:
    """Gradients (environments, components) of any rank, some equal, opposite or zero."""
    environments, rank = draw(st.integers(1, most)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    rows = torch.randn(environments, rank, generator=generator, dtype=torch.float64)
    rows += draw(st.sampled_from([0.0, 0.3, 3.0])) * torch.randn(rank, generator=generator, dtype=torch.float64)
    basis = torch.randn(rank, 50, generator=generator, dtype=torch.float64)
    special = draw(st.sampled_from(["none", "equal", "opposite", "zero"]))
    if special != "none":
        rows[-1] = {"equal": 1, "opposite": -1, "zero": 0}[special] * rows[0]
    return draw(st.sampled_from([1e-3, 1.0, 1e3])) * rows @ basis


def update(rule: Weighting, gradients: Tensor, step: int = 0) -> Tensor:
    return weights_of(rule, gram_of(gradients), step) @ gradients.double()


def assert_near(found: Tensor, expected: Tensor, gradients: Tensor, tolerance: float = 1e-5) -> None:
    """Two updates differ by no more than this part of the largest gradient."""
    assert (found - expected).norm() <= tolerance * gradients.norm(dim=1).max()


# Against TorchJD, on the same matrices


def torchjd() -> Any:
    import torchjd.aggregation  # takes a second in every process that reads this file

    return torchjd.aggregation


@claim
@given(matrices())
def test_upgrad_is_torchjds(gradients: Tensor) -> None:
    gram = gram_of(gradients)
    from torchjd.linalg import QuadprogProjector

    theirs = torchjd().UPGradWeighting(projector=QuadprogProjector(norm_eps=1e-30))(gram)
    assert_close(weights_of(UPGrad(), gram), theirs, rtol=1e-5, atol=1e-5)


@claim
@given(matrices(), st.integers(0, 1000))
def test_pcgrad_is_torchjds_in_the_same_order(gradients: Tensor, step: int) -> None:
    gram, count = gram_of(gradients), len(gradients)
    orders = iter(uniform(torch.arange(count**2), f"0 {step} order").view(count, count).argsort(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda _: next(orders))
        theirs = torchjd().PCGradWeighting()(gram)
    assert_near(update(PCGrad(), gradients, step), torch.nan_to_num(theirs) @ gradients, gradients)


@settings(max_examples=25, deadline=None)  # a second of TorchJD's iterations
@given(matrices())
def test_mgda_is_where_torchjds_iterations_go(gradients: Tensor) -> None:
    # TorchJD ends its Frank-Wolfe iterations early: its error falls with 1 / iterations.
    theirs = torchjd().MGDAWeighting(epsilon=1e-12, max_iters=3000)(gram_of(gradients)) @ gradients
    ours, size = update(MGDA(), gradients), gradients.norm(dim=1).max()
    assert ours.norm() <= theirs.norm() + 1e-6 * size
    assert_near(ours, theirs, gradients, 1e-5 if len(gradients) == 2 else 0.06)


@claim
@given(matrices().filter(lambda gradients: len(gradients) > 3))
def test_krum_is_torchjds_where_one_neighbour_counts(gradients: Tensor) -> None:
    # With more neighbours TorchJD adds distances, and the paper (section 4) squared distances.
    rule = Krum(byzantine=len(gradients) - 3)
    theirs = torchjd().KrumWeighting(n_byzantine=len(gradients) - 3)(gram_of(gradients))
    scores = torch.cdist(gradients, gradients).sort(1).values[:, 1]
    ours = weights_of(rule, gram_of(gradients))
    assert abs(scores[ours.argmax()] - scores[theirs.argmax()]) <= 1e-5 * gradients.norm(dim=1).max()


@claim
@given(matrices(), st.integers(0, 3))
def test_the_trimmed_mean_is_torchjds(gradients: Tensor, trimmed: int) -> None:
    count = len(gradients)
    if 2 * trimmed < count:
        assert_close(TrimmedMean(trimmed / count).combine(gradients), torchjd().TrimmedMean(trimmed)(gradients))


# What the papers say


@claim
@given(matrices(12))
def test_cagrad_serves_the_worst_environment_best_in_its_ball(gradients: Tensor) -> None:
    mean = gradients.mean(0)
    found = update(CAGrad(0.5), gradients)
    size = gradients.norm(dim=1).max()
    if not bool(found.any()):
        return  # ‖g_w‖ is 0
    assert (found - mean).norm() <= 0.5 * mean.norm() * (1 + 1e-6)
    worst = float((gradients @ found).min())
    gram, reach = gram_of(gradients) / size**2, 0.5 * float(mean.norm() / size)

    def dual(weights: Any) -> float:
        return float(weights @ gram.numpy().mean(1) + reach * np.sqrt(max(weights @ gram.numpy() @ weights, 1e-30)))

    start = np.full(len(gram), 1 / len(gram))
    bounds, one = [(0, 1)] * len(gram), {"type": "eq", "fun": lambda weights: weights.sum() - 1}
    best = minimize(dual, start, bounds=bounds, constraints=one, options={"maxiter": 500, "ftol": 1e-12}).fun
    assert worst / float(size**2) >= best - 1e-5  # equal by duality; no smaller than a feasible dual value's best


@claim
@given(matrices())
def test_cagrad_is_torchjds_and_serves_the_worst_no_less(gradients: Tensor) -> None:
    gram, size = gram_of(gradients), gradients.norm(dim=1).max()
    if gram.trace() < 1e-3:
        return  # TorchJD treats gradients below a fixed norm as 0
    ours, theirs = update(CAGrad(0.5), gradients), torchjd().CAGradWeighting(0.5)(gram) @ gradients
    assert_near(ours, theirs, gradients, 1e-4)  # the accuracy of its solver
    assert (gradients @ ours).min() >= (gradients @ theirs).min() - 1e-8 * size**2


@claim
@given(matrices())
def test_upgrad_and_mgda_oppose_no_environment(gradients: Tensor) -> None:
    size, gram, ridge = gradients.norm(dim=1).max(), gram_of(gradients), 1e-9
    weights = weights_of(UPGrad(ridge), gram)
    assert (gram @ weights + ridge * gram.trace() * weights).min() >= -1e-9 * size**2  # what the ridge allows
    found = update(MGDA(), gradients)
    assert (gradients @ found).min() >= found @ found - 1e-6 * size**2  # the variational inequality of a projection


@claim
@given(matrices(8))
def test_pcgrad_of_gradients_without_conflict_is_their_sum(gradients: Tensor) -> None:
    agreeing = gradients.abs()
    assert_near(update(PCGrad(), agreeing), agreeing.sum(0), agreeing)


@pytest.mark.parametrize(("size", "projected"), [(1e-3, True), (1e-9, False)])
def test_pcgrad_projects_onto_no_direction_of_rounding_errors(size: float, projected: bool) -> None:
    gradients = torch.tensor([[1.0, 0.0], [-size, 2 * size]], dtype=torch.float64)
    expected = torch.tensor([[0.8, 0.4], [0.0, 2 * size]]) if projected else gradients
    assert_near(update(PCGrad(), gradients), expected.double().sum(0), gradients)


def test_pcgrad_draws_another_order_at_each_step_and_the_same_again() -> None:
    gradients = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    of_steps = [update(PCGrad(), gradients.double(), step) for step in (0, 1, 0)]
    assert not torch.allclose(of_steps[0], of_steps[1])
    assert torch.equal(of_steps[0], of_steps[2])


@claim
@given(matrices().filter(lambda gradients: len(gradients) > 4), st.integers(0, 3), st.integers(1, 3))
def test_krum_takes_the_smallest_sums_of_squared_distances(gradients: Tensor, wrong: int, taken: int) -> None:
    wrong = min(wrong, len(gradients) - 3)
    distances = torch.cdist(gradients, gradients).square()
    scores = distances.sort(1).values[:, 1 : len(gradients) - wrong - 1].sum(1)
    weights = weights_of(Krum(wrong, taken), gram_of(gradients))
    assert weights.count_nonzero() == taken
    size = gradients.norm(dim=1).max() ** 2
    assert scores[weights > 0].max() <= scores[weights == 0].min() + 1e-9 * size


@claim
@given(matrices())
def test_no_environment_moves_the_model_further_than_its_norm(gradients: Tensor) -> None:
    factors = (2.0 / gradients.norm(dim=1)).clamp(max=1)
    expected = (gradients * torch.nan_to_num(factors, posinf=1)[:, None]).mean(0)
    assert_near(update(Clipping(2.0), gradients), expected, gradients)


@claim
@given(matrices())
def test_the_median_is_numpys(gradients: Tensor) -> None:
    assert_close(Median().combine(gradients), torch.from_numpy(np.median(gradients.numpy(), axis=0)))


@pytest.mark.parametrize("count", range(1, 41))
def test_any_number_of_values_is_put_in_order(count: int) -> None:
    columns = torch.randn(count, 50, generator=torch.Generator().manual_seed(count)).round(decimals=1)
    assert torch.equal(torch.stack(ordered(columns)), columns.sort(0).values)


def test_a_trimmed_mean_keeps_the_middle_whatever_it_leaves_out() -> None:
    columns = torch.tensor([[-100.0], [1.0], [50.0]])
    assert float(TrimmedMean(0.49).combine(columns)) == 1
    assert_close(TrimmedMean(0.0).combine(columns), columns.mean(0))


@claim
@given(matrices(), st.randoms())
def test_weights_move_with_their_environments(gradients: Tensor, random: Any) -> None:
    order = list(range(len(gradients)))
    random.shuffle(order)
    for rule in (UPGrad(), MGDA(), CAGrad(), Clipping()):
        assert_near(update(rule, gradients), update(rule, gradients[order]), gradients)


@claim
@given(matrices(), st.sampled_from([1e-15, 1e-4, 1e6, 1e15]))
def test_scaling_gradients_changes_no_weight(gradients: Tensor, scale: float) -> None:
    for rule in (UPGrad(), MGDA(), CAGrad(), PCGrad()):
        assert_near(update(rule, scale * gradients) / scale, update(rule, gradients), gradients)


@pytest.mark.parametrize("rule", WEIGHTINGS, ids=lambda rule: type(rule).__name__)
def test_gradients_of_zero_have_an_update_of_zero(rule: Weighting) -> None:
    assert torch.equal(update(rule, torch.zeros(5, 3)), torch.zeros(3, dtype=torch.float64))


# The solver


@claim
@given(matrices(100), st.booleans(), st.integers(0, 1 << 20))
def test_the_point_of_least_norm_is_that_of_gradients_of_any_precision(
    gradients: Tensor, twice: bool, seed: int
) -> None:
    """No point of the hull has a smaller product with it, but for the rounding of float32."""
    if twice:  # the same gradients again, added in another order
        noise = torch.randn(gradients.shape, generator=torch.Generator().manual_seed(seed))
        gradients = torch.cat([gradients, gradients * (1 + 1e-7 * noise)])
    for rows in (gradients, gradients.float()):
        weights = weights_of(MGDA(), gram_of(rows))
        assert_close(weights.sum(), torch.ones((), dtype=torch.float64))
        assert weights.min() >= 0
        products = gradients.double() @ (weights @ gradients.double())
        slack = 1e-6 * gradients.double().square().sum(1).mean()
        assert products.min() >= weights @ products - slack


@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_very_different_norms_have_a_point_of_least_norm(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, 30, generator=generator, dtype=torch.float64)
    rows *= 10 ** (4 * torch.rand(64, 1, generator=generator, dtype=torch.float64) - 2)
    weights = weights_of(MGDA(), gram_of(rows))
    products = rows @ (weights @ rows)
    assert products.min() >= weights @ products - 1e-9 * rows.square().sum(1).mean()


def test_a_hundred_dependent_gradients_of_float32_have_the_conflict_averse_update_of_float64() -> None:
    rows = torch.randn(100, 10, generator=torch.Generator().manual_seed(0)) @ torch.randn(10, 2000)
    expected = update(CAGrad(), rows.double())
    assert_near(update(CAGrad(), rows), expected, rows, tolerance=1e-3)


@claim
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 1 << 20))
def test_the_quadratic_programs_are_solved_exactly(size: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    quadratic, linear = rows @ rows.T + 1e-6 * torch.eye(size), torch.randn(5, size, generator=generator).double()
    solution = nonnegative_minimum(quadratic, linear)
    gradient = solution @ quadratic + linear
    assert solution.min() >= 0
    assert gradient.min() >= -1e-6
    assert (solution * gradient).abs().max() <= 1e-6 * (1 + solution.abs().max())


def test_programs_that_are_solved_a_few_at_a_time_have_the_same_solutions(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 100, generator=generator, dtype=torch.float64)
    quadratic = rows @ rows.T
    together = nonnegative_minimum(quadratic, quadratic)
    monkeypatch.setattr("concord.aggregation.nonnegative._AT_ONCE", 4 * 30**2)
    assert torch.equal(nonnegative_minimum(quadratic, quadratic), together)


def test_the_point_of_least_norm_of_a_hundred_gradients_of_one_rank() -> None:
    gram = gram_of(torch.randn(100, 1, generator=torch.Generator().manual_seed(0)).double())
    weights = minimum_norm(gram)
    assert weights @ gram @ weights < 1e-9 * gram.trace()  # the gradients have both signs, so some mean of them is 0
    assert_close(weights.sum(), torch.ones((), dtype=torch.float64))
    assert weights.min() >= 0


# What a user can get wrong


def test_gradients_whose_squares_overflow_have_their_weights() -> None:
    half = torch.full((2, 4), 6e4, dtype=torch.float16)
    assert_close(weights_of(Clipping(2.4e5), gram_of(half)), torch.full((2,), 0.5, dtype=torch.float64))
    large = torch.tensor([[1e30, 0], [0, 3e30]], dtype=torch.bfloat16)
    assert_close(weights_of(MGDA(), gram_of(large)), torch.tensor([0.9, 0.1], dtype=torch.float64), atol=1e-2, rtol=0)


class Wrong:
    def __init__(self, weights: Callable[[Tensor], Any]) -> None:
        self.weights = weights


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (lambda gram: torch.ones(3), r"rule Wrong: gives weights of shape \(3,\) for 4 environments; expected \(4,\)"),
        (lambda gram: [1.0] * 4, "rule Wrong: gives weights of list for 4 environments"),
        (lambda gram: gram[0] / 0, "rule Wrong: gives weights that are not finite at step 7, for norms 1, 1, 1, 1"),
    ],
)
def test_weights_that_are_wrong_are_refused_by_name(weights: Callable[[Tensor], Any], found: str) -> None:
    with pytest.raises(InputError, match=found):
        weights_of(Wrong(weights), torch.eye(4), step=7)


def test_krum_of_too_few_environments_is_refused() -> None:
    with pytest.raises(ArgumentError, match="byzantine=1: needs 4 environments at each step, and there are 3"):
        weights_of(Krum(), torch.eye(3))
    with pytest.raises(ArgumentError, match="selected=5: there are 4 environments at a step"):
        weights_of(Krum(selected=5), torch.eye(4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Krum(-1),
        lambda: Krum(selected=0),
        lambda: Clipping(0.0),
        lambda: CAGrad(-0.1),
        lambda: UPGrad(0.0),
        lambda: TrimmedMean(0.5),
    ],
)
def test_options_out_of_their_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError):
        make()


def test_torchjds_weightings_of_gram_matrices_are_rules() -> None:
    gram = gram_of(torch.randn(4, 9, generator=torch.Generator().manual_seed(0)))
    rule = as_rule(torchjd().KrumWeighting(1))
    assert isinstance(rule, Weighting)
    assert_close(weights_of(rule, gram), torchjd().KrumWeighting(1)(gram))
    with pytest.raises(InputError, match="rule TrimmedMean: needs statistics"):
        as_rule(torchjd().TrimmedMean(1))
