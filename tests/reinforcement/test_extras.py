"""Without the extras all else works, and errors show how to install them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Concord

from concord.cli import main

EXTRAS = {
    "coinrun": ("Procgen and RLlib", ("procgen", "tree")),
    "mujoco": ("MuJoCo", ("mujoco",)),
    "box2d": ("Box2D", ("Box2D",)),
}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """As where the extra is not installed: None in ``sys.modules`` makes an import fail, and its finding."""

    def block(extra: str) -> None:
        for module in EXTRAS[extra][1]:
            monkeypatch.setitem(sys.modules, module, None)

    return block


@pytest.mark.parametrize(
    ("extra", "command", "what"),
    [
        ("coinrun", "train coinrun-expert", "an agent"),
        ("coinrun", "data coinrun-clone", "making cloning data"),
        ("coinrun", "train coinrun-clone", "--play-episodes 100"),
        ("coinrun", "bench --only procgen_environment", "procgen_environment"),
        ("mujoco", "data distill-mujoco", "making the data of distill-mujoco"),
        ("mujoco", "bench --only reward_trajectories", "reward_trajectories"),
        ("box2d", "data room-runner", "making the data of room-runner"),
        ("box2d", "data funnel-board", "making the data of funnel-board"),
        ("box2d", "bench --only box_tasks", "box_tasks"),
    ],
)
def test_what_needs_an_extra_says_so_in_one_line_and_leaves_nothing(
    without: Callable[[str], None], concord_: Concord, extra: str, command: str, what: str
) -> None:
    without(extra)
    said = concord_(*command.split())
    assert said.status == 2
    assert said.err.splitlines()[-1] == f"concord: {what} needs {EXTRAS[extra][0]}: pip install 'concord[{extra}]'"
    assert list(Path().iterdir()) == []


def test_every_job_is_listed_without_extras(without: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    for extra in EXTRAS:
        without(extra)
    assert main(["jobs"]) == 0
    assert {"coinrun-clone", "coinrun-expert", "synthetic"} <= set(capsys.readouterr().out.split())


def test_a_clone_that_plays_nothing_needs_only_its_data(
    without: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without("coinrun")
    assert main(["train", "coinrun-clone", "--play-episodes", "0", "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "coinrun]" not in said
    assert "no data of coinrun-clone" in said
