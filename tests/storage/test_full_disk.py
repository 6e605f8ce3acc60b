"""Errors of a disk in one line, and runs on a full disk: a small file system, which only root can make.

``test_faults.py`` tries every write of whole commands.
"""

import contextlib
import errno
import os
import pickle
import re
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from tracked import points_of, tracked_runs

from concord.analysis.figures import save
from concord.analysis.trajectory_figures import moving_picture
from concord.cli import main
from concord.errors import InputError, RunFailedError
from concord.execution.run import run
from concord.record import folder_of, require_run
from concord.storage import (
    DiskError,
    Folder,
    JsonLines,
    append_line,
    disk_errors_in_one_line,
    read_lines,
    require_space,
)
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


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (lambda folder: Folder(folder).write("file", "text"), "file.new"),
        (lambda folder: append_line(folder / "lines", 1), "lines"),
        (lambda folder: save(Figure(), folder / "figure.png"), "figure.png"),
        (lambda folder: moving_picture(torch.zeros(2, 1, 3, 3), folder / "moving.gif"), "moving.gif"),
        (write_with_torch, "model.safetensors"),
        (write_with_torch, "optimizer.pt"),
        (write_with_torch, "progress.json"),
        (write_with_torch, "checksums.json"),
    ],
)
def test_a_folder_in_place_of_a_file_is_one_line_with_the_file(
    tmp_path: Path, write: Callable[[Path], object], file: str
) -> None:
    (tmp_path / file).mkdir()
    with pytest.raises(DiskError) as error, disk_errors_in_one_line(tmp_path):
        write(tmp_path)
    assert str(error.value) == f"{tmp_path / file}: cannot be read or written (Is a directory)"
    assert error.value.errno == errno.EISDIR
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_too_many_open_files_are_one_line_with_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(DiskError, match=r"/file\.new: cannot be read or written \(Too many open files\)$"):
            Folder(tmp_path).write("file", "text")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("function", ["write", "fsync", "ftruncate", "open"])
def test_an_error_without_a_name_gets_the_file_and_leaves_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, function: str
) -> None:
    append_line(tmp_path / "lines", "first")

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    def write() -> None:
        with contextlib.closing(JsonLines(tmp_path / "lines")) as lines:
            lines.append("second")
            lines.sync()

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        with pytest.raises(DiskError, match=rf"^{tmp_path / 'lines'}: ") as error:
            write()
    assert error.value.errno == number
    assert [*read_lines(tmp_path / "lines")][:1] == ["first"]


def test_a_line_that_is_taken_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:3]))
    append_line(tmp_path / "lines", "a long line")
    assert [*read_lines(tmp_path / "lines")] == ["a long line"]


def test_errors_that_are_not_of_a_disk_stay_what_they_are(tmp_path: Path) -> None:
    for other in (
        ConnectionRefusedError(111, "refused"),
        TimeoutError(110, "late"),
        OSError("no number"),
        KeyError("x"),
    ):
        with pytest.raises(type(other)), disk_errors_in_one_line(tmp_path):
            raise other
    with pytest.raises(OSError, match="Input/output error"), disk_errors_in_one_line():  # names no file
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(InputError), disk_errors_in_one_line(tmp_path):
        raise InputError("--x") from OSError(28, "No space left on device")


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(disk: Path) -> None:
    with contextlib.closing(JsonLines(disk / "lines")) as lines:
        lines.append("first")
        fill(disk)
        with pytest.raises(OSError, match=str(disk / "lines")):
            lines.append("x" * (1 << 20))
        with pytest.raises(OSError, match=str(disk / "lines")):
            lines.append("small", "x" * (1 << 20))  # which belong together
        (disk / "filler").unlink()
        lines.append("second", "third")
    assert list(read_lines(disk / "lines")) == ["first", "second", "third"]


def test_nothing_is_begun_on_a_disk_without_the_reserve(disk: Path) -> None:
    require_space(disk)
    (disk / "filler").write_bytes(bytes(11 << 19))
    with pytest.raises(DiskError, match=r"disk; 0\.5 MiB are free, at least 1 MiB must be free$"):
        require_space(disk)


@pytest.mark.parametrize("file", ["runs/a/metrics.json.new", "runs/a/figures", "keys"])
def test_a_run_whose_end_cannot_be_written_says_so_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    words = ["train", JOB_FILE, "--name", "a", "--epochs", "2", "--no-register", "--output", str(tmp_path)]
    output = tmp_path / Path(file).parent
    output.mkdir(parents=True, exist_ok=True)
    write = Folder.write

    def write_late(folder: Folder, name: str, *content: Any, **options: Any) -> None:
        if name == "record.json" and not (tmp_path / file).exists():  # a new run's folder must be empty
            (tmp_path / file).mkdir() if file.endswith(".new") else (tmp_path / file).touch()
        write(folder, name, *content, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "write", write_late)
        assert main(words) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert re.search(rf"^concord: {tmp_path / file}\S*: cannot be read or written \(\w.*\)$", said.err, re.MULTILINE)
    trained = require_run(folder_of(tmp_path, "a"))
    (tmp_path / file).rmdir() if file.endswith(".new") else (tmp_path / file).unlink()
    assert main([*words, "--resume"]) == 0
    finished = require_run(folder_of(tmp_path, "a"))
    assert finished.status == "FINISHED"
    assert finished.evaluations == trained.evaluations


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
