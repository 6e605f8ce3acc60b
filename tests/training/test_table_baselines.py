"""Baselines of a table predict what scikit-learn does, and are runs like any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict
from test_table_environments import patients
from torch import Tensor, nn

from concord.cli.job_options import read_command
from concord.models.table_baselines import BoostedTrees, fit_linear, one_hot
from concord.models.table_network import TableNetwork
from concord.studies.leave_one_out import plan_leave_one_out
from concord.studies.methods import plan_methods
from concord.training import ProcessContext, Silent, load_job, train
from concord.training.advice import mask_lines
from concord.training.within_environment import cross_validated

LEVELS = [3, 4]


def rows(seed: int, count: int, classes: int, missing: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Encoded rows, targets of this many classes (1: numbers), and other rows."""
    draw = np.random.default_rng(seed)
    numbers = draw.normal(size=(2 * count, 4)).round(1)
    codes = np.stack([draw.integers(0, each, 2 * count) for each in LEVELS], 1)
    inputs = torch.from_numpy(np.hstack([numbers, codes]).astype(np.float32))
    score = numbers[:, 0] + codes[:, 0] - 1 + 0.3 * draw.normal(size=2 * count)
    if classes == 1:
        return inputs[:count], torch.from_numpy(score[:count].astype(np.float32))[:, None], inputs[count:]
    targets = np.digitize(score, np.linspace(-1, 1, classes - 1 - missing) if classes - missing > 2 else [0.0])
    return inputs[:count], torch.from_numpy(targets[:count]), inputs[count:]


def columns(inputs: Tensor) -> Any:
    return one_hot(inputs, 4, LEVELS).numpy()


def predictions(network: nn.Module, inputs: Tensor, classes: int) -> Any:
    with torch.no_grad():
        outputs = network.eval()(inputs)
    return outputs[:, 0].numpy() if classes == 1 else outputs.softmax(1).numpy()


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 3, 4]), st.integers(2, 9))
def test_boosted_trees_are_those_of_scikit_learn(seed: int, classes: int, leaves: int) -> None:
    inputs, targets, others = rows(seed, 150, classes)
    network = BoostedTrees(4, LEVELS, classes, trees=12, leaves=leaves)
    assert not predictions(network, others, 1).any()
    network.fit(inputs, targets, rate=0.2, seed=seed)
    kind = HistGradientBoostingRegressor if classes == 1 else HistGradientBoostingClassifier
    sizes = {"max_iter": 12, "max_leaf_nodes": leaves, "max_depth": min(leaves - 1, 8)}
    found = kind(learning_rate=0.2, early_stopping=False, **sizes).fit(columns(inputs), targets.flatten().numpy())
    if classes == 1:
        expected = found.predict(columns(others))
    else:
        expected = np.zeros((len(others), classes))
        expected[:, found.classes_] = found.predict_proba(columns(others))
    assert predictions(network, others, classes) == pytest.approx(expected, abs=1e-5)


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0.1, 1.0, 30.0]))
def test_ridge_is_that_of_scikit_learn(seed: int, classes: int, penalty: float) -> None:
    inputs, targets, others = rows(seed, 150, classes)
    network = TableNetwork(4, LEVELS, classes, hidden_layers=0)
    fit_linear(network, inputs, targets, penalty)
    if classes == 1:
        expected = Ridge(alpha=penalty / 2).fit(columns(inputs), targets[:, 0]).predict(columns(others))
    else:
        found = LogisticRegression(C=1 / penalty, max_iter=1000).fit(columns(inputs).astype(float), targets)
        expected = np.zeros((len(others), classes))
        expected[:, found.classes_] = found.predict_proba(columns(others).astype(float))
    assert predictions(network, others, classes) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("present", [[0], [1], [0, 1]])
def test_a_class_that_no_training_row_has_is_not_predicted(classes: int, present: list[int]) -> None:
    inputs, targets, others = rows(0, 100, 2)
    targets = torch.tensor(present)[targets.clamp(max=len(present) - 1)]
    boosted, linear = BoostedTrees(4, LEVELS, classes, 5, 4), TableNetwork(4, LEVELS, classes, hidden_layers=0)
    boosted.fit(inputs, targets, 0.1, 0)
    fit_linear(linear, inputs, targets, 1.0)
    for network in (boosted, linear):
        found = predictions(network, others, classes)
        assert found[:, present].sum(1) == pytest.approx(1.0, abs=1e-6)
        assert set(found.argmax(1)) <= set(present)


def test_a_fitted_model_is_exported_and_kept_without_a_pickle(tmp_path: Path) -> None:
    inputs, targets, others = rows(1, 100, 3)
    network = BoostedTrees(4, LEVELS, 3, 6, 5)
    network.fit(inputs, targets, 0.1, 0)
    program = torch.export.export(network.eval(), (inputs[:4],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(program.module()(others), network(others))
    again = BoostedTrees(4, LEVELS, 3, 6, 5)
    again.load_state_dict(network.state_dict())
    torch.testing.assert_close(again(others), network(others))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("baselines") / "patients.csv"
    frame = patients()
    frame.assign(died=frame.died.map({0: "no", 1: "yes"})).to_csv(file, index=False)
    return file


@pytest.mark.parametrize("target", ["died", "age"])
@pytest.mark.parametrize("network", ["ridge", "boosting"])
def test_a_baseline_is_evaluated_once_on_the_same_rows_as_a_method(data: Path, target: str, network: str) -> None:
    job = load_job("table").job
    config = job.config.with_options(
        data=data, environment="hospital", target=target, test=("west",), network=network, aggregator="mean"
    )
    (end,) = train(job, config, ProcessContext(), Silent()).history
    assert end.epoch == config.schedule.epochs
    for metric in ("ood_loss", "worst_held_out_loss", "ood_auc" if target == "died" else "ood_r2"):
        assert np.isfinite(end.metrics[metric])
    better = "train_auc" if target == "died" else "train_r2"
    assert end.metrics[better] > (0.55 if target == "died" else 0.0)


def test_baselines_are_compared_with_the_methods_unless_they_are_not_wanted(data: Path, tmp_path: Path) -> None:
    words = ["--data", str(data), "--environment", "hospital", "--target", "died", "--output", str(tmp_path)]

    def planned(*more: str, of: Callable[..., Any] = plan_methods, table: str = "methods") -> Any:
        command = read_command("compare", load_job("table"), [table, *words, *more], "concord compare")
        return of(command.job, command.options, command.given)

    studies = planned("--methods", "erm,vrex", "--trials", "7").studies
    assert list(studies) == ["mean", "vrex", "ridge", "boosting"]
    assert {each.trials for each in studies.values()} == {7}
    assert studies["boosting"].varied == {"boosting_rate", "boosting_leaves"}
    assert studies["boosting"].criterion == studies["mean"].criterion
    assert studies["boosting"].base.network_options.network == "boosting"
    assert list(planned("--no-baselines", "--methods", "erm,vrex").studies) == ["mean", "vrex"]
    folds = planned(of=plan_leave_one_out, table="leave-one-out").tables["leave-one-out"]
    assert list(folds.configurations) == ["mean", "and-mask", "group-dro", "ridge", "boosting"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--workers", "2"], "--workers 2: the model is fitted to all examples at once, by one worker; give 1"),
        (
            ["--threshold", "0.9"],
            "--aggregator and-mask: the model is fitted to all examples at once, and no gradients",
        ),
        (
            ["--objective", "vrex"],
            "--objective vrex: the model is fitted to all examples at once, ",
        ),
        (["--ridge-penalty", "0"], "--ridge-penalty 0.0: must be above 0"),
        (["--boosting-leaves", "1"], "--boosting-leaves 1: must be at least 2"),
        (["--boosting-rate", "2"], "--boosting-rate 2.0: must lie in (0, 1]"),
    ],
)
def test_options_that_a_baseline_cannot_have_are_refused(
    data: Path, refused: Callable[..., str], words: list[str], line: str
) -> None:
    given_words = ["--data", str(data), "--environment", "hospital", "--target", "died", "--network", "boosting"]
    assert refused("train", "table", *given_words, *words).startswith(line)


@pytest.mark.parametrize("table", ["methods", "leave-one-out"])
def test_a_baseline_is_not_what_all_methods_start_from(data: Path, refused: Callable[..., str], table: str) -> None:
    words = ["--data", str(data), "--environment", "hospital", "--target", "died", "--network", "boosting"]
    assert refused("compare", "table", table, *words) == (
        "--network boosting: baselines are compared in any case; leave it out"
    )


@pytest.mark.parametrize(("network", "own"), [("ridge", {"ridge_penalty"}), ("boosting", {"boosting_leaves"})])
def test_a_baseline_is_named_and_has_no_options_of_steps(data: Path, network: str, own: set[str]) -> None:
    config = load_job("table").job.config.with_options(
        data=data, environment="hospital", target="died", network=network, device="cpu"
    )
    resolved = config.resolve()
    assert resolved.method == network
    assert {"aggregator", "threshold", "lr", "epochs", "optimizer", "hidden_units"} < resolved.unused()
    assert not own & resolved.unused()
    (line,) = mask_lines(resolved, 3, "concord compare table methods")
    assert line.startswith("baseline: fitted to all training examples at once, without steps")
    assert config.with_options(network="mlp").resolve().method == "mean"


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_within_an_environment_a_baseline_predicts_as_scikit_learn_cross_validated(classes: int) -> None:
    inputs, targets, _ = rows(2, 120, classes)
    found = cross_validated(
        lambda: TableNetwork(4, LEVELS, classes, 0, 0, 0.0),
        lambda network, *given: fit_linear(network, *given, penalty=2.0),  # type: ignore[arg-type]
        inputs,
        targets,
        seed=3,
    )
    assert found is not None
    folds: Any = (KFold if classes == 1 else StratifiedKFold)(5, shuffle=True, random_state=3)
    if classes == 1:
        expected = cross_val_predict(Ridge(alpha=1.0), columns(inputs).astype(float), targets[:, 0].numpy(), cv=folds)
        np.testing.assert_allclose(found[:, 0].numpy(), expected, atol=1e-4)
        return
    linear = LogisticRegression(C=0.5, max_iter=1000)
    expected = cross_val_predict(
        linear, columns(inputs).astype(float), targets.numpy(), cv=folds, method="predict_proba"
    )
    np.testing.assert_allclose(found.softmax(1).numpy(), expected, atol=1e-3)


@pytest.mark.parametrize("targets", [torch.zeros(49), torch.zeros(80).long(), (torch.arange(80) < 4).long()])
def test_an_environment_with_few_rows_or_of_a_class_is_not_cross_validated(targets: Tensor) -> None:
    assert cross_validated(nn.Identity, lambda *_: None, torch.zeros(len(targets), 6), targets, 0) is None


def test_a_run_without_an_environment_says_what_could_be_had_there(data: Path) -> None:
    job = load_job("table").job
    given_options = {"data": data, "environment": "hospital", "target": "died", "network": "ridge", "device": "cpu"}
    left_out = job.environments(job.config.with_options(**given_options)).train[:2]
    config = job.config.with_options(**given_options, leave_out=left_out)
    (end,) = train(job, config, ProcessContext(), Silent()).history
    for name in left_out:
        assert 0 < end.metrics[f"auc/itself/{name}"] <= 1
        assert end.metrics[f"accuracy/itself/{name}"] >= 0.3


def within(path: Path, frame: pd.DataFrame, measure: str, **options: Any) -> float:
    """The measure of a baseline in the environment ``a`` itself."""
    frame.to_csv(path / "rows.csv")
    job = load_job("table").job
    given_options = {
        "data": path / "rows.csv",
        "environment": "site",
        "target": "y",
        "device": "cpu",
        "network": "boosting",
    }
    config = job.config.with_options(**given_options, boosting_trees=20, leave_out="a", **options)
    (end,) = train(job, config, ProcessContext(), Silent()).history
    return end.metrics[f"{measure}/itself/a"]


def sites(seed: int = 0) -> pd.DataFrame:
    """Twenty patients of thirty equal rows in each of three sites; what a patient has says nothing of others."""
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": draw.normal(size=60), "y": draw.integers(0, 2, 60), "patient": range(60)})
    return frame.assign(site=np.repeat(["a", "b", "c"], 20)).loc[np.repeat(np.arange(60), 30)].reset_index(drop=True)


def test_within_an_environment_a_patients_rows_are_in_one_fold(tmp_path: Path) -> None:
    assert within(tmp_path, sites(), "accuracy", columns=("patient=ignore",)) > 0.9  # rows of the same patients
    assert within(tmp_path, sites(), "accuracy", cluster_by="patient") < 0.7


def test_within_an_environment_rows_count_by_their_weights(tmp_path: Path) -> None:
    frame = sites().drop(columns="patient")
    frame["weight"] = np.where(np.arange(len(frame)) % 2 == 0, 1.0, 1e-6)
    frame["y"] = np.where(frame.weight == 1, frame.x > 0, frame.x < 0).astype(int)
    assert within(tmp_path, frame, "accuracy", weight="weight") > 0.9


def test_within_an_environment_counts_are_numbers(tmp_path: Path) -> None:
    frame = sites().drop(columns="patient")
    frame["y"] = np.random.default_rng(0).poisson(np.exp(frame.x))
    assert within(tmp_path, frame, "r2", task="count") > 0.3


def test_numbers_of_units_are_predicted_by_folds_without_them() -> None:
    inputs, targets, _ = rows(5, 100, 1)
    units = np.repeat([f"patient {each}" for each in range(20)], 5)
    held_out: list[set[str]] = []

    def fit(network: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        held_out.append({unit for unit in units if not (inputs == own[unit]).all(1).any()})

    own = {unit: inputs[at] for at, unit in enumerate(units)}
    assert cross_validated(lambda: nn.Linear(6, 1), fit, inputs, targets, 0, units=units) is not None
    assert sorted(unit for fold in held_out for unit in fold) == sorted(own)
    assert cross_validated(lambda: nn.Linear(6, 1), fit, inputs, targets, 0, units=np.arange(100) // 25) is None
