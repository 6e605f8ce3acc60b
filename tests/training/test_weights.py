"""Weights of rows: in the loss, the measures, the baselines and the predictions that are kept."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from test_table_baselines import LEVELS, columns, predictions, rows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils import _pytree as pytree

from concord.aggregation import AndMask, Mean
from concord.cli import main
from concord.environments import Environment
from concord.environments.table import from_table
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.gradients import StackedGradients
from concord.models.table_baselines import BoostedTrees, fit_linear
from concord.models.table_network import TableNetwork
from concord.objectives import OBJECTIVES, IRMv1, PenaltyWeight
from concord.training import ProcessContext, Silent, load_job, train
from concord.training.evaluation import ACCURACY, EvaluatedPart, evaluate
from concord.training.measures import classification, errors_of, usual_classification
from concord.training.regression import regression_errors
from concord.weighted import Weighted

PLACES = ("east", "north", "south", "west")


def patients(count: int = 30, seed: int = 0) -> pd.DataFrame:
    """Rows of four hospitals with weights of 1 to 3."""
    draw = np.random.default_rng(seed)
    total = 4 * count
    frame = pd.DataFrame({"hospital": np.repeat(PLACES, count), "age": draw.normal(size=total)})
    frame["sex"] = draw.choice(["m", "f"], total)
    frame["stay"] = frame.age + draw.normal(size=total)
    frame["died"] = (frame.stay > 0).astype(int)
    return frame.assign(times=draw.integers(1, 4, total))


def repeated(frame: pd.DataFrame) -> pd.DataFrame:
    """Each row as often as its weight says."""
    return frame.loc[frame.index.repeat(frame.times)].drop(columns="times").reset_index(drop=True)


def repeat(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.repeat_interleave(weights.long(), 0) for each in values)


def drawn(seed: int, classes: int, count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs with ties, targets, and weights 1 to 3."""
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(count, classes, generator=draw).mul(2).round(decimals=0)
    targets = torch.randint(classes, (count,), generator=draw) if classes > 1 else torch.randn(count, 1, generator=draw)
    return outputs, targets, torch.randint(1, 4, (count,), generator=draw).float()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([2, 3, 5]))
def test_a_weight_of_two_is_a_row_given_twice_in_every_measure_of_classes(seed: int, classes: int) -> None:
    outputs, targets, weights = drawn(seed, classes)
    named = classification("auc", "average_precision", "f1", "recall", "specificity", classes=["c"] * classes)
    for evaluation in (usual_classification(classes, 0.3), named):
        found = evaluation.function(outputs, targets, weights)
        assert found == pytest.approx(evaluation.function(*repeat(weights, outputs, targets)), nan_ok=True)
        assert evaluation.function(outputs, targets, torch.ones(40)) == pytest.approx(
            evaluation.function(outputs, targets)
        )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_measures_are_those_of_scikit_learn_with_sample_weights(seed: int) -> None:
    outputs, targets, _ = drawn(seed, 2)
    weights = torch.rand(40, generator=torch.Generator().manual_seed(seed)) + 0.01
    found = usual_classification(2, 0.5).function(outputs, targets, weights)
    second, by = outputs.double().softmax(1)[:, 1].numpy(), {"sample_weight": weights.double().numpy()}
    truth, predicted = targets.numpy(), second >= 0.5
    assert found["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(truth, second, **by))
    assert found["average_precision"] == pytest.approx(sklearn_metrics.average_precision_score(truth, second, **by))
    assert found["brier"] == pytest.approx(sklearn_metrics.brier_score_loss(truth, second, **by))
    assert found["recall"] == pytest.approx(sklearn_metrics.recall_score(truth, predicted, **by))
    assert found["specificity"] == pytest.approx(sklearn_metrics.recall_score(truth, predicted, pos_label=0, **by))
    outputs, targets, _ = drawn(seed, 3)
    f1 = classification("f1").function(outputs, targets, weights)["f1"]
    assert f1 == pytest.approx(sklearn_metrics.f1_score(targets, outputs.argmax(1), average="macro", **by))
    outputs, targets, _ = drawn(seed, 1)
    found = regression_errors(1.0).function(outputs, targets, weights)
    pair = (targets.double().numpy()[:, 0], outputs.double().numpy()[:, 0])
    assert found["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(*pair, **by))
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(*pair, **by))
    assert found["r2"] == pytest.approx(sklearn_metrics.r2_score(*pair, **by))
    assert errors_of(*pair_of(outputs, targets), weights) == {name: found[name] for name in ("mse", "mae", "r2")}


def pair_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.double().flatten(), targets.double().flatten()


def test_an_evaluation_counts_every_row_by_its_weight() -> None:
    parts, doubled = [], []
    for name, seed in (("a", 1), ("b", 2)):
        outputs, targets, weights = drawn(seed, 2, count=20 * seed)
        data = Weighted(outputs, targets, weights)
        parts.append(EvaluatedPart("ood", name, Environment.of(name, data)))
        doubled.append(EvaluatedPart("ood", name, Environment(name, *repeat(weights, outputs, targets))))
    more = {"measures": {"accuracy": ACCURACY}, "evaluation": usual_classification(2, 0.5)}
    found, expected = (
        evaluate(nn.Identity(), cross_entropy, parts=each, process=ProcessContext(), examples_at_once=7, **more)
        for each in (parts, doubled)
    )
    assert found == pytest.approx(expected)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 3]))
def test_a_weight_of_two_is_a_row_given_twice_in_ridge_and_logistic_regression(seed: int, classes: int) -> None:
    inputs, targets, others = rows(seed, 60, classes)
    weights = torch.from_numpy(np.random.default_rng(seed).integers(1, 4, 60)).float()
    weighted, twice = (TableNetwork(4, LEVELS, classes, hidden_layers=0) for _ in range(2))
    fit_linear(weighted, inputs, targets, 1.0, weights)
    fit_linear(twice, *repeat(weights, inputs, targets), 1.0)
    np.testing.assert_allclose(
        predictions(weighted, others, classes), predictions(twice, others, classes), atol=1e-3 if classes > 1 else 1e-5
    )


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 3]))
def test_boosted_trees_of_weighted_rows_are_those_of_scikit_learn(seed: int, classes: int) -> None:
    inputs, targets, others = rows(seed, 150, classes)
    weights = torch.rand(150, generator=torch.Generator().manual_seed(seed)) + 0.1
    network = BoostedTrees(4, LEVELS, classes, trees=8, leaves=5)
    network.fit(inputs, targets, rate=0.2, seed=seed, weights=weights)
    kind: Any = HistGradientBoostingRegressor if classes == 1 else HistGradientBoostingClassifier
    own = kind(learning_rate=0.2, max_iter=8, max_leaf_nodes=5, max_depth=4, early_stopping=False, random_state=seed)
    own.fit(columns(inputs), targets.flatten().numpy(), sample_weight=weights.double().numpy())
    expected = own.predict(columns(others)) if classes == 1 else own.predict_proba(columns(others))
    np.testing.assert_allclose(predictions(network, others, classes), expected, atol=1e-5)


OF_EXAMPLES = {"coral", "mmd", "dann"}  # their penalties count examples, not weights


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - OF_EXAMPLES - {"mixup"}))
@pytest.mark.parametrize("classes", [1, 3])
def test_a_weight_of_two_is_a_row_given_twice_in_the_gradient_of_each_objective(name: str, classes: int) -> None:
    model, loss = TableNetwork(4, LEVELS, classes, hidden_units=5), mse_loss if classes == 1 else cross_entropy
    config = load_job("table").job.config.with_options(objective=name, penalty_warmup=0.0).resolve()
    values: list[Tensor] = []
    parts = [(*rows(seed, 12, classes)[:2], torch.tensor([1, 2, 3] * 4)) for seed in (0, 1, 2)]
    for twice in (False, True):
        objective = config.objective.build(loss, 10, None)
        objective.begin(model, 3, 10)
        if twice:
            batch: Any = tuple(map(torch.stack, zip(*(repeat(w, x, y) for x, y, w in parts), strict=True)))
        else:
            inputs, targets, weights = map(torch.stack, zip(*parts, strict=True))
            batch = Weighted(inputs, targets, weights.float())
        torch.manual_seed(0)
        objective.prepare(model, 0, range(3), lambda total: total)
        if objective.coupled:
            value = objective(model, batch, step=0)
        else:
            value = torch.stack(
                [torch.as_tensor(mean_risk(objective, model, batch, place)) for place in range(3)]
            ).mean()
        gradients = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
        values.append(torch.cat([each.flatten() for each in gradients if each is not None]))
    torch.testing.assert_close(*values, rtol=2e-4, atol=1e-6)


def mean_risk(objective: Any, model: nn.Module, batch: Any, place: int) -> Tensor:
    one = Weighted(*(leaf[place] for leaf in batch)) if isinstance(batch, Weighted) else tuple(b[place] for b in batch)
    found = objective.risk(model, one, 0)
    return found[0] / found[1] if isinstance(found, tuple) else found


OF_CLASSES = [nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2])), partial(cross_entropy, label_smoothing=0.2)]


@pytest.mark.parametrize("vectorize", ["pooled", True, False])
@pytest.mark.parametrize("loss", [*OF_CLASSES, IRMv1(OF_CLASSES[0], PenaltyWeight(2.0), classifier="vector").risk])
def test_weights_of_rows_and_of_classes_multiply(loss: Any, vectorize: Any) -> None:
    inputs, targets, _ = rows(0, 12, 3)
    targets[3] = -100
    weights, gradients = torch.tensor([1, 2, 3] * 4), []
    for batch in (Weighted(inputs, targets, weights.float()), repeat(weights, inputs, targets)):
        torch.manual_seed(0)
        model = TableNetwork(4, LEVELS, 3, hidden_units=5)
        StackedGradients(model, loss, Mean(), vectorize=vectorize)(pytree.tree_map(lambda leaf: leaf[None], batch))
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", OF_CLASSES)
def test_an_evaluation_does_not_depend_on_where_batches_are_cut(loss: Any) -> None:
    outputs, targets, _ = drawn(3, 3)
    targets[:9] = -100  # more than a batch
    part = EvaluatedPart("ood", "a", Environment("a", outputs, targets))
    for at_once in (1, 7, 40):
        found = evaluate(nn.Identity(), loss, {}, [part], ProcessContext(), examples_at_once=at_once)
        assert found["ood_loss"] == pytest.approx(float(loss(outputs, targets)))


@pytest.mark.parametrize("vectorize", ["pooled", True, False])
@pytest.mark.parametrize("rule", [Mean(), AndMask(threshold=0.5)])
def test_a_step_on_whole_environments_is_that_of_repeated_rows(rule: Any, vectorize: Any) -> None:
    gradients = []
    parts = [(*rows(seed, 12, 3)[:2], torch.tensor([1, 2, 3] * 4)) for seed in (0, 1, 2)]
    for twice in (False, True):
        torch.manual_seed(0)
        model = TableNetwork(4, LEVELS, 3, hidden_units=5)
        source = StackedGradients(model, cross_entropy, rule, names=["a", "b", "c"], vectorize=vectorize)
        if twice:
            batch: Any = tuple(map(torch.stack, zip(*(repeat(w, x, y) for x, y, w in parts), strict=True)))
        else:
            inputs, targets, weights = map(torch.stack, zip(*parts, strict=True))
            batch = Weighted(inputs, targets, weights.float())
        source(batch, 0)
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def table_config(data: Path, **more: Any) -> Any:
    where = {"data": data, "environment": "hospital", "test": ("west",), "weight": "times"}
    return load_job("table").job.config.with_options(
        **{**where, "target": "died", "epochs": 2, "held_out": 0.0, **more}
    )


@pytest.mark.parametrize("target", ["died", "stay"])
def test_training_on_whole_environments_by_weights_is_training_on_repeated_rows(target: str, tmp_path: Path) -> None:
    frame = patients().assign(times=np.tile([1, 2, 3], 40))  # as many rows in each hospital, and few levels
    frame.to_csv(tmp_path / "weighted.csv", index=False)
    repeated(frame).to_csv(tmp_path / "repeated.csv", index=False)
    # The encoder's scales of numbers are of rows.
    encoded = {"columns": ("age=ignore", "stay=ignore" if target == "died" else "died=category")}
    encoded |= {"optimizer": "sgd"}  # Adam's first steps are signs, which rounding turns round where a gradient is 0
    weighted = table_config(tmp_path / "weighted.csv", target=target, batch_size=30, **encoded)
    twice = table_config(tmp_path / "repeated.csv", target=target, batch_size=60, weight=None, **encoded)
    job = load_job("table").job
    found, expected = (
        train(job, config, ProcessContext(), Silent()).history[-1].metrics for config in (weighted, twice)
    )
    names = {name for name in expected if "step" not in name and "seconds" not in name}
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-3)


def test_a_column_of_weights_is_no_input_and_moves_mean_and_deviation() -> None:
    frame = patients()
    weighted = from_table(frame, target="stay", environment="hospital", weight="times").fitted(0.0, 0)
    twice = from_table(repeated(frame), target="stay", environment="hospital").fitted(0.0, 0)
    assert list(weighted.table.kinds) == ["age", "sex", "died"]
    assert weighted.target_scale == pytest.approx(twice.target_scale)
    data = weighted["east"].data
    assert isinstance(data, Weighted)
    assert data.weights.tolist() == frame.times[frame.hospital == "east"].tolist()
    other = from_table(
        frame.assign(times=frame.times[::-1].to_numpy()), target="stay", environment="hospital", weight="times"
    )
    assert weighted.version != other.version


def test_rows_of_weight_zero_are_left_out_and_said() -> None:
    frame = patients()
    frame.loc[[0, 5, 40], "times"] = 0
    with pytest.warns(UserWarning, match="column times: 3 of 120 rows have the weight 0 and are left out"):
        found = from_table(frame, target="died", environment="hospital", weight="times")
    assert found.table.frame.index.tolist() == [row for row in range(120) if row not in (0, 5, 40)]


WRONG: dict[str, tuple[Any, str]] = {
    "negative": (-1, "--weight times: data row 4 has -1.*; a weight is a number of at least 0"),
    "missing": (None, "--weight times: data row 4 has no weight; a weight is"),
    "infinite": (np.inf, "--weight times: data row 4 has inf; a weight is"),
    "too large": (1e300, r"--weight times: data row 4 has 1e\+300; a weight is"),
    "text": ("two", "--weight times: data row 4 has two; a weight is"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_weight_that_is_none_is_refused_by_its_row(case: str, tmp_path: Path, refused: Any) -> None:
    value, line = WRONG[case]
    frame = patients().astype({"times": object})
    frame.loc[3, "times"] = value
    frame.to_csv(tmp_path / "p.csv", index=False)
    words = ["--environment", "hospital", "--target", "died", "--weight", "times"]
    assert re.match(line, refused("train", "table", "--data", str(tmp_path / "p.csv"), *words))


def test_weights_of_no_column_of_the_target_or_of_zero_alone_are_refused() -> None:
    frame = patients()
    for weight, line in (
        ("time", "weight=time: no such column"),
        ("died", "weight=died: is the column of another option"),
    ):
        with pytest.raises(InputError, match=line):
            from_table(frame, target="died", environment="hospital", weight=weight)
    frame.loc[frame.hospital == "north", "times"] = 0
    with pytest.raises(InputError, match="weight=times: environment north has no row with a weight above 0"):
        from_table(frame, target="died", environment="hospital", weight="times")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"per_example": True}, "--per-example True: examples have weights; leave it out"),
        ({"consistency": 1}, "--consistency 1: examples have weights; give 0"),
        ({"objective": "mixup"}, "this objective, gradient or measurement takes no weights of examples"),
    ],
)
def test_what_takes_no_weights_is_refused_by_name(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    with pytest.raises(InputError, match=line):
        preflight(load_job("table"), table_config(tmp_path / "p.csv", **options))


@pytest.mark.parametrize("objective", sorted(OF_EXAMPLES))
def test_objectives_of_representations_take_weights(objective: str, tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    assert preflight(load_job("table"), table_config(tmp_path / "p.csv", objective=objective)).criterion


@pytest.mark.parametrize("network", ["mlp", "boosting"])
def test_a_fold_keeps_the_weights_of_its_predictions(network: str, tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    words = ["--environment", "hospital", "--target", "died", "--weight", "times", "--epochs", "1", "--name", "fold"]
    where = ["--data", str(tmp_path / "p.csv"), "--output", str(tmp_path / "out"), "--no-register"]
    assert main(["train", "table", *where, *words, "--leave-out", "east", "--network", network]) == 0
    kept = pd.read_parquet(tmp_path / "out" / "runs" / "fold" / "predictions.parquet")
    assert kept.weight.tolist() == patients().times[kept.row].tolist()
