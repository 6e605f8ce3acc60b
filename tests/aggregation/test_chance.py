"""How often signs agree by chance: against all outcomes, exact fractions, and in every placement of d."""

import itertools
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.aggregation import (
    AGGREGATORS,
    RULES,
    AndMask,
    GeometricMean,
    SignMask,
    TMask,
    XorMask,
    aggregate,
    aggregator_at_chance,
    agreeing_signs,
    chance_of,
    kept_where_signs_agree,
    required_agreement,
    threshold_at_chance,
)
from concord.aggregation.chance import format_chance, least_environments
from concord.errors import ArgumentError, format_for_cli

taus = st.fractions(0, 1, max_denominator=100)
chances = st.floats(-320, 0).map(lambda exponent: 10.0**exponent).filter(lambda p: p > 0)


def exactly(environments: int, agreement: int) -> Fraction:
    """The probability of |Σ sign| ≥ ``agreement`` by equation 4, in fractions."""
    ways = itertools.accumulate(range(environments), lambda ways, k: ways * (environments - k) // (k + 1), initial=1)
    reaching = sum(each for plus, each in enumerate(ways) if abs(2 * plus - environments) >= agreement)
    return Fraction(reaching, 2**environments)


@pytest.mark.parametrize(
    ("environments", "chance"),
    [(32, "2.56e-06"), (20, "4.02e-04"), (7, "1.56e-02"), (3, "2.50e-01"), (100, "3.06e-17")],
)
def test_what_passes_at_four_fifths(environments: int, chance: str) -> None:
    assert f"{chance_of(0.8, environments):.2e}" == chance


@settings(max_examples=30)
@given(taus, st.integers(1, 9))
def test_it_is_the_part_of_all_outcomes_that_the_mask_keeps(tau: Fraction, environments: int) -> None:
    outcomes = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=environments))).T
    for kind in (AndMask, GeometricMean, XorMask):
        rule = kind(float(tau))
        assert float(aggregate(rule, outcomes).kept.double().mean()) == rule.chance(environments)


@given(taus, st.integers(1, 300))
def test_it_is_the_formula_of_the_paper_in_exact_fractions(tau: Fraction, environments: int) -> None:
    assert chance_of(float(tau), environments) == float(exactly(environments, math.ceil(tau * environments)))
    signs = agreeing_signs(float(tau), environments)
    assert 2 * signs - environments >= tau * environments > 2 * (signs - 1) - environments


@given(chances, st.integers(1, 300))
def test_a_threshold_at_chance_is_the_least_that_chance_reaches_so_seldom(p: float, environments: int) -> None:
    if 2 ** Fraction(1 - environments) > Fraction(p):
        with pytest.raises(ArgumentError, match=r"agrees? fully with probability"):
            threshold_at_chance(p, environments)
        return
    agreement = round(threshold_at_chance(p, environments) * environments)
    assert Fraction(threshold_at_chance(p, environments)) == Fraction(agreement / environments)
    assert exactly(environments, agreement) <= Fraction(p)
    assert agreement < 2 or exactly(environments, agreement - 2) > Fraction(p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_threshold_selects_the_count_that_is_meant_for_every_d(dtype: torch.dtype) -> None:
    """At τ = n / d a sum of n passes, and n - 1, which a zero makes of it, does not: for d up to 10,000."""
    for environments in range(1, 10_001):
        least = environments % 2
        for agreement in {least, (environments // 4) * 2 + least, environments - 2, environments} - {-1, 0}:
            required = required_agreement(agreement / environments, environments, dtype)
            assert agreement - 1 < required <= agreement


@given(st.integers(1, 10_000), st.data())
def test_the_mask_keeps_what_reaches_the_count(environments: int, data: st.DataObject) -> None:
    agreement = environments - 2 * data.draw(st.integers(0, environments // 2))
    sums = torch.tensor([agreement, -agreement, max(agreement - 1, 0), max(agreement - 2, 0)]).float()
    kept = kept_where_signs_agree(sums, agreement / environments, environments)
    assert kept.tolist() == [1.0, 1.0, float(agreement == 0), float(agreement == 0)]
    assert agreeing_signs(agreement / environments, environments) == (environments + agreement) // 2


@pytest.mark.parametrize("environments", [9_998, 9_999, 10_000])
def test_ten_thousand_environments_are_as_exact(environments: int) -> None:
    agreement = round(threshold_at_chance(1e-4, environments) * environments)
    assert exactly(environments, agreement) <= Fraction(1e-4) < exactly(environments, agreement - 2)
    assert chance_of(0.8, environments) == 0.0  # below every float, not an error


@given(chances)
def test_the_least_number_of_environments_is_told_exactly(p: float) -> None:
    environments = least_environments(p)
    assert 2 ** Fraction(1 - environments) <= Fraction(p)
    assert environments == 1 or 2 ** Fraction(2 - environments) > Fraction(p)
    assert AndMask.at_chance(p, environments) == AndMask(1.0)


def test_what_cannot_be_had_is_refused_with_what_can() -> None:
    with pytest.raises(ArgumentError) as refused:
        AndMask.at_chance(1e-4, 7)
    assert format_for_cli(refused.value) == (
        "--significance 0.0001: by chance 7 environments agree fully with probability 1.6e-2; give 1.6e-2 or more, or "
        "at least 15 environments"
    )
    assert AndMask.at_chance(1.6e-2, 7) == AndMask.at_chance(1e-4, 15) == AndMask(1.0)


@given(st.integers(1, 60))
def test_the_probability_that_is_told_can_be_given(environments: int) -> None:
    with pytest.raises(ArgumentError) as refused:
        threshold_at_chance(2.0**-environments, environments)
    told = float(str(refused.value).split("give ")[1].split(" or more")[0])
    assert threshold_at_chance(told, environments) == 1.0


@pytest.mark.parametrize(("p", "environments"), [(0.0, 20), (1.1, 20), (math.nan, 20), (-0.1, 20), (0.1, 0)])
def test_what_is_no_probability_and_no_environment_is_refused(p: float, environments: int) -> None:
    with pytest.raises(ArgumentError):
        threshold_at_chance(p, environments)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_rules_that_do_not_go_by_signs_alone_have_none(name: str) -> None:
    if issubclass(RULES[name], SignMask):
        assert aggregator_at_chance(name, 1e-4, 20).threshold == 0.9  # type: ignore[attr-defined]
        return
    if name == "t-mask":
        assert aggregator_at_chance(name, 1e-4, 3) == TMask(1e-4)
        return
    with pytest.raises(ArgumentError, match=f"significance=0.01: {name} does not keep components by their signs alone"):
        aggregator_at_chance(name, 0.01, 20)


def test_the_documents_table_is_what_is_computed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) of \d+: (\S+) \| *(\d*) *\| *(\d*) *\| *(\d*) *\|$", page, re.MULTILINE)
    assert len(rows) == 11
    for d, at_four_fifths, chance, *signs in ((int(row[0]), *row[1:]) for row in rows):
        assert (agreeing_signs(0.8, d), format_chance(chance_of(0.8, d))) == (int(at_four_fifths), chance)
        possible = [p for p in (1e-2, 1e-4, 1e-6) if least_environments(p) <= d]
        found = [str(agreeing_signs(threshold_at_chance(p, d), d)) for p in possible]
        assert found + [""] * (3 - len(found)) == signs
