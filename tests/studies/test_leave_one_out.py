"""Each method with each environment left out, on real Ray: selection without that environment, and by it (oracle)."""

import json
import shlex
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

import concord
from concord.cli.job_options import read_command
from concord.interface.results import Comparison
from concord.options import science_values
from concord.record import EVENTS, RECORD
from concord.studies.comparison_page import comparison_page
from concord.studies.comparison_run import ComparisonResult, read_comparison, run_comparison
from concord.studies.job_tables import LEAVE_ONE_OUT
from concord.studies.leave_one_out import (
    BEST,
    CHOSEN,
    fold_values,
    leave_one_out_as_recorded,
    plan_leave_one_out,
    with_choices,
)
from concord.studies.results import ResultLine, as_lines
from concord.studies.verdicts import left_out_verdict
from concord.training import Evaluation, ProcessContext, Run, load_job, train
from concord.training.comparison import Folds
from concord.training.context import Silent
from documents import documented

SENSORS = Path(__file__).parents[1] / "jobs" / "sensors.py"
STATIONS = "abhv"
FEW = "--methods erm,vrex --penalty-weight 10 --epochs 4 --evaluations 4 --seeds 2"


@pytest.fixture(scope="module")
def stations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two of four stations the sensor is reversed: the average of the other three follows it the wrong way."""
    file = tmp_path_factory.mktemp("stations") / "stations.py"
    file.write_text(SENSORS.read_text().replace('train=TRAIN, validation=["v", "w"]', f'train=list("{STATIONS}")'))
    return file


def compared(file: Path, output: Path, words: str = FEW) -> ComparisonResult:
    given_words = [LEAVE_ONE_OUT, *words.split(), "--output", str(output)]
    command = read_command("compare", load_job(str(file)), given_words, "concord compare")
    return run_comparison(plan_leave_one_out(command.job, command.options, command.given), lambda _: None)


@pytest.fixture(scope="module")
def whole(ray_cluster: None, stations: Path, tmp_path_factory: pytest.TempPathFactory) -> ComparisonResult:
    return compared(stations, tmp_path_factory.mktemp("whole"))


def events_of_runs(result: ComparisonResult) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in result.plan.base.run.output.glob(f"runs/*/{EVENTS}")}


def metrics_of(result: ComparisonResult) -> Mapping[str, Any]:
    return {row["name"]: row["metrics"] for row in result.as_json()["rows"]}


def test_every_value_is_that_of_the_same_training_in_this_process(whole: ComparisonResult, stations: Path) -> None:
    job, rows = load_job(str(stations)).job, metrics_of(whole)
    for method, options in (("mean", {}), ("vrex", {"objective": "vrex", "penalty_weight": 10.0})):
        values = []
        for seed in (0, 1):
            own: dict[str, Any] = {"seed": seed, "epochs": 4, "evaluations": 4, "aggregator": "mean", "leave_out": "v"}
            history = train(job, job.config.with_options(**own, **options), ProcessContext(), Silent()).history
            first = max(range(4), key=lambda at: history[at].metrics["held_out_accuracy"])
            best = history[first].metrics["held_out_accuracy"]
            alike = [each.metrics for each in history if each.metrics["held_out_accuracy"] == best]
            values.append(min(alike, key=lambda each: each["held_out_loss"])["validation_accuracy"])
        assert rows[method]["v"]["mean"] == pytest.approx(statistics.fmean(values))
        assert rows[method]["v"]["std"] == pytest.approx(statistics.stdev(values))


def test_the_table_shows_the_method_that_holds_where_it_has_not_been(whole: ComparisonResult) -> None:
    rows = metrics_of(whole)
    assert rows["vrex"]["mean accuracy"]["mean"] > rows["mean"]["mean accuracy"]["mean"] + 0.1
    assert rows["vrex"]["worst accuracy"]["mean"] > rows["mean"]["worst accuracy"]["mean"]
    assert rows[BEST]["mean accuracy"]["mean"] >= rows[CHOSEN]["mean accuracy"]["mean"]
    header, cells = whole.tables[0].cells()
    assert header == ["leave-one-out", "rows", "majority share", "average", "V-REx", CHOSEN, BEST]
    summary = [f"{which} accuracy{suffix}" for suffix in ("", " (oracle)") for which in ("mean", "worst")]
    assert [row[0] for row in cells] == ["seeds", *STATIONS, *summary, "test accuracy"]
    assert [row[1] for row in cells] == ["", *["200"] * len(STATIONS), *[""] * 5]
    assert (whole.folder.path / "figures" / "leave-one-out.png").stat().st_size > 0
    assert "(oracle): the left-out environment itself chooses" in whole.tables[0].title


def test_every_example_is_predicted_by_a_model_that_has_not_seen_its_environment(
    whole: ComparisonResult, stations: Path
) -> None:
    found = concord.load("stations", job=stations, output=whole.plan.base.run.output)
    assert isinstance(found, Comparison)
    job = load_job(str(stations)).job
    lines = {(line.configuration, line.seed): line.values for line in whole.tables[0].runs}
    for (method, seed, name), rows in found.predictions.groupby(["method", "seed", "environment"]):
        assert (rows.target == rows.prediction).mean() == pytest.approx(lines[method, seed][name])
        assert sorted(rows.row) == list(range(200))
        targets = job.environments(job.config.with_options(seed=seed))[name].targets[rows.row.tolist()]
        assert list(rows.target) == list(map(str, targets.tolist()))
        assert rows.target.value_counts(normalize=True).max() == lines[method, seed][f"{name} (majority share)"]
        assert (rows.probability_1 > 0.5).tolist() == (rows.prediction == "1").tolist()
    assert len(found.predictions) == 2 * 2 * 4 * 200
    assert whole.as_json()["environments"].keys() == set(STATIONS)
    tests = [lines["vrex", 0][f"{name} (test)"] for name in STATIONS]
    assert lines["vrex", 0]["test accuracy"] == pytest.approx(statistics.fmean(tests))


def test_a_verdict_rests_on_the_environments_and_agrees_with_the_table(whole: ComparisonResult, stations: Path) -> None:
    found, rows = whole.verdict, metrics_of(whole)
    assert found is not None
    (difference,) = found.differences
    assert (found.unit, difference.units, difference.comparisons) == ("environments", 4, 1)
    means = {method: rows[method]["mean accuracy"]["mean"] for method in ("mean", "vrex")}
    assert {each.method: each.value for each in found.methods} == pytest.approx(means)
    assert difference.value == pytest.approx(means["vrex"] - means["mean"])
    assert found.recommended == ("vrex" if difference.verdict == "better" else "mean")
    assert {(each.environment, each.units, each.seeds) for each in found.environments} == {
        (name, 400, 2)
        for name in STATIONS  # the job makes other rows for each seed
    }
    assert found.next_environment is not None
    assert found.next_environment.environments == 4
    assert whole.as_json()["verdict"] == found.as_json()
    assert all(line in whole.output() for line in found.lines)
    loaded = concord.load("stations", job=stations, output=whole.plan.base.run.output)
    assert isinstance(loaded, Comparison)
    assert loaded.verdict == found
    frame = loaded.intervals()
    for each in found.environments:
        row = frame.loc[each.method, each.environment]
        assert each.interval is not None
        shown = (each.value, *each.interval, each.deviation)
        assert (row.value, row.low, row.high, row["std"]) == pytest.approx(shown)


def test_the_answer_ends_with_the_command_that_trains_the_recommended_method(whole: ComparisonResult) -> None:
    assert whole.verdict is not None
    row = "V-REx" if whole.verdict.recommended == "vrex" else "average"
    assert whole.verdict.lines[0].startswith("does it hold? ")
    assert whole.verdict.lines[1].startswith(f"recommended: {row};")
    assert whole.train == whole.plan.train_command(LEAVE_ONE_OUT, whole.verdict.recommended)
    output = whole.output()
    assert output[output.index(whole.verdict.lines[-1]) + 1] == f"train it  {whole.train}"
    assert whole.as_json()["train"] == whole.train
    assert f"train it: `{whole.train}`" in whole.note()


def test_an_unfinished_comparison_recommends_nothing(whole: ComparisonResult, stations: Path) -> None:
    """Neither in the verdict nor on the page, and no command trains a method that was not compared with all."""
    words = [*FEW.split(), "--output", str(whole.plan.base.run.output)]
    words[words.index("--seeds") + 1] = "3"
    command = read_command("compare", load_job(str(stations)), [LEAVE_ONE_OUT, *words], "concord compare")
    part = read_comparison(plan_leave_one_out(command.job, command.options, command.given))
    assert part.missing
    assert part.verdict is not None
    missing, planned = len(part.missing[LEAVE_ONE_OUT]), len(part.plan.runs[LEAVE_ONE_OUT])
    said = f"unfinished, so no method is recommended yet: {missing} of {planned} runs are missing"
    assert part.verdict.lines[0] == said
    assert part.train is None
    assert not any("train it" in str(each) for each in part.output())
    html = comparison_page([part], lambda _: None).html()
    assert said[1:] in html
    assert "on all environments, and register its model" not in html


@pytest.mark.parametrize(
    "words", ["--environment hospital --lr 0.02", "--environment hospital --epochs 3 --model-name risk"]
)
def test_the_command_of_each_method_trains_what_was_compared_on_all_environments(tmp_path: Path, words: str) -> None:
    places = [f"{place},{place}{row},{row},{row % 2}" for place in "abc" for row in range(20)]
    (tmp_path / "rows.csv").write_text("hospital,name,age,died\n" + "\n".join(places))
    asked = [LEAVE_ONE_OUT, "--data", str(tmp_path / "rows.csv"), "--target", "died", *words.split()]
    command = read_command("compare", load_job("table"), [*asked, "--output", str(tmp_path)], "concord compare")
    plan = plan_leave_one_out(command.job, command.options, command.given)
    assert [*plan.tables[LEAVE_ONE_OUT].configurations] == ["mean", "and-mask", "group-dro", "ridge", "boosting"]
    for spec in plan.runs[LEAVE_ONE_OUT][::9]:  # of three seeds and three environments
        concord_, verb, _, *typed = shlex.split(plan.train_command(LEAVE_ONE_OUT, spec.place["row"]))
        assert (concord_, verb) == ("concord", "train")
        config = read_command("train", load_job("table"), typed, "concord train").options
        config.check()
        trained, compared = (science_values(each.resolve()) for each in (config, spec.config))
        unused = spec.config.unused()
        assert {name for name, value in trained.items() if value != compared[name]} - unused == {"leave_out"}
        assert config.run.model_name == spec.config.run.model_name
        assert config.network_options.baseline == spec.config.network_options.baseline


@pytest.mark.parametrize(
    ("target", "task", "measure"),
    [("died", "auto", "accuracy"), ("age", "regression", "mse"), ("visits", "count", "poisson_deviance")],
)
def test_numbers_are_compared_in_their_own_unit(tmp_path: Path, target: str, task: str, measure: str) -> None:
    """A fold's loss of standardized numbers is in a unit of that fold."""
    places = [f"{place},{place}{row},{row / 3},{row % 2},{row % 4}" for place in "abc" for row in range(20)]
    (tmp_path / "rows.csv").write_text("hospital,name,age,died,visits\n" + "\n".join(places))
    words = f"--data {tmp_path / 'rows.csv'} --environment hospital --target {target} --task {task}".split()
    command = read_command("compare", load_job("table"), [LEAVE_ONE_OUT, *words], "concord compare")
    folds = plan_leave_one_out(command.job, command.options, command.given).tables[LEAVE_ONE_OUT].folds
    assert folds is not None
    assert (folds.measure, folds.mode) == (measure, "max" if measure == "accuracy" else "min")


@pytest.mark.slow
def test_a_killed_comparison_continues_to_the_same_table(
    whole: ComparisonResult, stations: Path, tmp_path: Path
) -> None:
    before = events_of_runs(whole)
    cut = compared(stations, tmp_path, FEW.replace("--seeds 2", "--seeds 1"))
    events = cut.folder.path / EVENTS
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-12]))
    for name in sorted(path.name for path in tmp_path.glob("runs/*"))[:3]:  # killed before these ended
        of_run = tmp_path / "runs" / name / EVENTS
        of_run.write_text("".join(of_run.read_text().splitlines(keepends=True)[:-1]))
    assert compared(stations, tmp_path).tables[0].cells() == whole.tables[0].cells()
    again = compared(stations, whole.plan.base.run.output)
    assert again.tables[0].cells() == whole.tables[0].cells()
    assert events_of_runs(whole) == before  # nothing is trained again


def test_report_and_documents_show_the_kept_runs(whole: ComparisonResult, stations: Path, tmp_path: Path) -> None:
    record = json.loads((whole.folder.path / RECORD).read_text())
    plan = leave_one_out_as_recorded(load_job(str(stations)), record, whole.plan.base.run.output, None)
    found = read_comparison(plan)
    assert found.tables[0].cells() == whole.tables[0].cells()
    (tmp_path / "stations-leave-one-out.jsonl").write_bytes(as_lines(found.tables[0].runs))
    shown = documented(str(stations), LEAVE_ONE_OUT, tmp_path)
    for row in whole.tables[0].cells()[1]:
        assert f"| {' | '.join(row)} |".replace("|  |", "| |") in shown
    assert "`concord compare stations.py leave-one-out --seeds 2 --methods erm,vrex" in shown


def test_another_measure_trains_nothing_again_and_is_in_the_kept_command(
    whole: ComparisonResult, stations: Path
) -> None:
    before = events_of_runs(whole)
    by_loss = compared(stations, whole.plan.base.run.output, f"{FEW} --metric loss")
    assert events_of_runs(whole) == before
    commands = {line.origin["command"] for line in by_loss.tables[0].runs}
    assert len(commands) == 1
    assert " --metric loss " in commands.pop()


# --- the choice

FOLDS = Folds(("a", "b", "c"), "accuracy", "max")


def run(name: str, *moments: tuple[float, float]) -> Run:
    values = [
        {"held_out_accuracy": held, "validation_accuracy": own, "held_out_loss": 1 - own} for held, own in moments
    ]
    history = [Evaluation(epoch, epoch, metrics) for epoch, metrics in enumerate(values, 1)]
    return Run.of(history, 0, {"leave_out": name})


def test_the_others_choose_the_evaluation_and_the_oracle_stands_beside_it() -> None:
    found = fold_values(run("a", (0.6, 0.9), (0.8, 0.4), (0.7, 0.5)), FOLDS)
    assert found == {"a": 0.4, "a (held-out)": 0.8, "a (oracle)": 0.9}


ACCURACIES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=4)


@given(st.lists(st.lists(ACCURACIES, min_size=3, max_size=3), min_size=2, max_size=3), st.randoms())
def test_values_of_the_one_left_out_choose_neither_method_nor_evaluation(
    methods: list[list[list[tuple[float, float]]]], random: Any
) -> None:
    lines = [
        ResultLine(str(at), 0, fold_values(run(name, *moments), FOLDS), 1.0, {})
        for at, each in enumerate(methods)
        for name, moments in zip(FOLDS.environments, each, strict=True)
    ]
    random.shuffle(lines)
    by_row = {line.configuration: line.values for line in with_choices(lines, FOLDS, len(methods))}
    for place, name in enumerate(FOLDS.environments):
        held = {at: max(moment[0] for moment in each[place]) for at, each in enumerate(methods)}
        best = max(held.values())
        among = [own for at, each in enumerate(methods) for h, own in each[place] if h == held[at] == best]
        assert by_row[CHOSEN][name] in among
        assert by_row[BEST][name] == max(own for each in methods for _, own in each[place])
    mine = [by_row[CHOSEN][name] for name in FOLDS.environments]
    assert by_row[CHOSEN]["mean accuracy"] == pytest.approx(statistics.fmean(mine))
    assert by_row[CHOSEN]["worst accuracy"] == min(mine)


def test_a_method_without_all_folds_has_no_mean_and_nothing_is_chosen() -> None:
    lines = [ResultLine("mean", 0, fold_values(run("a", (0.5, 0.5)), FOLDS), 1.0, {})]
    rows = {line.configuration: line.values for line in with_choices(lines, FOLDS, 2)}
    assert rows["mean"].keys() == {"a", "a (held-out)", "a (oracle)"}
    assert rows[CHOSEN] == rows[BEST] == {}


@pytest.mark.parametrize("diverged", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_method_that_diverged_is_not_chosen_wherever_it_stands(diverged: float, mode: Any) -> None:
    folds = Folds(("a",), "loss", mode)
    lines = [
        ResultLine("diverged", 0, {"a": diverged, "a (held-out)": diverged, "a (oracle)": diverged}, 1.0, {}),
        ResultLine("learned", 0, {"a": 0.3, "a (held-out)": 0.2, "a (oracle)": 0.1}, 1.0, {}),
    ]
    for order in (lines, lines[::-1]):
        rows = {line.configuration: line.values for line in with_choices(order, folds, 2)}
        assert (rows[CHOSEN]["a"], rows[BEST]["a"]) == (0.3, 0.1)


def test_the_verdict_of_a_worst_measure_is_of_each_environments_own_value() -> None:
    folds, right = Folds(("a", "b", "c"), "worst_accuracy", "max"), {"a": 40, "b": 20, "c": 39}
    lines = [ResultLine("mean", 0, {name: count / 40 for name, count in right.items()}, 1.0, {})]
    rows = [
        {"environment": name, "row": row, "target": "1", "prediction": "1" if row < count else "0"}
        for name, count in right.items()
        for row in range(40)
    ]
    frame = pandas.DataFrame(rows).assign(method="mean", seed=0, probability_0=0.5, probability_1=0.5)
    found = left_out_verdict(lines, folds, frame)
    assert found is not None
    assert all(each.interval is not None for each in found.environments)
    assert found.next_environment is not None
    assert found.next_environment.interval.high < 1


# --- the command


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--methods erm,vrx", "--methods vrx: there is no such method; did you mean vrex?"),
        ("--methods erm mean", "--methods erm mean: mean is given twice"),
        ("--folds 1", "--folds 1: must be at least 2, or 0 for all environments"),
        ("--folds 9", "--folds 9: there are 8 training environments"),
        ("--held-out 0", "--held-out 0.0: held-out examples choose; give a fraction above 0"),
        ("--leave-out a", "--leave-out a: each environment is left out in turn; leave this option out"),
        ("--objective vrex", "--objective vrex: the methods are compared; leave it out"),
        ("--seed 1", "--seed 1: a comparison trains several; give --first-seed and --seeds"),
        ("--metric f1", "--metric f1: the job does not report it; there are accuracy, loss, each also as worst_…"),
        (
            "--methods sand-mask --threshold 1",
            "sand-mask: --threshold 1.0: no component ever passes the SAND-mask at 1",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line(refused: Callable[..., str], words: str, line: str) -> None:
    assert refused("compare", SENSORS, LEAVE_ONE_OUT, *words.split()).startswith(line)


def test_the_worst_of_a_measure_without_a_mode_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    job = tmp_path / "margins.py"
    measured = 'measures={"margin": lambda outputs, _: outputs[:, 1]}, config=TrainConfig()'
    job.write_text(SENSORS.read_text().replace("config=TrainConfig()", measured))
    assert refused("compare", job, LEAVE_ONE_OUT, "--metric", "worst_margin", "--mode", "max") == (
        "--metric worst_margin: runs do not report it, since margin has no mode; give --metric margin"
    )


def test_jobs_without_three_environments_or_the_platforms_loop_are_refused(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    two = tmp_path / "two.py"
    two.write_text(SENSORS.read_text().replace("train=TRAIN", 'train=["a", "b"]'))
    assert refused("compare", two, LEAVE_ONE_OUT) == (
        "compare leave-one-out: job two has 2 training environments (a, b); it needs at least 3, so that two are left "
        "to compare"
    )
    assert refused("compare", "coinrun-expert", LEAVE_ONE_OUT) == (
        "compare leave-one-out: job coinrun-expert has a loop of its own; this needs the platform's"
    )
    assert refused("report", SENSORS, LEAVE_ONE_OUT, "--output", tmp_path).startswith(
        f"table leave-one-out: there is none in {tmp_path}; concord compare "
    )
    assert refused("train", SENSORS, "--leave-out", "x").startswith("--leave-out x: give one of a, b, c")
    assert refused("tune", SENSORS, "--leave-out", "a", "--selection", "leave-one-out") == (
        "--leave-out a: --selection leave-one-out leaves each out in turn; leave this option out"
    )


def test_the_environments_of_a_step_are_those_of_the_runs_with_one_left_out(refused: Callable[..., str]) -> None:
    assert refused("tune", SENSORS, "--selection", "leave-one-out", "--environments-per-step", "8") == (
        "--environments-per-step 8: there are 7 training environments; give fewer, "
        "since --selection leave-one-out leaves one out"
    )
    assert refused("compare", SENSORS, LEAVE_ONE_OUT, "--methods", "erm", "--environments-per-step", "8").endswith(
        "--environments-per-step 8: there are 7 training environments; give fewer"
    )
    words = f"{LEAVE_ONE_OUT} --methods erm --environments-per-step 7".split()
    command = read_command("compare", load_job(str(SENSORS)), words, "concord compare")
    assert list(plan_leave_one_out(command.job, command.options, command.given).tables) == [LEAVE_ONE_OUT]
