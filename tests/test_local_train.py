"""Training in processes of this machine, without Ray: the same result, and the same end whatever befalls a worker."""

import sys
import types
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from typing import Any

import pytest
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import _CheckpointManagerState

from concord.errors import InputError, RunFailedError
from concord.runs.checkpoints import (
    CHECKPOINTS,
    SNAPSHOT,
    journal_length,
    keep_checkpoint,
    last_checkpoint,
    note_journal_length,
    remove_partial_checkpoints,
)
from concord.runs.folder import run_folder, write_record
from concord.runs.local_train import _nothing_to_import, train_here, trains_here
from concord.runs.worker import Trained
from concord.storage import Folder, read_lines
from concord.tracking import Store
from concord.training import TrainConfig, load_job

JOB_FILE = str(Path(__file__).parent / "jobs" / "shared_rule.py")
OPTIONS: dict[str, Any] = {
    "epochs": 4, "batch_size": 16, "lr": 5e-2, "threshold": 0.6, "evaluations": 2, "vectorize": "vmap",
}  # fmt: skip


def trained(output: Path, **options: Any) -> Trained:
    """Train in a folder of its own, as a run does."""
    job = load_job(JOB_FILE)
    config = job.job.config.with_options(**OPTIONS | {"output": output} | options)
    store = Store.open(output)
    folder = run_folder(output, "a")
    folder.path.mkdir(parents=True)
    run_id = store.start_run("job", "a", {}, {})
    write_record(folder.path, {"job": "job", "run_id": run_id, "config": {}})
    return train_here(job, config, folder, store.uri, run_id)


def comparable(done: Trained) -> dict[str, float]:
    return {name: value for name, value in done.outcome.metrics.items() if name != "steps_per_second"}


def test_the_number_of_processes_changes_nothing_but_rounding_and_every_step_is_tracked(output: Path) -> None:
    one, three = trained(output / "one"), trained(output / "three", workers=3)
    assert comparable(three) == pytest.approx(comparable(one), rel=1e-4)
    assert [part.name for part in three.data] == [part.name for part in one.data]
    for each in ("one", "three"):
        store = Store.open(output / each)
        (run,) = store.runs("job", finished_only=False)
        assert [step for step, _ in store.history(run.run_id, "step/loss")] == list(range(1, 21))
        assert run.metrics["ood_accuracy"] == one.outcome.metrics["ood_accuracy"]
    assert (one.unsent, three.unsent) == (0, 0)


def test_a_worker_that_always_dies_is_replaced_as_often_as_is_said_and_named(output: Path) -> None:
    with pytest.raises(
        RunFailedError,
        match=r"^training failed: worker 1 was ended by SIGKILL; the machine may have run out of memory$",
    ):
        trained(output, workers=2, trouble="killed", max_failures=1)
    assert [line for line, _ in read_lines(output / "attempts")] == ["c"] * 2


@pytest.mark.parametrize(
    ("trouble", "error", "line"),
    [
        ("target", InputError, "^environment c: target 2 is out of range"),
        ("infinite", RunFailedError, "^the gradient of environment c is not finite at step 0"),
        ("bug", RunFailedError, "(?s)^training failed: ZeroDivisionError.*Traceback"),
    ],
)
def test_a_mistake_that_one_worker_meets_is_told_once(
    output: Path, capfd: pytest.CaptureFixture[str], trouble: str, error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=line):
        trained(output, workers=2, trouble=trouble)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_what_asks_for_ray_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = TrainConfig()
    assert trains_here(config)
    for asks in ({"address": "local"}, {"use_gpu": True}, {"workers": 2, "min_workers": 1}):
        assert not trains_here(config.with_options(**asks))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert not trains_here(config)


def test_a_script_is_not_run_again_by_the_workers_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    script.__file__ = "script.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert "init_main_from_path" in get_preparation_data("worker")
    with _nothing_to_import():
        assert not {name for name in get_preparation_data("worker") if name.startswith("init_main")}
    assert sys.modules["__main__"] is script


# --- checkpoints


def write_checkpoint(folder: Path, number: int) -> Path:
    written = folder / f"written-{number}"
    written.mkdir(parents=True)
    (written / "model").write_text(str(number))
    note_journal_length(written, 10 * number)
    return written


def test_the_last_checkpoints_are_kept_in_a_list_that_ray_train_reads(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    (folder.path / CHECKPOINTS).mkdir(parents=True)
    assert last_checkpoint(folder) is None
    assert journal_length(None) == 0
    for number in range(4):
        keep_checkpoint(folder, write_checkpoint(tmp_path, number), {"train_loss": float(number)})
    last = last_checkpoint(folder)
    assert last is not None
    assert ((last / "model").read_text(), journal_length(last)) == ("3", 30)
    listed = _CheckpointManagerState.parse_raw((folder.path / CHECKPOINTS / SNAPSHOT).read_text())
    assert [each.metrics["train_loss"] for each in listed.checkpoint_results] == [2.0, 3.0]
    assert listed.checkpoint_report_indices == [2, 3]
    assert listed.current_report_index == 4
    kept = {each.checkpoint_dir_name for each in listed.checkpoint_results}
    assert set(folder.names(CHECKPOINTS)) == kept | {SNAPSHOT}
    (folder.path / CHECKPOINTS / "checkpoint_of-a-kill").mkdir()
    remove_partial_checkpoints(folder)
    assert set(folder.names(CHECKPOINTS)) == kept | {SNAPSHOT}


def test_a_list_that_a_kill_cut_short_is_named_and_removes_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (folder.path / CHECKPOINTS / "checkpoint_1").mkdir(parents=True)
    (folder.path / CHECKPOINTS / SNAPSHOT).write_text('{"checkpoint_results": [')
    remove_partial_checkpoints(folder)
    assert "checkpoint_1" in folder.names(CHECKPOINTS)
    with pytest.raises(RunFailedError, match=rf"^{tmp_path}/{CHECKPOINTS}/{SNAPSHOT}: cannot be read"):
        last_checkpoint(folder)
