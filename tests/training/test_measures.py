"""Measures of whole environments are scikit-learn's, by environment and for the worst, with a class missing too."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor, nn

from concord.environments import Environment, Environments
from concord.errors import InputError
from concord.training import Job, ProcessContext, Silent, TrainConfig, train
from concord.training.evaluation import AUC, EvaluatedPart, evaluate
from concord.training.measures import classification, regression, usual_classification

ALL = ("auc", "average_precision", "f1", "recall", "specificity", "brier", "calibration_error", "majority_share")


def measured(evaluation: Any, outputs: Tensor, targets: Tensor) -> dict[str, float | None]:
    part = EvaluatedPart("ood", "north", Environment("north", outputs, targets))
    found: dict[str, float | None] = evaluation(nn.Identity(), part, 0, 0)
    return found


def drawn(seed: int, examples: int, classes: int) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(examples, classes, generator=generator), generator


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(2, 400), st.booleans())
def test_measures_of_classes_are_those_of_scikit_learn(seed: int, classes: int, examples: int, missing: bool) -> None:
    outputs, generator = drawn(seed, examples, classes)
    targets = torch.randint(0, classes - missing, (examples,), generator=generator)  # no example of the last class
    found = measured(classification(*ALL, classes=[str(each) for each in range(classes)]), outputs, targets)
    probabilities, predicted = outputs.double().softmax(1).numpy(), outputs.argmax(1).numpy()
    present = np.unique(targets)
    columns = [each for each in present if classes > 2 or each == 1]
    areas = [metrics.roc_auc_score(targets == each, probabilities[:, each]) for each in columns if len(present) > 1]
    assert found["auc"] == (pytest.approx(np.mean(areas)) if areas else None)
    precisions = [metrics.average_precision_score(targets == each, probabilities[:, each]) for each in columns]
    assert found["average_precision"] == (pytest.approx(np.mean(precisions)) if precisions else None)
    assert found["f1"] == pytest.approx(metrics.f1_score(targets, predicted, average="macro"))
    recalls = metrics.recall_score(targets, predicted, average=None, labels=present)
    assert found["recall"] == pytest.approx(recalls.mean())
    others = [each for each in range(classes) if (targets != each).any()]
    kept = [metrics.recall_score(targets != each, predicted != each) for each in others]
    assert found["specificity"] == pytest.approx(np.mean(kept))
    assert found["brier"] == pytest.approx(
        metrics.brier_score_loss(targets, probabilities, labels=range(classes), scale_by_half=classes == 2)
    )
    assert found["majority_share"] == np.bincount(targets).max() / examples
    for each in range(classes):
        expected = dict(zip(present, recalls, strict=True)).get(each)
        assert found[f"accuracy_of_{each}"] == (None if expected is None else pytest.approx(expected))


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 400), st.booleans())
def test_measures_of_several_labels_are_those_of_scikit_learn(
    seed: int, labels: int, examples: int, missing: bool
) -> None:
    outputs, generator = drawn(seed, examples, labels)
    targets = torch.rand(examples, labels, generator=generator).round()
    targets[:, 0] *= not missing
    found = measured(classification(*ALL, classes=[str(each) for each in range(labels)]), outputs, targets)
    truth, guess, scores = targets.numpy() > 0.5, outputs.numpy() > 0, outputs.numpy()
    some = [each for each in range(labels) if truth[:, each].any()]
    areas = [metrics.roc_auc_score(truth[:, e], scores[:, e]) for e in some if not truth[:, e].all()]
    assert found["auc"] == (pytest.approx(np.mean(areas)) if areas else None)
    precisions = [metrics.average_precision_score(truth[:, e], scores[:, e]) for e in some]
    assert found["average_precision"] == (pytest.approx(np.mean(precisions)) if precisions else None)
    occurring = [e for e in range(labels) if (truth | guess)[:, e].any()]
    scored = [metrics.f1_score(truth[:, e], guess[:, e]) for e in occurring]
    assert found["f1"] == (pytest.approx(np.mean(scored)) if scored else None)
    recalls = [metrics.recall_score(truth[:, e], guess[:, e]) for e in some]
    assert found["recall"] == (pytest.approx(np.mean(recalls)) if recalls else None)
    assert found["brier"] == pytest.approx(np.mean((1 / (1 + np.exp(-scores.astype(float))) - truth) ** 2))
    for each in range(labels):
        expected = metrics.accuracy_score(truth[:, each], guess[:, each])
        assert found[f"accuracy_of_{each}"] == pytest.approx(expected)


@given(st.integers(0, 10_000), st.integers(1, 200), st.floats(0, 1))
def test_recall_and_specificity_at_a_cutoff_are_those_of_the_second_class(
    seed: int, examples: int, cutoff: float
) -> None:
    outputs, generator = drawn(seed, examples, 2)
    targets = torch.randint(0, 2, (examples,), generator=generator)
    found = measured(usual_classification(2, cutoff), outputs, targets)
    predicted = (outputs.diff(dim=1).squeeze(1).double().sigmoid() >= cutoff).numpy()
    for name, label in (("recall", 1), ("specificity", 0)):
        expected = metrics.recall_score(targets, predicted, pos_label=label) if (targets == label).any() else None
        assert found[name] == (None if expected is None else pytest.approx(expected))


def test_measures_of_outputs_cost_no_further_pass_of_the_model() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(inputs)

    model, parts = Counting(3, 2), []
    for name, examples in (("north", 40), ("south", 30)):
        inputs, generator = drawn(examples, examples, 3)
        targets = torch.randint(0, 2, (examples,), generator=generator)
        parts.append(EvaluatedPart("ood", name, Environment(name, inputs, targets)))
    evaluation = usual_classification(2, 0.5)
    found = evaluate(model, nn.functional.cross_entropy, {}, parts, ProcessContext(), 16, evaluation=evaluation)
    assert model.calls == 3 + 2  # of 16 examples each
    for part in parts:
        alone = evaluation(model, part, 0, 0)
        assert {name: found[f"{name}/ood/{part.name}"] for name in alone} == pytest.approx(alone)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_the_calibration_error_is_that_of_the_bins(seed: int, examples: int) -> None:
    """Of a label by scikit-learn's curve; of classes the same with the largest probability as confidence."""
    from sklearn.calibration import calibration_curve

    def expected(confidence: np.ndarray[Any, Any], correct: np.ndarray[Any, Any]) -> float:
        accuracy, mean = calibration_curve(correct, confidence, n_bins=15)
        counts = np.bincount(np.digitize(confidence, np.linspace(0, 1, 16)[1:-1]), minlength=15)
        return float((np.abs(accuracy - mean) * counts[counts > 0]).sum() / len(confidence))

    outputs, generator = drawn(seed, examples, 3)
    labels = torch.rand(examples, 3, generator=generator).round()
    by_label = [expected(outputs[:, e].double().sigmoid().numpy(), labels[:, e].numpy()) for e in range(3)]
    assert measured(classification("calibration_error"), outputs, labels)["calibration_error"] == pytest.approx(
        np.mean(by_label), abs=1e-6
    )
    targets = torch.randint(0, 3, (examples,), generator=generator)
    confidence, predicted = outputs.double().softmax(1).max(1)
    found = measured(classification("calibration_error"), outputs, targets)["calibration_error"]
    assert found == pytest.approx(expected(confidence.numpy(), (predicted == targets).numpy()), abs=1e-6)


@given(st.integers(0, 10_000), st.integers(2, 300), st.sampled_from([(), ("height",), ("height", "weight")]))
def test_errors_of_several_targets_are_those_of_scikit_learn(seed: int, examples: int, names: tuple[str, ...]) -> None:
    outputs, generator = drawn(seed, examples, max(len(names), 1))
    targets = torch.randn(outputs.shape, generator=generator)
    found = measured(regression(*names), outputs, targets if names else targets[:, 0])
    for place, name in enumerate(names or ("",)):
        end, pair = f"_{name}" if name else "", (targets[:, place].double(), outputs[:, place].double())
        assert found[f"mse{end}"] == pytest.approx(metrics.mean_squared_error(*pair))
        assert found[f"mae{end}"] == pytest.approx(metrics.mean_absolute_error(*pair))
        assert found[f"r2{end}"] == pytest.approx(metrics.r2_score(*pair))


def test_an_environment_where_a_measure_is_undefined_is_left_out() -> None:
    outputs, generator = drawn(0, 60, 2)
    targets = torch.randint(0, 2, (60,), generator=generator)
    parts = [
        EvaluatedPart("ood", "north", Environment("north", outputs, targets)),
        EvaluatedPart("ood", "south", Environment("south", outputs, torch.zeros(60, dtype=torch.long))),
        EvaluatedPart("train", "east", Environment("east", outputs, torch.ones(60, dtype=torch.long))),
    ]
    evaluation = classification("auc", "recall", classes=["no", "yes"])
    numbers = [evaluation(nn.Identity(), part, 0, 0) for part in parts]
    found = evaluate(
        nn.Identity(), nn.functional.cross_entropy, {}, parts, ProcessContext(), evaluation=evaluation, numbers=numbers
    )
    area = AUC(nn.Identity(), parts[0], 0, 0)["auc"]
    assert found["ood_auc"] == found["worst_ood_auc"] == found["auc/ood/north"] == area
    assert math.isnan(found["auc/ood/south"])
    assert math.isnan(found["train_auc"])
    assert found["ood_accuracy_of_yes"] == found["accuracy_of_yes/ood/north"]
    assert found["worst_ood_recall"] == min(found["recall/ood/north"], found["recall/ood/south"])


def test_a_measure_may_be_numpys() -> None:
    outputs, generator = drawn(0, 60, 2)
    targets = torch.randint(0, 2, (60,), generator=generator)
    part = EvaluatedPart("ood", "north", Environment("north", outputs, targets))

    def wrong(outputs: Tensor, targets: Tensor) -> Any:
        return (outputs.argmax(1) != targets).numpy().astype(float)

    found = evaluate(nn.Identity(), nn.functional.cross_entropy, {"wrong": wrong}, [part], ProcessContext())
    assert found["ood_wrong"] == (outputs.argmax(1) != targets).double().mean()


def test_a_diverged_model_has_no_finite_error_and_no_better_area_than_chance() -> None:
    outputs, targets = torch.full((6, 2), math.nan), torch.tensor([0, 1] * 3)
    assert measured(classification("auc"), outputs, targets) == {"auc": 0.5}
    assert math.isnan(measured(regression(), outputs[:, :1], targets.float())["mse"] or 0.0)


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"measures=accuracy: there is no such measure; give some of auc, "):
        classification("accuracy")
    with pytest.raises(InputError, match="measures=none"):
        classification()
    with pytest.raises(InputError, match=r"cutoff=1.5: must be a probability, in \[0, 1\]"):
        classification("recall", cutoff=1.5)
    outputs, targets = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(InputError, match="classes=no, yes: the model has 3 outputs"):
        measured(classification(classes=["no", "yes"]), outputs, targets)
    with pytest.raises(InputError, match=r"cutoff=0.5: is of two classes; the model has 3 outputs"):
        measured(classification("recall", cutoff=0.5), outputs, targets)
    with pytest.raises(InputError, match=r"classification: outputs \(4, 3\) and targets \(4, 2\)"):
        measured(classification("f1"), outputs, torch.zeros(4, 2))
    with pytest.raises(InputError, match=r"regression: outputs \(4, 3\) and targets \(4, 3\); expected 2"):
        measured(regression("height", "weight"), outputs, outputs)


def test_a_job_reports_them_by_environment_and_selects_by_one() -> None:
    def data(name: str) -> tuple[Tensor, Tensor]:
        inputs, generator = drawn(len(name), 40, 5)
        return inputs, (inputs[:, :3] + 0.1 * torch.randn(40, 3, generator=generator) > 0).float()

    job: Job[TrainConfig] = Job(
        lambda _: Environments(data, train=["a", "bb", "ccc"], test=["dddd"]),
        lambda _: nn.Linear(5, 3),
        nn.functional.binary_cross_entropy_with_logits,
        config=TrainConfig().with_options(
            epochs=60, lr=0.1, batch_size=16, aggregator="mean", evaluations=2, held_out=0.3
        ),
        evaluation=classification("f1", classes=["red", "green", "blue"]),
        criterion="validation_f1",
        name="labels",
    )
    found = train(job, job.config, ProcessContext(), Silent()).metrics
    assert found["ood_f1"] > 0.8
    assert found["worst_train_accuracy_of_green"] == min(
        found[f"accuracy_of_green/train/{e}"] for e in ("a", "bb", "ccc")
    )


@pytest.mark.parametrize(("count", "kept"), [(20, [True, True]), (40, [False, True])])
def test_of_many_environments_the_numbers_of_each_are_kept_at_the_end(count: int, kept: list[bool]) -> None:
    def data(name: str) -> tuple[Tensor, Tensor]:
        inputs, _ = drawn(int(name), 10, 2)
        return inputs, torch.arange(10) % 2

    job: Job[TrainConfig] = Job(
        lambda _: Environments(data, train=list(map(str, range(count)))),
        lambda _: nn.Linear(2, 2),
        nn.functional.cross_entropy,
        config=TrainConfig().with_options(epochs=2, evaluations=2, aggregator="mean"),
        evaluation=usual_classification(2, 0.5),
        name="many",
    )
    history = train(job, job.config, ProcessContext(), Silent()).history
    assert ["auc/train/0" in each.metrics for each in history] == kept
    assert all({"train_auc", "worst_held_out_auc", "accuracy/train/0"} <= each.metrics.keys() for each in history)
