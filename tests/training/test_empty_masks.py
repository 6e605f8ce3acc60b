"""A mask that never kept anything is reported with what may help; one that did at least once is not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concord.training import TrainConfig
from concord.training.empty_masks import empty_masks
from concord.record import Evaluation

fractions = st.lists(st.sampled_from([0.0, 1e-9, 1.0]), max_size=5)


def history(kept: list[float]) -> list[Evaluation]:
    return [Evaluation(at, 10 * at, {"kept_fraction": each}) for at, each in enumerate(kept, 1)]


@given(fractions)
def test_only_a_mask_that_never_kept_anything_is_reported(kept: list[float]) -> None:
    assert (empty_masks(history(kept), TrainConfig(), 32) is not None) == (kept != [] and not any(kept))


def test_a_rule_that_drops_nothing_is_not_reported() -> None:
    assert empty_masks([Evaluation(1, 10, {"train_loss": 0.0})], TrainConfig(), 32) is None


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
    line = empty_masks(history([0.0]), TrainConfig().with_options(**options), environments)
    assert line == f"warning: kept_fraction was 0 at every evaluation: the mask keeps nothing; try {tries}"
