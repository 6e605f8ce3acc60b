"""Heart disease in four hospitals: the data as read, and logistic regression in an unseen hospital."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from concord.environments import Environment
from concord.errors import InputError
from concord.execution.run import run
from concord.training import Job, ProcessContext, load_job, train
from concord.training.context import Silent
from concord.training.evaluation import AUC, EvaluatedPart, auc
from concord_jobs.heart_disease import auc_with_interval

SHARED = Path(__file__).parents[3] / "shared" / "data" / "heart-disease"
ROWS = {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
# Logistic regression on the three other hospitals by scikit-learn: accuracy, and area under the ROC curve.
REACHED = {"cleveland": (0.80, 0.876), "hungarian": (0.82, 0.899), "switzerland": (0.76, 0.728), "va": (0.73, 0.718)}


@pytest.fixture
def job() -> Job:
    return load_job("heart-disease").job


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Files of the archive's form, with other numbers and a fifth of them missing."""
    draw = np.random.default_rng(0)
    for hospital, rows in ROWS.items():
        numbers = draw.integers(1, 4, (rows, 14)).astype(str)
        numbers[:, :13][draw.random((rows, 13)) < 0.2] = "?"
        lines = [",".join(row) for row in np.char.replace(numbers, "3", "0")]
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_hospital_is_left_for_the_test(job: Job, made: Path) -> None:
    config = job.config.with_options(data=made, test_hospital="switzerland", epochs=1, evaluations=1).resolve()
    found = job.environments(config)
    assert (found.train, found.test) == (("cleveland", "hungarian", "va"), ("switzerland",))
    assert found.table.kinds["cp"] == "category"
    assert found.table.frame.chol.min() > 0
    metrics = train(job, config, ProcessContext(), Silent()).metrics
    assert 0 <= metrics["ood_auc"] <= 1


@pytest.mark.usefixtures("without_figures")
def test_a_champion_is_not_replaced_by_a_model_of_other_hospitals(made: Path, output: Path) -> None:
    file = load_job("heart-disease")
    config = file.job.config.with_options(data=made, output=output, epochs=1, evaluations=1)
    first, second = (
        run(file, config.with_options(test_hospital=hospital), lambda _: None).report
        for hospital in ("va", "cleveland")
    )
    assert first is not None
    assert first["champion"]
    assert second is not None
    assert second["registration"] == (
        "not compared with champion version 1: it was scored on cleveland, hungarian, switzerland, this one on "
        "hungarian, switzerland, va; concord models promote heart-disease 2 makes it the champion"
    )


def test_a_file_that_was_cut_short_is_refused(job: Job, made: Path) -> None:
    path = made / "processed.va.data"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(InputError, match=r"processed.va.data: has \(199, 14\) rows and columns, expected \(200, 14\)"):
        job.environments(job.config.with_options(data=made))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the real files are not on this machine")
@pytest.mark.parametrize("hospital", ROWS)
def test_the_average_reaches_logistic_regression_in_every_hospital(job: Job, hospital: str) -> None:
    config = job.config.with_options(data=SHARED, test_hospital=hospital, aggregator="mean", evaluations=1)
    metrics = train(job, config, ProcessContext(), Silent()).metrics
    accuracy, area = REACHED[hospital]
    assert metrics["ood_accuracy"] > accuracy - 0.03
    assert metrics["ood_auc"] > area - 0.03


def test_the_interval_is_that_of_patients_drawn_again() -> None:
    draw = np.random.default_rng(1)
    inputs = torch.from_numpy((8 * draw.normal(size=(150, 2))).round() / 8).float()  # some scores are equal, exactly
    targets = torch.from_numpy((draw.normal(size=150) + inputs[:, 1].numpy() > 0).astype(np.int64))
    found = auc_with_interval(inputs, targets)
    scores = inputs.diff(dim=1).squeeze(1)
    assert found["auc"] == pytest.approx(roc_auc_score(targets, scores))
    drawn = [draw.integers(0, 150, 150) for _ in range(2000)]
    better = (scores[:, None] > scores).double() + 0.5 * (scores[:, None] == scores)
    areas = []
    for places in drawn:
        ill, well = places[targets[places] == 1], places[targets[places] == 0]
        areas.append(float(better[ill][:, well].mean()))
    assert np.quantile(areas, [0.025, 0.975]) == pytest.approx([found["auc_low"], found["auc_high"]], abs=0.015)


def test_a_hospital_where_all_are_ill_ranks_no_model() -> None:
    ill = torch.randn(12, 2), torch.ones(12, dtype=torch.int64)
    assert auc_with_interval(*ill) == {"auc": 0.5, "auc_low": 0.5, "auc_high": 0.5}
    assert auc(*ill) == {"auc": 0.5}


def test_the_area_of_a_model_on_another_device_is_of_inputs_on_that_device() -> None:
    class Elsewhere(torch.nn.Module):
        """Has a parameter on a device without data, and refuses inputs from any other device."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(1, device="meta"))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert inputs.device == self.weight.device
            return torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])

    part = EvaluatedPart("ood", "one", Environment("one", torch.ones(3, 2), torch.tensor([1, 0, 1])))
    assert AUC(Elsewhere(), part, 0, 0) == {"auc": 1.0}
