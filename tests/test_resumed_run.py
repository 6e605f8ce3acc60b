"""What is found again of a run that goes on: its options, and the metrics that the store has not taken."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from concord.errors import InputError
from concord.runs.folder import recorded_config, run_folder, write_record
from concord.runs.lifecycle import reserved_run, run_lifecycle
from concord.runs.run import send_unsent
from concord.runs.worker import METRICS
from concord.storage import Folder
from concord.tracking import MetricLog, Store
from concord.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """Of a later version than the one that began the run."""

    widths: tuple[int, ...] = field(default_factory=lambda: (8, 8))
    """An option that was not there yet."""
    table: Path | None = Path("table.csv")
    """Another, a path."""


def test_a_run_of_a_version_without_an_option_was_one_with_its_default(output: Path) -> None:
    before = TrainConfig().with_options(output=output, name="a")
    store = Store.open(output)
    run_id = store.start_run("job", "a", {}, {})
    run_folder(output, "a").path.mkdir(parents=True)
    write_record(run_folder(output, "a").path, {"job": "job", "run_id": run_id, "config": recorded_config(before)})
    now = Path("table.csv").absolute()  # as paths are when a run begins
    goes_on = Config().with_options(output=output, name="a", resume=True, table=now).resolved()
    with reserved_run("job", goes_on) as reserved, run_lifecycle(reserved, {}) as opened:
        assert (opened.resumed, opened.run_id) == (True, run_id)
    with (
        pytest.raises(InputError, match=r"--widths \(4,\): the run a was started with \(8, 8\)"),
        reserved_run("job", goes_on.with_options(widths=(4,))),
    ):
        pass


def test_what_the_store_had_not_taken_when_training_ended_is_sent_when_it_is_back(output: Path) -> None:
    store = Store.open(output)
    run_id = store.start_run("job", "a", {}, {})
    kept = Folder(output) / "runs" / "a"
    log = MetricLog(kept.path / METRICS, "http://127.0.0.1:9", run_id)
    log.log({"loss": 1.0, "epoch": 2.0}, 3)
    assert log.close(0.0) == 2
    assert send_unsent(kept, store.uri, run_id) == 0
    assert store.metrics(run_id) == {"loss": 1.0, "epoch": 2.0}
