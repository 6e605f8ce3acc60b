"""Regressions: errors in the target's units, and a line when a constant is as good."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import r2_score

from concord.environments import Environments
from concord.environments.table import from_table
from concord.errors import InputError
from concord.record import Evaluation
from concord.training.advice import no_better_than_constant
from concord.training.regression import regression_errors

SITES = ("east", "north", "south", "west")


def houses(rows: int = 40, mean: float = 430_000.0, deviation: float = 60_000.0) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    areas = draw.normal(size=4 * rows)
    prices = mean + deviation * (areas + 0.1 * draw.normal(size=4 * rows))
    return pd.DataFrame({"site": np.repeat(SITES, rows), "area": areas, "price": prices})


@given(st.sampled_from([0.0, 43.0, -2e3, 430_000.0, 1e9]), st.sampled_from([1e-6, 1.0, 60_000.0, 1e12]))
def test_targets_have_mean_0_and_deviation_1_in_training(mean: float, deviation: float) -> None:
    """Also where float32 cannot tell them apart, as with a mean of 1e9 and a deviation of 1."""
    frame = houses(mean=mean, deviation=deviation)
    if frame.price.std() < 1e-9 * abs(mean):
        return
    found = from_table(frame, target="price", environment="site", test=["west"]).fitted(0.0, 0)
    targets = torch.cat([found[name].targets for name in found.train])
    assert targets.mean().item() == pytest.approx(0, abs=1e-5)
    assert targets.std(correction=0).item() == pytest.approx(1, rel=1e-5)
    assert found.target_scale is not None
    restored = found.target_scale.mean + found.target_scale.deviation * found["west"].targets.double()
    np.testing.assert_allclose(restored[:, 0], frame.price[frame.site == "west"], rtol=1e-6, atol=1e-6 * deviation)


def test_neither_the_test_nor_held_out_rows_scale_the_target() -> None:
    frame = houses()
    changed = frame.assign(price=frame.price.where(frame.site != "west", 1.5))
    scales = [
        from_table(each, target="price", environment="site", test=["west"]).fitted(0.25, 3).target_scale
        for each in (frame, changed)
    ]
    assert scales[0] == scales[1]
    whole = from_table(frame, target="price", environment="site", test=["west"]).fitted(0.0, 3).target_scale
    assert whole != scales[0]
    left_out = from_table(frame, target="price", environment="site", test=["west"]).leaving_out("north")
    assert left_out.fitted(0.0, 3).target_scale != whole


def test_classes_are_not_scaled_and_one_value_is_no_regression() -> None:
    classes = houses().assign(price=[0, 1] * 80)
    assert from_table(classes, target="price", environment="site").fitted(0.0, 0).target_scale is None
    with pytest.raises(InputError, match=r"price: has one value in all training environments, 1.5"):
        from_table(houses().assign(price=1.5), target="price", environment="site")
    binary = from_table(classes, target="price", environment="site", task="regression").fitted(0.0, 0)
    assert binary.target_scale == (0.5, 0.5, False)
    assert binary["east"].targets.unique().tolist() == [-1.0, 1.0]


def test_errors_are_in_the_targets_units() -> None:
    values = torch.tensor([[1.0], [-2.0], [3.0]])
    evaluation = regression_errors(deviation=10.0)
    found = evaluation.function(values / 2, values)
    expected = {"mse": 100 * (1 + 4 + 9) / 12, "mae": 10.0, "constant_mse": 100 * 14 / 3}
    assert found == pytest.approx({**expected, "r2": r2_score(values, values / 2)})
    assert evaluation.modes == {"mse": "min", "mae": "min", "constant_mse": None, "r2": "max"}


def ended(**metrics: float) -> list[Evaluation]:
    return [Evaluation(1, 1, {"held_out_mse": math.inf}), Evaluation(2, 2, metrics)]


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"held_out_mse": 4.0, "held_out_constant_mse": 5.0}, None),
        ({"held_out_mse": 5.0, "held_out_constant_mse": 5.0}, "mse on held-out examples 5, the constant 5"),
        ({"held_out_mse": math.nan, "held_out_constant_mse": 5.0}, "mse on held-out examples nan, the constant 5"),
        ({"train_mse": 6.0, "train_constant_mse": 5.0}, "mse on train examples 6, the constant 5"),
        (
            {"held_out_mse": 1.0, "held_out_constant_mse": 5.0, "ood_mse": 7.0, "ood_constant_mse": 2.0},
            "mse on the test (oracle: do not select by it) 7, the constant 2",
        ),
        ({"held_out_loss": 3.0, "ood_loss": 4.0}, None),
    ],
)
def test_a_regression_is_judged_against_the_mean_of_the_training_target(
    metrics: dict[str, float], line: str | None
) -> None:
    environments = Environments(lambda _: None, ["a", "b"], test=["c"])
    said = no_better_than_constant(ended(**metrics), environments)
    assert said == (None if line is None else f"warning: no better than the mean of the training target: {line}")


def test_a_classifier_is_judged_against_the_most_frequent_class() -> None:
    environments = Environments(lambda _: None, ["a", "b"], validation=["v"], test=["c"])
    shares = {f"{split}_majority_share": 0.8 for split in ("held_out", "validation", "ood")}
    better = {"held_out_accuracy": 0.9, "validation_accuracy": 0.81, "ood_accuracy": 0.85}
    assert no_better_than_constant(ended(**shares, **better), environments) is None
    assert no_better_than_constant(ended(**better), environments) is None
    said = no_better_than_constant(
        ended(**shares, **{**better, "validation_accuracy": 0.8, "ood_accuracy": 0.7, "ood_auc": 0.61}), environments
    )
    assert said == (
        "warning: no better than the most frequent class for every row: accuracy on validation environments 0.8, its "
        "share 0.8; on the test (oracle: do not select by it) 0.7, its share 0.8 (auc 0.61)"
    )
