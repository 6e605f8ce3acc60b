"""Consistency where it is known exactly: the means of Hessians, quadratic losses, grids, the paper's propositions."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from concord.aggregation import AndMask, aggregate
from concord.analysis.consistency.loss_surfaces import (
    PATCHWORK_SOLUTION,
    SEPARATE_MINIMUM,
    SHARED_MINIMUM,
    crossed_ellipses,
    descended,
    diverging_curvatures,
    patchwork_losses,
    two_minima,
    two_minima_gradients,
)
from concord.analysis.consistency.quadratic import inconsistency_bound, quadratic_inconsistency
from concord.analysis.consistency.random_gradients import (
    decay_base,
    descent_bound,
    kept_probability,
    masked_norm_bound,
    masked_squared_norm,
    squared_norm,
)
from concord.analysis.consistency.spd_means import arithmetic_mean, geometric_mean, harmonic_mean, karcher_mean
from concord.analysis.consistency.sublevel import connected_region, grid_inconsistency
from concord.errors import ArgumentError


def spd(seed: int, size: int, condition: float = 10.0) -> Any:
    """A random symmetric positive definite matrix."""
    draw = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(draw.standard_normal((size, size)))
    return (basis * np.exp(draw.uniform(0, np.log(condition), size))) @ basis.T


SEEDS, SIZES = st.integers(0, 10_000), st.integers(1, 6)

# --- means of matrices


def test_the_karcher_mean_of_two_has_the_known_answer() -> None:
    first, second = [[2, 1], [1, 2]], np.diag([1, 4])
    expected = [[1.39317, 0.48610], [0.48610, 2.65609]]
    assert geometric_mean(first, second) == pytest.approx(np.array(expected), abs=5e-6)
    assert karcher_mean([first, second]) == pytest.approx(geometric_mean(first, second), abs=1e-8)
    assert np.linalg.det(karcher_mean([first, second])) == pytest.approx(math.sqrt(12))
    assert quadratic_inconsistency([first, second], 1.0) == pytest.approx(2.86852, abs=5e-6)


@pytest.mark.filterwarnings("ignore:logm result may be inaccurate:RuntimeWarning")
@given(SEEDS, SIZES, st.integers(1, 5), st.sampled_from([2.0, 1e2, 1e4]))
def test_the_karcher_mean_solves_its_equation_and_lies_between_the_others(
    seed: int, size: int, count: int, condition: float
) -> None:
    matrices = [spd(seed + place, size, condition) for place in range(count)]
    mean = karcher_mean(matrices)
    logarithms = sum(scipy.linalg.logm(np.linalg.solve(each, mean)) for each in matrices)
    assert np.abs(logarithms).max() < 1e-5
    scale = np.abs(arithmetic_mean(matrices)).max()
    for lower, upper in itertools.pairwise([harmonic_mean(matrices), mean, arithmetic_mean(matrices)]):
        assert np.linalg.eigvalsh(upper - lower)[0] > -1e-8 * scale


@given(SEEDS, SIZES)
def test_the_karcher_mean_follows_a_change_of_coordinates_and_not_the_order(seed: int, size: int) -> None:
    matrices = [spd(seed + place, size) for place in range(3)]
    change = np.random.default_rng(seed).standard_normal((size, size)) + 3 * np.eye(size)
    moved = karcher_mean([change @ each @ change.T for each in matrices])
    assert moved == pytest.approx(change @ karcher_mean(matrices) @ change.T, rel=1e-6, abs=1e-6)
    assert karcher_mean(matrices[::-1]) == pytest.approx(karcher_mean(matrices), rel=1e-7, abs=1e-9)


def test_of_diagonal_matrices_it_is_the_geometric_mean_of_each_entry() -> None:
    mean = karcher_mean([np.diag([1.0, 8.0]), np.diag([10.0, 1.0]), np.diag([100.0, 1.0])])
    assert mean == pytest.approx(np.diag([10.0, 2.0]))


@pytest.mark.parametrize("spread", [0.0, 0.6, 0.95])
def test_fig_11_the_same_arithmetic_mean_with_ever_smaller_geometric_gradients(spread: float) -> None:
    pair = diverging_curvatures(spread)
    assert arithmetic_mean(pair) == pytest.approx(np.eye(2))
    assert karcher_mean(pair) == pytest.approx(math.sqrt(1 - spread**2) * np.eye(2))


# --- quadratic losses


@pytest.mark.parametrize(("narrow", "ratio", "inconsistency"), [(0.05, 5.5125, 20.0), (0.01, 25.5025, 100.0)])
def test_fig_3_and_12_have_the_known_determinants_and_inconsistency(
    narrow: float, ratio: float, inconsistency: float
) -> None:
    pair = crossed_ellipses(narrow)
    found = np.linalg.det(arithmetic_mean(pair)) / np.linalg.det(karcher_mean(pair))
    assert found == pytest.approx(ratio)
    assert quadratic_inconsistency(crossed_ellipses(narrow), 0.1) == pytest.approx(0.1 * inconsistency)


def test_the_constant_that_the_paper_prints_in_proposition_3_is_too_small() -> None:
    """H = (10) and (1): I = 10ε, twice the squared ratio of determinants is 6.05, and four times it 12.1."""
    found, bound = quadratic_inconsistency([[[10.0]], [[1.0]]], 1.0), inconsistency_bound([[10.0]], [[1.0]], 1.0)
    assert (found, bound) == (pytest.approx(10), pytest.approx(12.1))
    assert bound / 2 < found


def test_the_constant_4_is_the_least() -> None:
    close = inconsistency_bound([[1.0]], [[1e8]], 1.0) / quadratic_inconsistency([[[1.0]], [[1e8]]], 1.0)
    assert 1 < close < 1 + 1e-6


@given(SEEDS, SIZES, st.sampled_from([1.0, 1e2, 1e6]))
def test_the_bound_with_4_holds_for_matrices_that_share_no_axes(seed: int, size: int, condition: float) -> None:
    first, second = spd(seed, size, condition), spd(seed + 1, size, condition)
    found = quadratic_inconsistency([first, second], 0.3)
    assert found <= inconsistency_bound(first, second, 0.3) * (1 + 1e-6)
    assert found >= 0.3


@given(SEEDS, SIZES, st.floats(1e-3, 1e3))
def test_inconsistency_knows_no_order_and_no_scale_of_the_parameters_and_grows_with_epsilon(
    seed: int, size: int, scale: float
) -> None:
    matrices = [spd(seed + place, size) for place in range(3)]
    found = quadratic_inconsistency(matrices, 0.1)
    assert quadratic_inconsistency(matrices[::-1], 0.1) == pytest.approx(found)
    axes = np.diag(np.random.default_rng(seed).uniform(0.1, 10, size)) * scale
    assert quadratic_inconsistency([axes @ each @ axes for each in matrices], 0.1) == pytest.approx(found, rel=1e-5)
    assert quadratic_inconsistency(matrices, 0.2) == pytest.approx(2 * found)
    assert quadratic_inconsistency([matrices[0]] * 2, 0.1) == pytest.approx(0.1)


# --- grids


AXIS = np.linspace(-1.5, 1.5, 601)  # steps of 0.005
GRID = two_minima(*np.meshgrid(AXIS, AXIS, indexing="ij"))


def at(point: tuple[float, float]) -> tuple[int, int]:
    row, column = (int(np.abs(AXIS - value).argmin()) for value in point)
    return row, column


def test_fig_1_both_minima_are_as_good_and_only_one_is_consistent() -> None:
    assert grid_inconsistency(GRID, at(SHARED_MINIMUM), 0.01) == pytest.approx(0.01, abs=1e-3)
    assert grid_inconsistency(GRID, at(SEPARATE_MINIMUM), 0.01) == pytest.approx(3.56, abs=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_on_a_grid_quadratic_losses_have_their_exact_inconsistency(seed: int) -> None:
    axis = np.linspace(-1, 1, 801)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    matrices = [spd(2 * seed + place, 2) for place in range(2)]
    losses = [0.5 * np.einsum("...i,ij,...j->...", points, each, points) for each in matrices]
    exact = quadratic_inconsistency(matrices, 0.05)
    found = grid_inconsistency(losses, (400, 400), 0.05)
    assert exact * 0.97 < found <= exact * (1 + 1e-9)


def test_a_region_as_good_behind_a_wall_does_not_count() -> None:
    wall = np.array([[0.0, 0.0, 5.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    assert connected_region(wall, (0, 0), 0.1).tolist() == [[True, True, False, False]] * 2
    other = np.array([[0.0, 0.0, 0.0, 9.0], [0.0, 0.2, 0.0, 0.0]])
    assert grid_inconsistency([wall, other], (0, 0), 0.3) == pytest.approx(5.0)  # other's region holds the wall
    assert grid_inconsistency([wall, wall], (0, 0), 0.3) == 0.0


def test_fig_2_where_descent_ends() -> None:
    def differences(place: Any) -> tuple[Any, Any]:
        step = 1e-6
        moves = [np.array([step, 0.0]), np.array([0.0, step])]
        ends = [(two_minima(*(place + move)), two_minima(*(place - move))) for move in moves]
        return tuple(np.array([(up[e] - down[e]) / (2 * step) for up, down in ends]) for e in range(2))  # type: ignore[return-value]

    assert [each.tolist() for each in two_minima_gradients([0.5, 0.5])] == [[-1, 0], [0, -1]]
    for place in np.random.default_rng(0).uniform(-1.5, 1.5, (50, 2)):
        assert np.array(two_minima_gradients(place)) == pytest.approx(np.array(differences(place)), abs=1e-6)
    gradients = two_minima_gradients
    ways = {"A": lambda p: gradients(p)[0], "B": lambda p: gradients(p)[1], "both": lambda p: sum(gradients(p)) / 2}
    ends = {name: descended(way, (0.5, 0.5)).round(3).tolist() for name, way in ways.items()}
    assert ends == {"A": [1, 0.5], "B": [0.5, 1], "both": [1, 1]}
    for way in ways.values():
        assert descended(way, (-1.0, -1.2)).round(3).tolist() == [-0.5, -0.5]


def test_fig_10_what_a_cannot_tell_b_needs() -> None:
    solution = patchwork_losses(PATCHWORK_SOLUTION)
    assert solution == (pytest.approx(0.003192, abs=5e-7), pytest.approx(0.003193, abs=5e-7))
    for weight, loss in ((-0.5, 1.0584), (0.0, 0.4667), (2.0, 0.4997)):
        a, b = patchwork_losses((*PATCHWORK_SOLUTION[:5], weight))
        assert a == pytest.approx(solution[0], abs=1e-12)
        assert b == pytest.approx(loss, abs=5e-5)


# --- random gradients


def test_fig_4_has_the_known_norms() -> None:
    counts = (10, 20, 30, 40, 50, 100)
    assert [squared_norm(3000, d) for d in counts] == [300, 150, 100, 75, 60, 30]
    masked = [masked_squared_norm(3000, d, round(0.8 * d)) for d in counts]
    assert masked[:5] == pytest.approx([99.96, 9.538, 1.1007, 0.1366, 0.0176], rel=2e-3)
    assert masked[5] == pytest.approx(8e-7, abs=5e-8)
    assert decay_base(0.8) == pytest.approx(1.2126, abs=5e-5)
    assert 1 - (1 - kept_probability(100, 80)) ** 3000 == pytest.approx(3.3e-6, rel=0.02)


@pytest.mark.parametrize(("environments", "signs"), [(3, 2), (5, 5), (10, 8), (7, 4)])
def test_the_rule_on_random_gradients_keeps_what_the_propositions_say(environments: int, signs: int) -> None:
    import torch

    gradients = torch.randn(environments, 400_000, generator=torch.Generator().manual_seed(environments))
    update = aggregate(AndMask((2 * signs - environments) / environments), gradients)
    kept = kept_probability(environments, signs)
    assert update.kept.double().mean().item() == pytest.approx(kept, abs=5 * math.sqrt(kept / 400_000))
    norm = update.value.double().square().sum().item()
    assert norm == pytest.approx(masked_squared_norm(400_000, environments, signs), rel=0.03)


@given(st.integers(1, 60), st.data())
def test_the_bound_of_proposition_2_holds_and_is_not_0_where_all_agree(environments: int, data: st.DataObject) -> None:
    signs = data.draw(st.integers(environments // 2 + 1, environments))
    assert 0 < masked_squared_norm(100, environments, signs) <= masked_norm_bound(100, environments, signs) * (1 + 1e-9)
    assert masked_squared_norm(100, environments, signs) <= squared_norm(100, environments) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_masked_descent_of_smooth_losses_is_as_fast_as_proposition_1_says(seed: int) -> None:
    import torch

    matrices = torch.stack([torch.from_numpy(spd(seed + place, 6)) for place in range(5)])
    place = torch.from_numpy(np.random.default_rng(seed).standard_normal(6))
    rate = 1 / float(torch.linalg.eigvalsh(matrices.mean(0))[-1])

    def loss(at: Any) -> float:
        return float(0.5 * at @ matrices.mean(0) @ at)

    first, norms = loss(place), []
    for step in range(1, 40):
        move = aggregate(AndMask(0.6), matrices @ place).value
        norms.append(float(move.square().sum()))
        before, place = loss(place), place - rate * move
        assert loss(place) <= before - rate / 2 * norms[-1] + 1e-12
        assert min(norms) <= descent_bound(first, rate, step) + 1e-12


# --- what cannot be meant


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: quadratic_inconsistency([np.eye(2)], 0.1), "hessians=1: consistency compares two environments"),
        (lambda: quadratic_inconsistency([np.eye(2)] * 2, 0.0), "epsilon=0.0: must be a number above 0"),
        (lambda: quadratic_inconsistency([np.eye(2)] * 2, math.nan), "epsilon=nan"),
        (lambda: quadratic_inconsistency([np.eye(2), np.diag([1, -1])], 0.1), "matrix 1: is not positive definite"),
        (lambda: karcher_mean([np.array([[1, 2], [0, 1]])]), "matrix 0: is not symmetric"),
        (lambda: karcher_mean([np.eye(2), np.eye(3)]), "square matrices of one size"),
        (lambda: karcher_mean([]), "there has to be at least one"),
        (lambda: kept_probability(10, 5), "signs=5: must be more than half of 10 environments"),
        (lambda: masked_squared_norm(3, 10, 11), "signs=11"),
        (lambda: decay_base(0.5), "agreement=0.5"),
        (lambda: descent_bound(1.0, 0.0, 3), "learning_rate=0.0"),
        (lambda: connected_region(np.zeros((2, 2)), (2, 0), 0.1), "is not on the grid"),
        (lambda: connected_region(np.full((2, 2), np.nan), (0, 0), 0.1), "the loss is not finite there"),
        (lambda: grid_inconsistency([np.zeros((2, 2))], (0, 0), 0.1), "losses=1: consistency compares two"),
    ],
)
def test_what_has_no_consistency_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert said in str(error.value)
