"""Without the extras all else works, and errors show how to install them."""

import json
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Concord

from concord import extras
from concord.cli import main
from concord.errors import InputError
from concord.extras import EXTRAS, install_command, require_extra

ROOT = Path(__file__).parents[1]


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
    without: Callable[[str], None],
    concord_: Concord,
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
    command: str,
    what: str,
) -> None:
    without(extra)
    monkeypatch.setattr(extras, "_published_elsewhere", lambda _: None)
    said = concord_(*command.split())
    assert said.status == 2
    assert said.err.splitlines()[-1] == f"concord: {what} needs {EXTRAS[extra][0]}: {install_command(extra)}"
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


def test_every_extra_for_users_is_known_by_name_and_modules() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(declared) - {"dev", "docs", "server", "test"}
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == extras.DISTRIBUTION


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """The words after ``pip install`` for the extra ``images``, where Concord and torch are installed in this way."""

    def words(torch: str, origin: object = None, sources: Path = tmp_path / "site-packages") -> list[str]:
        monkeypatch.setattr(extras, "version", {"torch": torch}.__getitem__)
        monkeypatch.setattr(extras, "_SOURCES", sources)
        metadata = type("Metadata", (), {"read_text": lambda self, name: origin and json.dumps(origin)})
        monkeypatch.setattr(extras, "distribution", {"concord-ood": metadata()}.__getitem__)
        _, found, rest = install_command("images").partition("pip install ")
        assert found
        return shlex.split(rest)

    return words


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a check out"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    (folder / "constraints.txt").write_text("pandas==3.0.6\ntorch==2.13.0\n")
    return folder


CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


def test_from_the_index_an_extra_keeps_the_installed_torch(installed: Callable[..., list[str]]) -> None:
    assert installed("2.13.0+cpu") == [*CPU_INDEX, "concord-ood[images]", "torch==2.13.0+cpu"]
    assert installed("2.13.0") == ["concord-ood[images]", "torch==2.13.0"]
    assert installed("2.13.0+cu130", {"archive_info": {}, "url": "file:///a.whl"})[1].endswith("/whl/cu130")


def test_an_extra_of_a_checkout_is_installed_from_its_folder(
    installed: Callable[..., list[str]], checkout: Path
) -> None:
    constraint, origin = ["--constraint", f"{checkout}/constraints.txt"], {"dir_info": {}, "url": checkout.as_uri()}
    assert installed("2.13.0+cpu", origin) == [*constraint, *CPU_INDEX, f"{checkout}[images]"]
    assert installed("2.13.0", sources=checkout) == [*constraint, "--editable", f"{checkout}[images]"]
    assert installed("2.9.1", sources=checkout) == ["torch==2.9.1", "--editable", f"{checkout}[images]"]
    shutil.rmtree(checkout)
    assert installed("2.13.0", origin) == ["concord-ood[images]", "torch==2.13.0"]


def test_the_line_calls_the_pip_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/another/bin")
    assert install_command("images").startswith(shlex.join([sys.executable, "-m", "pip", "install", ""])[:-3])
    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    assert install_command("images", replaced="torchvision").startswith(
        "pip uninstall --yes torchvision && pip install "
    )


def test_where_a_package_is_not_published_no_line_is_given(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without("coinrun")
    without("box2d")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(InputError, match=r"Procgen, .* for Python 3\.11 and 3\.12 on Linux on x86-64 alone$"):
        require_extra("coinrun", "an agent")
    monkeypatch.setattr("sys.version_info", (3, 14, 0))
    with pytest.raises(InputError, match=r"Box2D, which is published for Python 3\.11 to 3\.13 alone$"):
        require_extra("box2d", "a task")
