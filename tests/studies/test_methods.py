"""Choosing a method: a study of each on real Ray with a real store, judged without the test, a recommendation."""

import dataclasses
import json
import math
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Concord, outcome
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tracked import tracked_runs

from concord.cli.job_options import read_command
from concord.errors import InputError
from concord.objectives import OBJECTIVES
from concord.record import EVENTS, Run, write_record
from concord.space import Uniform
from concord.storage import Folder
from concord.studies.criterion import TrialEvaluator
from concord.studies.methods import (
    KNOWN,
    MethodsCommand,
    MethodsPlan,
    method_names,
    methods_options_for,
    plan_methods,
    run_methods,
)
from concord.studies.methods_result import compare_command, read_methods, train_method
from concord.studies.proposals import Trial
from concord.studies.recommendation import MethodsResult
from concord.studies.results import StudyResult
from concord.tracking import Store
from concord.tracking.registry import models
from concord.training import Evaluation, load_job
from documents import side_by_side

pytestmark = pytest.mark.usefixtures("without_figures")
JOBS = Path(__file__).parents[1] / "jobs"
OWN_OBJECTIVE = "--objective vrex: the job minimizes an objective of its own"
SENSORS, TINY = str(JOBS / "sensors.py"), str(JOBS / "tiny_study.py")


def plan(file: str, output: Path, config: Mapping[str, Any], **options: Any) -> MethodsPlan:
    job = load_job(file)
    asked = methods_options_for(job).with_options(**options, **config, output=output)
    assert isinstance(asked, MethodsCommand)
    return plan_methods(job, asked, {*options, *config})


def test_every_method_is_studied_alike_and_the_best_is_recommended(ray_cluster: None, tmp_path: Path) -> None:
    few: dict[str, Any] = {"methods": ("mean", "and-mask", "vrex"), "trials": 3, "seeds": 2}
    planned = plan(SENSORS, tmp_path, {"epochs": 4, "evaluations": 1}, **few)
    lines: list[str] = []
    result = run_methods(planned, {}, lines.append)
    (first, second) = (line for line in lines if "methods; the others take about" in line)
    assert (first[:13], second[:13]) == ("1 of 3 method", "2 of 3 method")
    assert list(result.studies) == ["mean", "and-mask", "vrex"]
    assert result.metric == "validation_accuracy"
    assert all(len(study.finished) == 3 and list(study.reruns) == [1, 2] for study in result.studies.values())
    assert all("ood" not in study.criterion.metric for study in result.studies.values())

    said = result.as_json()
    for row, study in zip(said["rows"], result.studies.values(), strict=True):
        values = [metrics["validation_accuracy"] for metrics in study.reruns.values()]
        assert row["metrics"]["validation_accuracy"]["mean"] == pytest.approx(statistics.fmean(values))
        assert {"held_out_accuracy", "ood_accuracy"} < row["metrics"].keys()
    header, rows = result.table().cells()
    assert header[2:5] == ["validation accuracy (criterion)", "held-out accuracy", "o.o.d. test accuracy"]
    assert len(rows) == 3

    # What was found is there, and nothing is trained again.
    before = {file: file.read_bytes() for file in tmp_path.glob(f"runs/*/{EVENTS}")}
    again = run_methods(plan(SENSORS, tmp_path, {"epochs": 4, "evaluations": 1}, **few), {}, lambda _: None)
    assert {file: file.read_bytes() for file in tmp_path.glob(f"runs/*/{EVENTS}")} == before != {}
    assert again.table().cells() == result.table().cells()
    read = read_methods(load_job(SENSORS), tmp_path, None)
    assert read is not None
    assert {**read.as_json(), "seconds": 0} == {**said, "seconds": 0}
    assert read.lines() == result.lines()
    assert read_methods(load_job(SENSORS), tmp_path, "another") is None
    store = Store.open(tmp_path, None)
    assert {"sensors-methods-mean", "sensors-methods-vrex"} < {
        run.name for run in tracked_runs(store, "sensors-studies")
    }
    assert models(store) == []

    command = result.train
    assert command.startswith(f"concord train {SENSORS} --")
    assert "--epochs 4" in command
    assert f"--output {tmp_path}" in command


@pytest.mark.slow
def test_without_validation_environments_each_is_left_out_in_turn(ray_cluster: None, tmp_path: Path) -> None:
    planned = plan(TINY, tmp_path, {"epochs": 1}, methods=("mean", "geometric-mean"), trials=2, seeds=2)
    result = run_methods(planned, {}, lambda _: None)
    assert result.environments == 2
    assert result.metric == "left_out_accuracy"
    for study, row in zip(result.studies.values(), result.as_json()["rows"], strict=True):
        values = [metrics["left_out_accuracy"] for metrics in study.reruns.values()]
        assert len(values) == 2
        assert row["metrics"]["left_out_accuracy"]["mean"] == pytest.approx(statistics.fmean(values))
        assert row["metrics"]["left_out_accuracy"]["std"] == pytest.approx(statistics.stdev(values))
    assert "2 environments, on which each trial trains, are few votes for a mask" in " ".join(result.lines())


@pytest.mark.slow
def test_a_rule_of_ones_own_is_compared_with_its_threshold_searched_and_one_that_fails_is_said(
    ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rules.py").write_text(OWN_RULE)
    own = f"{tmp_path}/rules.py:Scaled"
    few: dict[str, Any] = {"methods": (own, "mean"), "trials": 2, "seeds": 2}
    planned = plan(SENSORS, tmp_path, {"epochs": 2, "evaluations": 1}, **few)
    result = run_methods(planned, {}, lambda _: None)
    assert list(result.studies) == [own, "mean"]
    assert all(set(study.reruns) == {1, 2} for study in result.studies.values())
    assert {"lr", "l2", "threshold"} == {name for run in result.studies[own].finished for name in run.point}
    assert f"--aggregator {own} " in train_method(load_job(SENSORS), own, result.studies[own])
    assert f" --methods {own} mean " in compare_command(load_job(SENSORS), result, {})

    options = ("--trials", "2", "--seeds", "2", "--epochs", "2", "--evaluations", "1", "--output", str(tmp_path))
    failing = f"{tmp_path}/rules.py:Failing"
    status, again = outcome(capsys, "compare", SENSORS, "methods", "--methods", own, "mean", failing, *options)
    assert status == 1
    assert again["rows"] == json.loads(json.dumps(result.as_json()["rows"]))
    assert again["error"].startswith(f"failed methods: 1, the first of them {failing}: ")
    assert "not finite" in again["failed"][failing]


def test_a_rule_of_ones_own_declares_what_is_searched(tmp_path: Path) -> None:
    declared = """
from typing import ClassVar
from concord.space import Uniform

@dataclass(frozen=True)
class Declared(Scaled):
    factor: float = 1.0
    space: ClassVar = {"factor": Uniform(0.5, 2.0)}
"""
    (tmp_path / "rules.py").write_text(OWN_RULE + declared)
    own = f"{tmp_path}/rules.py:Declared"
    searched = plan(SENSORS, tmp_path, {}, methods=("mean", own)).studies[own].space.entries
    assert searched["factor"] == Uniform(0.5, 2.0)
    assert "threshold" not in searched


OWN_RULE = """
import math
from dataclasses import dataclass
from concord.aggregation import GRADIENT, Update

@dataclass(frozen=True)
class Scaled:
    threshold: float = 0.5

    @property
    def statistics(self):
        return (GRADIENT,)

    def finish(self, sums, environments):
        return Update(sums["gradient"] / environments * (1 + self.threshold), sums["gradient"] != 0)

@dataclass(frozen=True)
class Failing(Scaled):
    def finish(self, sums, environments):
        return Update(sums["gradient"] * math.inf, sums["gradient"] != 0)
"""


@pytest.mark.slow
def test_methods_are_judged_by_the_spread_of_losses_and_shown_by_accuracy(ray_cluster: None, tmp_path: Path) -> None:
    few: dict[str, Any] = {"methods": ("mean", "vrex"), "trials": 1, "seeds": 2, "metric": "spread"}
    planned = plan(SENSORS, tmp_path, {"epochs": 2, "evaluations": 1}, selection="held-out", **few)
    result = run_methods(planned, {}, lambda _: None)
    header, rows = result.table().cells()
    assert header[2:5] == ["held out spread (criterion)", "held-out accuracy", "o.o.d. test accuracy"]
    spreads = [statistics.fmean(r["held_out_spread"] for r in each.reruns.values()) for each in result.studies.values()]
    assert rows[0][0] == ["average", "V-REx"][spreads.index(min(spreads))]
    assert "cannot reveal" not in " ".join(result.lines())


def test_environments_left_out_recommend_the_method_without_the_shortcut(ray_cluster: None, tmp_path: Path) -> None:
    # In two of four stations the sensor is reversed: the average of the other three follows it the wrong way.
    file = tmp_path / "stations.py"
    file.write_text(Path(SENSORS).read_text().replace('train=TRAIN, validation=["v", "w"]', 'train=list("abhv")'))
    few: dict[str, Any] = {"methods": ("mean", "vrex"), "trials": 1, "seeds": 2}
    lines: list[str] = []
    config = {"epochs": 4, "evaluations": 1, "penalty_weight": 10.0}
    result = run_methods(plan(str(file), tmp_path, config, **few), {}, lines.append)
    assert lines[0].startswith("30 trainings of 2 methods, ")
    assert re.search(r" at a time: about \d+ s; the start of their processes", lines[0])
    assert result.recommended == "vrex"
    said = result.as_json()
    values = {row["method"]: row["metrics"]["left_out_accuracy"] for row in said["rows"]}
    assert values["vrex"]["mean"] > values["mean"]["mean"] + 0.2
    header, rows = result.table().cells()
    shown = {row[0]: row[header.index("left out accuracy (criterion)")] for row in rows}
    assert list(shown) == ["V-REx", "average"]
    means = {method: f"{value['mean']:.3f}" for method, value in values.items()}
    evidence = f"V-REx; accuracy {means['vrex']} against average {means['mean']}: difference "
    assert result.lines()[0].startswith(f"recommended: {evidence}")
    assert result.lines()[0].endswith("; 4 environments), more than chance")
    assert result.lines()[1].startswith("judged by training environments left out in turn, which also chose the ")
    assert result.verdict is not None
    assert result.verdict.next_environment is not None
    assert (result.verdict.unit, result.verdict.next_environment.environments) == ("environments", 4)
    assert list(said["verdict"]["lines"]) == list(result.verdict.lines)


# --- what is recommended


def study(method: str, values: Sequence[float], mode: str = "max", selection: str = "validation") -> StudyResult:
    split = {"validation": "validation", "held-out": "held_out"}[selection]
    criterion = {"selection": selection, "metric": f"{split}_accuracy", "mode": mode}
    record = {"name": method, "criterion": criterion, "measure": "accuracy", "space": {}}

    def of(seed: int | None, **metrics: float) -> Trial:
        return Trial("trial", 0, {"lr": 0.1}, seed, {}, {None: Run.of([Evaluation(1, 1, metrics)])}, TrialEvaluator())

    trial = of(None, **{f"{split}_accuracy": 1.0})
    reruns = [of(seed, **{f"{split}_accuracy": value, "ood_accuracy": -value}) for seed, value in enumerate(values)]
    return StudyResult(
        folder=Folder(Path(method)),
        record=record,
        finished=[trial],
        failed=[],
        ended=[trial],
        left_out={},
        repeated=reruns,
    )


def judged_in(environments: Mapping[str, tuple[float, float]], **more: float) -> StudyResult:
    """A study of two seeds with these accuracies and majority shares of validation environments."""
    metrics = {"validation_accuracy": statistics.fmean(value for value, _ in environments.values())}
    for name, (value, share) in environments.items():
        metrics |= {f"accuracy/validation/{name}": value, f"majority_share/validation/{name}": share}
    made = study("mean", [0.0, 0.0])
    for each in made.repeated:
        assert each.run is not None
        (evaluation,) = each.run.history
        evaluation.metrics.update(metrics)
    return made


def test_the_verdict_of_methods_says_whether_the_model_is_better_than_a_constant() -> None:
    def lines(**environments: tuple[float, float]) -> list[str]:
        studies = {name: judged_in(environments) for name in ("mean", "and-mask")}
        return MethodsResult("job", studies, {}, 10, range(2)).lines()

    constant = lines(a=(0.8, 0.8), b=(0.9, 0.9), c=(0.85, 0.85))  # the most frequent class for every row
    assert constant[0] == (
        "does it hold? not everywhere: in a, b, c (3 of 3) average is no better than a constant, which needs no model"
    )
    assert constant[1].startswith("recommended: average; ")
    assert constant[2].startswith("judged by validation environments")
    held = lines(a=(0.85, 0.8), b=(0.95, 0.9), c=(0.9, 0.85))[0]
    assert held.startswith("does it hold? in all 3 environments average is better than a constant, which")


def compared(*runs: Sequence[float], environments: int = 10, **options: Any) -> MethodsResult:
    names = ("mean", "and-mask", "vrex")
    studies = {name: study(name, values, **options) for name, values in zip(names, runs, strict=False)}
    return MethodsResult("job", studies, {}, environments, range(max(map(len, runs))))


RULE = ", which also chose the settings; a method replaces average only if it is better by more than chance"
SEEDS = "seeds repeat training on the same rows; they show no chance of other rows or of a new environment"


def test_a_method_that_is_better_on_every_seed_is_recommended() -> None:
    result = compared([0.2, 0.5, 0.8], [0.25, 0.56, 0.85])
    assert result.recommended == "and-mask"
    assert result.lines() == [
        "recommended: AND-mask; validation accuracy 0.553 against average 0.500: difference 0.053 (95 % 0.039 to "
        "0.068; 3 seeds), more than the chance of seeds",
        "judged by validation environments" + RULE,
        SEEDS,
    ]
    assert compared([0.2, 0.5, 0.8], [0.25, 0.56, 0.85], mode="min").recommended == "mean"


def test_where_other_seeds_may_turn_it_around_it_is_the_first() -> None:
    result = compared([0.2, 0.5, 0.8], [0.7, 0.4, 0.6])
    assert result.recommended == "mean"
    assert result.lines()[0] == (
        "recommended: average; validation accuracy of AND-mask 0.567 against average 0.500: difference 0.067 (95 % "
        "-0.874 to 1.007; 3 seeds), not more than the chance of seeds"
    )


def test_few_votes_and_a_choice_that_knows_no_other_environment_are_said() -> None:
    said = compared([0.5, 0.5], [0.4, 0.4], environments=3, selection="held-out").lines()
    assert said[0] == (
        "recommended: average; held out accuracy 0.500 against AND-mask 0.400: difference 0.100 (95 % 0.100 to 0.100; "
        "2 seeds), more than the chance of seeds"
    )
    assert said[1] == "judged by held-out examples of the training environments" + RULE
    assert said[2] == SEEDS
    assert said[3].startswith("3 environments, on which each trial trains, are few votes for a mask: random signs")
    assert said[3].endswith("all agree with probability 2.5e-1")
    assert said[4].startswith("held-out examples have the shortcuts")


# Of up to a million examples; squares of smaller differences may be 0.
ACCURACIES = st.lists(st.integers(0, 10**6).map(lambda right: right / 10**6), min_size=3, max_size=3)


@given(ACCURACIES, ACCURACIES, ACCURACIES, st.sampled_from(["max", "min"]))
def test_the_recommended_is_the_first_or_better_than_it_by_more_than_chance(
    first: list[float], second: list[float], third: list[float], mode: str
) -> None:
    result = compared(first, second, third, mode=mode)
    runs = dict(zip(result.studies, (first, second, third), strict=True))
    if result.recommended != "mean":
        sign = 1 if mode == "max" else -1
        better = [sign * (a - b) for a, b in zip(runs[result.recommended], first, strict=True)]
        among_two = stats.t.ppf(1 - 0.05 / 2 / 2, 2)
        assert statistics.fmean(better) > among_two * statistics.stdev(better) / math.sqrt(3)


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0], []])
def test_a_method_with_a_failed_or_diverged_seed_is_not_recommended(values: list[float]) -> None:
    result = compared([0.2, 0.3], values, [0.1, 0.1])
    assert result.recommended == "mean"
    assert [row[0] for row in result.table().cells()[1]] == ["average", "V-REx", "AND-mask"]
    lacking = ", ".join(str(seed) for seed in (0, 1) if values[seed : seed + 1] != [1.0])
    assert f"AND-mask: ranks last; on seed {lacking} it has no finite validation_accuracy" in result.lines()


def test_without_the_averages_value_the_best_other_method_is_recommended() -> None:
    result = compared([0.9], [0.2, 0.3], [0.1, 0.1])
    assert result.recommended == "and-mask"
    assert "average is left out: no value in seed 1" in result.lines()
    none = compared([], [0.2], [0.1, 0.1])
    assert none.recommended == "vrex"
    assert none.lines()[0] == "recommended: V-REx; no other method has a value in all 2 seeds"


def test_the_command_takes_back_a_default_that_the_method_cannot_use(tmp_path: Path) -> None:
    file = tmp_path / "chance.py"
    file.write_text(Path(SENSORS).read_text().replace("with_options(", "with_options(significance=0.1, "))
    planned = plan(str(file), tmp_path, {}, methods=("mean", "and-mask"), trials=1)
    average = study("mean", [0.9, 0.8])
    average = dataclasses.replace(average, record=planned.studies["mean"].record(Store.open(tmp_path)))
    concord, train, _, *words = shlex.split(train_method(load_job(str(file)), "mean", average))
    assert (concord, train) == ("concord", "train")
    options = read_command("train", load_job(str(file)), words, "concord train").options
    options.check()
    assert (options.aggregation.aggregator, options.aggregation.significance) == ("mean", None)


def test_only_the_seeds_that_were_asked_for_are_compared() -> None:
    result = dataclasses.replace(compared([0.2, 0.3, 0.9], [0.3, 0.4]), seeds=range(2))
    assert result.recommended == "and-mask"
    assert [row["seeds"] for row in result.as_json()["rows"]] == [2, 2]
    assert {line.seed for line in result.result_lines("concord compare")} == {0, 1}


# --- the command


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--methods mean", "--methods mean: give at least two, or none for the default ones"),
        ("--methods mean mean", "--methods mean mean: mean is given twice"),
        ("--methods mean vrx", "--methods vrx: there is no such method; did you mean vrex?"),
        ("--objective vrex", "--objective vrex: the methods are compared; leave it out"),
        ("--aggregator mean", "--aggregator mean: the methods are compared; leave it out"),
        ("--seeds 1", "--seeds 1: must be at least 2, to have a spread"),
        ("--trials 0", "--trials 0: must be at least 1"),
        ("--concurrent -1", "--concurrent -1: must not be negative"),
        ("--gpus-per-trial 0", "--gpus-per-trial 0.0: must be above 0"),
        ("--epochs 0", "--epochs 0: must be at least 1"),
        ("--results s3://a/b", "--results s3://a/b: must be a folder on this machine's disk"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    refused: Callable[..., str], words: str, line: str
) -> None:
    assert refused("compare", SENSORS, "methods", *words.split()) == line


def test_the_methods_that_there_are_include_the_other_name_of_the_average() -> None:
    with pytest.raises(
        InputError, match=r"^--methods 1: there is no such method; there are mean \(or erm\), and-mask, "
    ):
        method_names(["irm", "1"])
    assert method_names(["erm,irm"]) == ("mean", "irm")


def test_jobs_without_methods_and_tables_of_that_name_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused("compare", "coinrun-expert", "methods") == (
        "compare methods: job coinrun-expert has a loop of its own; this needs the platform's"
    )
    assert refused("compare", SENSORS, "methods", "other").endswith("methods is not a table of the job; give it alone")
    named = tmp_path / "named.py"
    named.write_text(
        Path(SENSORS)
        .read_text()
        .replace(
            "job = Job(",
            "from concord.training import Comparison\n\njob = Job(\n    "
            'comparisons={"methods": Comparison({"a": {}}, columns={"loss": "train_loss"})},',
        )
    )
    assert "table methods: compare JOB methods tunes each method; rename the table" in refused("compare", named, "a")
    assert refused("compare", SENSORS, "a") == (
        "job sensors: has no tables to compare; give it comparisons={…}, or compare methods with "
        f"concord compare {SENSORS} methods, or leave-one-out"
    )


@pytest.mark.parametrize("method", sorted({*KNOWN} - {"mean"}))
def test_every_method_has_a_space_that_a_built_in_job_can_begin_with(tmp_path: Path, method: str) -> None:
    study = plan("synthetic", tmp_path, {}, methods=("mean", method)).studies[method]
    assert study.own is not None
    assert study.space.varied()
    assert json.dumps(study.record(Store.open(tmp_path)))


def test_more_trials_continue_a_comparison_whose_searches_go_on_as_they_began(tmp_path: Path) -> None:
    few = plan(SENSORS, tmp_path, {}, methods=("mean", "and-mask"), trials=4).studies
    for study in few.values():
        study.folder.make()
        write_record(study.folder, "study", study.record(Store.open(tmp_path)))
    more = plan(SENSORS, tmp_path, {}, methods=("mean", "and-mask"), trials=12).studies
    assert {(study.trials, study.options.startup) for study in more.values()} == {(12, 2)}
    with pytest.raises(InputError, match=r"--batch-size 7: the study .* was started with"):
        plan(SENSORS, tmp_path, {"batch_size": 7}, methods=("mean", "and-mask"), trials=12)


def test_every_known_method_is_planned_with_options_that_it_uses(tmp_path: Path) -> None:
    planned = plan(SENSORS, tmp_path, {}, methods=KNOWN, trials=1)
    assert planned.studies.keys() == set(KNOWN)
    for method, study in planned.studies.items():
        assert study.base.objective.objective == (method if method in OBJECTIVES else "erm")
        assert not set(study.space.entries) & study.base.resolve().unused()


def test_a_job_with_an_objective_of_its_own_is_compared_by_its_rules(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    source = (
        Path(SENSORS).read_text().replace("import torch\n", "import torch\n\nfrom concord.objectives import ERM\n", 1)
    )
    made = "job = Job(\n    objective=lambda config: ERM(torch.nn.functional.cross_entropy),"
    own.write_text(source.replace("job = Job(", made))
    planned = plan(str(own), tmp_path, {})
    assert list(planned.studies) == ["mean", "and-mask", "t-mask"]
    assert planned.left_out == dict.fromkeys(("vrex", "irm"), OWN_OBJECTIVE) | {
        "irm": OWN_OBJECTIVE.replace("vrex", "irm")
    }


def test_the_command_says_what_it_found(concord_: Concord, ray_cluster: None, tmp_path: Path) -> None:
    words = ("--methods", "mean", "and-mask", "--trials", "1", "--seeds", "2", "--epochs", "1", "--output", tmp_path)
    said = concord_("compare", SENSORS, "methods", *words)
    assert said.status == 0, said.err
    lines = said.out.splitlines()
    assert any(line.startswith("recommended: ") for line in lines)
    assert any(line.startswith("train it  concord train ") for line in lines)
    # A later call with a folder for results keeps them without training.
    results = tmp_path / "results"
    as_json = concord_("compare", SENSORS, "methods", *words, "--results", results, "--json").json
    assert as_json["recommended"] in ("mean", "and-mask")
    assert [row["method"] for row in as_json["rows"]] == ["mean", "and-mask"]
    kept = [json.loads(line) for line in (results / "sensors-methods.jsonl").read_text().splitlines()]
    assert [(line["configuration"], line["seed"]) for line in kept] == [
        (row["method"], seed)
        for row in sorted(as_json["rows"], key=lambda row: -row["metrics"]["validation_accuracy"]["mean"])
        for seed in (1, 2)
    ]
    for row in as_json["rows"]:
        of_method = [line for line in kept if line["configuration"] == row["method"]]
        test = [line["values"]["o.o.d. test accuracy"] for line in of_method]
        assert statistics.fmean(test) == pytest.approx(row["metrics"]["ood_accuracy"]["mean"])
        command = "concord compare sensors.py methods --methods mean and-mask --trials 1 --seeds 2 --epochs 1"
        assert {line["command"] for line in of_method} == {command}
        assert all(line["machine"] and line["commit"] for line in of_method)

    # A report shows the same, trains nothing, and writes the same page but for the command that repeats it.
    pages = [tmp_path / "compared.html", tmp_path / "reported.html"]
    assert concord_("compare", SENSORS, "methods", *words, "--html", pages[0]).status == 0
    before = {file: file.read_bytes() for file in tmp_path.glob(f"runs/*/{EVENTS}")}
    report = ("report", SENSORS, "methods", "--output", tmp_path, "--html", pages[1], "--results", tmp_path / "again")
    reported = concord_(*report, "--json").json["tables"]["methods"]
    assert {**reported, "seconds": 0} == {**as_json, "seconds": 0}
    assert {file: file.read_bytes() for file in tmp_path.glob(f"runs/*/{EVENTS}")} == before != {}
    one, other = (page.read_text().splitlines() for page in pages)
    assert all("concord compare" in first for first, second in zip(one, other, strict=True) if first != second)
    lines = (tmp_path / "again" / "sensors-methods.jsonl").read_text().splitlines()
    assert [json.loads(line)["values"] for line in lines] == [line["values"] for line in kept]
    read = read_methods(load_job(SENSORS), tmp_path, None)
    assert read is not None
    again = shlex.split(compare_command(load_job(SENSORS), read, {}))
    assert again[3:] == ["methods", *map(str, [*words[:-4], "--selection", "validation", *words[-4:]])]
    document = side_by_side([SENSORS, SENSORS], "methods", results)
    average = next(row for row in as_json["rows"] if row["method"] == "mean")["metrics"]["ood_accuracy"]
    assert f"| average | {average['mean']:.3f} ± {average['std']:.3f} |" in document
    assert command in document
