"""A run that ended too early reports it; a converged run, or one with noisy losses, reports nothing."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from concord.training import TrainConfig
from concord.record import Evaluation
from concord.training.underfitting import late_fall, underfitting

lengths = st.integers(6, 60)
losses = st.lists(st.floats(1e-3, 10), min_size=6, max_size=60)


def history(losses: Sequence[float], epochs: int) -> list[Evaluation]:
    each = epochs // len(losses)
    return [Evaluation(each * at, at, {"held_out_loss": loss}) for at, loss in enumerate(losses, 1)]


def learned(count: int, pace: float, floor: float = 0.3, start: float = 0.4) -> list[float]:
    """Losses that approach a floor, ``pace`` of their distance after all evaluations."""
    return [floor + start * math.exp(-pace * at / count) for at in range(1, count + 1)]


@given(lengths, st.floats(0.5, 3), st.floats(0.05, 1))
def test_what_still_falls_is_seen(count: int, pace: float, floor: float) -> None:
    found = late_fall(learned(count, pace, floor))
    assert found is not None
    late = learned(count, pace, floor)[-max(6, math.ceil(0.6 * count)) :]
    assert found == pytest.approx(late[0] - late[-1], rel=0.4)


@given(lengths, st.floats(12, 100), st.floats(0.05, 1))
def test_what_has_converged_is_not(count: int, pace: float, floor: float) -> None:
    assert late_fall(learned(max(count, 10), pace, floor)) is None


@given(losses)
def test_no_loss_that_ends_higher_than_it_was_is_said_to_fall(losses: list[float]) -> None:
    """Not even where most of the pairs fall: the last six must have a trend, and that downwards."""
    late = losses[-max(6, math.ceil(0.6 * len(losses))) :]
    assert late_fall(sorted(losses)) is None
    if late[-1] >= max(late[:-1]):
        assert late_fall(losses) is None


@given(st.builds(learned, lengths, st.floats(0.5, 100), st.floats(0.05, 1)), st.integers(-10, 10))
def test_the_unit_of_the_loss_does_not_matter(losses: list[float], exponent: int) -> None:
    unit = 2.0**exponent  # which scales without rounding
    found, expected = late_fall([unit * loss for loss in losses]), late_fall(losses)
    assert found == (None if expected is None else pytest.approx(unit * expected))


@given(losses, st.integers(0, 5), st.sampled_from([math.nan, math.inf]))
def test_losses_that_are_few_or_not_finite_say_nothing(losses: list[float], at: int, bad: float) -> None:
    assert late_fall(sorted(losses, reverse=True)[:5]) is None
    assert late_fall([*losses[:at], bad, *losses[at:]]) is None


@pytest.mark.parametrize("count", [6, 10, 20])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_noise_is_seldom_taken_for_learning(count: int, noise: float) -> None:
    """Around a loss that has converged, independent from one evaluation to the next."""
    generator = np.random.default_rng(0)
    rows = np.exp(noise * generator.standard_normal((2000, count)))
    assert sum(late_fall(row.tolist()) is not None for row in rows) <= 0.01 * len(rows)


def test_a_run_is_told_by_what_came_before_the_learning_rate_was_lowered() -> None:
    config = TrainConfig().with_options(epochs=20, lr=1e-3)
    falling, flat = learned(10, 1.5), learned(10, 40)
    frozen = [falling[-1] - 0.001 * at / 10 for at in range(10)]
    said = underfitting(history([*falling, *frozen], 20), config)
    assert said is not None
    assert said.startswith("the held-out loss was still falling at epoch 10, when --lr was lowered: by 0.0")
    assert said.endswith("since epoch 5, to 0.389; more --epochs than 20 or a larger --lr than 0.001 may learn more")
    assert underfitting(history([*flat, *flat], 20), config) is None
    higher = [1.1 * loss for loss in falling]
    assert underfitting(history([*falling, *higher], 20), config) is None  # more of it would make it worse

    constant = TrainConfig().with_options(epochs=20, milestones=(), lr=0.01)
    assert "at the end of the run" in str(underfitting(history(learned(20, 1.5), 20), constant))
    assert underfitting(history([*falling, *frozen], 20), constant) is None
    assert underfitting([Evaluation(20, 1, {"train_loss": 0.1})], config) is None
    assert underfitting([], config) is None
