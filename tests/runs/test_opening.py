"""The first lines of a run describe its data, its selection and its rule."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from concord.environments import Environments
from concord.record import OpenRun, Run
from concord.runs.lifecycle import Open
from concord.runs.opening import comparison, mask_lines, mask_parameters, method_line, opening_lines, purposes
from concord.storage import Folder
from concord.tracking import Store
from concord.training import TrainConfig, load_job

STORE = Store("postgresql://me:pa55word@host/runs", None)
RUN = Open(cast(OpenRun, Run(Folder(Path("there/runs/first")))), STORE, cast(Any, None), resumed=False)
COMPARE = "concord compare mine methods"


def environments(names: str, **purposes: list[str]) -> Environments:
    data = torch.zeros(2, 3), torch.arange(2)
    return Environments.from_arrays(dict.fromkeys(names, data), **purposes)


@pytest.mark.parametrize(
    ("config", "data", "line"),
    [
        (TrainConfig(), environments("ab"), "data: 2 environments for training (0.1 of each held out)"),
        (
            TrainConfig().with_options(held_out=0.0),
            environments("abcd", validation=["b", "c"], test=["d"]),
            "data: 1 environment for training, 2 for validation, 1 for test",
        ),
    ],
)
def test_the_data_are_told_by_what_they_are_for(config: TrainConfig, data: Environments, line: str) -> None:
    said = purposes(data, config.data.held_out)
    assert line in opening_lines(RUN, method_line(config, on_ray=False), [f"data: {said}"], None)


def test_what_selects_is_said_and_where_the_run_is_kept_without_passwords() -> None:
    best, lowest, none = (
        opening_lines(
            RUN, method_line(TrainConfig().with_options(workers=2), on_ray=True), ["data"], criterion, required
        )
        for criterion, required in (
            (("validation_accuracy", "max"), {}),
            (("held_out_spread", "min"), {"worst_train_accuracy": 0.65}),
            (None, {}),
        )
    )
    assert best[0] == "run first: and-mask, 2 workers on Ray Train"
    assert best[2] == "champion: the version with the largest validation_accuracy"
    assert (
        lowest[2]
        == "champion: the version with the smallest held_out_spread, with worst_train_accuracy of at least 0.65"
    )
    assert none[2] == "champion: none is selected, since the model is not registered"
    assert best[3] == "kept in there/runs/first, tracked in postgresql://me:***@host/runs"


def mask(count: int, **options: object) -> list[str]:
    lines = mask_lines(TrainConfig().with_options(**options), count, COMPARE)
    return [line.removeprefix("mask: ") for line in lines]


def passing(signs: str, chance: str, count: str = "32 environments", tau: str = "0.8") -> str:
    return f"{count}, τ {tau}: {signs} must agree; by chance a component passes with probability {chance}"


def test_what_a_threshold_means_is_said() -> None:
    assert mask(32) == [passing("29 of 32 signs", "2.6e-6", tau="0.8125")]
    assert mask(32, threshold=0.8) == [passing("29 of 32 signs", "2.6e-6")]
    assert mask(100) == [passing("75 of 100 signs", "5.6e-7", "100 environments", "0.5")]
    assert mask(20) == [passing("20 of 20 signs", "1.9e-6", "20 environments", "1")]
    assert mask(32, significance=1e-6) == [passing("30 of 32 signs", "2.5e-7", tau="0.875")]
    assert mask(32, environments_per_step=16)[0] == passing("15 of 16 signs", "5.2e-4", "16 environments")
    assert mask(8, steps_per_update=4)[0] == passing("29 of 32 signs", "2.6e-6", "32 votes", "0.8125")
    assert mask(2, per_example=True, batch_size=16) == [passing("29 of 32 signs", "2.6e-6", "32 examples", "0.8125")]
    assert mask(20, aggregator="t-mask") == [
        "20 environments, t-test at 1.0e-4: a mean must be 4.9 standard errors from 0"
    ]
    assert mask(32, aggregator="mean") == mask(32, aggregator="sand-mask") == []
    assert mask(32, aggregator="xor-mask") == [
        "32 environments, τ 0.8: fewer than 29 of 32 signs may agree; by chance a component passes with probability 1"
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"workers": 4},
            "compares 8 gradients, and the workers send them all: 2 × the bytes of a sum; --workers 8 sends 1 ×",
        ),
        (
            {"workers": 3},
            "compares 8 gradients, and the workers send them all: 2.67 × the bytes of a sum; --workers 8 sends 1 ×",
        ),
        (
            {"workers": 8, "steps_per_update": 2},
            "compares 16 gradients, and the workers send them all: 2 × the bytes of a sum",
        ),
        ({"workers": 8}, None),
        ({"workers": 1}, None),
        ({"workers": 4, "aggregator": "and-mask"}, None),
    ],
)
def test_gradients_that_travel_for_a_comparison_are_counted_before_a_run(
    options: dict[str, object], line: str | None
) -> None:
    lines = mask_lines(TrainConfig().with_options(**{"aggregator": "pcgrad"} | options), 8, COMPARE)
    found = [each for each in lines if each.startswith("exchange: ")]
    assert found == ([] if line is None else [f"exchange: pcgrad {line}"])


@pytest.mark.parametrize(
    ("count", "options", "warning"),
    [
        (3, {}, "chance alone keeps 25% of the components; at least 8 environments at a step bring it below 1%"),
        (10, {}, "chance alone keeps 2% of the components; --significance 0.01 asks for 10 of 10 signs"),
        (20, {}, None),
        (10, {"threshold": 0.0}, None),  # the average
        (10, {"threshold": 0.4}, None),  # little agreement is asked for
        (10, {"significance": 0.05}, None),
        (10, {"aggregator": "xor-mask"}, None),
    ],
)
def test_a_mask_that_chance_passes_is_warned_of_where_it_is_not_asked_for(
    count: int, options: dict[str, object], warning: str | None
) -> None:
    warnings = [line for line in mask(count, **options) if line.startswith("warning: ")]
    assert warnings == ([] if warning is None else [f"warning: {warning}"])


@pytest.mark.parametrize(
    ("count", "options", "told"),
    [
        (7, {}, "these 7 environments agree fully with probability 1.6e-2,"),
        (17, {}, "these 17 environments agree fully with probability 1.5e-5,"),
        (18, {}, None),
        (100, {"environments_per_step": 10}, "these 10 environments agree fully with probability 2.0e-3,"),
        (
            7,
            {"steps_per_update": 8},
            "these 7 environments agree fully with probability 1.6e-2,",
        ),  # batches of one environment share its shortcuts
        (7, {"environment_momentum": 0.9}, "these 7 environments agree fully with probability 1.6e-2,"),
        (10, {"significance": 0.01}, "these 10 environments agree fully with probability 2.0e-3,"),
        (7, {"aggregator": "geometric-mean"}, "these 7 environments agree fully with probability 1.6e-2,"),
        (7, {"aggregator": "t-mask"}, "these 7 environments agree fully with probability 1.6e-2,"),
        (20, {"aggregator": "t-mask"}, None),
        (7, {"aggregator": "mean"}, None),
        (7, {"threshold": 0.0}, None),
        (2, {"per_example": True, "threshold": 0.2}, None),
    ],
)
def test_few_environments_are_told_before_training_what_to_expect(
    count: int, options: dict[str, object], told: str | None
) -> None:
    expected = [line for line in mask(count, **options) if line.startswith("expect: shortcuts may be learned")]
    assert [told in line for line in expected] == ([] if told is None else [True])
    assert all(line.endswith(f"; to compare methods: {COMPARE}") for line in expected)


def test_the_command_that_compares_methods_has_the_job_and_the_options_of_its_data(tmp_path: Path) -> None:
    job = load_job("table")
    config = job.job.config.with_options(data=tmp_path, target="chest pain", lr=0.1, name="a")
    command = f"concord compare table methods --data {tmp_path} --target 'chest pain'"
    assert comparison(job, config, {"target", "data", "lr", "name"}) == command
    config = TrainConfig().with_options(data_dir=tmp_path, threshold=0.9)
    command = f"concord compare {tmp_path / 'mine.py'} methods --data-dir {tmp_path}"
    assert comparison(dataclasses.replace(job, path=str(tmp_path / "mine.py")), config, {"data_dir"}) == command


def test_what_follows_from_the_options_is_a_parameter() -> None:
    assert mask_parameters(TrainConfig(), 20) == {"chance_fraction": 2**-19, "threshold": 1.0}
    given = TrainConfig().with_options(threshold=0.8)
    assert mask_parameters(given, 20) == {"chance_fraction": pytest.approx(4.02e-4, rel=1e-2)}
    assert mask_parameters(TrainConfig().with_options(aggregator="sand-mask"), 20) == {"threshold": 0.8}
    found = mask_parameters(TrainConfig().with_options(significance=1e-4), 20)
    assert found == {"chance_fraction": 42 / 2**20, "threshold": 0.9}
    assert mask_parameters(TrainConfig().with_options(aggregator="mean"), 20) == {}
    by_test = mask_parameters(TrainConfig().with_options(aggregator="t-mask"), 3)
    assert by_test == {"chance_fraction": 1e-4, "significance": 1e-4}
