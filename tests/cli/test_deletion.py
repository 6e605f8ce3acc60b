"""``concord runs delete`` and ``concord models delete`` ask, and refuse what a champion needs."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Concord
from recorded import described

from concord.record import Kind, OpenRun, folder_of, write_record
from concord.tracking import Store, models, register
from concord.tracking.mirror import track
from concord.tracking.registry import delete_version, deleted_version


def recorded(store: Store, output: Path, name: str, kind: Kind = "run", **more: Any) -> OpenRun:
    """A finished run or group, tracked in a store."""
    folder = folder_of(output, name, kind)
    folder.make()
    run = OpenRun(folder, write_record(folder, kind, described(kind, **more)))
    track(store, run)
    run.append("began")
    run.append("ended", status="FINISHED")
    run.close()
    return run


@pytest.fixture
def store(output: Path) -> Store:
    """Runs a and b with a model each, of which b's is the champion; a study with two trials, one of them in another."""
    store = Store.open(output)
    for name, value in (("a", 0.5), ("b", 0.9)):
        run_id = str(recorded(store, output, name).run_id)
        register(store, f"runs:/{run_id}/model", run_id, "mine", {"auc": value}, "auc", "max")
    for study, trials in (("s", ["s-trial-0", "s-trial-1"]), ("t", ["s-trial-1"])):
        group = recorded(store, output, study, "study")
        again = OpenRun(group.folder, group.record)
        for number, trial in enumerate(trials):
            again.append("asked", kind="trial", run=trial, key="k", trial=number, point={})
        again.close()
    for number in range(2):
        recorded(store, output, f"s-trial-{number}", group="s")
    return store


def names(output: Path, kind: str = "runs") -> list[str]:
    return sorted(path.name for path in (output / kind).iterdir())


def test_a_run_goes_with_its_files_and_its_versions(store: Store, output: Path, concord_: Concord) -> None:
    done = concord_("runs", "delete", "a", "--yes", "--output", output, "--json")
    assert (done.status, done.json) == (0, {"deleted": ["a"], "models": ["models:/mine/1"]})
    assert names(output) == ["b", "s-trial-0", "s-trial-1"]
    assert [each.version for each in models(store)] == [2]
    assert "a" not in [run.name for run in store.search("")]


def test_a_study_goes_with_its_trials_but_for_those_of_others(store: Store, output: Path, concord_: Concord) -> None:
    assert concord_("runs", "delete", "s", "--yes", "--output", output).status == 0
    assert (names(output), names(output, "studies")) == (["a", "b", "s-trial-1"], ["t"])
    assert concord_("runs", "delete", "s-trial-1", "--yes", "--output", output).status == 0  # its study is gone


@pytest.mark.usefixtures("store")
def test_what_a_champion_needs_and_what_is_unclear_is_refused(output: Path, refused: Callable[..., str]) -> None:
    end = ("--yes", "--output", output)
    assert refused("runs", "delete", "b", *end) == (
        "delete b: models:/mine/2: is the champion of mine; promote another version first: concord models promote mine "
        "VERSION"
    )
    assert refused("models", "delete", "mine", "2", *end).startswith("models:/mine/2: is the champion of mine")
    assert (
        refused("runs", "delete", "s-trial-0", *end) == "delete s-trial-0: is a run of s; delete that, or leave the run"
    )
    assert refused("runs", "delete", "z", *end).endswith("has this name")
    assert refused("runs", "delete", *end) == "runs delete: no run is named; give names; concord runs lists them"
    assert refused("models", "delete", "mine", *end).startswith("models delete mine: no version is given")
    assert refused("runs", "--yes").startswith("--yes: applies to runs delete")
    with folder_of(output, "a").locked("run"):
        assert "another process is using this run" in refused("runs", "delete", "a", *end)


@pytest.mark.usefixtures("store")
def test_it_is_asked_for_on_a_terminal_and_needs_yes_elsewhere(
    output: Path, concord_: Concord, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refused("runs", "delete", "a", "--output", output)
    assert line == "--yes: is needed to delete where no terminal can be asked: run a; model models:/mine/1"
    for answer, status in (("no\n", 1), ("", 1), ("yes\n", 0)):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        assert names(output) == ["a", "b", "s-trial-0", "s-trial-1"]
        said = concord_("runs", "delete", "a", "--output", output)
        assert said.status == status
        assert "run a\nmodel models:/mine/1\ndelete this? yes or no\n" in said.err
    assert names(output) == ["b", "s-trial-0", "s-trial-1"]


def test_a_version_goes_and_its_run_stays(store: Store, output: Path, concord_: Concord) -> None:
    assert concord_("models", "delete", "mine", "1", "--yes", "--output", output).status == 0
    assert [each.version for each in models(store)] == [2]
    assert "a" in names(output)


def test_a_version_that_was_deleted_is_said_to_be(store: Store) -> None:
    assert deleted_version(store, "models:/mine/1") is None
    delete_version(store, next(each for each in models(store) if each.version == 1))
    gone = "models:/mine/1 was deleted from the registry; MLflow keeps the model with its run"
    assert deleted_version(store, "models:/mine/1") == gone
    assert [deleted_version(store, each) for each in ("models:/mine/2", "models:/m-1", None)] == [None] * 3
