"""Properties of every rule for any gradients: order and placement do not matter, and the formula holds."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitwise import bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch.testing import assert_close

from concord.aggregation import (
    AGGREGATORS,
    SIGN,
    Aggregator,
    AndMask,
    GeometricMean,
    Mean,
    SandMask,
    Statistic,
    Statistics,
    TMask,
    Update,
    XorMask,
    aggregate,
    aggregator,
    required_agreement,
    sum_over_environments,
)
from concord.aggregation import rule as rule_module
from concord.errors import InputError
from concord.gradients.finish import finish_whole
from concord.gradients.layout import Layers

settings.register_profile("aggregation", max_examples=60, deadline=None)
claim = settings(settings.get_profile("aggregation"))

names = st.sampled_from(AGGREGATORS)
# Thresholds as exact fractions: the reference compares |Σ sign| with τd without rounding.
fractions = st.integers(0, 100).map(lambda hundredths: Fraction(hundredths, 100))


@st.composite
def stacks(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradients (environments, components) in sixteenths: their sums are exact, so order cannot hide in rounding."""
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 10)))
    whole = draw(hnp.arrays(np.int64, shape, elements=st.integers(-40, 40)))
    return torch.from_numpy(whole).to(dtype) / 16


def reference(name: str, gradients: Tensor, threshold: Fraction, steepness: float = 10.0) -> tuple[Tensor, Tensor]:
    """Value and kept, component by component, from the formulas in the papers, in float64."""
    from scipy.stats import ttest_1samp

    value, kept = [], []
    for component in gradients.double().numpy().T:
        d = len(component)
        signs = int((component > 0).sum()) - int((component < 0).sum())
        agrees = abs(signs) >= threshold * d
        mean = math.fsum(component) / d
        if name == "mean":
            update, mask = mean, 1.0
        elif name == "and-mask":
            update, mask = mean * agrees, float(agrees)
        elif name == "xor-mask":
            update, mask = mean * (not agrees), float(not agrees)
        elif name == "geometric-mean":
            magnitude = math.prod(abs(component) ** (1 / d))
            update, mask = np.sign(math.fsum(component)) * magnitude * agrees, float(agrees)
        elif name == "t-mask":
            passes = bool(mean) if d == 1 or not component.std() else ttest_1samp(component, 0).pvalue <= 1e-4
            update, mask = mean * passes, float(passes)
        else:
            variance = component.var(ddof=1) if d > 1 else 0.0
            excess = float(Fraction(abs(signs), d) - threshold)
            mask = 0.0 if excess <= 0 else 1.0 if variance < 1e-25 else math.tanh(steepness / variance * excess)
            update = mean * mask
        value.append(update)
        kept.append(mask)
    return torch.tensor(value, dtype=torch.float64), torch.tensor(kept, dtype=torch.float64)


# Order and placement


@claim
@given(names, fractions, stacks(), st.randoms(use_true_random=False))
def test_order_of_environments_does_not_matter(name: Any, tau: Fraction, gradients: Tensor, random: Any) -> None:
    rule = aggregator(name, float(tau))
    order = list(range(len(gradients)))
    random.shuffle(order)
    found, expected = aggregate(rule, gradients[order]), aggregate(rule, gradients)
    bitwise(found.kept, expected.kept)
    assert_close(found.value, expected.value)


@claim
@given(names, fractions, stacks(), st.data())
def test_sum_may_be_split_in_any_way(name: Any, tau: Fraction, gradients: Tensor, data: st.DataObject) -> None:
    rule = aggregator(name, float(tau))
    environments = len(gradients)
    owners = data.draw(st.lists(st.integers(0, 3), min_size=environments, max_size=environments))
    parts = [gradients[[e for e in range(environments) if owners[e] == owner]] for owner in sorted(set(owners))]

    whole = sum_over_environments(rule, gradients)
    apart = [sum_over_environments(rule, part) for part in parts]
    added = {key: torch.stack([sums[key] for sums in apart]).sum(0) for key in whole}
    running = sum_over_environments(rule, parts[0])
    for part in parts[1:]:
        returned = sum_over_environments(rule, part, out=running, accumulate=True)
        assert returned is running

    expected = rule.finish(whole, environments)
    for sums in (added, running):
        found = rule.finish(sums, environments)
        bitwise(found.kept, expected.kept)
        assert_close(found.value, expected.value)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_out_is_overwritten_without_accumulate(name: Any) -> None:
    rule = aggregator(name, 0.5)
    gradients = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    out = {each.name: torch.full((2, 3), 7.0, dtype=each.dtype) for each in rule.statistics}
    expected = sum_over_environments(rule, gradients)
    assert sum_over_environments(rule, gradients, out=out) is out
    for key in expected:
        bitwise(out[key], expected[key])


# How the rules relate


@claim
@given(
    st.sampled_from(["mean", "and-mask", "xor-mask", "geometric-mean", "t-mask"]),
    fractions,
    stacks(),
    st.integers(-8, 8),
)
def test_scaling_gradients_scales_the_update(name: Any, tau: Fraction, gradients: Tensor, exponent: int) -> None:
    rule, scale = aggregator(name, float(tau)), 2.0**exponent
    found, expected = aggregate(rule, gradients * scale), aggregate(rule, gradients)
    bitwise(found.kept, expected.kept)
    assert_close(found.value, expected.value * scale)


@claim
@given(fractions, stacks(torch.float64), st.integers(-4, 4))
def test_sand_mask_scales_with_steepness_over_scale_squared(tau: Fraction, gradients: Tensor, exponent: int) -> None:
    scale = 2.0**exponent
    found = aggregate(SandMask(float(tau), steepness=10.0 * scale**2), gradients * scale)
    expected = aggregate(SandMask(float(tau), steepness=10.0), gradients)
    assert_close(found.value, expected.value * scale)


@claim
@given(stacks())
def test_and_mask_with_threshold_zero_is_the_mean(gradients: Tensor) -> None:
    update = aggregate(AndMask(0.0), gradients)
    bitwise(update.value, aggregate(Mean(), gradients).value)
    assert bool((update.kept == 1).all())


@claim
@given(fractions, stacks())
def test_and_mask_plus_xor_mask_is_the_mean(tau: Fraction, gradients: Tensor) -> None:
    kept, dropped = aggregate(AndMask(float(tau)), gradients), aggregate(XorMask(float(tau)), gradients)
    bitwise(kept.value + dropped.value, aggregate(Mean(), gradients).value)
    bitwise(kept.kept + dropped.kept, torch.ones_like(kept.kept))


@claim
@given(st.sampled_from(["and-mask", "geometric-mean", "sand-mask"]), fractions, fractions, stacks())
def test_higher_threshold_never_keeps_more(name: Any, one: Fraction, other: Fraction, gradients: Tensor) -> None:
    low, high = sorted((float(one), float(other)))
    strict, lenient = aggregate(aggregator(name, high), gradients), aggregate(aggregator(name, low), gradients)
    assert bool((strict.kept <= lenient.kept).all())


@claim
@given(st.sampled_from(["and-mask", "xor-mask", "sand-mask", "t-mask"]), fractions, stacks())
def test_masks_never_enlarge_the_mean(name: Any, tau: Fraction, gradients: Tensor) -> None:
    update, mean = aggregate(aggregator(name, float(tau)), gradients), aggregate(Mean(), gradients).value
    assert bool((update.value.abs() <= mean.abs()).all())
    assert bool((update.value * mean >= 0).all())
    assert bool(((update.kept >= 0) & (update.kept <= 1)).all())


@claim
@given(stacks())
def test_geometric_mean_of_agreeing_environments_is_at_most_the_mean(gradients: Tensor) -> None:
    update, mean = aggregate(GeometricMean(1.0), gradients).value, aggregate(Mean(), gradients).value
    assert bool((update.abs() <= mean.abs() * (1 + 1e-5)).all())
    assert bool((update * mean >= 0).all())


@claim
@given(fractions, stacks())
def test_threshold_is_the_papers_count_of_agreeing_environments(tau: Fraction, gradients: Tensor) -> None:
    """§2.3: t = d(τ + 1)/2 environments with the same sign, where no component is zero."""
    gradients = torch.where(gradients == 0, 1.0, gradients)
    d = len(gradients)
    most = torch.maximum((gradients > 0).sum(0), (gradients < 0).sum(0)).tolist()
    expected = [float(count >= d * (tau + 1) / 2) for count in most]
    assert aggregate(AndMask(float(tau)), gradients).kept.tolist() == expected


# The formulas


@claim
@given(names, fractions, stacks(torch.float64))
def test_formula_holds_for_any_gradients(name: Any, tau: Fraction, gradients: Tensor) -> None:
    update = aggregate(aggregator(name, float(tau)), gradients)
    value, kept = reference(name, gradients, tau)
    assert_close(update.kept.double(), kept, rtol=1e-9, atol=1e-12)
    assert_close(update.value, value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("environments", [1, 2, 5, 20, 300])
@pytest.mark.parametrize("name", AGGREGATORS)
def test_formula_holds_for_real_numbers(name: Any, environments: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(environments)
    # A common part makes environments agree in some components; some gradients are zero, as after a dead unit.
    common = torch.randn(40, generator=generator, dtype=torch.float64)
    gradients = (common + torch.randn(environments, 40, generator=generator, dtype=torch.float64)).to(dtype)
    gradients[0, :3] = 0
    for tau in (Fraction(0), Fraction(1, 5), Fraction(4, 5), Fraction(1)):
        update = aggregate(aggregator(name, float(tau)), gradients)
        value, kept = reference(name, gradients, tau)
        assert update.value.dtype == dtype
        assert_close(update.kept.double(), kept, rtol=tolerance, atol=tolerance)
        assert_close(update.value.double(), value, rtol=tolerance, atol=tolerance * 1e-2)


GRADIENTS = torch.tensor(
    [
        [1.0, 1.0, 1.0, 0.0, -1.0, 2.0, 5.0],
        [1.0, -1.0, 2.0, 1.0, -2.0, -2.0, -1.0],
        [1.0, 1.0, 4.0, 1.0, -4.0, 1.0, -1.0],
        [1.0, 3.0, 8.0, 2.0, -2.0, -1.0, -1.0],
    ]
)
KNOWN: list[tuple[Aggregator, list[float], list[float]]] = [  # worked out by hand: the rule, the update, what is kept
    (Mean(), [1, 1, 3.75, 1, -2.25, 0, 0.5], [1, 1, 1, 1, 1, 1, 1]),
    (AndMask(1.0), [1, 0, 3.75, 0, -2.25, 0, 0], [1, 0, 1, 0, 1, 0, 0]),
    (AndMask(0.75), [1, 0, 3.75, 1, -2.25, 0, 0], [1, 0, 1, 1, 1, 0, 0]),
    (AndMask(0.5), [1, 1, 3.75, 1, -2.25, 0, 0.5], [1, 1, 1, 1, 1, 0, 1]),
    (AndMask(0.51), [1, 0, 3.75, 1, -2.25, 0, 0], [1, 0, 1, 1, 1, 0, 0]),
    (XorMask(1.0), [0, 1, 0, 1, 0, 0, 0.5], [0, 1, 0, 1, 0, 1, 1]),
    (XorMask(0.0), [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]),
    (GeometricMean(1.0), [1, 0, 2.8284271, 0, -2, 0, 0], [1, 0, 1, 0, 1, 0, 0]),
    (GeometricMean(0.5), [1, 1.3160740, 2.8284271, 0, -2, 0, 1.4953488], [1, 1, 1, 1, 1, 0, 1]),
    (
        SandMask(0.5, steepness=1.0),
        [1, 0, 0.1954748, 0.3583574, -0.6878133, 0, 0],
        [1, 0, 0.0521266, 0.3583574, 0.3056948, 0, 0],
    ),
    (SandMask(1.0), [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]),
    # p is 0, .308, .0939, .0917, .0374, 1 and .761.
    (TMask(0.1), [1, 0, 3.75, 1, -2.25, 0, 0], [1, 0, 1, 1, 1, 0, 0]),
    (TMask(0.0925), [1, 0, 0, 1, -2.25, 0, 0], [1, 0, 0, 1, 1, 0, 0]),
    (TMask(0.05), [1, 0, 0, 0, -2.25, 0, 0], [1, 0, 0, 0, 1, 0, 0]),
]


@pytest.mark.parametrize(("rule", "value", "kept"), KNOWN, ids=[repr(rule) for rule, _, _ in KNOWN])
def test_known_answers(rule: Aggregator, value: list[float], kept: list[float]) -> None:
    update = aggregate(rule, GRADIENTS)
    assert_close(update.value, torch.tensor(value, dtype=torch.float32), rtol=2e-6, atol=1e-7)
    assert_close(update.kept, torch.tensor(kept, dtype=torch.float32), rtol=2e-6, atol=1e-7)


# Corners


@pytest.mark.parametrize("tau", [0.0, 0.8, 1.0])
def test_one_environment_keeps_all_but_zeros(tau: float) -> None:
    gradient = torch.tensor([[0.0, -2.0, 3.0]])
    for rule in (Mean(), AndMask(tau), GeometricMean(tau)):
        assert_close(aggregate(rule, gradient).value, gradient[0])
    assert aggregate(AndMask(tau), gradient).kept.tolist() == [float(tau == 0), 1, 1]
    expected = [0.0, 0.0, 0.0] if tau == 1 else [0.0, -2.0, 3.0]
    assert aggregate(SandMask(tau), gradient).value.tolist() == expected
    assert aggregate(TMask(), gradient).kept.tolist() == [0, 1, 1]


def test_equal_gradients_have_no_variance_whatever_rounding_says() -> None:
    """Σg² - d·mean² is rounding where all environments are alike; the mask must still be all or nothing."""
    row = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-6, 3, 1000)
    rule = SandMask(0.8)
    for environments in (2, 7, 31, 300):
        stacked = sum_over_environments(rule, row.expand(environments, -1))
        one_by_one = sum_over_environments(rule, row[None])
        for _ in range(environments - 1):
            sum_over_environments(rule, row[None], out=one_by_one, accumulate=True)
        for sums in (stacked, one_by_one):
            update = rule.finish(sums, environments)
            assert bool((update.kept == 1).all())
            assert_close(update.value.float(), row, rtol=1e-6, atol=0)


@pytest.mark.parametrize("environments", [2, 3, 7, 20, 100])
@pytest.mark.parametrize("significance", [0.1, 1e-3])
def test_the_t_mask_keeps_its_significance_of_unrelated_gradients(environments: int, significance: float) -> None:
    gradients = torch.randn(environments, 200_000, generator=torch.Generator().manual_seed(environments))
    kept = aggregate(TMask(significance), gradients).kept.double().mean().item()
    assert kept == pytest.approx(significance, abs=5 * math.sqrt(significance / 200_000))
    assert TMask(significance).chance(environments) == significance


@pytest.mark.parametrize(("environments", "significance"), [(2, 1e-6), (2, 1e-8), (3, 1e-8)])
def test_the_t_mask_keeps_small_significances_of_few_gradients(environments: int, significance: float) -> None:
    gradients = torch.randn(environments, 1_000_000, generator=torch.Generator().manual_seed(environments))
    assert int(aggregate(TMask(significance), gradients).kept.sum()) <= 6  # 1 expected with 1e-6
    alike = gradients[:1].expand(environments, -1)
    assert bool((aggregate(TMask(significance), alike).kept == 1).all())


def test_the_documents_table_of_the_t_mask_is_what_it_asks_for() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
    table = page[page.index("standard errors at P = 0.01") :]
    rows = re.findall(r"^\| (\d+) \|" + r" ([\d.]+) \|" * 4 + "$", table, re.MULTILINE)
    assert len(rows) == 6
    for d, *asked in rows:
        assert asked == [f"{TMask(p).quantile(int(d)):.3g}" for p in (1e-2, 1e-3, 1e-4, 1e-5)]


def test_the_t_mask_asks_for_more_than_signs_of_few_environments_can_say() -> None:
    alike, apart = [1.0, 1.1, 0.9, 1.0], [0.01, 2.0, 0.5, 3.0]  # four signs that agree; p is 1.5e-4 and .14
    assert aggregate(TMask(1e-3), torch.tensor([alike, apart]).T).kept.tolist() == [1, 0]
    assert aggregate(AndMask(1.0), torch.tensor([alike, apart]).T).kept.tolist() == [1, 1]


def test_squares_that_overflow_are_a_variance_without_end() -> None:
    gradients = torch.tensor([[1e18, 1e20, 1e30], [1.1e18, 1.5e20, 2e30], [0.9e18, 0.5e20, 3e30]])
    update = aggregate(SandMask(0.5, steepness=1e35), gradients)
    expected = aggregate(SandMask(0.5, steepness=1e35), gradients.double())
    assert_close(update.kept.double(), expected.kept, rtol=1e-3, atol=1e-3)
    assert update.kept[0] > 0.5


def test_a_zero_counts_for_neither_sign() -> None:
    gradients = torch.tensor([[1.0], [0.0], [1.0], [1.0]])  # |Σ sign| is 3 of 4
    assert aggregate(AndMask(0.75), gradients).kept.item() == 1
    assert aggregate(AndMask(0.76), gradients).kept.item() == 0
    assert aggregate(GeometricMean(0.75), gradients).value.item() == 0


@pytest.mark.parametrize(
    ("threshold", "environments", "enough"),
    [(0.55, 20, 11), (0.7, 10, 7), (0.1 + 0.2, 10, 3), (0.29, 100, 29), (0.8, 5, 4), (1.0, 7, 7), (0.0, 9, 0)],
)
def test_threshold_times_environments_is_decimal(threshold: float, environments: int, enough: int) -> None:
    """0.55 · 20 is 11.000000000000002 in floating point, and 11 environments are enough."""
    assert required_agreement(threshold, environments) == enough
    for agreement, expected in ((enough, 1.0), (enough - 1, 0.0)):
        if agreement >= 0:
            gradients = torch.zeros(environments, 1)
            gradients[:agreement] = -0.25
            assert aggregate(AndMask(threshold), gradients).kept.item() == expected
            assert aggregate(XorMask(threshold), gradients).kept.item() == 1 - expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_counts_three_hundred_signs_exactly(dtype: torch.dtype) -> None:
    against = torch.tensor([0, 1, 2, 3, 150])
    gradients = torch.ones(300, 5, dtype=dtype)
    gradients[torch.arange(300)[:, None] < against] = -1
    for fewest in (300, 298, 296, 294):  # bfloat16 itself cannot tell 298 from 296
        update = aggregate(AndMask(fewest / 300), gradients)
        assert update.kept.tolist() == [float(300 - 2 * count >= fewest) for count in against.tolist()]
    assert aggregate(Mean(), gradients).value.dtype == dtype
    assert_close(aggregate(Mean(), gradients).value.double(), 1 - against.double() / 150, rtol=1e-2, atol=1e-4)


def test_half_precision_sums_do_not_overflow() -> None:
    gradients = torch.full((300, 2), 60_000.0, dtype=torch.float16)
    for rule in (Mean(), AndMask(1.0)):
        assert aggregate(rule, gradients).value.tolist() == [60_000.0, 60_000.0]


def test_geometric_mean_of_small_numbers_does_not_underflow() -> None:
    gradients = torch.full((300, 3), -1e-30)
    assert_close(aggregate(GeometricMean(1.0), gradients).value, torch.full((3,), -1e-30), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
@pytest.mark.parametrize("name", AGGREGATORS)
def test_update_has_the_shape_of_one_gradient(name: Any, shape: tuple[int, ...]) -> None:
    gradients = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    before = gradients.clone()
    update = aggregate(aggregator(name, 0.5), gradients)
    assert update.value.shape == update.kept.shape == shape
    bitwise(gradients, before)
    turned = gradients.movedim(0, -1).contiguous().movedim(-1, 0)  # the same numbers, not contiguous
    bitwise(aggregate(aggregator(name, 0.5), turned).value, update.value)


# Rescaling


def rescaled(rule: Aggregator, gradients: Tensor) -> Tensor:
    """The rescaled update of one layer, flat."""
    out = torch.empty(gradients[0].numel(), dtype=gradients.dtype)
    sums = sum_over_environments(rule, gradients.flatten(1))
    finish_whole(rule, sums, out, Layers((len(out),), (0,)), len(gradients), 0, rescale=True)
    return out


def test_rescaling_multiplies_a_layer_by_components_over_kept() -> None:
    gradients = GRADIENTS.repeat(1, 3).reshape(4, 3, 7)
    update = aggregate(AndMask(1.0), gradients)
    assert update.kept.sum() == 9
    assert_close(rescaled(AndMask(1.0), gradients), update.value.flatten() * (21 / 9))
    bitwise(rescaled(Mean(), gradients), aggregate(Mean(), gradients).value.flatten())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [AndMask(1.0), GeometricMean(1.0), XorMask(0.0), SandMask(1.0)])
def test_where_nothing_is_kept_the_update_is_exactly_zero(rule: Aggregator, dtype: torch.dtype) -> None:
    gradients = torch.tensor([[1.0, -3.0], [-1.0, 2.0]], dtype=dtype)
    update = aggregate(rule, gradients)
    assert update.kept.tolist() == update.value.tolist() == [0, 0]
    assert rescaled(rule, gradients).tolist() == [0, 0]


def test_rescaling_a_half_precision_layer_of_which_little_is_kept() -> None:
    """The factor, 80,000, is more than float16 can hold; the rescaled update is not."""
    gradients = torch.full((2, 80_000), 0.5, dtype=torch.float16)
    gradients[1, 1:] = -0.5
    assert rescaled(AndMask(1.0), gradients * 1e-3)[0].item() == pytest.approx(40, rel=1e-3)


# Random gradients (Proposition 2, Fig. 4): 3,000 components, t = 0.8d, that is τ = 0.6


def random_step(examples: int, repeats: int = 1) -> tuple[float, float, float]:
    """Mean squared norms of the plain and of the masked gradient, and the fraction kept."""
    generator = torch.Generator().manual_seed(examples)
    plain = masked = kept = 0.0
    for _ in range(repeats):
        gradients = torch.randn(examples, 3000, generator=generator)
        update = aggregate(AndMask(0.6), gradients)
        plain += float(aggregate(Mean(), gradients).value.square().sum()) / repeats
        masked += float(update.value.square().sum()) / repeats
        kept += float(update.kept.mean()) / repeats
    return plain, masked, kept


def test_random_gradients_of_more_than_100_examples_are_masked_entirely() -> None:
    for examples in (101, 130, 200, 400):
        plain, masked, kept = random_step(examples)
        assert masked == 0
        assert kept == 0
        assert plain == pytest.approx(3000 / examples, rel=0.15)


def test_mask_shrinks_random_gradients_exponentially_and_the_mean_linearly() -> None:
    steps = {examples: random_step(examples, repeats=20) for examples in (10, 20, 30, 40)}
    for examples, (plain, _, kept) in steps.items():
        assert plain == pytest.approx(3000 / examples, rel=0.05)
        # Equation 4 of the proof: the probability of keeping a component.
        fewest = -(-8 * examples // 10)
        expected = 2 * sum(math.comb(examples, k) for k in range(fewest, examples + 1)) / 2**examples
        deviation = math.sqrt(expected * (1 - expected) / (3000 * 20))
        assert abs(kept - expected) < 4 * deviation + 1e-9
    for fewer, more in ((10, 20), (20, 30), (30, 40)):
        assert steps[fewer][0] / steps[more][0] < 2.5
        assert steps[fewer][1] / steps[more][1] > 5


# Blocks


class Recording:
    """The AND-mask, with a note of the shapes that it was given."""

    def __init__(self) -> None:
        self.rule = AndMask(0.5)
        self.shapes: list[tuple[int, ...]] = []

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (Statistic("gradient", self.seen), SIGN)

    def seen(self, gradient: Tensor) -> Tensor:
        self.shapes.append(tuple(gradient.shape))
        return gradient

    def finish(self, sums: Statistics, environments: int) -> Update:
        return self.rule.finish(sums, environments)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_blocks_do_not_change_the_result(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = aggregator(name, 0.5)
    generator = torch.Generator().manual_seed(0)
    for components in (1, 3, 4, 5, 8, 9, 17):
        gradients = torch.randn(3, components, generator=generator)
        whole = aggregate(rule, gradients)
        for elements in (12, 1):  # four components at once, and one (a block cannot be smaller)
            with monkeypatch.context() as patch:
                patch.setattr(rule_module, "BLOCK_ELEMENTS", elements)
                found = aggregate(rule, gradients)
                twice = sum_over_environments(rule, gradients, sum_over_environments(rule, gradients), accumulate=True)
            bitwise(found.value, whole.value)
            bitwise(found.kept, whole.kept)
            for key, total in sum_over_environments(rule, gradients).items():
                assert_close(twice[key], 2 * total)


def test_a_rule_of_ones_own_sees_blocks_no_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "BLOCK_ELEMENTS", 12)
    rule, gradients = Recording(), torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    bitwise(aggregate(rule, gradients).value, aggregate(AndMask(0.5), gradients).value)
    assert rule.shapes[-3:] == [(3, 4), (3, 4), (3, 2)]


# What is refused


@pytest.mark.parametrize("rule", [AndMask, GeometricMean, XorMask, SandMask])
@pytest.mark.parametrize("threshold", [-0.1, 1.001, float("nan"), float("inf")])
def test_threshold_outside_0_to_1_is_refused(rule: Callable[[float], Aggregator], threshold: float) -> None:
    with pytest.raises(InputError, match=rf"threshold={threshold}: "):
        rule(threshold)


@pytest.mark.parametrize("significance", [0.0, 1.0, -0.1, float("nan")])
def test_a_significance_that_is_no_level_of_a_test_is_refused(significance: float) -> None:
    with pytest.raises(InputError, match=f"significance={significance}"):
        TMask(significance)


@pytest.mark.parametrize("steepness", [0.0, -1.0, float("nan")])
def test_steepness_that_is_not_positive_is_refused(steepness: float) -> None:
    with pytest.raises(InputError, match=f"steepness={steepness}"):
        SandMask(0.5, steepness)


def test_name_of_no_rule_is_refused() -> None:
    with pytest.raises(InputError, match="aggregator=median: must be one of mean, and-mask"):
        aggregator("median")


@pytest.mark.parametrize("name", AGGREGATORS)
def test_no_environment_is_refused(name: Any) -> None:
    with pytest.raises(InputError, match=r"shape \(0, 3\)"):
        aggregate(aggregator(name, 0.5), torch.zeros(0, 3))
    with pytest.raises(InputError, match=r"shape \(\)"):
        aggregate(aggregator(name, 0.5), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_gradients_that_are_no_real_numbers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=str(dtype)):
        aggregate(Mean(), torch.ones(2, 3).to(dtype))
