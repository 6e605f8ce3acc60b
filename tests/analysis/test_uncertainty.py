"""Intervals from rows and clusters, and what a verdict says and does not say."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from concord.analysis.intervals import (
    Estimate,
    area_under_curve,
    jackknife,
    mean_of_rows,
    next_interval,
    scale_of,
    t_interval,
)
from concord.analysis.uncertainty import Verdict, verdict

HOSPITALS = ("basel", "budapest", "cleveland", "long beach")


def compared(*methods: list[float], mode: str = "max") -> Verdict:
    names = ("mean", "boosting", "vrex")
    values = {
        name: {place: [value] for place, value in zip(HOSPITALS, each, strict=False)}
        for name, each in zip(names, methods, strict=False)
    }
    found = verdict(values, "accuracy", mode, rows=dict.fromkeys(HOSPITALS, 200))  # type: ignore[arg-type]
    assert found is not None
    return found


# --- intervals


def test_the_interval_of_a_share_is_wilsons_also_where_all_rows_are_right() -> None:
    rows = np.arange(400) < 320
    interval = mean_of_rows(rows.astype(float)).interval("share")
    wilson = stats.binomtest(320, 400).proportion_ci(method="wilson")
    assert interval == pytest.approx((wilson.low, wilson.high), abs=1e-3)
    interval = mean_of_rows(np.ones(60)).interval("share")
    assert interval is not None
    assert interval.low == pytest.approx(stats.binomtest(60, 60).proportion_ci(method="wilson").low, abs=5e-3)
    assert interval.high == 1


AREAS = st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=4, max_size=40)


@given(AREAS)
def test_the_area_is_scikit_learns_and_its_influence_sums_to_zero(rows: list[tuple[float, bool]]) -> None:
    scores, positive = np.array([score for score, _ in rows]), np.array([truth for _, truth in rows])
    found = area_under_curve(np.stack([scores, scores]), positive)
    if positive.all() or not positive.any():
        assert found is None
        return
    assert found is not None
    assert found.value == pytest.approx(roc_auc_score(positive, scores))
    assert found.influence.sum() == pytest.approx(0, abs=1e-9)
    interval = found.interval("bounded")
    if interval is not None:
        assert 0 <= interval.low <= found.value + 1e-9
        assert found.value - 1e-9 <= interval.high <= 1


def test_the_jackknife_of_a_mean_has_the_variance_of_the_mean() -> None:
    numbers = np.random.default_rng(0).normal(size=25)
    found = jackknife(lambda places: float(numbers[places].mean()), 25)
    assert found is not None
    assert found.variance == pytest.approx(numbers.var(ddof=1) / 25)


def test_clusters_of_one_row_are_rows_and_clusters_of_equal_rows_count_once() -> None:
    rows = (np.random.default_rng(0).random(100) < 0.7).astype(float)
    alone = mean_of_rows(rows, np.arange(100))
    assert alone.variance == pytest.approx(mean_of_rows(rows).variance)
    fivefold = mean_of_rows(np.repeat(rows, 5), np.repeat(np.arange(100), 5))
    assert fivefold.variance == pytest.approx(alone.variance)
    assert fivefold.units == 100
    assert mean_of_rows(rows, np.zeros(100, dtype=int)).interval("share") is None


def test_weights_count_as_so_many_rows() -> None:
    numbers, counts = np.array([1.0, 2.0, 4.0]), np.array([3, 1, 2])
    twice = mean_of_rows(np.repeat(numbers, counts), np.repeat(np.arange(3), counts))
    weighted = mean_of_rows(numbers, weights=counts)
    assert (weighted.value, weighted.variance) == pytest.approx((twice.value, twice.variance))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bounded_measure_at_its_end_has_an_interval_though_its_rows_differ(value: float) -> None:
    """The calibration error of a probability of 1/2 is 0 where half of the rows are right."""
    interval = Estimate(value, np.array([0.01, -0.01, 0.02, -0.02]), False, 3, 4).interval("bounded")
    assert interval is not None
    assert interval.low <= value <= interval.high
    assert 0.3 < interval.high - interval.low < 1


def test_methods_that_are_right_in_the_same_rows_differ_by_nothing() -> None:
    rows = mean_of_rows((np.arange(50) < 40).astype(float))
    assert rows.difference(rows).variance == 0


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [0.0, 0.5, 1.0], [0.7, 0.8, 0.75, 0.9]])
def test_the_next_share_is_expected_in_0_to_1(values: list[float]) -> None:
    found = next_interval(values, "share", [100] * len(values))
    assert found is not None
    assert 0 < found[0].low < found[0].high < 1
    assert found[0].high - found[0].low > 0.01  # equal values of few rows are no certainty
    assert found[1] == "t interval"


@pytest.mark.parametrize("measure", ["mse", "mae", "poisson_deviance"])
def test_the_next_error_is_expected_above_0(measure: str) -> None:
    found = next_interval([0.1, 0.2, 2.0], scale_of(measure))
    assert found is not None
    assert 0 < found[0].low < found[0].high


def test_equal_errors_say_nothing_of_the_next() -> None:
    assert next_interval([0.5, 0.5, 0.5], "positive") is None


def test_from_39_environments_on_the_next_is_between_order_statistics() -> None:
    values = list(np.random.default_rng(0).normal(size=60))
    assert next_interval(values, "free") == ((min(values), max(values)), "order statistics")


# --- the verdict


def test_four_hospitals_show_no_small_difference_and_say_what_to_expect() -> None:
    found = compared([0.75, 0.80, 0.74, 0.84], [0.76, 0.75, 0.77, 0.80])
    assert found.recommended == "mean"
    assert found.lines == (
        "recommended: mean; accuracy 0.782 against boosting 0.770: difference 0.012 (95 % -0.049 to 0.074; 4 "
        "environments), not more than chance",
        "expect accuracy 0.572 to 0.908 of mean in a new environment (with 95 % probability; t interval of 4 "
        "environments)",
        "more environments would tell more",
    )


def test_a_clear_difference_is_more_than_chance_and_its_limits_are_said() -> None:
    found = compared([0.5, 0.52, 0.48, 0.5], [0.7, 0.71, 0.69, 0.68], [0.4, 0.6, 0.4, 0.6])
    assert found.recommended == "boosting"
    assert found.lines[0].endswith("for 2 comparisons together; 4 environments), more than chance")
    assert found.lines[1] == (
        "it holds in 4 of 4 environments, which leaves room for up to 53 % of new environments where it does not"
    )
    assert compared([0.5, 0.52, 0.48, 0.5], [0.7, 0.71, 0.69, 0.68], mode="min").recommended == "mean"


def test_an_environment_where_both_are_equal_is_no_win_of_either() -> None:
    first, second = (0.7, 0.71, 0.69, 0.7, 0.7), (0.6, 0.61, 0.59, 0.6, 0.7)
    by_method = {"mean": first, "vrex": second}
    values = {method: {f"site {at}": [value] for at, value in enumerate(each)} for method, each in by_method.items()}
    found = verdict(values, "accuracy", "max")
    assert found is not None
    (difference,) = found.differences
    assert (difference.verdict, difference.wins, difference.losses) == ("worse", 0, 4)
    assert found.lines[1] == "it holds in 4 of 5 environments"


def test_the_recommended_method_shows_its_own_evidence_where_another_is_best_by_chance() -> None:
    found = compared([0.5, 0.52, 0.48, 0.5], [0.6, 0.61, 0.59, 0.6], [0.9, 0.3, 0.9, 0.5])
    assert found.methods[0].method == "vrex"
    assert found.lines[0].startswith("recommended: boosting; accuracy 0.600 against mean 0.500: difference 0.100 (95 %")
    assert found.lines[0].endswith(", more than chance")


def test_the_interval_of_a_difference_is_students_over_the_comparisons() -> None:
    first, second = [0.5, 0.6, 0.7, 0.8], [0.6, 0.6, 0.9, 0.8]
    each = np.array(second) - np.array(first)
    half = stats.t.ppf(1 - 0.05 / 2 / 2, 3) * each.std(ddof=1) / 2
    (difference, _) = compared(first, second, first).differences
    assert difference.interval == pytest.approx((each.mean() - half, each.mean() + half))
    assert t_interval(0, 1, 4, 2).high == pytest.approx(stats.t.ppf(1 - 0.05 / 4, 3))


def test_the_variance_over_environments_is_no_smaller_than_the_chance_of_their_rows() -> None:
    random = np.random.default_rng(0)
    rows = {name: random.permutation(20) for name in HOSPITALS}
    estimates = {
        method: {name: mean_of_rows((order < right).astype(float)) for name, order in rows.items()}
        for method, right in (("mean", 12), ("boosting", 13))
    }
    values = {method: {name: [one.value] for name, one in each.items()} for method, each in estimates.items()}
    assert (found := verdict(values, "accuracy", "max", estimates=estimates)) is not None
    assert found.differences[0].verdict == "chance"  # one row more in each of four
    assert found.next_environment is not None
    assert found.next_environment.share_of_rows == 1
    assert "more rows in each environment would tell more" in found.lines[-1]
    assert {each.units for each in found.environments} == {20}


def test_methods_with_different_rows_are_compared_over_environments_alone() -> None:
    random = np.random.default_rng(0)
    counts = {"mean": 60, "boosting": 40}  # of seeds with rows of their own, of which one lacks a run
    estimates = {
        method: {name: mean_of_rows(random.random(count)) for name in HOSPITALS} for method, count in counts.items()
    }
    values = {method: {name: [one.value] for name, one in each.items()} for method, each in estimates.items()}
    found, plain = verdict(values, "mse", "min", estimates=estimates), verdict(values, "mse", "min")
    assert found is not None
    assert plain is not None
    assert found.differences == plain.differences


def test_a_method_or_an_environment_without_a_value_is_left_out_by_name() -> None:
    nan = math.nan
    found = compared([0.7, 0.8, nan, 0.9], [0.7, 0.8, nan, 0.8], [0.9, nan, nan, 0.9])
    assert found.left_out == {"cleveland": "the measure is not defined there", "vrex": "no value in budapest"}
    assert found.lines[-2:] == (
        "cleveland is left out: the measure is not defined there",
        "vrex is left out: no value in budapest",
    )
    assert verdict({"mean": {"a": [nan]}}, "accuracy", "max") is None


def test_many_environments_without_a_value_are_one_line() -> None:
    values = {f"village {number}": [math.nan if number < 40 else number / 100] for number in range(60)}
    found = verdict({"mean": values, "ridge": values}, "auc", "max")
    assert found is not None
    named = ", ".join(f"village {number}" for number in range(5))
    assert found.lines[-1] == f"{named} and 35 more are left out: the measure is not defined there"
    assert len(found.left_out) == 40


def test_two_environments_have_no_interval_over_environments() -> None:
    found = compared([0.7, 0.8], [0.9, 0.95])
    assert found.lines == (
        "recommended: mean; accuracy of boosting 0.925 against mean 0.750 in 2 environments; an interval needs at "
        "least 3 environments, so nothing is said of chance",
        "2 environments are too few to say what to expect in a new one; 3 are needed",
    )
    assert json.loads(json.dumps(found.as_json()))["differences"][0]["interval"] is None


VALUES = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@given(VALUES, VALUES, VALUES, st.sampled_from(["max", "min"]))
def test_the_recommended_is_the_first_or_its_interval_excludes_zero(
    first: list[float], second: list[float], third: list[float], mode: str
) -> None:
    found = compared(first, second, third, mode=mode)
    if found.recommended != "mean":
        difference = next(each for each in found.differences if each.method == found.recommended)
        assert difference.interval is not None
        assert difference.advantage > 0
        assert difference.interval.low > 0 or difference.interval.high < 0


PLACES = ["a", "b", "c", "d"]
ERRORS = {"model": {name: [0.2 + 0.01 * at] for at, name in enumerate(PLACES)}}


def test_the_first_line_says_whether_the_method_holds() -> None:
    """By a constant, which needs no model, in each environment and in a new one."""
    low, high = dict.fromkeys(PLACES, 0.1), dict.fromkeys(PLACES, 0.9)
    for mode, worse, better in (("max", high, low), ("min", low, high)):
        bad = verdict(ERRORS, "mse", mode, constants={**better, "b": worse["b"]})  # type: ignore[arg-type]
        assert bad is not None
        assert bad.below == ["b"]
        assert bad.lines[0].startswith("does it hold? not everywhere: in b (1 of 4) model is no better than a constant")
        good = verdict(ERRORS, "mse", mode, constants=better)  # type: ignore[arg-type]
        assert good is not None
        assert good.below == []
        assert good.lines[0].startswith("does it hold? in all 4 environments model is better than a constant")
        assert good.lines[0].endswith("; a new one is likely to follow")
    unknown = verdict(ERRORS, "kappa", "max")
    assert unknown is not None
    assert unknown.below is None
    assert unknown.lines[0].startswith("recommended: ")


def test_a_method_that_is_close_to_a_constant_need_not_hold_in_a_new_environment() -> None:
    values = {"model": {name: [value] for name, value in zip(PLACES, (0.6, 0.9, 0.7, 0.95), strict=True)}}
    found = verdict(values, "accuracy", "max", constants=dict.fromkeys(PLACES, 0.55))
    assert found is not None
    assert found.lines[0].endswith("; a new one need not follow")
    some = verdict(values, "accuracy", "max", constants={"a": 0.55})
    assert some is not None
    assert "where its value is known (1 of 4 environments) model is better" in some.lines[0]


def test_an_unfinished_comparison_recommends_nothing_in_words() -> None:
    values = {"mean": ERRORS["model"], "other": {name: [0.9] for name in PLACES}}
    found = verdict(values, "accuracy", "max", unfinished="70 of 90 runs are missing")
    assert found is not None
    assert found.lines[0] == "unfinished, so no method is recommended yet: 70 of 90 runs are missing"
    assert not any(line.startswith("recommended") for line in found.lines)
    assert any(line.startswith("expect ") for line in found.lines)


@pytest.mark.parametrize(("seeds", "said"), [([0.5, 0.7, 0.9], True), ([0.70, 0.71, 0.69], False)])
def test_seeds_that_differ_by_more_than_the_rows_interval_are_said(seeds: list[float], said: bool) -> None:
    values = {"model": {name: seeds if name == "b" else [0.7, 0.7, 0.7] for name in PLACES}}
    estimates = {"model": {name: mean_of_rows(np.arange(400) % 10 < 7) for name in PLACES}}
    found = verdict(values, "accuracy", "max", estimates=estimates)
    assert found is not None
    assert any(line.startswith("in b the seeds differ by more than the interval") for line in found.lines) is said
