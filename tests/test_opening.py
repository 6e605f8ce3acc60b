"""The first lines of a run say what is decided."""

from pathlib import Path

import pytest
import torch

from concord.environments import Environments
from concord.runs.folder import RunFolder
from concord.runs.opening import method_line, opening_lines, purposes
from concord.storage import Folder
from concord.tracking import Store
from concord.training import TrainConfig

STORE = Store("postgresql://me:pa55word@host/runs", None)
RUN = RunFolder("first", Folder(Path("there/runs/first")), STORE, "0", resumed=False)


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
    assert line in opening_lines(RUN, method_line(config), said, None)


def test_what_selects_is_said_and_where_the_run_is_kept_without_passwords() -> None:
    best, lowest, none = (
        opening_lines(RUN, method_line(TrainConfig().with_options(workers=2)), "data", criterion, required)
        for criterion, required in (
            (("validation_accuracy", "max"), {}),
            (("held_out_spread", "min"), {"worst_train_accuracy": 0.65}),
            (None, {}),
        )
    )
    assert best[0] == "run first: and-mask, 2 workers"
    assert best[2] == "champion: the version with the largest validation_accuracy"
    assert (
        lowest[2]
        == "champion: the version with the smallest held_out_spread, with worst_train_accuracy of at least 0.65"
    )
    assert none[2] == "champion: none is selected, since the model is not registered"
    assert best[3] == "kept in there/runs/first, tracked in postgresql://me:***@host/runs"
