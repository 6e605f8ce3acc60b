"""The advice of a run: what a mask may let pass, and what went wrong in training; a run without a problem has none."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Concord
from hypothesis import given
from hypothesis import strategies as st

from concord.environments import Environments
from concord.training import Evaluation, Job, ProcessContext, TrainConfig, load_job, train
from concord.training.advice import (
    LARGE,
    empty_masks,
    falls_short,
    large_losses,
    late_fall,
    mask_lines,
    shortcuts,
    underfitting,
)
from concord.training.context import Silent
from concord.training.evaluation import ACCURACY, modes

JOBS = Path(__file__).parents[1] / "jobs"
JOB: Job[Any] = load_job(str(JOBS / "sensors.py")).job
COMPARE = "concord compare mine methods"


# --- before a run: masks


def mask(count: int, **options: object) -> list[str]:
    lines = mask_lines(TrainConfig().with_options(**{"aggregator": "and-mask"} | options).resolve(), count, COMPARE)
    return [line.removeprefix("mask: ") for line in lines]


def passing(signs: str, chance: str, count: str = "32 environments", tau: str = "0.8") -> str:
    return f"{count}, τ {tau}: {signs} must agree; by chance a component passes with probability {chance}"


def test_the_meaning_of_a_threshold_is_in_the_first_lines() -> None:
    assert mask(32) == [passing("29 of 32 signs", "2.6e-6", tau="0.8125")]
    assert mask(32, threshold=0.8) == [passing("29 of 32 signs", "2.6e-6")]
    assert mask(100) == [passing("75 of 100 signs", "5.6e-7", "100 environments", "0.5")]
    assert mask(20) == [passing("20 of 20 signs", "1.9e-6", "20 environments", "1")]
    assert mask(32, significance=1e-6) == [passing("30 of 32 signs", "2.5e-7", tau="0.875")]
    assert mask(32, environments_per_step=16)[0] == passing("15 of 16 signs", "5.2e-4", "16 environments")
    assert mask(8, steps_per_update=4)[0] == passing("29 of 32 signs", "2.6e-6", "32 votes", "0.8125")
    assert mask(2, per_example=True, batch_size=16) == [passing("29 of 32 signs", "2.6e-6", "32 examples", "0.8125")]
    assert mask(20, aggregator="t-mask") == [
        "20 environments, t-test at 1.0e-4: a mean must be 4.9 standard errors from 0"
    ]
    assert mask(32, aggregator="sand-mask") == mask(1, aggregator="mean") == []
    assert mask(32, aggregator="mean") == [
        f"average: gradients are averaged, without a mask; to find a better method: {COMPARE}"
    ]
    assert mask(32, aggregator="mean", objective="vrex") == []
    assert mask(32, aggregator="xor-mask") == [
        "32 environments, τ 0.8: fewer than 29 of 32 signs may agree; by chance a component passes with probability 1"
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"workers": 4},
            "compares 8 gradients, and the workers send them all: 2 × the bytes of a sum; --workers 8 sends 1 ×",
        ),
        (
            {"workers": 3},
            "compares 8 gradients, and the workers send them all: 2.67 × the bytes of a sum; --workers 8 sends 1 ×",
        ),
        (
            {"workers": 8, "steps_per_update": 2},
            "compares 16 gradients, and the workers send them all: 2 × the bytes of a sum",
        ),
        ({"workers": 8}, None),
        ({"workers": 1}, None),
        ({"workers": 4, "aggregator": "and-mask"}, None),
    ],
)
def test_gradients_sent_for_a_comparison_are_counted_before_a_run(options: dict[str, object], line: str | None) -> None:
    lines = mask_lines(TrainConfig().with_options(**{"aggregator": "pcgrad"} | options).resolve(), 8, COMPARE)
    found = [each for each in lines if each.startswith("exchange: ")]
    assert found == ([] if line is None else [f"exchange: pcgrad {line}"])


@pytest.mark.parametrize(
    ("count", "options", "warning"),
    [
        (3, {}, "chance alone keeps 25% of the components; at least 8 environments at a step bring it below 1%"),
        (10, {}, "chance alone keeps 2% of the components; --significance 0.01 asks for 10 of 10 signs"),
        (20, {}, None),
        (10, {"threshold": 0.0}, None),  # the average
        (10, {"threshold": 0.4}, None),  # little agreement is asked for
        (10, {"significance": 0.05}, None),
        (10, {"aggregator": "xor-mask"}, None),
    ],
)
def test_a_mask_that_chance_passes_is_warned_of_unless_asked_for(
    count: int, options: dict[str, object], warning: str | None
) -> None:
    warnings = [line for line in mask(count, **options) if line.startswith("warning: ")]
    assert warnings == ([] if warning is None else [f"warning: {warning}"])


@pytest.mark.parametrize(
    ("count", "options", "told"),
    [
        (7, {}, "these 7 environments agree fully with probability 1.6e-2,"),
        (17, {}, "these 17 environments agree fully with probability 1.5e-5,"),
        (18, {}, None),
        (100, {"environments_per_step": 10}, "these 10 environments agree fully with probability 2.0e-3,"),
        (
            7,
            {"steps_per_update": 8},
            "these 7 environments agree fully with probability 1.6e-2,",
        ),  # batches of one environment share its shortcuts
        (7, {"environment_momentum": 0.9}, "these 7 environments agree fully with probability 1.6e-2,"),
        (10, {"significance": 0.01}, "these 10 environments agree fully with probability 2.0e-3,"),
        (7, {"aggregator": "geometric-mean"}, "these 7 environments agree fully with probability 1.6e-2,"),
        (7, {"aggregator": "t-mask"}, "these 7 environments agree fully with probability 1.6e-2,"),
        (20, {"aggregator": "t-mask"}, None),
        (7, {"aggregator": "mean"}, None),
        (7, {"threshold": 0.0}, None),
        (2, {"per_example": True, "threshold": 0.2}, None),
    ],
)
def test_few_environments_are_told_what_to_expect_before_training(
    count: int, options: dict[str, object], told: str | None
) -> None:
    expected = [line for line in mask(count, **options) if line.startswith("expect: shortcuts may be learned")]
    assert [told in line for line in expected] == ([] if told is None else [True])
    assert all(line.endswith(f"; to compare methods: {COMPARE}") for line in expected)


# --- large losses


@pytest.mark.parametrize("value", [0.0, 0.7, 1e6, LARGE, -1e30, math.nan])
def test_losses_that_float32_can_train_on_are_not_mentioned(value: float) -> None:
    assert large_losses([Evaluation(1, 5, {"loss/train/a": value, "accuracy/train/a": 2 * LARGE})]) is None
    assert large_losses([]) is None


def test_the_largest_loss_of_the_first_evaluation_is_named() -> None:
    first = {"loss/train/a": 0.7, "loss/held_out/b": 3.21e29, "loss/ood/c": 1e12, "train_loss": 1e30}
    said = large_losses([Evaluation(1, 5, first), Evaluation(2, 10, {"loss/train/a": 0.5})])
    assert said is not None
    assert said.startswith("warning: loss/held_out/b was 3.21e+29 at the first evaluation; losses above 1e+10 ")


def test_train_warns_of_absurdly_large_inputs(concord_: Concord, output: Path) -> None:
    said = concord_("train", JOBS / "shared_rule.py", "--trouble", "large", "--epochs", "1", "--output", output)
    assert said.status == 0
    (line,) = [line for line in said.err.splitlines() if line.startswith("warning: loss/")]
    assert line.split()[1] in ("loss/train/c", "loss/held_out/c")


# --- empty masks

fractions = st.lists(st.sampled_from([0.0, 1e-9, 1.0]), max_size=5)


def masked(kept: list[float]) -> list[Evaluation]:
    return [Evaluation(at, 10 * at, {"kept_fraction": each}) for at, each in enumerate(kept, 1)]


@given(fractions)
def test_only_a_mask_that_never_kept_anything_is_reported(kept: list[float]) -> None:
    assert (empty_masks(masked(kept), TrainConfig().resolve(), 32) is not None) == (kept != [] and not any(kept))


def test_a_rule_that_drops_nothing_is_not_reported() -> None:
    assert empty_masks([Evaluation(1, 10, {"train_loss": 0.0})], TrainConfig().resolve(), 32) is None


@pytest.mark.parametrize(
    ("options", "environments", "tries"),
    [
        (
            {"batch_size": 8},
            512,
            "a smaller --threshold than 0.5, or more examples of each environment at a step than --batch-size 8, "
            "or fewer environments at a step than 512 (--environments-per-step)",
        ),
        (
            {"aggregator": "t-mask", "batch_size": 4, "environments_per_step": 16},
            64,
            "a larger --significance than 0.0001, or more examples of each environment at a step than --batch-size 4, "
            "or fewer environments at a step than 16 (--environments-per-step)",
        ),
        (
            {"threshold": 1.0, "batch_size": 2},
            2,
            "a smaller --threshold than 1, or more examples of each environment at a step than --batch-size 2",
        ),
        (
            {"aggregator": "t-mask", "environment_momentum": 0.9, "batch_size": 4},
            64,
            "a larger --significance than 0.0001, or more examples of each environment at a step than --batch-size 4",
        ),
        ({"per_example": True, "threshold": 0.9}, 1, "a smaller --threshold than 0.9"),
    ],
)
def test_the_advice_is_for_the_rule_and_the_batches(options: dict[str, Any], environments: int, tries: str) -> None:
    config = TrainConfig().with_options(**{"aggregator": "and-mask"} | options).resolve()
    line = empty_masks(masked([0.0]), config, environments)
    assert line == f"warning: kept_fraction was 0 at every evaluation: the mask keeps nothing; try {tries}"


# --- underfitting

lengths = st.integers(6, 60)
losses = st.lists(st.floats(1e-3, 10), min_size=6, max_size=60)


def with_losses(losses: Sequence[float], epochs: int) -> list[Evaluation]:
    each = epochs // len(losses)
    return [Evaluation(each * at, at, {"held_out_loss": loss}) for at, loss in enumerate(losses, 1)]


def learned(count: int, pace: float, floor: float = 0.3, start: float = 0.4) -> list[float]:
    """Losses that approach a floor, ``pace`` of their distance after all evaluations."""
    return [floor + start * math.exp(-pace * at / count) for at in range(1, count + 1)]


@given(lengths, st.floats(0.5, 3), st.floats(0.05, 1))
def test_a_loss_that_still_falls_is_found(count: int, pace: float, floor: float) -> None:
    found = late_fall(learned(count, pace, floor))
    assert found is not None
    late = learned(count, pace, floor)[-max(6, math.ceil(0.6 * count)) :]
    assert found == pytest.approx(late[0] - late[-1], rel=0.4)


@given(lengths, st.floats(12, 100), st.floats(0.05, 1))
def test_a_converged_loss_is_not_reported(count: int, pace: float, floor: float) -> None:
    assert late_fall(learned(max(count, 10), pace, floor)) is None


@given(losses)
def test_a_loss_that_ends_higher_does_not_fall(losses: list[float]) -> None:
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
def test_few_losses_or_non_finite_ones_give_nothing(losses: list[float], at: int, bad: float) -> None:
    assert late_fall(sorted(losses, reverse=True)[:5]) is None
    assert late_fall([*losses[:at], bad, *losses[at:]]) is None


@pytest.mark.parametrize("count", [6, 10, 20])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_noise_is_seldom_taken_for_learning(count: int, noise: float) -> None:
    """Around a loss that has converged, independent from one evaluation to the next."""
    generator = np.random.default_rng(0)
    rows = np.exp(noise * generator.standard_normal((2000, count)))
    assert sum(late_fall(row.tolist()) is not None for row in rows) <= 0.01 * len(rows)


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_noise_before_a_lower_rate_is_seldom_taken_for_learning_in_short_runs(count: int, noise: float) -> None:
    """A converged loss, with less noise and lower after the rate fell, twice."""
    generator = np.random.default_rng(0)
    config = TrainConfig().with_options(epochs=2 * count).resolve()
    sizes = noise * np.repeat([1.0, 0.3, 0.1], [count, count // 2, count - count // 2])
    rows = np.exp(sizes * generator.standard_normal((2000, 2 * count)) + sizes)
    named = [underfitting(with_losses(row.tolist(), 2 * count), config) for row in rows]
    assert sum(map(bool, named)) <= 0.02 * len(rows)


@pytest.mark.parametrize("schedule", ["milestones", "cosine"])
@pytest.mark.parametrize("epochs", [8, 10, 20])
def test_a_loss_that_falls_until_the_rate_is_low_is_named(schedule: str, epochs: int) -> None:
    config = TrainConfig().with_options(epochs=epochs, schedule=schedule).resolve()
    falling = learned(epochs // 2, 1.5)
    frozen = [falling[-1] - 0.001 * at for at in range(1, epochs // 2 + 1)]
    said = underfitting(with_losses([*falling, *frozen], epochs), config)
    assert f"still falling at epoch {epochs // 2}, when --lr was lowered" in str(said)
    assert underfitting(with_losses([*learned(epochs // 2, 40), *frozen], epochs), config) is None
    # Too few evaluations are not enough, nor are four that fell once others have risen.
    assert underfitting(with_losses(learned(6, 1.5), 6), TrainConfig().with_options(epochs=6).resolve()) is None
    if epochs == 8:
        assert underfitting(with_losses([*falling, *frozen[1:], frozen[-1]], epochs), config) is None


@pytest.mark.parametrize(
    ("options", "fraction"),
    [
        ({}, 0.5),
        ({"schedule": "constant"}, 1.0),
        ({"schedule": "cosine"}, 0.5),
        ({"milestones": ()}, 1.0),
        ({"milestones": (0.8, 0.3), "decay": 0.4}, 0.3),
        ({"milestones": (0.3, 0.8), "decay": 0.6}, 0.8),
        ({"milestones": (0.3, 0.8), "decay": 0.9}, 1.0),
        ({"decay_per_step": 0.5**0.01}, 0.25),
        ({"decay_per_step": 0.5**0.001}, 0.5),
    ],
)
def test_the_rate_is_halved_where_its_schedule_says_so(options: dict[str, Any], fraction: float) -> None:
    assert TrainConfig().with_options(**options).schedule.lr_halved(400) == pytest.approx(fraction)


def test_only_losses_before_the_learning_rate_falls_count() -> None:
    config = TrainConfig().with_options(epochs=20, lr=1e-3).resolve()
    falling, flat = learned(10, 1.5), learned(10, 40)
    frozen = [falling[-1] - 0.001 * at / 10 for at in range(10)]
    said = underfitting(with_losses([*falling, *frozen], 20), config)
    assert said is not None
    assert said.startswith("the held-out loss was still falling at epoch 10, when --lr was lowered: by 0.0")
    assert said.endswith("since epoch 5, to 0.389; more --epochs than 20 or a larger --lr than 0.001 may learn more")
    assert underfitting(with_losses([*flat, *flat], 20), config) is None
    higher = [1.1 * loss for loss in falling]
    assert underfitting(with_losses([*falling, *higher], 20), config) is None  # more of it would make it worse

    constant = TrainConfig().with_options(epochs=20, milestones=(), lr=0.01).resolve()
    assert "at the end of the run" in str(underfitting(with_losses(learned(20, 1.5), 20), constant))
    assert underfitting(with_losses([*falling, *frozen], 20), constant) is None
    assert underfitting([Evaluation(20, 1, {"train_loss": 0.1})], config) is None
    assert underfitting([], config) is None


# --- shortcuts


def advice_after(job: Job[Any], environments: Environments, **options: Any) -> str | None:
    """The advice against shortcuts after a training in this process."""
    job = dataclasses.replace(job, environments=lambda _: environments)
    config = job.config.with_options(**options).resolve()
    outcome = train(job, config, ProcessContext(), Silent())
    measures = modes({} if job.measures is not None else {"accuracy": ACCURACY})
    return shortcuts(outcome.history, job, config, environments, measures)


DATA = JOB.environments(JOB.config)
AVERAGED = {"aggregator": "mean", "epochs": 5}


def only(**purposes: Any) -> Environments:
    return Environments(lambda name: DATA[name].data, train=list("abcdefgh"), **purposes)


def test_only_the_test_is_called_an_oracle() -> None:
    said = str(advice_after(JOB, only(test=["t"]), **AVERAGED))
    assert "in the test (oracle: only it shows this; do not select by it) 0." in said
    assert "oracle" not in str(advice_after(JOB, only(validation=["v"], test=["t"]), **AVERAGED))
    assert advice_after(JOB, only(), **AVERAGED) is None
    assert advice_after(JOB, only(validation=["v"], test=["t"]), **AVERAGED, held_out=0.0) is None
    assert advice_after(JOB, only(validation=["v"], test=["t"]), threshold=1.0) is None


def test_without_an_accuracy_the_loss_shows_shortcuts() -> None:
    losses = dataclasses.replace(JOB, measures={})
    said = str(advice_after(losses, only(validation=["v"]), **AVERAGED))
    assert said.startswith("shortcuts were learned: loss on held-out examples 0.")
    assert advice_after(losses, only(validation=["v"]), threshold=1.0) is None


def test_advice_depends_on_the_rule_and_the_number_of_environments() -> None:
    few = Environments(lambda name: DATA[name].data, train=list("abc"), validation=["v"])
    said = str(advice_after(JOB, few, threshold=0.8))
    t_mask = "--aggregator t-mask --environment-momentum 0.9"
    assert said.endswith(f"; try more training environments than 3, or {t_mask}, or --objective vrex --aggregator mean")
    said = str(advice_after(JOB, few, aggregator="t-mask", significance=0.9))
    assert said.endswith("; try more training environments than 3, or --objective vrex --aggregator mean")
    said = str(advice_after(JOB, few, objective="vrex"))
    assert said.endswith("; try more training environments than 3, or an --objective other than vrex")
    many = only(validation=["v"])
    assert "try --significance 0.01, or more" in str(advice_after(JOB, many, threshold=0.2, epochs=5))


def test_the_t_test_is_advised_only_after_a_mask_of_many_signs() -> None:
    names = [f"{name}{copy}" for name in "abcdefgh" for copy in range(3)]
    many = Environments(lambda name: DATA[name[0]].data, train=names, validation=["v"])
    advised = "--aggregator t-mask --environment-momentum 0.9"
    assert advised in str(advice_after(JOB, many, threshold=0.0))
    said = str(advice_after(JOB, many, **AVERAGED))
    assert "try --aggregator and-mask, or more" in said
    assert advised not in said


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 10))
def test_a_measure_as_good_outside_never_falls_short(inside: float, gain: float, first: float) -> None:
    better = min(inside + gain, 1.0)
    assert not falls_short(inside, better, first, "max")
    assert not falls_short(better, inside, first, "min")


@pytest.mark.parametrize(
    ("inside", "outside", "first", "mode", "short"),
    [
        (0.96, 0.51, 0.5, "max", True),
        (0.96, 0.80, 0.5, "max", False),  # less by 0.16
        (0.60, 0.39, 0.5, "max", False),  # 0.61 is not twice 0.4
        (120.0, 60.0, 10.0, "max", True),
        (120.0, 70.0, 10.0, "max", False),
        (-5.0, -50.0, 1.0, "max", False),
        (0.3, 0.6, 1.0, "min", True),
        (0.3, 0.5, 1.0, "min", False),
        (0.001, 0.01, 1.0, "min", False),  # hardly anything of what the loss was
        (-3.0, 2.0, 1.0, "min", False),
        (0.9, math.nan, 0.5, "max", False),
    ],
)
def test_the_margins_between_inside_and_outside(
    inside: float, outside: float, first: float, mode: Any, short: bool
) -> None:
    assert falls_short(inside, outside, first, mode) == short
