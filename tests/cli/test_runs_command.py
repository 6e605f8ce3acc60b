"""``concord runs`` on a real MLflow store lists, finds and compares tracked runs of any job."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Concord
from recorded import described

from concord.record import folder_of, write_record
from concord.tracking import Store
from concord.tracking.run_search import Condition


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store has runs of two jobs, one that goes on, a study, and a trial of it."""
    output = tmp_path_factory.mktemp("tracked")
    store = Store.open(output)

    def track(job: str, name: str, options: dict[str, Any], metrics: dict[str, float], **tags: str) -> str:
        known = {
            "concord.version": "1",
            "concord.run": name,
            **({"concord.job": job, "torch": "2.13.0"} if job else {}),
        }
        run_id = store.start_run(job or "mine-studies", name, options, {**known, **tags})
        store.log_metrics(run_id, metrics)
        return run_id

    for name, lr, loss, accuracy in (("low", 0.001, 0.3, 0.9), ("middle", 0.01, 0.2, 0.95), ("high", 1.0, 9.0, 0.1)):
        metrics = {
            "train_accuracy": 1.0,
            "ood_accuracy": accuracy,
            "ood_loss": loss,
            "ood_accuracy/far-east": accuracy,
            "ood_top-5": accuracy,
        }
        store.finish_run(track("mine", name, {"lr": lr, "objective": "irm", "name": name}, metrics))
    store.finish_run(track("mine", "lost", {"lr": 0.1, "objective": "erm"}, {"ood_accuracy": math.nan}), "FAILED")
    track("agent", "playing", {"steps": 5}, {"episode_return": 3.5}, **{"mlflow.user": "ann"})
    track("mine", "searched", {"trials": 4}, {}, **{"concord.study": "searched"})
    track("", "searched 0", {"lr": 0.5}, {"ood_accuracy": 0.99}, **{"concord.study": "searched", "concord.kind": "t"})
    return output


@pytest.fixture
def names(concord_: Concord, tracked: Path) -> Callable[..., list[str]]:
    """The names of the runs that are found."""

    def call(*words: object) -> list[str]:
        said = concord_("runs", "--output", tracked, *words, "--json")
        assert said.status == 0, said.err
        return [run["name"] for run in said.json["runs"]]

    return call


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "searched playing lost high middle low"),
        ("--job agent", "playing"),
        ("--job mine --status finished", "high middle low"),
        ("--status running", "searched playing"),
        ("--name dl", "middle"),
        ("--top 2", "searched playing"),
        ("--metric ood_accuracy", "middle low high lost"),
        ("--metric ood-accuracy --mode min", "high low middle lost"),
        ("--metric ood_loss", "middle low high"),
        ("--metric ood_accuracy --top 1", "middle"),
        ("--where lr=1e-2", "middle"),
        ("--where lr==1e-2", "middle"),
        ("--where objective=irm ood_accuracy>0.5", "middle low"),
        ("--where objective!=irm", "lost"),
        ("--where ood_accuracy/far-east>0.5", "middle low"),
        ("--metric ood_accuracy/far-east --top 1", "middle"),
        ("--where ood_top-5>0.92 --metric ood_top-5", "middle"),
        ("--where ood-accuracy>0.92", "middle"),
        ("--job mine --where lr=0.3", ""),
        ("--job agent --status failed", ""),
        ("--study searched", "searched 0"),
        ("--name searched --status running --where lr=0.5", "searched 0"),
    ],
)
def test_runs_are_found_by_what_is_known_of_them(
    names: Callable[..., list[str]],
    words: str,
    expected: str,
) -> None:
    assert names(*words.split()) == ([expected] if "searched" in words else expected.split())


def test_the_table_shows_the_main_metrics_and_what_is_asked_for(concord_: Concord, tracked: Path) -> None:
    said = concord_("runs", "--output", tracked, "--metric", "ood_loss", "--show", "lr")
    head, *rows = [line.split() for line in said.out.splitlines() if line.strip() and "──" not in line]
    assert " ".join(head) == "run job owner status started (UTC) ood loss lr train accuracy ood accuracy"
    (middle,) = (row for row in rows if row[0] == "middle")
    assert middle[1:3] + middle[5:] == ["mine", "finished", "0.200", "0.01", "1.000", "0.950"]
    assert concord_("runs", "--output", tracked, "--name", "nobody").err == "there is no such run\n"


def test_the_owner_is_shown_and_finds_runs(
    concord_: Concord, names: Callable[..., list[str]], tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONCORD_USER", "ann")
    assert names("--mine") == ["playing"]
    table = concord_("runs", "--output", tracked, "--mine").out
    (row,) = (line.split()[:4] for line in table.splitlines() if "playing" in line)
    assert row == ["playing", "agent", "ann", "running"]
    monkeypatch.setenv("CONCORD_USER", "bob")
    assert names("--mine") == []


def test_a_run_of_a_group_is_shown_with_its_job_and_its_group(concord_: Concord, tracked: Path) -> None:
    table = concord_("runs", "--output", tracked, "--name", "searched").out
    assert [line.count("mine (study searched)") for line in table.splitlines() if "searched" in line] == [1, 1]


def test_two_runs_compared_show_their_differing_options_and_metrics(
    concord_: Concord,
    tracked: Path,
) -> None:
    said = concord_("runs", "--output", tracked, "--compare", "low", "middle", "--json").json
    assert said["options"] == {"lr": ["0.001", "0.01"]}
    assert {key: value for key, value in said["metrics"].items() if key != "ood_top-5"} == {
        "ood_accuracy": [0.9, 0.95], "ood_loss": [0.3, 0.2], "train_accuracy": [1.0, 1.0],
    }  # fmt: skip
    table = concord_("runs", "--output", tracked, "--compare", "low", "playing").out
    assert [line.split() for line in table.splitlines() if line.split()[:1] in (["steps"], ["job"])] == [
        ["job", "mine", "agent"],
        ["steps", "5"],
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--metric ood_acuracy", "--metric ood_acuracy: no run has it; did you mean ood_accuracy?"),
        ("--where objektive=irm", "--where objektive: no run has it; did you mean objective?"),
        ("--show treshold", "--show treshold: no run has it"),
        ("--top 1 --show ood_loss", "--show ood_loss: none of the first 1 runs has it; --top looks at more"),
        ("--where lr", "--where lr: give OPTION=VALUE, or METRIC>NUMBER or METRIC<NUMBER, in quotes"),
        ("--where lr>high", "--where lr>high: give OPTION=VALUE, or METRIC>NUMBER or METRIC<NUMBER, in quotes"),
        ("--compare low", "--compare low: is one run; give at least two names"),
        ("--compare low midle", "--compare midle: there is no such run; did you mean middle?"),
        ("--job mien", "--job mien: no run is of it; there are runs of agent, mine; did you mean mine?"),
        ("--job nobody --where lr=1e-2", "--job nobody: no run is of it; there are runs of agent, mine"),
        ("--study seached", "--study seached: no run is of it; there are runs of searched; did you mean searched?"),
        ("--mode min", "--mode min: needs a metric; give --metric"),
        ("--top 0", "--top 0: must be at least 1"),
        ("--job it's", "--job it's: must be without quotation marks"),
    ],
)
def test_what_no_run_has_is_refused_with_the_nearest_name(
    refused: Callable[..., str],
    tracked: Path,
    words: str,
    line: str,
) -> None:
    assert refused("runs", "--output", tracked, *words.split()) == line


def test_without_a_store_there_is_nothing_to_list(refused: Callable[..., str]) -> None:
    assert refused("runs").startswith("--output concord-runs: has no MLflow store")


@pytest.mark.parametrize(("kind", "words"), [("study", []), ("comparison", []), ("run", []), ("run", ["--study", "s"])])
def test_what_no_process_holds_is_interrupted(concord_: Concord, tmp_path: Path, kind: Any, words: list[str]) -> None:
    """A group, a run, and a trial, which is found by its study."""
    store = Store.open(tmp_path)
    own = {"concord.study": "s", "concord.kind": "trial"} if words else {"concord.job": "mine"}
    tags = {"concord.version": "1", **own}
    elsewhere, dead, busy = (store.start_run("mine", name, {}, tags) for name in "abc")
    for name, run_id in (("b", dead), ("c", busy)):
        folder = folder_of(tmp_path, name, kind)
        folder.make()
        write_record(folder, kind, described(kind, run_id=run_id))

    def listed(*more: str) -> dict[str, str]:
        said = concord_("runs", "--output", tmp_path, *words, *more, "--json")
        return {run["run_id"]: run["status"] for run in said.json["runs"]}

    with folder.locked(kind):
        assert listed() == {elsewhere: "running", dead: "interrupted", busy: "running"}
        assert listed("--status", "interrupted", "--top", "1") == {dead: "interrupted"}
        assert listed("--status", "running") == {elsewhere: "running", busy: "running"}


def test_a_condition_compares_numbers_as_numbers_and_words_as_words() -> None:
    assert Condition.of("--where", "lr = 1e-2", "") == Condition("lr", "=", "1e-2")
    assert Condition.of("--where", "ood-accuracy>=0.5", "") == Condition("ood_accuracy", ">=", "0.5")
    environment = Condition("accuracy/ood/far-west coast", ">", "0.5")
    assert Condition.of("--where", "accuracy/ood/far-west coast > 0.5", "") == environment
