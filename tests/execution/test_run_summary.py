"""The first lines of a run describe its method, its data and its selection."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from concord.environments import Environments
from concord.execution.lifecycle import ActiveRun
from concord.execution.preflight import PreflightResult
from concord.execution.run import mask_parameters, methods_command, run_summary
from concord.storage import Folder
from concord.tracking import Store
from concord.training import TrainConfig, load_job

STORE = Store("postgresql://me:pa55word@host/runs", None)
RUN = ActiveRun("run", Folder(Path("there/runs/first")), STORE, None)
JOB = load_job("table")
DATA = torch.zeros(2, 3), torch.arange(2)
SOME = Environments.from_arrays(dict.fromkeys("ab", DATA))
ALL = Environments.from_arrays(dict.fromkeys("abcd", DATA), validation=["b", "c"], test=["d"])
BEST, LEAST = ("validation_accuracy", "max"), ("held_out_spread", "min")


def summary(
    environments: Environments = SOME, criterion: Any = BEST, required: Any = None, **options: Any
) -> list[str]:
    config = TrainConfig().with_options(**{"device": "cpu", **options}).resolve()
    checked = PreflightResult(config, environments, torch.zeros(1, 3), {}, {}, criterion)
    job = dataclasses.replace(JOB, job=dataclasses.replace(JOB.job, required=required))
    return run_summary(job, config, RUN, checked, ())


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (summary(), "data: 2 environments for training (0.1 of each held out)"),
        (summary(ALL, held_out=0.0), "data: 1 environment for training, 2 for validation, 1 for test"),
        (summary(), "run first: mean, 1 worker"),
        (summary(device="cuda"), "run first: mean, 1 worker, on CUDA"),
        (summary(workers=2), "run first: mean, 2 workers on Ray Train"),
        (summary(), "champion: the version with the largest validation_accuracy"),
        (
            summary(criterion=LEAST, required=lambda _: {"worst_train_accuracy": 0.65}),
            "champion: the version with the smallest held_out_spread, with worst_train_accuracy of at least 0.65",
        ),
        (summary(register=False), "champion: none is selected, since the model is not registered"),
        (summary(), "kept in there/runs/first, tracked in postgresql://me:***@host/runs"),
    ],
)
def test_method_data_and_choice_are_described_without_passwords(found: list[str], line: str) -> None:
    assert line in found


def test_the_command_for_methods_has_the_job_and_its_data_options(tmp_path: Path) -> None:
    job = load_job("table")
    config = job.job.config.with_options(data=tmp_path, target="chest pain", lr=0.1, name="a")
    command = f"concord compare table methods --data {tmp_path} --target 'chest pain'"
    assert methods_command(job, config, {"target", "data", "lr", "name"}) == command
    config = TrainConfig().with_options(data=tmp_path, threshold=0.9)
    command = f"concord compare {tmp_path / 'mine.py'} methods --data {tmp_path}"
    assert methods_command(dataclasses.replace(job, path=str(tmp_path / "mine.py")), config, {"data"}) == command


def test_what_follows_from_the_options_is_a_parameter() -> None:
    assert mask_parameters(TrainConfig().with_options(aggregator="and-mask").resolve(), 20) == {
        "chance_fraction": 2**-19,
        "threshold": 1.0,
    }
    given = TrainConfig().with_options(threshold=0.8).resolve()
    assert mask_parameters(given, 20) == {"chance_fraction": pytest.approx(4.02e-4, rel=1e-2)}
    assert mask_parameters(TrainConfig().with_options(aggregator="sand-mask").resolve(), 20) == {"threshold": 0.8}
    found = mask_parameters(TrainConfig().with_options(significance=1e-4).resolve(), 20)
    assert found == {"chance_fraction": 42 / 2**20, "threshold": 0.9}
    assert mask_parameters(TrainConfig().with_options(aggregator="mean").resolve(), 20) == {}
    by_test = mask_parameters(TrainConfig().with_options(aggregator="t-mask").resolve(), 3)
    assert by_test == {"chance_fraction": 1e-4, "significance": 1e-4}
