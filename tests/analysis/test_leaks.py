"""Columns that alone give the target away are named before training."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from concord.analysis.columns.leaks import leak_warning, leaking_columns
from concord.environments.table import from_table
from concord.errors import InputWarning
from concord.training import load_job

RANDOM = np.random.default_rng(0)
ROWS = 600
DIED = RANDOM.random(ROWS) < 0.15
COST = np.exp(2 * RANDOM.normal(size=ROWS))  # with a long tail
FRAME = pd.DataFrame(
    {
        "hospital": np.repeat(["east", "north", "west"], ROWS // 3),
        "age": RANDOM.normal(60, 10, ROWS),
        "score": RANDOM.normal(size=ROWS) + 1.5 * DIED,
        "risk": np.where(DIED, 5.0, -5.0) + RANDOM.normal(size=ROWS),
        "ward": np.where(DIED, "chapel", RANDOM.choice(["a", "b", "c"], ROWS)),
        "left": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.where(DIED, 0, 1 + RANDOM.integers(0, 99, ROWS)), "D"),
        "euros": 1.1 * COST,
        "died": DIED.astype(int),
        "cost": COST,
    }
)


@pytest.mark.parametrize(
    ("target", "left_out", "expected"),
    [("died", "cost", ["risk", "ward", "left"]), ("cost", "died", ["euros"]), ("hospital", "", [])],
)
def test_a_column_that_alone_gives_the_target_away_is_found(target: str, left_out: str, expected: list[str]) -> None:
    frame, environment = FRAME.drop(columns=left_out or []), "hospital"
    if target == "hospital":  # what other columns say nothing of
        frame, environment = FRAME[["hospital", "age"]].assign(site=["a", "b"] * (ROWS // 2)), "site"
    table = from_table(frame, target=target, environment=environment).table
    assert leaking_columns(table) == expected


def test_one_line_names_at_most_five_leaking_columns() -> None:
    assert leak_warning([]) is None
    assert leak_warning(["ward"]) == "column ward alone gives the target away; is it known when you predict?"
    several = leak_warning([*"abcdefg"])
    assert (
        several == "columns a, b, c, d, e and 2 more each give the target away alone; are they known when you predict?"
    )


def test_the_job_of_a_table_warns_of_a_leak_in_one_line(tmp_path: Path) -> None:
    FRAME.drop(columns="cost").to_csv(tmp_path / "patients.csv", index=False)
    config = load_job("table").job.config.with_options(
        data=tmp_path / "patients.csv", environment="hospital", target="died"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InputWarning)
        load_job("table").job.environments(config)
    assert "columns risk, ward, left each give the target away alone" in str(caught[-1].message)
