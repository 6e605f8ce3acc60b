"""Targets of ordered levels and of counts: models, losses, measures, baselines, and what a registered model gives."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from test_table_baselines import LEVELS, columns, predictions, rows
from torch import nn
from torch.nn.functional import cross_entropy

from concord.cli import main
from concord.environments.table import from_table
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.models.cumulative_logits import CumulativeLogits
from concord.models.table_baselines import BoostedTrees, fit_linear
from concord.models.table_network import TableNetwork
from concord.objectives import OBJECTIVES
from concord.tracking import Store
from concord.tracking.exported_model import load_predictor, log_model
from concord.training import ProcessContext, Silent, load_job, train
from concord.training.measures import ordinal
from concord.training.regression import count_errors, poisson_deviance

ORDER = ("low", "mid", "high")


def patients(count: int = 60, seed: int = 0) -> pd.DataFrame:
    """Rows of four hospitals, with a pain of three levels and a number of visits that both rise with age."""
    draw = np.random.default_rng(seed)
    total = 4 * count
    age = draw.normal(size=total)
    pain = np.array(ORDER, dtype=object)[np.digitize(age + draw.logistic(size=total), [-1, 1])]
    frame = pd.DataFrame({"hospital": np.repeat(["east", "north", "south", "west"], count), "age": age, "pain": pain})
    frame["ward"] = draw.choice(["a", "b"], total)
    return frame.assign(visits=draw.poisson(np.exp(1 + 0.5 * age)))


def config_of(data: Path, **more: Any) -> Any:
    where = {"data": data, "environment": "hospital", "test": ("west",)}
    return load_job("table").job.config.with_options(**{**where, "target": "pain", "levels": ORDER, **more})


def counts(data: Path, **more: Any) -> Any:
    return config_of(data, **{"target": "visits", "levels": (), "task": "count", **more})


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 6), st.floats(0.1, 30))
def test_levels_have_proportional_odds(seed: int, levels: int, size: float) -> None:
    torch.manual_seed(seed)
    model = CumulativeLogits(nn.Linear(3, 1), [5] * levels).double()
    rows = size * torch.randn(20, 3, dtype=torch.float64)
    with torch.no_grad():
        model.log_gaps.normal_()
        probabilities, score = model(rows).exp(), model.score(rows)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(20, dtype=torch.float64))
    cuts = torch.cat([model.first, model.first + model.log_gaps.exp().cumsum(0)]).detach()
    torch.testing.assert_close(probabilities.cumsum(1)[:, :-1], (cuts - score).sigmoid())


def test_a_far_score_has_a_finite_loss_and_a_gradient() -> None:
    model = CumulativeLogits(nn.Identity(), [1, 1, 1])
    outputs = model(torch.tensor([[-500.0], [500.0]]))
    assert torch.isfinite(cross_entropy(outputs, torch.tensor([2, 0])))
    cross_entropy(outputs, torch.tensor([1, 1])).backward()
    assert model.first.grad is not None
    assert bool(torch.isfinite(model.log_gaps.grad).all())  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=2, max_size=6))
def test_cut_points_begin_at_the_shares_of_the_levels(counts_of: list[int]) -> None:
    found = CumulativeLogits(nn.Identity(), counts_of)(torch.zeros(1, 1)).exp()[0]
    shares = np.array(counts_of) + 1
    np.testing.assert_allclose(found.detach().numpy(), shares / shares.sum(), rtol=1e-4)


@pytest.mark.parametrize("task", ["ordinal", "count"])
def test_a_network_begins_without_the_targets_of_what_is_left_out(task: str, tmp_path: Path) -> None:
    frame, job = patients(), load_job("table").job
    left_out, others = frame.hospital == "east", frame.hospital.isin(["north", "south"])
    frame.loc[left_out, ["pain", "visits"]] = ["high", 1000]
    frame.loc[others & (frame.pain == "high"), "pain"] = "mid"
    frame.to_csv(tmp_path / "p.csv", index=False)

    def first(config: Any) -> torch.Tensor:
        numbers, levels = job.environments(config).table.widest.widths
        with torch.no_grad():
            return job.model(config)(torch.zeros(1, numbers + len(levels))).exp()

    if task == "ordinal":
        assert float(first(config_of(tmp_path / "p.csv", leave_out="east"))[0, 2]) < 0.05
        return
    config = counts(tmp_path / "p.csv", leave_out="east")
    assert float(first(config)) == pytest.approx(frame.visits[others].mean())
    frame.assign(visits=np.where(others, 0, frame.visits)).to_csv(tmp_path / "p.csv", index=False)
    assert 0 < float(first(config)) < 0.01


def test_two_levels_are_logistic_regression() -> None:
    inputs, targets, others = rows(0, 200, 2)
    model = CumulativeLogits(nn.Linear(9 + 2, 1), [100, 100]).double()
    table = torch.from_numpy(columns(inputs).astype(float))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(table), targets) + 0.5e-2 * model.score.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    own = LogisticRegression(C=1 / (200 * 1e-2), max_iter=1000, tol=1e-8).fit(columns(inputs).astype(float), targets)
    expected = own.predict_proba(columns(others).astype(float))
    found = model(torch.from_numpy(columns(others).astype(float))).exp().detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 5), st.booleans())
def test_measures_of_levels_are_those_of_scikit_learn(seed: int, levels: int, weighted: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    outputs, targets = torch.randn(30, levels, generator=draw), torch.randint(levels, (30,), generator=draw)
    weights = torch.rand(30, generator=draw) + 0.1
    given_weights = (weights,) if weighted else ()
    by = {"sample_weight": weights.double().numpy()} if weighted else {}
    found, predicted = ordinal(levels).function(outputs, targets, *given_weights), outputs.argmax(1)
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(targets, predicted, **by))
    kappa = sklearn_metrics.cohen_kappa_score(targets, predicted, weights="quadratic", **by)
    assert found["kappa"] == pytest.approx(kappa)


def test_kappa_of_one_level_is_not_defined() -> None:
    outputs = torch.tensor([[2.0, 0.0]]).expand(4, 2)
    assert ordinal(2).function(outputs, torch.zeros(4, dtype=torch.long))["kappa"] is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_measures_of_counts_are_those_of_scikit_learn(seed: int, weighted: bool) -> None:
    draw = np.random.default_rng(seed)
    log_rates, truth, weights = draw.normal(size=30), draw.poisson(2, 30), draw.random(30) + 0.1
    by = {"sample_weight": weights} if weighted else {}
    given_weights = (torch.from_numpy(weights),) if weighted else ()
    tensors = torch.from_numpy(log_rates)[:, None], torch.from_numpy(truth)[:, None]
    found, rates = count_errors(2.0).function(*tensors, *given_weights), np.exp(log_rates)
    assert found["poisson_deviance"] == pytest.approx(sklearn_metrics.mean_poisson_deviance(truth, rates, **by))
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(truth, rates, **by))
    assert found["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(truth, rates, **by))
    assert found["constant_mse"] == pytest.approx(sklearn_metrics.mean_squared_error(truth, np.full(30, 2.0), **by))
    if not weighted:
        loss = load_job("table").job.loss
        assert loss is not None
        assert float(loss(*tensors)) == pytest.approx(found["poisson_deviance"])


def test_the_deviance_of_the_right_rate_is_zero() -> None:
    truth = torch.tensor([1, 2, 7])
    assert poisson_deviance(truth.double().log(), truth).tolist() == pytest.approx([0.0, 0.0, 0.0])


@pytest.mark.parametrize("weighted", [False, True])
def test_baselines_of_counts_are_those_of_scikit_learn(weighted: bool) -> None:
    inputs, _, others = rows(3, 150, 2)
    draw = np.random.default_rng(0)
    truth = draw.poisson(np.exp(0.5 * inputs[:, 0].numpy()))
    targets, weights = torch.from_numpy(truth)[:, None], torch.from_numpy(draw.random(150) + 0.1)
    by = {"sample_weight": weights.numpy()} if weighted else {}
    given_weights = weights if weighted else None
    linear, boosted = TableNetwork(4, LEVELS, 1, hidden_layers=0), BoostedTrees(4, LEVELS, 1, trees=8, leaves=5)
    fit_linear(linear, inputs, targets, 2.0, given_weights)
    boosted.fit(inputs, targets, 0.2, 0, given_weights)
    alpha = 2.0 / 2 / (weights.sum().item() if weighted else 150)  # scikit-learn halves the deviance, our loss
    own = PoissonRegressor(alpha=alpha, solver="newton-cholesky", max_iter=1000)
    trees = HistGradientBoostingRegressor(
        loss="poisson",
        learning_rate=0.2,
        max_iter=8,
        max_leaf_nodes=5,
        max_depth=4,
        early_stopping=False,
        random_state=0,
    )
    for network, expected, type_ in ((linear, own, float), (boosted, trees, np.float32)):
        expected.fit(columns(inputs).astype(type_), truth, **by)
        found = np.exp(predictions(network, others, 1))
        np.testing.assert_allclose(found, expected.predict(columns(others).astype(type_)), rtol=1e-3)


def test_a_poisson_regression_trained_by_steps_is_that_of_scikit_learn(tmp_path: Path) -> None:
    frame = patients(200).drop(columns=["pain", "ward"])
    frame.to_csv(tmp_path / "p.csv", index=False)
    job = load_job("table").job
    steps = {"network": "linear", "lr": 0.05, "epochs": 150, "batch_size": 200, "held_out": 0.0, "test": ()}
    found = train(job, counts(tmp_path / "p.csv", **steps), ProcessContext(), Silent()).history[-1].metrics
    own = PoissonRegressor(alpha=0).fit(frame[["age"]], frame.visits)
    expected = sklearn_metrics.mean_poisson_deviance(frame.visits, own.predict(frame[["age"]]))
    assert found["train_poisson_deviance"] == pytest.approx(expected, rel=1e-3)
    assert found["train_loss"] == pytest.approx(found["train_poisson_deviance"], rel=1e-5)


# Each objective with one of the two tasks; with the other in ``make test-slow``.
TASKS = [
    pytest.param(name, task, marks=[] if number % 2 == at else [pytest.mark.slow])
    for number, name in enumerate(sorted(OBJECTIVES))
    for at, task in enumerate(("levels", "counts"))
]


@pytest.mark.parametrize(("name", "task"), TASKS)
def test_every_objective_takes_levels_and_counts(name: str, task: str, tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    options = {"objective": name, "epochs": 1, "batch_size": 20}
    config = config_of(tmp_path / "p.csv", **options) if task == "levels" else counts(tmp_path / "p.csv", **options)
    job = load_job("table")
    checked = preflight(job, config)
    assert checked.criterion == (
        ("validation_mae", "min") if task == "levels" else ("validation_poisson_deviance", "min")
    )
    metrics = train(job.job, config, ProcessContext(), Silent()).history[-1].metrics
    assert all(np.isfinite(value) for metric, value in metrics.items() if metric.startswith("ood_"))


@pytest.mark.parametrize("aggregator", ["and-mask", "pcgrad", "geometric-mean"])
def test_rules_take_levels_and_learn_them(aggregator: str, tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    config = config_of(tmp_path / "p.csv", aggregator=aggregator, lr=0.05, epochs=10)
    history = train(load_job("table").job, config, ProcessContext(), Silent()).history
    assert history[-1].metrics["ood_kappa"] > 0.3
    assert history[-1].metrics["ood_accuracy"] > 0.4


def test_levels_have_the_order_that_is_given_and_numbers_their_own() -> None:
    frame = patients()
    found = from_table(frame, target="pain", environment="hospital", levels=["high", "mid", "low"])
    assert found.table.classes == ("high", "mid", "low")
    numbers = frame.assign(pain=frame.pain.map({"low": 10.0, "mid": 2.0, "high": 3.0}))
    found = from_table(numbers, target="pain", environment="hospital", task="ordinal")
    assert found.table.classes == (2, 3, 10)
    versions = {
        from_table(numbers, target="pain", environment="hospital", task=task).version
        for task in ("ordinal", "classification", "count", "regression")
    }
    assert len(versions) == 4


@pytest.mark.parametrize("task", ["levels", "counts"])
def test_registered_models_take_raw_rows_and_give_probabilities_or_counts(
    task: str, tmp_path: Path, store: Store, run_id: str
) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    config = config_of(tmp_path / "p.csv") if task == "levels" else counts(tmp_path / "p.csv")
    job = load_job("table").job
    environments, network = job.environments(config).fitted(0.1, 0), job.model(config)
    inputs, raw = environments["east"].inputs, environments.raw
    assert raw is not None
    served = load_predictor(store, log_model(store, run_id, network, inputs, raw))
    found = served.predict(patients().head(60))
    assert served.metadata.get_output_schema().input_names() == list(found.columns) == list(raw.outputs)
    with torch.no_grad():
        outputs = network.eval()(inputs)
    assert list(found.columns) == (list(ORDER) if task == "levels" else ["visits"])
    np.testing.assert_allclose(found.to_numpy(), outputs.exp().numpy(), rtol=1e-4)


@pytest.mark.parametrize("task", ["levels", "counts"])
def test_a_fold_keeps_predictions_in_units(task: str, tmp_path: Path) -> None:
    frame = patients()
    frame.to_csv(tmp_path / "p.csv", index=False)
    where = ["--data", str(tmp_path / "p.csv"), "--output", str(tmp_path / "out"), "--environment", "hospital"]
    words = ["--target", "pain", "--levels", *ORDER] if task == "levels" else ["--target", "visits", "--task", "count"]
    assert (
        main(["train", "table", *where, *words, "--epochs", "2", "--leave-out", "east", "--name", "a", "--no-register"])
        == 0
    )
    kept = pd.read_parquet(tmp_path / "out" / "runs" / "a" / "predictions.parquet")
    last = kept[kept.step == kept.step.max()]
    metrics = json.loads((tmp_path / "out" / "runs" / "a" / "metrics.json").read_text())
    if task == "levels":
        assert last.target.tolist() == frame.pain[last.row].tolist()
        levels = {name: place for place, name in enumerate(ORDER)}
        errors = (last.prediction.map(levels) - last.target.map(levels)).abs()
        assert errors.mean() == pytest.approx(metrics["validation_mae"])
    else:
        assert last.target.tolist() == frame.visits[last.row].tolist()
        deviance = sklearn_metrics.mean_poisson_deviance(last.target, last.prediction)
        assert deviance == pytest.approx(metrics["validation_poisson_deviance"], rel=1e-4)


PAIN, COUNT, ORDINAL = ["--target", "pain"], ["--task", "count"], ["--task", "ordinal"]
IN_ORDER = [*PAIN, "--levels", *ORDER]
WRONG: dict[str, tuple[list[str], str]] = {
    "no order": ([*PAIN, *ORDINAL], "--target pain: has texts; give its --levels, from the lowest"),
    "too many": (["--target", "age", *ORDINAL], "--target age: has 180 values; give its --levels"),
    "another value": ([*PAIN, "--levels", "low", "mid"], r"--levels low mid: data row 3 has high, which is none"),
    "one level": ([*PAIN, "--levels", "low"], "--levels low: must be two or more different values"),
    "a level twice": ([*PAIN, "--levels", "low", "low"], "--levels low low: must be two or more different"),
    "another task": ([*IN_ORDER, *COUNT], "give the order of an ordinal target"),
    "a cutoff": ([*IN_ORDER, "--cutoff", "0.3"], "--cutoff 0.3: the target does not have two"),
    "negative": (["--target", "minus", *COUNT], "--target minus: data row 1 has -1, and a count is a whole number"),
    "a fraction": (["--target", "age", *COUNT], "--target age: data row 1 has 0.125.*, and a count is a whole"),
    "text": ([*PAIN, *COUNT], "--target pain: has no numbers, which counts are"),
    "one value": (["--target", "one", *COUNT], "--target one: has one value in all training environments, 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_level_or_count_is_refused(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    words, line = WRONG[case]
    patients().assign(minus=-1, one=1).to_csv(tmp_path / "p.csv", index=False)
    where = ["--data", str(tmp_path / "p.csv"), "--environment", "hospital", "--test", "west"]
    assert re.match(f".*{line}", refused("train", "table", *where, *words))


def test_a_check_shows_levels_in_their_order_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    check = ["data", "table", "--check", str(tmp_path / "p.csv"), "--environment", "hospital"]
    assert main([*check, "--target", "pain", "--levels", *ORDER]) == 0
    lines = capsys.readouterr().err
    assert "240 rows, levels in an order\n" in lines
    assert re.search(r"environment east \(train\): 60 rows; target low [\d.]+, mid [\d.]+, high", lines)
    assert re.search(r"^ +age +numeric +\+0\.\d+ to \+0\.\d+ +4 of 4", lines, re.MULTILINE)
    assert main([*check, "--target", "visits", "--task", "count"]) == 0
    assert "240 rows, counts\n" in capsys.readouterr().err


def test_a_task_of_levels_needs_a_target_with_them() -> None:
    with pytest.raises(InputError, match="give its --levels"):
        from_table(patients(), target="pain", environment="hospital", task="ordinal")
