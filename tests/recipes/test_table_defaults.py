"""A run of the job `table` without options: trained to where held-out environments no longer improve."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from concord.execution.preflight import preflight
from concord.training import JobFile, ProcessContext, Silent, load_job
from concord.training.advice import advice
from concord.training.loop import training

JOB: JobFile = load_job("table")


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """A target that is a product of two columns, in twelve schools of which the last two have a shifted one."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(600, 3)), columns=["a", "b", "c"]).assign(school=np.repeat(range(12), 50))
    noise = 0.3 * random.normal(size=600)
    return frame.assign(score=2 * frame.a + 1.5 * frame.b * frame.c + noise + 3 * (frame.school >= 10))


def config(folder: Path, rows: pd.DataFrame, **options: Any) -> Any:
    rows.to_csv(folder / "rows.csv", index=False)
    given = {"data": folder / "rows.csv", "environment": "school", "target": "score", "test": ("10", "11")}
    return JOB.job.config.with_options(**given | options)


def held_out(config: Any) -> set[str]:
    return set(JOB.job.environments_of(config).held_out)


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 20))
def test_the_order_of_rows_does_not_choose_what_is_held_out(tmp_path: Path, rows: pd.DataFrame, seed: int) -> None:
    given = held_out(config(tmp_path, rows, seed=seed))
    assert len(given) == 2
    assert given.isdisjoint({"10", "11"})
    assert held_out(config(tmp_path, rows.sample(frac=1, random_state=seed), seed=seed)) == given


def test_of_a_folder_the_order_of_its_files_does_not_choose_what_is_held_out(
    tmp_path: Path, rows: pd.DataFrame
) -> None:
    (folder := tmp_path / "schools").mkdir()
    for name, part in reversed(list(rows.groupby("school"))):
        part.drop(columns="school").to_csv(folder / f"{name}.csv", index=False)
    assert held_out(config(tmp_path, rows, data=folder, environment=None)) == held_out(config(tmp_path, rows))


def test_nine_schools_or_some_for_validation_hold_out_rows_as_before(tmp_path: Path, rows: pd.DataFrame) -> None:
    assert not held_out(config(tmp_path, rows[rows.school != 0]))
    assert not held_out(config(tmp_path, rows, validation=("3",)))
    assert not held_out(config(tmp_path, rows, held_out_environments=0.0))


def test_held_out_schools_and_the_test_teach_the_encoder_nothing(tmp_path: Path, rows: pd.DataFrame) -> None:
    plain = config(tmp_path, rows)
    apart = held_out(plain) | {"10", "11"}
    changed = rows.assign(score=rows.score + 100 * rows.school.astype(str).isin(apart))
    scales = []
    for each in (rows, changed):
        given = config(tmp_path, each)
        scales.append(JOB.job.environments_of(given).fitted(given.data.held_out, 0).target_scale)
    assert scales[0] == scales[1]


def test_a_run_without_options_learns_a_product_and_ends_by_itself(tmp_path: Path, rows: pd.DataFrame) -> None:
    found = config(tmp_path, rows, batch_size=8, lr=0.02, patience=3)  # for a fast test
    history = list(training(JOB.job, found.resolve(), ProcessContext(), Silent()))
    end = history[-1].metrics
    assert end["out_of_patience"] == 1
    assert end["held_out_loss"] == min(each.metrics["held_out_loss"] for each in history)
    linear = list(training(JOB.job, found.with_options(network="ridge").resolve(), ProcessContext(), Silent()))[-1]
    assert end["held_out_mse"] < 0.5 * linear.metrics["held_out_mse"]
    assert linear.metrics["held_out_mse"] > 1


def test_given_epochs_are_passes_over_the_largest_environment_and_all_are_trained(
    tmp_path: Path, rows: pd.DataFrame
) -> None:
    found = config(tmp_path, rows, epochs=3)
    assert (found.schedule.epoch_steps, found.schedule.patience) == (0, 0)
    history = list(training(JOB.job, found.resolve(), ProcessContext(), Silent()))
    assert (history[-1].epoch, history[-1].step) == (3, 3)  # 50 rows of the largest are one batch
    asked = config(tmp_path, rows, epochs=3, epoch_steps=4, patience=1)
    assert (asked.schedule.epoch_steps, asked.schedule.patience) == (4, 1)


def test_a_given_rate_or_schedule_changes_nothing_else(tmp_path: Path, rows: pd.DataFrame) -> None:
    usual, asked = config(tmp_path, rows), config(tmp_path, rows, lr=0.5, schedule="cosine")
    assert (asked.optimizer.lr, asked.schedule.schedule) == (0.5, "cosine")
    assert asked.with_options(lr=usual.optimizer.lr, schedule=usual.schedule.schedule) == usual


@pytest.mark.parametrize("given", [{"held_out": 0.0}, {"stop_spread": 0.1}, {"keep": "last"}])
def test_where_nothing_chooses_weights_the_last_are_kept(
    tmp_path: Path, rows: pd.DataFrame, given: dict[str, Any]
) -> None:
    found = config(tmp_path, rows, **given)
    found.check()
    assert (found.schedule.keep, found.schedule.patience) == ("last", 0)
    preflight(JOB, found)
    assert config(tmp_path, rows, validation=("3",), held_out=0.0).schedule.keep == "least-loss"


def test_a_baseline_ignores_how_weights_are_kept(tmp_path: Path, rows: pd.DataFrame) -> None:
    found = preflight(JOB, config(tmp_path, rows, network="ridge"))
    history = list(training(JOB.job, found.config, ProcessContext(), Silent()))
    assert not [
        line for line in advice(JOB.job, found.config, history, found.environments, found.measures) if "--keep" in line
    ]
