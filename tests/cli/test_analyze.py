"""concord analyze: finished runs and registered models, on this machine and by Ray, kept results, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Concord, Said
from damaged import damage
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tracked import lose_run, points_of

from concord.analysis.consistency.figures import runs_figure
from concord.analysis.consistency.measurement import Measurement, as_cells, method_as_json, over_runs
from concord.analysis.consistency.network import Settings, measure
from concord.cli import main
from concord.errors import ArgumentError
from concord.execution.analyzing import environment_losses, require_comparable
from concord.execution.trained_model import model_of_run, model_of_version
from concord.tracking import Store, models
from concord.training import load_job
from documents import with_tables

pytestmark = pytest.mark.usefixtures("without_figures")
JOBS = Path(__file__).parents[1] / "jobs"
TINY = ["--environments", "3", "--examples", "64", "--hidden-units", "8", "--hidden-layers", "1", "--epochs", "2"]
TINY += ["--evaluations", "1", "--checkpoints", "1", "--workers", "1"]
QUICK = ["--examples", "32", "--pairs", "2", "--epsilon", "0.1"]


RUNS = {
    "mask-1": ["--seed", "1"],
    "mask-2": ["--seed", "2"],
    "mean-1": ["--seed", "1", "--aggregator", "mean"],
    "mean-slow": ["--seed", "2", "--aggregator", "mean", "--lr", "1e-4"],
    "wide": ["--seed", "3", "--hidden-units", "16"],
    "alone": ["--environments", "1"],
    "normed-1": ["--batch-norm"],
    "normed-2": ["--batch-norm", "--seed", "2"],
}


def train(folder: Path, name: str, *more: str) -> None:
    words = ["train", "synthetic", *TINY, *RUNS[name], *more, "--name", name, "--output", str(folder)]
    assert main(words) == 0


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with runs of `synthetic`, the first of which is the champion, and one of another job."""
    folder = tmp_path_factory.mktemp("analyzed")
    for name in RUNS:
        train(folder, name, *([] if name == "mask-1" else ["--no-register"]))
    assert main(["train", str(JOBS / "sensors.py"), "--epochs", "1", "--name", "own", "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def analyze(concord_: Concord, output: Path) -> Callable[..., Said]:
    return lambda job, *words: concord_("analyze", job, *words, "--output", str(output))


def test_a_run_is_analyzed_kept_and_not_measured_again(analyze: Callable[..., Said], output: Path) -> None:
    said = analyze("synthetic", "--name", "mask-1", *QUICK, "--json").json
    assert said["job"] == "synthetic"
    assert said["epsilon"] == [0.1]
    assert said["environments"] == 3
    assert (len(said["pairs"]), said["possible_pairs"]) == (2, 6)
    ((low, high),) = said["inconsistency"]["quadratic"]
    assert 0 <= low <= high
    assert high >= 0.1
    assert said["inconsistency"]["bound"][0] >= 0
    assert said["inconsistency"]["null"].keys() == {"quadratic", "bound"}
    assert [layer["name"] for layer in said["layers"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {"agreement", "kept", "chance", "log_ratio", "null_agreement"} < said["layers"][0].keys()
    assert said["figures"].keys() == {"layers", "line", "plane"}
    assert all(Path(path).stat().st_size > 1000 for path in said["figures"].values())

    kept = json.loads((output / "runs" / "mask-1" / "consistency" / "consistency.json").read_text())
    assert kept["inconsistency"] == said["inconsistency"]
    store = Store.open(output)
    metrics = store.run(said["run_id"]).metrics
    assert metrics["analyzed/bound/epsilon_0.1"] == pytest.approx(said["inconsistency"]["bound"][0])
    assert metrics["analyzed/null_log_ratio"] == pytest.approx(said["log_ratio"]["null"])
    assert "ood_accuracy" in metrics
    assert store.read_json(said["run_id"], "consistency/consistency.json")["run"] == "mask-1"

    again = analyze("synthetic", "--name", "mask-1", *QUICK)
    assert "mask-1: was analyzed before with these options" in again.err
    assert "quadratic high, ε 0.1" in again.out
    assert "sign agreement" in again.out
    report = output / "runs" / "mask-1" / "consistency" / "consistency.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"run_id": "another run of this name"}))
    assert "before" not in analyze("synthetic", "--name", "mask-1", *QUICK).err
    other = analyze("synthetic", "--name", "mask-1", *QUICK, "--seed", "5", "--parts", "signs")
    assert "before" not in other.err
    assert "chance agreement" in other.out
    assert "quadratic" not in other.out


def test_an_analysis_that_mlflow_did_not_take_is_kept_and_sent_later(
    analyze: Callable[..., Said], output: Path
) -> None:
    file, store = output / "runs" / "wide" / "consistency" / "consistency.json", Store.open(output)
    words = ["synthetic", "--name", "wide", "--examples", "32", "--parts", "signs"]
    run_id = model_of_run(load_job("synthetic"), output, "wide").run_id
    obstacle = output / "artifacts" / run_id / "artifacts" / "consistency"
    obstacle.write_text("a file in place of the folder")
    said = analyze(*words)
    assert said.status == 0
    assert "wide: could not be kept in MLflow (" in said.err
    kept = json.loads(file.read_text())
    assert "untracked" in kept

    obstacle.unlink()
    again = analyze(*words)
    assert "wide: was analyzed before with these options" in again.err
    assert "could not be kept" not in again.err
    assert json.loads(file.read_text()) == {name: value for name, value in kept.items() if name != "untracked"}
    assert store.run(run_id).metrics["analyzed/agreement"] == pytest.approx(kept["signs"]["environments"]["agreement"])
    sent = store.read_json(run_id, "consistency/consistency.json")
    assert (sent["run"], "untracked" in sent) == ("wide", False)


def test_any_value_in_a_report_is_used_or_the_report_is_made_again(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ("mask-1", "mask-2")
    for name in runs:
        assert main(["analyze", "synthetic", "--name", name, *QUICK, "--output", str(output)]) == 0
    file = output / "runs" / "mask-1" / "consistency" / "consistency.json"
    whole = json.loads(file.read_text())
    monkeypatch.setattr("concord.execution.analyzing.analyze_model", lambda *_: whole)
    monkeypatch.setattr("concord.analysis.figures.save", lambda _, path: path)

    @settings(max_examples=6, phases=[Phase.generate])
    @given(
        st.data(),
        st.sampled_from([{}, {"untracked": "no answer"}]),
        st.sampled_from([["mask-1"], [*runs, "--results", str(output / "results"), "--json"]]),
    )
    def any_value(data: st.DataObject, further: dict[str, str], words: list[str]) -> None:
        file.write_text(json.dumps({**whole, **further}))
        damage(file, data)
        capsys.readouterr()
        status = main(["analyze", "synthetic", *QUICK, "--output", str(output), "--name", *words])
        assert status == 0, capsys.readouterr().err

    try:
        any_value()
    finally:
        file.write_text(json.dumps(whole))


def test_a_figure_of_runs_has_the_numbers_that_all_of_them_have() -> None:
    parts = [Measurement("bound", 0.3, epsilon=0.1, null=0.1), Measurement("log_ratio", 0.5, null=0.2)]
    figure = runs_figure([("and-mask", parts), ("mean", parts)])
    assert figure is not None
    labels = ["$I^\\epsilon$ at least, true losses, ε = 0.1", "log ratio of curvatures"]
    assert [each.get_xlabel() for each in figure.axes] == labels
    less = runs_figure([("and-mask", [replace(parts[0], epsilon=None)]), ("mean", parts)])
    assert less is not None
    assert [each.get_xlabel() for each in less.axes] == ["$I^\\epsilon$ at least, true losses"]
    assert runs_figure([("and-mask", parts[:1]), ("mean", parts[1:])]) is None


@pytest.mark.parametrize("gone", ["deleted", "lost"])
def test_an_analyzed_run_that_mlflow_lacks_is_restored_or_tracked_again(
    analyze: Callable[..., Said], output: Path, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(output)
    run_id = model_of_run(load_job("synthetic"), output, "mean-slow").run_id
    trained = points_of(store, run_id, "ood_accuracy")
    if gone == "deleted":
        store.client.delete_run(run_id)
    else:
        lose_run(output / "mlflow.db", run_id)
    said = analyze("synthetic", "--name", "mean-slow", *QUICK, "--parts", "signs", "--again", "--json")
    assert f"tracking at {store.uri} has {gone} run {run_id}; " in caplog.text
    assert "could not be kept" not in said.err
    tracked = store.run(said.json["run_id"])
    assert (tracked.run_id == run_id) == (gone == "deleted")
    assert (tracked.name, tracked.status) == ("mean-slow", "FINISHED")
    assert points_of(store, tracked.run_id, "ood_accuracy") == trained
    assert tracked.metrics["analyzed/agreement"] == pytest.approx(said.json["signs"]["environments"]["agreement"])
    assert store.read_json(tracked.run_id, "consistency/consistency.json")["run_id"] == tracked.run_id
    assert "was analyzed before" in analyze("synthetic", "--name", "mean-slow", *QUICK, "--parts", "signs").err


def test_a_run_of_another_store_is_analyzed_and_not_tracked_in_this_one(
    analyze: Callable[..., Said], output: Path, tmp_path: Path
) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    said = analyze("synthetic", "--name", "normed-1", *QUICK, "--parts", "signs", "--tracking-uri", other)
    assert said.status == 0
    assert f"(--tracking-uri {other}: the run normed-1 was started with sqlite:///{output}/mlflow.db)" in said.err
    assert not [*Store.open(output, other).search("")]


def test_what_is_said_is_what_the_parts_measure_of_the_last_checkpoint(
    analyze: Callable[..., Said], output: Path
) -> None:
    words = ["--examples", "20", "--pairs", "2", "--epsilon", "0.3", "--parts", "curvature", "bound", "--seed", "4"]
    said = analyze("synthetic", "--name", "mask-2", *words, "--split", "held-out", "--json").json
    trained = model_of_run(load_job("synthetic"), output, "mask-2")
    asked = Settings(epsilon=(0.3,), pairs=2, parts=("curvature", "bound"), examples=20, split="held-out", seed=4)
    losses = environment_losses(trained, asked, torch.device("cpu"))
    assert all(losses.examples(name) == 7 for name in losses.names)  # held out beside 64
    found = measure(losses, asked)
    ends = [found.of(name)[0].value for name in ("quadratic_low", "quadratic_high")]
    assert said["inconsistency"]["quadratic"][0] == pytest.approx(ends, rel=1e-4)
    assert said["inconsistency"]["bound"] == pytest.approx([found.of("bound")[0].value], rel=1e-4)
    assert said["losses"] == pytest.approx(losses.at_solution)


def test_a_champion_is_analyzed_without_its_runs_folder(
    analyze: Callable[..., Said], output: Path, tmp_path: Path
) -> None:
    (version,) = [each for each in models(Store.open(output)) if each.name == "synthetic"]
    by_run = analyze("synthetic", "--name", "mask-1", *QUICK, "--parts", "curvature", "--json").json
    hidden = (output / "runs" / "mask-1").rename(tmp_path / "mask-1")
    try:
        by_alias = analyze("synthetic", "--model", "synthetic@champion", *QUICK, "--parts", "curvature", "--json").json
    finally:
        hidden.rename(output / "runs" / "mask-1")
    assert by_alias["run_id"] == by_run["run_id"] == version.run_id
    ends = by_run["inconsistency"]["quadratic"][0], by_alias["inconsistency"]["quadratic"][0]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    losses = [
        environment_losses(trained, Settings(examples=8), torch.device("cpu"))
        for trained in (
            model_of_run(load_job("synthetic"), output, "mask-1"),
            model_of_version(load_job("synthetic"), Store.open(output), f"synthetic/{version.version}"),
        )
    ]
    assert losses[0].at_solution == pytest.approx(losses[1].at_solution, rel=1e-5)
    assert losses[0].size == losses[1].size


@pytest.mark.slow
def test_runs_stand_side_by_side_by_ray(ray_cluster: None, concord_: Concord, tmp_path: Path) -> None:
    """The tests on Ray have a process of their own, so this one trains no more runs than it compares."""

    def analyze(job: str, *words: str) -> Said:
        return concord_("analyze", job, *words, "--output", str(tmp_path / "runs"))

    names = ["mask-1", "mask-2", "mean-1"]
    for name in names:
        train(tmp_path / "runs", name, "--no-register")
    words = ["--name", *names, *QUICK, "--parts", "signs", "curvature", "bound"]
    said = analyze("synthetic", *words, "--json").json
    assert [run["run"] for run in said["runs"]] == names
    mask, mean = said["methods"]
    assert (mask["method"], mask["seeds"], mean["method"], mean["seeds"]) == ("t-mask", 2, "mean", 1)
    bounds = [run["inconsistency"]["bound"][0] for run in said["runs"]]
    assert mask["ilc"][0]["bound"]["mean"] == pytest.approx(-(bounds[0] + bounds[1]) / 2)
    assert mask["ilc"][0]["bound"]["std"] == pytest.approx(abs(bounds[0] - bounds[1]) / 2**0.5)
    assert mean["ilc"][0]["bound"] == {"mean": pytest.approx(-bounds[2]), "std": None}
    assert Path(said["figures"]["runs"]).stat().st_size > 1000
    # Each is what it is alone, and all are known now.
    alone = analyze("synthetic", "--name", "mean-1", *words[4:])
    assert "mean-1: was analyzed before with these options" in alone.err
    shown = analyze("synthetic", *words, "--results", str(tmp_path))
    assert shown.err.count("was analyzed before with these options") == 3
    assert "ILC       t-mask, ε 0.1" in shown.out
    # The same numbers as a document's table, with what they were made by.
    text = with_tables("<!-- results: synthetic analyzed -->\n<!-- end of results -->", tmp_path)
    assert "| t-mask | 2 |" in text
    assert f"{(bounds[0] + bounds[1]) / 2:.3f} ± " in text
    assert "`concord analyze synthetic --name mask-1 mask-2 mean-1 --epsilon 0.1" in text
    assert str(tmp_path) not in text


def test_a_users_own_job_is_analyzed(analyze: Callable[..., Said], output: Path) -> None:
    said = analyze(str(JOBS / "sensors.py"), "--name", "own", *QUICK, "--json").json
    assert said["job"] == "sensors"
    assert said["inconsistency"]["bound"][0] >= 0


def test_slices_lead_through_another_run(analyze: Callable[..., Said], output: Path) -> None:
    words = ["--parts", "slices", *QUICK]
    said = analyze("synthetic", "--name", "mask-1", "--through", "mean-1", *words, "--json").json
    assert said["figures"].keys() == {"line", "plane"}
    assert "null" not in said["inconsistency"]
    trained = [model_of_run(load_job("synthetic"), output, name) for name in ("mask-1", "mean-1")]
    losses = environment_losses(trained[0], Settings(examples=16), torch.device("cpu"))
    other = torch.cat([value.detach().flatten() for value in trained[1].model.parameters()])
    found = measure(losses, Settings(parts=("slices",)), through=other - losses.solution)
    assert found.line is not None
    at = abs(found.line.places - float((other - losses.solution).norm())).argmin()
    there = environment_losses(trained[1], Settings(examples=16), torch.device("cpu"))
    assert found.line.losses[:, at].mean() == pytest.approx(sum(there.at_solution.values()) / 3, rel=0.05)


def test_examples_without_environments_are_dealt_out_to_groups(analyze: Callable[..., Said]) -> None:
    said = analyze("synthetic", "--name", "alone", "--environments", "4", *QUICK, "--parts", "signs", "--json").json
    assert said["environments"] == 4
    assert list(said["losses"]) == ["group 0", "group 1", "group 2", "group 3"]


REFUSED: list[tuple[str, str, str]] = [
    ("synthetic", "", "analyze: no model is named; give --name RUN, or several, or --model NAME@champion"),
    ("synthetic", "--name mask-1 --model synthetic@champion", "analyze: no model is named"),
    ("synthetic", "--name mask", "--name mask: there is no such run"),
    ("synthetic", "--name own", "--name own: is a run of job sensors, not of synthetic"),
    ("synthetic", "--name alone", "job synthetic: has one training environment; consistency needs at least two"),
    ("synthetic", "--name mask-1 mask-1", "--name mask-1: is given twice; give it once"),
    ("synthetic", "--name mean-1 mean-slow", "--name mean-slow: --lr is 0.0001, in mean-1 0.01"),
    ("synthetic", "--name mean-1 wide", "--name wide: --hidden-units is 16, in mean-1 8"),
    ("synthetic", "--name mask-1 --epsilon 0.1 nan", "--epsilon 0.1 nan: give one number above 0, or several"),
    ("synthetic", "--name mask-1 --environments 9999", "--environments 9999: there are 192 examples"),
    ("synthetic", "--name mask-1 --parts shape", "--parts shape: must be one of"),
    (
        "synthetic",
        "--name mask-1 --parts signs columns",
        "--parts columns: job synthetic has no table, or no loss",
    ),
    ("synthetic", "--name mask-1 --through mask-1", "--through mask-1: is the same model; a slice needs two"),
    ("synthetic", "--name mask-1 --through wide", "--through wide: has 594 parameters, not 298; give the same"),
    ("synthetic", "--name normed-1 --through normed-2", "--through normed-2: has other buffers, such as statistics of"),
    ("synthetic", "--name mask-1 mask-2 --through wide", "--through wide: needs one run to start from"),
    ("synthetic", "--name mask-1 --through wide --parts signs", "--through wide: is for slices"),
    ("synthetic", "--model synthetic", "--model synthetic: give NAME@champion, or NAME/VERSION"),
    ("synthetic", "--model synthetic@best", "model 'synthetic' has no version or alias 'best'"),
    ("synthetic", "--model nothing@champion", "no model 'nothing' in the registry"),
    ("synthetic", "--model sensors@champion", "--model sensors@champion: is of job sensors, not of job synthetic"),
    ("coinrun-expert", "--name mask-1", "analyze: job coinrun-expert has a loop of its own; this needs"),
    ("synthetic", "--name mask-2 --tracking-uri http://127.0.0.1:1", "--tracking-uri http://127.0.0.1:1: no MLflow"),
    ("synthetic", "--name mask-1 --results s3://a/b", "--results s3://a/b: must be a folder on this machine's disk"),
    ("synthetic", "--name nobody --device cuda", "--device cuda: one worker wants a GPU; this machine has 0"),
    ("synthetic", "--name nobody mask-1 --device cuda", "--device cuda: one worker wants a GPU; "),
]


@pytest.mark.parametrize(("job", "words", "line"), REFUSED, ids=[words or "nothing" for _, words, _ in REFUSED])
def test_what_cannot_be_analyzed_is_refused_in_a_line(
    analyze: Callable[..., Said], job: str, words: str, line: str
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = analyze(job, *words.split())
    assert said.status == 2
    assert said.err.splitlines()[-1].startswith(f"concord: {line}")


def test_an_unfinished_run_and_split_without_held_out_are_refused(analyze: Callable[..., Said], output: Path) -> None:
    events = output / "runs" / "mask-2" / "events.jsonl"
    whole = events.read_text()
    events.write_text("".join(line for line in whole.splitlines(True) if '"event":"ended"' not in line))
    try:
        said = analyze("synthetic", "--name", "mask-2")
        assert said.status == 2
        assert "--name mask-2: is not finished; run concord train synthetic --name mask-2 --resume" in said.err
    finally:
        events.write_text(whole)
    words = ["train", "synthetic", *TINY, "--held-out", "0", "--name", "whole", "--output", str(output)]
    assert main([*words, "--no-register"]) == 0
    said = analyze("synthetic", "--name", "whole", "--split", "held-out")
    assert said.status == 2
    assert "--split held-out: run whole has no held-out examples; give train" in said.err


def test_a_job_whose_examples_are_environments_is_asked_for_groups(output: Path) -> None:
    trained = model_of_run(load_job("synthetic"), output, "mask-1")
    trained = replace(trained, config=trained.config.with_options(per_example=True))
    with pytest.raises(ArgumentError, match="environments=0: in run mask-1 every example is an environment; give the"):
        environment_losses(trained, Settings(), torch.device("cpu"))
    assert len(environment_losses(trained, Settings(environments=5), torch.device("cpu")).names) == 5


def test_methods_may_differ_but_not_data_or_networks(output: Path) -> None:
    trained = {name: model_of_run(load_job("synthetic"), output, name) for name in ("mask-1", "mask-2", "mean-slow")}
    require_comparable(list(trained.values()))  # another rule, with another learning rate
    same = replace(trained["mask-1"], name="again")
    with pytest.raises(ArgumentError, match="name=again: has seed 1, as mask-1 has; give runs that differ"):
        require_comparable([trained["mask-1"], same])


def test_spread_is_over_the_runs_of_a_method() -> None:
    runs = [[Measurement("ood_accuracy", bound), Measurement("bound", bound, 0.1, null=1.0)] for bound in (1.0, 3.0)]
    row = method_as_json(over_runs(runs))
    assert row["bound/epsilon_0.1"] == row["ood_accuracy"] == {"mean": 2.0, "std": pytest.approx(2**0.5)}
    assert row["null_bound/epsilon_0.1"] == {"mean": 1.0, "std": 0.0}
    assert row["ilc"] == [{"epsilon": 0.1, "bound": {"mean": -2.0, "std": pytest.approx(2**0.5)}}]
    assert method_as_json(over_runs(runs[:1]))["bound/epsilon_0.1"] == {"mean": 1.0, "std": None}
    cells = {"I at least, ε 0.1": 3.0, "I at least, ε 0.1, null": 1.0, "I at least, ε 0.1, over null": 3.0}
    assert as_cells(runs[1]) == {"o.o.d. accuracy": 3.0, **cells}
    assert "I at least, ε 0.1, over null" not in as_cells([Measurement("bound", 0.1, 0.1, null=0.0)])


def test_a_run_compares_its_environments_when_it_is_asked_to(
    ray_cluster: None, concord_: Concord, tmp_path: Path
) -> None:
    """The same with one worker and two, at as many evaluations as asked; training itself is not changed by it."""
    words = ["train", "synthetic", *TINY, "--epochs", "4", "--evaluations", "4", "--no-register"]
    words += ["--output", str(tmp_path)]
    histories = {}
    for name, more in {
        "one": ["--consistency", "2"],
        "two": ["--consistency", "2", "--workers", "2"],
        "plain": [],
    }.items():
        said = concord_(*words, *more, "--name", name, "--json").json
        store = Store.open(tmp_path)
        names = [f"consistency/{what}" for what in ("agreement", "log_ratio", "agreement/0.weight", "seconds")]
        histories[name] = (
            [points_of(store, said["run_id"], metric) for metric in names],
            said["metrics"]["train_loss"],
        )
    one, two, plain = (histories[name] for name in ("one", "two", "plain"))
    assert [len(history) for history in one[0]] == [2, 2, 2, 2]
    assert [step for step, _ in one[0][0]] == [step for step, _ in two[0][0]]
    for first, second in zip(one[0][:3], two[0][:3], strict=True):
        assert [value for _, value in first] == pytest.approx([value for _, value in second], rel=0.02)
    assert plain[0] == [[], [], [], []]
    assert plain[1] == one[1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--consistency 30", "--consistency 30: must be from 0 to the number of evaluations, 20"),
        ("--consistency -1", "--consistency -1: must be from 0 to"),
        ("--consistency 1 --environments 1", "--consistency 1: compares training environments, and there is only"),
        ("--consistency 1 --per-example", "--consistency 1: with --per-example examples are environments; give 0"),
    ],
)
def test_a_comparison_in_training_that_cannot_be_is_refused(
    concord_: Concord, tmp_path: Path, words: str, line: str
) -> None:
    said = concord_("train", "synthetic", *words.split(), "--output", str(tmp_path))
    assert said.status == 2
    assert said.err.splitlines()[-1].startswith(f"concord: {line}")
