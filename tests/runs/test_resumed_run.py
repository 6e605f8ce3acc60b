"""The options of a resumed run, some of which are newer than the run."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from concord.errors import InputError
from concord.record import write_record
from concord.redaction import redact
from concord.runs.lifecycle import open_run, reserved_run, run_description
from concord.runs.run_folder import recorded_config, run_folder
from concord.tracking import Store
from concord.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """Of a later version than the one that began the run."""

    widths: tuple[int, ...] = field(default_factory=lambda: (8, 8))
    """An option that was not there yet."""
    table: Path | None = Path("table.csv")
    """Another, a path."""


def test_a_run_of_a_version_without_an_option_was_one_with_its_default(output: Path) -> None:
    before = TrainConfig().with_options(output=output, name="a").resolve()
    store = Store.open(output)
    run_id = store.start_run("job", "a", {}, {})
    folder = run_folder(output, "a")
    folder.make()
    about = {"job": "job", "run_id": run_id, "store": redact(store.uri), "config": recorded_config(before)}
    write_record(folder, "run", about)
    now = Path("table.csv").absolute()  # as paths are when a run begins
    goes_on = Config().with_options(output=output, name="a", resume=True, table=now).resolve()
    description = run_description(goes_on, "job", {})
    with reserved_run("job", goes_on) as reserved, open_run(reserved, description, lambda _: None) as run:
        assert (run.resumed, run.run_id) == (True, run_id)
    with (
        pytest.raises(InputError, match=r"--widths \[4\]: the run a was started with \[8, 8\]"),
        reserved_run("job", goes_on.with_options(widths=(4,))),
    ):
        pass
