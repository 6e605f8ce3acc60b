"""Runs on a full disk: a small file system, which only root can make."""

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tracked import points_of, tracked_runs

from concord.errors import InputError, RunFailedError
from concord.runs.run import run
from concord.storage import DiskError, JsonLines, append_line, disk_errors_in_one_line, read_lines, require_space
from concord.tracking import Store
from concord.training import load_job
from concord.training.checkpoint import write_checkpoint
from concord.training.optimization import Optimization

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")
OPTIONS: dict[str, Any] = {"epochs": 8, "batch_size": 16, "lr": 5e-2, "threshold": 0.6, "evaluations": 4}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MiB and 400 files."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m,nr_inodes=400", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte."""
    with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 << 10))


def write_with_torch(folder: Path) -> None:
    model = torch.nn.Linear(1000, 1000)
    config = load_job(JOB_FILE).job.config.resolve()
    from concord.training.checkpoint import Progress

    write_checkpoint(folder, model, Optimization(list(model.parameters()), config, 1), Progress())


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: (folder / "file").write_bytes(bytes(1 << 20)),
        lambda folder: save_file({"a": torch.zeros(1 << 18)}, folder / "file"),
        lambda folder: append_line(folder / "lines", "x" * (1 << 20)),
        write_with_torch,
    ],
)
def test_whatever_finds_a_disk_full_says_so_in_one_line(disk: Path, write: Callable[[Path], object]) -> None:
    fill(disk)
    with pytest.raises(DiskError) as error, disk_errors_in_one_line(disk):
        write(disk)
    assert str(error.value).startswith(str(disk))
    assert "no space left on the disk" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_full_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk_errors_in_one_line(tmp_path):
        (tmp_path / "nothing").read_bytes()
    with pytest.raises(InputError), disk_errors_in_one_line(tmp_path):
        raise InputError("--x") from OSError(28, "No space left on device")


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(disk: Path) -> None:
    with contextlib.closing(JsonLines(disk / "lines")) as lines:
        lines.append("first")
        fill(disk)
        with pytest.raises(OSError, match=str(disk / "lines")):
            lines.append("x" * (1 << 20))
        (disk / "filler").unlink()
        lines.append("second")
    assert list(read_lines(disk / "lines")) == ["first", "second"]


def test_nothing_is_begun_on_a_disk_without_the_reserve(disk: Path) -> None:
    require_space(disk)
    (disk / "filler").write_bytes(bytes(11 << 19))
    with pytest.raises(DiskError, match=r"disk; 0\.5 MiB are free, at least 1 MiB must be free$"):
        require_space(disk)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_on_a_full_disk_ends_in_one_line_and_resumes_with_space(
    ray_cluster: None,
    disk: Path,
    capfd: pytest.CaptureFixture[str],
    workers: int,
) -> None:
    """There are bytes, but no files: so a checkpoint is begun, and cannot be finished."""
    folder = disk / "runs" / "full"
    fillers = disk / "fillers"
    fillers.mkdir()

    def checkpoints() -> list[Path]:
        found = folder.glob("checkpoints/checkpoint_*/model.safetensors")
        return sorted(path for path in found if path.parent.suffix != ".new")

    def fill_after_the_first_checkpoint() -> None:
        deadline = time.monotonic() + 120
        while not checkpoints() and time.monotonic() < deadline:
            time.sleep(0.05)
        for number in range(os.statvfs(disk).f_favail - 3):  # a checkpoint has a folder and four files
            (fillers / str(number)).touch()

    job = load_job(JOB_FILE)
    config = job.job.config.with_options(**OPTIONS, output=disk, name="full", pause=0.1, workers=workers)
    watcher = threading.Thread(target=fill_after_the_first_checkpoint)
    watcher.start()
    with pytest.raises(RunFailedError) as error:
        run(job, config, lambda _: None)
    watcher.join()
    line = rf"{folder}/checkpoints/checkpoint_\d+\.new(/\w+\.\w+)?: no space left on the disk"
    assert re.fullmatch(line, str(error.value))
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    (kept,) = tracked_runs(Store.open(disk), "shared-rule", finished_only=False)
    assert kept.status == "FAILED"
    assert checkpoints()
    assert {path.parent for path in checkpoints()} == set(folder.glob("checkpoints/checkpoint_*"))
    for filler in fillers.iterdir():
        filler.unlink()
    # No bytes: so it is not begun.
    config = config.with_options(resume=True)
    fill(disk)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - (256 << 10))
    with pytest.raises(
        RunFailedError, match=rf"^{folder}: no space left on the disk; 0\.\d MiB are free, at least 1 MiB must"
    ):
        run(job, config, lambda _: None)
    (disk / "filler").unlink()
    (folder / "checkpoints" / "checkpoint_000000000001").mkdir()  # as a kill leaves one
    report = run(job, config, lambda _: None)
    store = Store.open(disk)
    assert [step for step, _ in points_of(store, report.run_id, "step/loss")] == list(range(1, 41))
    assert store.run(report.run_id).status == "FINISHED"
    assert len(checkpoints()) == 2
