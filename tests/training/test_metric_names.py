"""Metrics whose names would collide are refused before the run begins."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from concord.environments import Environment, Environments
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.metric_name import metric_name
from concord.training import Job, TrainConfig
from concord.training.context import ProcessContext, Silent
from concord.training.declared_measures import Measure
from concord.training.evaluation import EvaluatedPart, evaluate
from concord.training.job import JobFile
from concord.training.loop import train
from concord.training.metric_names import check_metric_names, environments_of

# Characters that MLflow has a place for, and some that it has not; names that other metrics have.
NAMES = st.text("a_/°%.", min_size=1, max_size=3) | st.sampled_from(
    ["train", "worst", "held_out", "validation", "ood", "step", "resumed", "loss", "spread", "worst_train", "accuracy"]
)


def none(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(outputs))


def one(name: str) -> Environment:
    return Environment(name, torch.zeros(1, 1), torch.zeros(1, 1))


def reported(environments: Environments, measures: Sequence[str]) -> tuple[list[str], int]:
    """What an evaluation reports, and how many metrics it should be."""
    splits = [("train", environments.train), ("held_out", environments.train)]
    splits += [("validation", environments.validation), ("ood", environments.test)]
    splits += [(name, (name,)) for name in environments.monitored]
    parts = [EvaluatedPart(split, name, one(name)) for split, names in splits for name in names]
    functions: dict[str, Measure] = dict.fromkeys(measures, Measure(none, "max"))
    found = evaluate(nn.Identity(), nn.functional.mse_loss, functions, parts, ProcessContext())
    number = (1 + len(measures)) * (len(parts) + 2 * sum(bool(names) for _, names in splits))
    return [*found, "held_out_spread", "kept_fraction", "step/loss"], number + 3


@settings(deadline=None)
@given(
    st.lists(NAMES, min_size=1, max_size=5, unique=True),
    st.integers(1, 3),
    st.lists(NAMES, max_size=3, unique=True),
)
def test_names_that_are_let_through_stay_apart(names: list[str], few: int, measures: list[str]) -> None:
    train, rest = names[:few], names[few:]
    try:
        environments = Environments(lambda name: ([], []), train, test=rest[:1], monitored=rest[1:])
        check_metric_names(environments, measures, ["weight"])
    except InputError:
        return
    metrics, number = reported(environments, measures)
    assert len(metrics) == number
    assert len({metric_name(name) for name in metrics}) == number


def data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(len(name))
    return torch.randn(8, 2, generator=drawn), torch.randint(0, 2, (8,), generator=drawn)


JOB = Job(
    environments=lambda _: Environments(data, ["a", "b"]),
    model=lambda _: nn.Linear(2, 2),
    loss=nn.functional.cross_entropy,
    name="names",
)


def odd_layers(_: TrainConfig) -> nn.Module:
    model = nn.Sequential()
    model.add_module("one°", nn.Linear(2, 2))
    model.add_module("one%", nn.Linear(2, 2))
    return model


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"environments": lambda _: Environments(data, ["90°", "90%"])},
            "environment '90°' and environment '90%': both would be reported as the metric loss/train/90_; rename one",
        ),
        (
            {"environments": lambda _: Environments(data, ["a", "b"], monitored=["train"])},
            "environment train: monitored environments are reported by name, and train_loss is the loss of the "
            "training environments; rename it",
        ),
        (
            {"environments": lambda _: Environments(data, ["a", "b"], monitored=["worst_train"])},
            "the worst of the training environments and monitored environment 'worst_train': both would be reported as "
            "the metric worst_train_loss; rename one",
        ),
        (
            {"environments": lambda _: Environments(data, ["a", "b"], monitored=["seen°", "seen%"])},
            "monitored environment 'seen°' and monitored environment 'seen%': both would be reported as the metric "
            "seen__loss; rename one",
        ),
        (
            {"environments": lambda _: Environments(data, ["e" * 250 + "1", "e" * 250 + "2"])},
            "rename one",
        ),
        (
            {"measures": {"f1°": none, "f1%": none}},
            "measure 'f1°' and measure 'f1%': both would be reported as the metric train_f1_; rename one",
        ),
        (
            {"measures": {"loss": none}},
            "the loss and measure 'loss': both would be reported as the metric train_loss; rename one",
        ),
        (
            {"measures": {"spread": none}},
            "the metric held_out_spread and the held-out part of the training environments, measure 'spread': both "
            "would be reported as the metric held_out_spread; rename one",
        ),
        (
            {"model": odd_layers},
            "parameter 'one°.weight' and parameter 'one%.weight': both would be reported as the metric "
            "kept_fraction/one_.weight; rename one",
        ),
    ],
    ids=["environments", "a split", "worst", "monitored", "long", "measures", "loss", "spread", "layers"],
)
def test_names_that_meet_are_refused_before_a_run(changes: dict[str, object], line: str, tmp_path: Path) -> None:
    job = JobFile(dataclasses.replace(JOB, **changes), str(tmp_path / "names.py"), "")
    with pytest.raises(InputError) as refused:
        preflight(job, TrainConfig().with_options(output=tmp_path))
    assert str(refused.value).endswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("validation_auc", ("c",)),
        ("worst_held_out_loss", ("a", "b")),
        ("ood_accuracy", ("d", "e")),
        ("a_bit_loss", ("a_bit",)),
        ("kept_fraction", ()),
    ],
)
def test_a_metric_names_the_environments_that_it_is_measured_in(metric: str, names: tuple[str, ...]) -> None:
    environments = Environments(one, ["a", "b"], ["c"], ["d", "e"], monitored=["a_b", "a_bit"])
    assert environments_of(metric, environments) == names


def test_validation_without_environments_of_its_own_is_of_the_training_environments() -> None:
    assert environments_of("validation_auc", Environments(one, ["a", "b"], test=["d"])) == ("a", "b")


def test_a_final_measure_replaces_no_other_metric() -> None:
    plain = train(JOB, TrainConfig().with_options(epochs=1), ProcessContext(), Silent())
    job = dataclasses.replace(
        JOB, final_measures=lambda _, model: {"train_loss": -1.0, "depth°": 1.0, "depth%": 2.0, "step/loss": 3.0}
    )
    with pytest.warns(UserWarning, match="final measures 'train_loss', 'depth%', 'step/loss': left out"):
        measured = train(job, TrainConfig().with_options(epochs=1), ProcessContext(), Silent())
    assert measured.metrics["depth°"] == 1.0
    assert measured.metrics["train_loss"] == plain.metrics["train_loss"]
    assert measured.metrics.keys() - plain.metrics.keys() == {"depth°"}


def test_final_measures_may_be_numbers_of_numpy_and_torch() -> None:
    given = {"numpy": np.float32(0.25), "torch": torch.tensor(0.5), "whole": np.int64(3)}
    job = dataclasses.replace(JOB, final_measures=lambda *_: given)
    measured = train(job, TrainConfig().with_options(epochs=1), ProcessContext(), Silent()).metrics
    assert json.loads(json.dumps({name: measured[name] for name in given})) == {"numpy": 0.25, "torch": 0.5, "whole": 3}


def test_a_final_measure_that_is_no_number_is_left_out_with_a_warning() -> None:
    job = dataclasses.replace(JOB, final_measures=lambda *_: {"margin": torch.ones(2)})
    with pytest.warns(UserWarning, match="the job's final measures are missing: .*Error: "):
        measured = train(job, TrainConfig().with_options(epochs=1), ProcessContext(), Silent()).metrics
    assert "margin" not in measured
    assert "train_loss" in measured
