"""Folds of environments: each environment is left out once, whatever the order of the rows that name them."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from concord.environments import Environments
from concord.errors import InputError
from concord.options import option_values
from concord.space import frozen
from concord.studies.criterion import left_out_metrics
from concord.studies.environment_folds import drawn, ends_of, folds_of, most_left_out
from concord.studies.leave_one_out import HELD_OUT, fold_values, left_out_table, with_choices
from concord.studies.methods import changes_of
from concord.studies.results import ResultLine
from concord.training import Job, ProcessContext, Run, Silent, TrainConfig, load_job, train
from concord.training.comparison import Folds
from concord.training.options import as_names

COUNTS = (7, 10, 100, 161)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"school {place}" for place in range(count))


@pytest.mark.parametrize("count", COUNTS)
@given(seed=st.integers(0, 2**32), folds=st.sampled_from([0, 2, 5, 7]), random=st.randoms())
def test_each_environment_is_in_one_fold_whatever_the_order_of_rows(
    count: int, seed: int, folds: int, random: Any
) -> None:
    shuffled = list(names(count))
    random.shuffle(shuffled)
    found = folds_of(shuffled, folds, seed)
    assert sorted(name for fold in found for name in as_names(fold)) == sorted(names(count))
    assert len(found) == (folds or (7 if count == 7 else 5))
    assert {*found} == {*folds_of(names(count), folds, seed)}
    sizes = [len(as_names(fold)) for fold in found]
    assert max(sizes) - min(sizes) <= 1
    assert most_left_out(found) == max(sizes)
    assert {len(as_names(fold)) for fold in ends_of(found)} == {*sizes}


def test_folds_are_those_of_scikit_learn() -> None:
    from sklearn.model_selection import GroupKFold

    of_rows = np.array(sorted(names(31)))
    split = GroupKFold(5, shuffle=True, random_state=3).split(of_rows, groups=of_rows)
    assert sorted(map(len, (test for _, test in split))) == sorted(
        len(as_names(each)) for each in folds_of(names(31), 5, 3)
    )
    assert folds_of(names(31), 5, 3) != folds_of(names(31), 5, 4)


@given(seed=st.integers(0, 99), count=st.integers(2, 9))
def test_as_many_folds_as_drawn_environments_leave_each_out_alone(seed: int, count: int) -> None:
    few = drawn(names(30), count, seed)
    assert folds_of(few, 0, seed) == folds_of(few, count, seed) == few
    assert len({*few}) == count


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, unique=True), st.randoms())
def test_names_left_out_are_a_set_and_one_is_itself_as_in_old_records(given_names: list[str], random: Any) -> None:
    shuffled = list(given_names)
    random.shuffle(shuffled)
    one, other = (TrainConfig().with_options(leave_out=tuple(each)) for each in (given_names, shuffled))
    assert one == other
    assert one.data.left_out == tuple(sorted(given_names))
    if len(given_names) == 1:
        assert option_values(one)["leave_out"] == given_names[0]
        assert TrainConfig().with_options(leave_out=given_names[0]) == one
    assert frozen(list(one.data.left_out)) == one.data.left_out


def data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(ord(name)))
    return inputs, (inputs[:, 0] > 0).long()


JOB: Job[TrainConfig] = Job(
    lambda _: Environments(data, train=list("abcdef")),
    lambda _: torch.nn.Linear(3, 2),
    torch.nn.functional.cross_entropy,
)


class Kept(Silent):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, path: str, write: Any) -> None:
        write(self.folder / path)


def test_a_run_predicts_each_environment_of_its_fold_by_itself(tmp_path: Path) -> None:
    import pandas as pd

    config = JOB.config.with_options(epochs=2, evaluations=2, aggregator="mean", leave_out=("e", "b"), lr=0.1)
    history = train(JOB, config, ProcessContext(), Kept(tmp_path)).history
    found = pd.read_parquet(tmp_path / "predictions.parquet")
    for each in history:
        rows = found[found.step == each.step]
        assert list(rows.environment.unique()) == ["b", "e"]
        assert not any(f"accuracy/train/{name}" in each.metrics for name in "be")
        for name in "be":
            own = rows[rows.environment == name]
            assert (own.target == own.prediction).mean() == pytest.approx(each.metrics[f"accuracy/validation/{name}"])
    folds = Folds(tuple("abcdef"), "accuracy", "max", (("b", "e"), ("a", "c"), ("d", "f")))
    values = fold_values(dataclasses.replace(Run.of(history, 0, {"leave_out": ("b", "e")})), folds)
    assert {name for name in values if " (" not in name} == {"b", "e"}


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        (("a", "x"), "--leave-out a x: give some of a, b, c, d, e, f"),
        (tuple("abcdef"), "--leave-out a b c d e f: are all training environments; leave one to train on"),
    ],
)
def test_unknown_environments_or_all_of_them_are_refused(left_out: tuple[str, ...], line: str) -> None:
    with pytest.raises(InputError) as refused:
        JOB.environments_of(JOB.config.with_options(leave_out=left_out))
    assert str(refused.value) == line


@given(st.lists(st.floats(0, 1), min_size=7, max_size=7), st.integers(1, 6))
def test_a_trials_mean_and_worst_weigh_environments_and_not_folds(values: list[float], cut: int) -> None:
    each = {f"e{place}": value for place, value in enumerate(values)}

    def fold(part: list[str]) -> dict[str, float]:
        own = {f"{kind}/validation/{name}": each[name] for name in part for kind in ("accuracy", "loss")}
        return {"validation_accuracy": sum(each[name] for name in part) / len(part), "validation_loss": 0.0, **own}

    found = left_out_metrics([fold(list(each)[:cut]), fold(list(each)[cut:])], {"accuracy": "max"})
    assert found["left_out_accuracy"] == pytest.approx(sum(values) / 7)
    assert found["worst_left_out_accuracy"] == min(values)


def test_where_a_measure_is_not_defined_the_others_count_and_a_model_that_diverged_does_not() -> None:
    fold = {"validation_auc": 0.7, "auc/validation/a": 0.7, "auc/validation/b": math.nan}
    losses = {"validation_loss": 0.5, "loss/validation/a": 0.4, "loss/validation/b": 0.6}
    assert left_out_metrics([fold | losses], {"auc": "max"})["left_out_auc"] == 0.7
    diverged = losses | {"loss/validation/b": math.nan}
    assert math.isnan(left_out_metrics([fold | diverged], {"auc": "max"})["left_out_auc"])
    alone = {"validation_auc": math.nan, "auc/validation/c": math.nan, "validation_loss": 0.5, "loss/validation/c": 0.5}
    found = left_out_metrics([fold | losses, alone], {"auc": "max"})
    assert (found["left_out_auc"], found["worst_left_out_auc"]) == (0.7, 0.7)
    nowhere = left_out_metrics([alone], {"auc": "max"})
    assert math.isnan(nowhere["left_out_auc"])
    assert math.isnan(nowhere["worst_left_out_auc"])
    assert math.isnan(left_out_metrics([fold | losses, alone | {"loss/validation/c": math.nan}], {})["left_out_auc"])


def lines_of(count: int, methods: int = 3) -> tuple[list[ResultLine], Folds]:
    random = np.random.default_rng(0)
    folds = Folds(names(count), "accuracy", "max", tuple(map(as_names, folds_of(names(count), 5, 0))))
    lines = []
    for method in range(methods):
        for fold in folds.folds:
            values = {name: float(random.uniform()) for name in fold}
            values |= {f"{name}{kind}": 0.5 for name in fold for kind in (HELD_OUT, " (oracle)", " (rows)")}
            lines.append(ResultLine(str(method), 0, values, 1.0, {}))
    return with_choices(lines, folds, methods), folds


def test_results_of_160_environments_are_a_screen_and_all_of_them_are_in_json_and_csv() -> None:
    lines, folds = lines_of(160)
    table = left_out_table("leave-one-out", lines)
    shown = [row[0] for row in table.cells()[1]]
    assert len(table.text().splitlines()) < 40
    assert {"lower quartile accuracy", "median accuracy", "upper quartile accuracy"} < {*shown}
    means = {name: np.mean([line.values[name] for line in lines[:3]]) for name in folds.environments}
    assert {min(means, key=means.__getitem__), max(means, key=means.__getitem__)} < {*shown}
    metrics = table.as_json()[0]["metrics"]
    assert {*folds.environments} < metrics.keys()
    assert metrics["median accuracy"]["mean"] == pytest.approx(
        np.median([lines[0].values[each] for each in names(160)])
    )
    assert all(name in table.csv() for name in folds.environments)
    assert {*folds.environments} < {*table.frame().columns}


def test_an_environment_without_a_value_for_any_method_is_not_in_the_mean() -> None:
    folds = Folds(("a", "b", "c"), "auc", "max", (("a", "b"), ("c",)))

    def line(method: str, **values: float) -> ResultLine:
        every = {f"{name}{kind}": value for name, value in values.items() for kind in ("", HELD_OUT, " (oracle)")}
        return ResultLine(method, 0, every, 1.0, {})

    lines = with_choices([line("mean", a=0.5, b=math.nan, c=0.7), line("irm", a=0.6, b=math.nan, c=math.nan)], folds, 2)
    by_row = {each.configuration: each.values for each in lines}
    assert by_row["mean"]["mean auc"] == pytest.approx(0.6)
    assert "mean auc" not in by_row["irm"]  # which has none where the other has one


def test_what_a_baseline_reaches_within_environments_is_a_row_of_its_own_and_chosen_by_nobody() -> None:
    folds = Folds(("a", "b"), "auc", "max")

    def line(method: str, value: float, **within: float) -> ResultLine:
        every = {f"{name}{kind}": value for name in "ab" for kind in ("", HELD_OUT, " (oracle)")}
        return ResultLine(method, 0, every | {f"{name} (itself)": each for name, each in within.items()}, 1.0, {})

    found = {
        each.configuration: each.values
        for each in with_choices([line("mean", 0.7), line("ridge", 0.6, b=0.9)], folds, 2)
    }
    assert found["ridge, in the environment itself (oracle)"] == {"b": 0.9}
    assert found["chosen by held-out"]["mean auc"] == found["chosen by itself (oracle)"]["mean auc"] == 0.7


@pytest.mark.parametrize(
    ("method", "weight"), [("vrex", 1.0), ("irm", 0.1), ("fishr", 0.1), ("iga", 0.1), ("coral", None)]
)
def test_a_penalty_begins_at_a_weight_that_does_not_ruin_a_table_unless_one_is_given(
    method: str, weight: float | None
) -> None:
    file = load_job(str(Path(__file__).parents[1] / "jobs" / "tiny_study.py"))
    assert changes_of(file, JOB.config, method).get("penalty_weight") == weight
    assert "penalty_weight" not in changes_of(file, JOB.config.with_options(penalty_weight=1e4), method)
