"""The options of a resumed run, some of which are newer than the run, and its data."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from concord.runs.resume import require_same_data
from concord.runs.run_folder import recorded_config, run_folder
from test_table_environments import patients

from concord.cli import main
from concord.environments.table import from_table
from concord.errors import InputError
from concord.record import RECORD, read_record, write_record
from concord.redaction import redact
from concord.runs.lifecycle import open_run, reserved_run, run_description
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


def test_a_run_resumes_on_the_data_of_its_beginning_alone(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a table with a renamed level the encoder, fitted again, would give the checkpoint other levels."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    file, before = tmp_path / "patients.csv", patients()
    before.to_csv(file, index=False)
    words = ["train", "table", "--data", str(file), "--environment", "hospital", "--target", "died"]
    words += ["--output", str(output), "--name", "a", "--epochs", "2", "--no-register"]
    with monkeypatch.context() as patch:
        patch.setattr("concord.runs.run.remove_older", interrupted)  # after the first checkpoint
        assert main(words) == 1

    folder = run_folder(output, "a")
    record, kept = read_record(folder), (folder.path / RECORD).read_bytes()
    assert record is not None
    began = from_table(file, environment="hospital", target="died").version
    assert record["data"] == began
    before.replace("typical", "usual").to_csv(file, index=False)
    now = from_table(file, environment="hospital", target="died").version
    capsys.readouterr()
    assert main([*words, "--resume"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"concord: --name a: the run was started with data of version {began}, and these have version {now}; restore "
        "the data, or give another name without --resume"
    )
    assert (folder.path / RECORD).read_bytes() == kept

    before.to_csv(file, index=False)
    assert main([*words, "--resume"]) == 0


def test_a_run_without_a_version_of_its_data_resumes_as_before(output: Path) -> None:
    require_same_data("a", "b2", None)  # recorded by an earlier Concord
    require_same_data("a", None, "a1")  # the data have moved to an address, which has none
    config = TrainConfig().with_options(output=output, name="a").resolve()
    with (
        reserved_run("job", config) as reserved,
        open_run(reserved, run_description(config, "job", {}), lambda _: None) as run,
    ):
        assert "data" not in json.loads((run.kept.path / RECORD).read_text())
