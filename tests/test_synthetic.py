"""The synthetic memorization task: what the paper says of it comes out, in small here and in full under -m slow."""

import dataclasses
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from concord.analysis.gradient_correlation import gradient_correlations
from concord.environments import BatchStream, Spirals
from concord.models import MLP
from concord.training import load_job
from concord.training.sweep import sweep

JOB = load_job("synthetic").job


def config(**changes: Any) -> Any:
    return JOB.config(**changes)


def accuracies(tmp_path: Path, aggregator: str, seeds: range, **changes: Any) -> dict[str, list[float]]:
    configurations = [config(aggregator=aggregator, seed=seed, evaluations=1, **changes) for seed in seeds]
    record = tmp_path / f"{aggregator}.jsonl"
    return {
        metric: sweep(JOB, {0: configurations}, metric, record, lambda _: None)[0]
        for metric in ("train_accuracy", "ood_accuracy")
    }


def test_the_and_mask_finds_the_mechanism_where_the_average_takes_the_shortcuts(tmp_path: Path) -> None:
    """One revolution, 16 environments and a third of the steps: easy enough for half a minute."""
    small = {"environments": 16, "revolutions": 1.0, "examples": 512, "batch_size": 64, "epochs": 40}
    masked = accuracies(tmp_path, "and-mask", range(1), **small)
    averaged = accuracies(tmp_path, "mean", range(1), **small)
    assert masked["ood_accuracy"][0] > 0.95
    assert averaged["train_accuracy"][0] > 0.99
    assert averaged["ood_accuracy"][0] < 0.75


def test_agreement_raises_the_mechanisms_part_of_the_gradient_and_disagreement_lowers_it() -> None:
    """Fig. 7 in small: ρ with the mechanism's gradient at τ = 0, at τ = 1, and under the XOR-mask."""
    spirals = Spirals(environments=16, examples=1024).as_environments()
    batch = BatchStream(spirals.load(spirals.train), 1024, seed=0).batch(0)
    found = [
        correlation
        for seed in range(4)
        for correlation in gradient_correlations(
            lambda: MLP(34, 2, initialization="default"), *batch, 2, [0.0, 0.3, 1.0], seed
        )
    ]

    def rho(mask: str, threshold: float, signal: str) -> float:
        chosen = [c.rho for c in found if (c.mask, c.threshold, c.signal) == (mask, threshold, signal)]
        return statistics.mean(value for value in chosen if not math.isnan(value))  # a mask may leave too little

    plain = rho("and-mask", 0.0, "mechanism")
    assert rho("and-mask", 1.0, "mechanism") > plain + 0.2
    assert rho("xor-mask", 0.3, "mechanism") < plain
    assert rho("and-mask", 1.0, "mechanism") > rho("and-mask", 1.0, "shortcuts")
    assert rho("and-mask", 0.0, "shortcuts") > plain


def test_zero_epochs_stand_for_the_papers_number() -> None:
    assert config().epochs == 94
    assert config(environments=1024).epochs == 3
    assert config(epochs=5).epochs == 5


def test_the_held_out_part_comes_on_top_of_the_papers_1280_examples() -> None:
    environments = JOB.environments(config())
    assert len(environments["train-000"]) == round(1280 / 0.9)
    assert len(environments["ood"]) == 2000
    assert len(environments.train) == 32


def test_every_quantity_of_the_data_is_an_option() -> None:
    options = {field.name for field in dataclasses.fields(JOB.config)}
    renamed = {"examples", "seed"}
    assert {field.name for field in dataclasses.fields(Spirals)} - renamed <= options


def test_the_report_has_the_columns_of_the_readmes_table() -> None:
    runs = [{"ood_accuracy": 1.0, "train_accuracy": 0.98}, {"ood_accuracy": 0.5, "train_accuracy": 0.99}]
    summary = sys.modules["concord_job_synthetic"]._summary(runs)
    assert summary == {"o.o.d. mean": 0.75, "o.o.d. least": 0.5, "o.o.d. largest": 1.0, "train least": 0.98}


def test_two_jobs_of_the_same_seed_see_the_same_data_whatever_the_aggregator() -> None:
    one, other = (JOB.environments(config(aggregator=name))["train-003"] for name in ("mean", "and-mask"))
    assert torch.equal(one.inputs, other.inputs)


@pytest.mark.slow
def test_ten_seeds_of_the_full_task(tmp_path: Path) -> None:
    """The README's table: 20 runs of about a minute."""
    masked = accuracies(tmp_path, "and-mask", range(10))
    averaged = accuracies(tmp_path, "mean", range(10))
    assert statistics.mean(masked["ood_accuracy"]) >= 0.99
    assert min(masked["ood_accuracy"]) >= 0.97
    assert statistics.mean(averaged["ood_accuracy"]) <= 0.60
    assert min(averaged["train_accuracy"]) >= 0.99
