"""Measures of environments from kept predictions: equal to those that runs report, by rows or clusters, over seeds."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

from concord.analysis.intervals import Values
from concord.errors import InputError
from concord.training.measures import classification, errors_of
from concord.training.row_estimates import intervals_of, row_estimates, values_agree

NAMES = ("auc", "average_precision", "brier", "calibration_error", "f1", "recall", "specificity")


def predicted(seeds: int = 2, rows: int = 60, classes: int = 2) -> tuple[pd.DataFrame, Values, Values]:
    """Predictions of one method in one environment, the logits ``(seeds, rows, classes)``, and the targets."""
    random = np.random.default_rng(0)
    targets, logits = random.integers(0, classes, rows), random.normal(size=(seeds, rows, classes))
    logits[:, np.arange(rows), targets] += 1
    frames = []
    for seed, each in enumerate(logits):
        order = random.permutation(rows)  # runs keep the rows in any order
        probabilities = torch.from_numpy(each).softmax(1).numpy()
        columns = {f"probability_{at}": probabilities[:, at] for at in range(classes)}
        found = {"row": np.arange(rows), "target": targets.astype(str), "prediction": each.argmax(1).astype(str)}
        frame = pd.DataFrame({"method": "mean", "seed": seed, "environment": "a", **found, **columns})
        frames.append(frame.iloc[order])
    return pd.concat(frames), logits, targets


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_measure_of_rows_is_the_mean_over_seeds_of_the_reported_one(name: str, classes: int) -> None:
    frame, logits, targets = predicted(classes=classes)
    cutoff = 0.5 if classes == 2 and name in ("recall", "specificity") else None
    evaluation = classification(name, cutoff=cutoff)
    reported = [evaluation.function(torch.from_numpy(each), torch.from_numpy(targets))[name] for each in logits]
    found = row_estimates(frame, name)["mean"]["a"]
    assert found.value == pytest.approx(np.mean(reported))
    assert values_agree({"a": found}, {"a": [float(np.mean(reported)) + 0.1]}) == {}
    table = intervals_of(frame, name).loc["mean", "a"]
    assert table.low < found.value < table.high
    assert (table.seeds, table["std"]) == (2, pytest.approx(np.std(reported, ddof=1)))


@pytest.mark.parametrize("name", ["recall", "specificity"])
@pytest.mark.parametrize("cutoff", [0.0, 0.2, 0.9, None])
def test_recall_and_specificity_are_at_the_cutoff_of_the_rows(name: str, cutoff: float) -> None:
    frame, logits, targets = predicted()
    evaluation = classification(name, cutoff=cutoff)
    reported = [evaluation.function(torch.from_numpy(each), torch.from_numpy(targets))[name] for each in logits]
    found = row_estimates(frame.assign(cutoff=np.nan if cutoff is None else cutoff), name)["mean"]["a"]
    assert found.value == pytest.approx(np.mean(reported))


def test_errors_of_numbers_are_those_that_runs_report() -> None:
    random = np.random.default_rng(0)
    target, prediction = random.normal(size=(2, 50))
    about = {"method": "mean", "seed": 0, "environment": "a", "row": np.arange(50)}
    frame = pd.DataFrame({**about, "target": target, "prediction": prediction})
    for name, value in errors_of(torch.from_numpy(prediction), torch.from_numpy(target)).items():
        assert row_estimates(frame, name)["mean"]["a"].value == pytest.approx(value)
    weighted = row_estimates(frame.assign(weight=np.arange(50) + 1.0), "mse")["mean"]["a"].value
    assert weighted == pytest.approx(np.average(np.square(target - prediction), weights=np.arange(50) + 1))


def test_clusters_are_the_units_and_several_seeds_add_none() -> None:
    frame, _, _ = predicted(seeds=3)
    assert row_estimates(frame, "accuracy")["mean"]["a"].units == 60
    by_patient = row_estimates(frame.assign(cluster=[f"patient {row // 3}" for row in frame.row]), "accuracy")["mean"][
        "a"
    ]
    assert (by_patient.units, by_patient.clusters) == (20, True)


def test_an_environment_of_one_class_has_no_area_and_another_measure_is_refused_by_name() -> None:
    frame, _, _ = predicted()
    alone = frame[frame.target == "1"].assign(environment="b")
    assert row_estimates(pd.concat([frame, alone]), "auc")["mean"].keys() == {"a"}
    with pytest.raises(InputError, match=re.escape("measure reward: is not known of these predictions; there are ")):
        intervals_of(frame, "reward")
