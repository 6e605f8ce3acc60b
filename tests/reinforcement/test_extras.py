"""Without the extra coinrun all else works, and errors show how to install the extra."""

import sys
from pathlib import Path

import pytest

from concord.cli import main


@pytest.fixture
def without_coinrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ``pip install .`` was all: None in ``sys.modules`` makes an import fail, and its finding."""
    for module in ("procgen", "tree"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("without_coinrun")
@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["train", "coinrun-expert"], "an agent"),
        (["data", "coinrun-clone"], "making cloning data"),
        (["train", "coinrun-clone"], "--play-episodes 100"),
        (["bench", "--only", "procgen_environment"], "procgen_environment"),
    ],
)
def test_what_needs_the_extra_says_so_in_one_line_and_leaves_nothing(
    command: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"concord: {what} needs Procgen and RLlib: pip install 'concord[coinrun]'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_coinrun")
def test_every_job_is_listed_without_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0
    assert {"coinrun-clone", "coinrun-expert", "synthetic"} <= set(capsys.readouterr().out.split())


@pytest.mark.usefixtures("without_coinrun")
def test_a_clone_that_plays_nothing_needs_only_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "coinrun-clone", "--play-episodes", "0", "--data-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "coinrun]" not in said
    assert "no data of coinrun-clone" in said


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["data", "distill-mujoco"], "making the data of distill-mujoco"),
        (["bench", "--only", "reward_trajectories"], "reward_trajectories"),
    ],
)
def test_what_needs_mujoco_says_so_in_one_line_and_leaves_nothing(
    command: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"concord: {what} needs MuJoCo: pip install 'concord[mujoco]'"
    assert list(tmp_path.iterdir()) == []
