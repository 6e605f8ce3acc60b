"""Several rows a patient: what is held out are whole patients."""

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

from concord.cli import main
from concord.environments.collection import held_out_places
from concord.environments.table import TableEnvironments, from_table
from concord.errors import ArgumentError, InputError
from concord.training import ProcessContext, load_job
from concord.training.worker_data import prepare


def visits(seed: int = 0, rows: int = 200) -> pd.DataFrame:
    """Visits of patients of four hospitals, about five each."""
    draw = np.random.default_rng(seed)
    hospital = np.repeat(["east", "north", "south", "west"], rows // 4)
    patient = [f"{place[0]}{number}" for place, number in zip(hospital, draw.integers(0, 10, rows), strict=True)]
    return pd.DataFrame(
        {"hospital": hospital, "patient": patient, "age": draw.normal(size=rows), "died": draw.integers(0, 2, rows)}
    )


def environments(frame: Any, **more: Any) -> TableEnvironments:
    return from_table(frame, **{"environment": "hospital", "target": "died", "cluster_by": "patient", **more})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 100))
def test_units_are_held_out_whole_and_both_sides_have_some(units: list[int], fraction: float, seed: int) -> None:
    codes = torch.from_numpy(pd.factorize(np.array(units))[0])
    if codes.max() == 0:
        with pytest.raises(ArgumentError, match="environment e has one unit of --cluster-by, which cannot be split"):
            held_out_places("e", len(units), fraction, seed, codes)
        return
    kept, held = held_out_places("e", len(units), fraction, seed, codes)
    assert kept is not None
    assert held is not None
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(units)))
    assert not set(codes[kept].tolist()) & set(codes[held].tolist())
    assert len(kept) > 0
    assert len(held) > 0
    largest = int(codes.bincount().max())
    assert len(held) <= max(fraction * len(units), 1) + largest


def test_single_rows_are_held_out_in_the_number_of_the_fraction() -> None:
    kept, held = held_out_places("e", 50, 0.2, 3, torch.arange(50))
    assert held is not None
    assert len(held) == 10
    assert kept is not None
    assert len(kept) == 40


def test_no_patient_stands_on_both_sides_of_a_split(tmp_path: Path) -> None:
    frame = visits()
    frame["age"] = pd.factorize(frame.patient)[0].astype(float)  # so that encoded rows name their patient
    frame.to_csv(tmp_path / "visits.csv", index=False)
    options = {"data": tmp_path / "visits.csv", "environment": "hospital", "target": "died", "cluster_by": "patient"}
    config = load_job("table").job.config.with_options(**options, test=("west",), held_out=0.3).resolve()
    for training, held_out in prepare(load_job("table").job, config, ProcessContext()).training:
        assert held_out is not None
        assert not set(training.inputs[:, 0].tolist()) & set(held_out.inputs[:, 0].tolist())
        assert 0.1 < len(held_out) / (len(training) + len(held_out)) < 0.5


def test_the_encoder_is_fitted_without_the_patients_that_are_held_out() -> None:
    found = environments(visits(), test=["west"])
    training = found.fitted(0.3, 0)
    rows = pd.concat(
        [
            found.table.rows([name]).iloc[held_out_places(name, 50, 0.3, 0, found.units(name))[0].numpy()]  # type: ignore[union-attr]
            for name in found.train
        ]
    )
    assert training.encoder is not None
    assert training.encoder.numeric[0].mean == pytest.approx(rows.age.mean())
    assert list(found.table.kinds) == ["age"]  # the patient is no input
    assert found.version != from_table(visits(), environment="hospital", target="died", test=["west"]).version


def test_a_patient_of_several_hospitals_is_said() -> None:
    frame = visits()
    frame.loc[[0, 60, 61], "patient"] = ["moved", "moved", "e3"]
    said = "column patient: 2 of its 41 values stand in several environments, such as e3; a test there is not of new"
    with pytest.warns(UserWarning, match=re.escape(said)):
        environments(frame)


def test_codes_keep_their_zeros(tmp_path: Path) -> None:
    frame = visits()
    frame["patient"] = np.where(frame.died == 1, "007", "7")
    frame.to_csv(tmp_path / "visits.csv", index=False)
    with pytest.warns(UserWarning, match="column patient: 2 of its 2 values stand in several environments"):
        codes = environments(tmp_path / "visits.csv").units("east")
    assert codes is not None
    assert codes.max() == 1


WRONG: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "a missing one": (
        lambda frame: frame.assign(patient=frame.patient.where(frame.index != 9)),
        "data row 10 has no value",
    ),
    "one row each": (lambda frame: frame.assign(patient=range(200)), "each row has a value of its own"),
    "one for all": (lambda frame: frame.assign(patient="a"), "all rows have one value; give a column with several"),
    "no column": (lambda frame: frame.drop(columns="patient"), "no such column; there are hospital, age, died"),
    "the target": (lambda frame: frame.drop(columns="died").rename(columns={"patient": "died"}), "no such column"),
}


@pytest.mark.parametrize("case", WRONG)
def test_units_that_are_none_are_refused_in_one_line(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    change, line = WRONG[case]
    change(visits()).to_csv(tmp_path / "visits.csv", index=False)
    words = ["--data", str(tmp_path / "visits.csv"), "--environment", "hospital", "--target", "died"]
    assert line in refused("train", "table", *words, "--cluster-by", "patient")


def test_a_hospital_of_one_patient_and_a_column_with_two_meanings_are_refused(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    frame = visits()
    frame.loc[frame.hospital == "north", "patient"] = "n"
    frame.to_csv(tmp_path / "visits.csv", index=False)
    words = ["--data", str(tmp_path / "visits.csv"), "--environment", "hospital", "--target", "died"]
    assert refused("train", "table", *words, "--cluster-by", "patient") == (
        "--held-out 0.1: environment north has one unit of --cluster-by, which cannot be split; join it with others, "
        "or give 0"
    )
    with pytest.raises(InputError, match="cluster_by=hospital: is the column of another option, too; give another"):
        environments(frame, cluster_by="hospital")


def test_a_check_says_what_the_units_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    visits().to_csv(tmp_path / "visits.csv", index=False)
    words = ["--environment", "hospital", "--target", "died", "--cluster-by", "patient"]
    assert main(["data", "table", "--check", str(tmp_path / "visits.csv"), *words]) == 0
    assert "column patient names 40 units of 200 rows, and is no input\n" in capsys.readouterr().err
