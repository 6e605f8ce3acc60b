"""The jobs on objectives, small: command-line training, complete reports, one line for wrong input."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import outcome
from planned_comparison import planned
from test_images import write_mnist
from test_shortcut_environments import write_sst2

from concord.cli import main
from concord.errors import InputError
from concord.execution.finish import shortfall
from concord.execution.preflight import preflight
from concord.job_files import built_in_jobs
from concord.studies.plan import plan_study
from concord.studies.study_options import options_for
from concord.training import ProcessContext, load_job, train
from concord.training.context import Silent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_mnist(folder, train=120, test=300, side=28)
    write_sst2(folder / "sst2", 200)
    return folder


def test_example_1_finds_the_causes_with_the_penalty_and_not_without() -> None:
    job = load_job("irm-regression").job
    # A hundredth of the steps, at a rate that makes up for most of it and would diverge at first without clipping.
    quick = {"epochs": 500, "lr": 3e-2, "clip": 1.0, "evaluations": 1, "examples": 2000, "batch_size": 2000}
    metrics = train(job, job.config.with_options(**quick), ProcessContext(), Silent()).metrics
    weights = [metrics[f"weight_{place}"] for place in range(4)]
    assert weights == pytest.approx([1, 1, 0, 0], abs=0.07)
    assert metrics["test-0.01_loss"] < 0.01
    averaged = job.config.with_options(**quick | {"epochs": 200, "lr": 1e-2}, objective="erm", aggregator="mean")
    metrics = train(job, averaged, ProcessContext(), Silent()).metrics
    assert metrics["weight_2"] > 0.25
    assert metrics["test-0.01_loss"] > 0.1


def test_the_table_of_example_1_stands_beside_the_tutorials(
    ray_cluster: None, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "irm-regression", "--seeds", "2", "--epochs", "5", "--output", str(output)]
    status, result = outcome(capsys, *words)
    assert (status, result["table"], result["runs"]) == (0, "example-1", 4)
    irm, erm = result["rows"]
    assert (irm["name"], irm["seeds"], irm["metrics"]["weight_0"]["paper"]) == ("irm", 2, 1.006)
    assert erm["metrics"]["test-0.01_loss"]["paper"] == 0.2302
    assert "| best possible |" in (Path(result["artifacts"]) / "tables" / "example-1.md").read_text()
    assert Path(result["figures"]["data"]).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("method", "metric", "more"),
    [("irm", "held_out_spread", {}), ("meta-irm", "worst_held_out_accuracy", {"spread_reached": 1.0})],
)
def test_the_studies_of_colored_mnist_see_no_test(
    method: str, metric: str, more: dict[str, float], data: Path, output: Path
) -> None:
    job = load_job("colored-mnist")
    options = options_for(job.job.config).with_options(method=method, data=data, examples=50, output=output)
    plan = plan_study(job, options, {"method", "data", "examples", "output"})
    assert plan.criterion.metric == metric
    # Models that are sure of nothing are equal in all environments, and models of colours are the most accurate.
    assert plan.criterion.required == {"worst_held_out_accuracy": 0.625} | more
    assert plan.space.fixed({})["objective"] == method


@pytest.mark.parametrize("method", ["irm", "meta-irm"])
def test_the_studies_of_punctuated_sst2_are_judged_by_sentences_of_dev(method: str, data: Path, tmp_path: Path) -> None:
    job, given = load_job("punctuated-sst2"), {"method", "data", "output"}
    options = options_for(job.job.config).with_options(method=method, data=data, output=tmp_path / "runs")
    with pytest.raises(InputError, match=r"validation_flip=0\.5: needs dev\.tsv of SST-2 beside train\.tsv"):
        plan_study(job, options, given)
    whole = write_sst2(tmp_path / "whole", 200)
    (whole / "dev.tsv").write_text((whole / "test.tsv").read_text())
    plan = plan_study(job, options.with_options(data=whole), given)
    assert plan.criterion.metric == "validation_accuracy"
    assert plan.space.fixed({}).items() >= {"objective": method, "validation_flip": 0.5}.items()


@pytest.mark.parametrize(("objective", "one_logit"), [("irm", False), ("irm", True), ("meta-irm", False)])
def test_colored_mnist_trains_and_measures_similarity(objective: Any, one_logit: bool, data: Path) -> None:
    job = load_job("colored-mnist").job
    config = job.config.with_options(
        objective=objective, data=data, examples=50, batch_size=25, epochs=2, hidden_units=8, similarity=True,
        evaluations=1, one_logit=one_logit,
    )  # fmt: skip
    config.check()
    metrics = train(job, config, ProcessContext(), Silent()).metrics
    assert 0 <= metrics["ood_accuracy"] <= 1
    assert metrics["pwcca_0.1"] == pytest.approx(1.0)
    assert 0 <= metrics["pwcca_0.9"] <= 1
    assert ("pwcca_adapted_0_train-0.1" in metrics) == (objective == "meta-irm")


@pytest.mark.slow
def test_the_tables_and_figures_of_colored_mnist_are_all_made(
    ray_cluster: None, output: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "colored-mnist", "--seeds", "1", "--examples", "24", "--epochs", "1", "--hidden-units", "8"]
    status, result = outcome(capsys, *words, "--data", str(data), "--output", str(output))
    assert status == 0, result
    others = {
        "choice",
        "choice-five-classes",
        "mm-rex-choice",
        "oracle-choice",
        "fewer-steps",
        "fig-6",
        "gap",
        "gap-choice",
        "similarity",
        "adapted",
        "fishr",
    }
    assert set(result["tables"]) == {*(f"table-{n}" for n in range(1, 6)), *others}
    (row,) = (row for row in result["rows"] if (row["table"], row["name"]) == ("table-1", "meta-irm"))
    assert row["metrics"]["ood_accuracy"]["paper"] == pytest.approx(0.704)
    drawn = {"flips", "sizes", "sizes-epochs", "penalty", "patches", "gap", "similarity", "layers"}
    assert set(result["figures"]) == drawn
    assert all(Path(path).stat().st_size > 5_000 for path in result["figures"].values())


def test_punctuated_sst2_learns_words_or_takes_glove_vectors(data: Path, tmp_path: Path) -> None:
    job = load_job("punctuated-sst2").job
    options = {"data": data, "epochs": 20, "batch_size": 50, "evaluations": 1, "noise": 0.0, "lr": 1e-2}
    learned = train(
        job, job.config.with_options(objective="erm", aggregator="mean", **options), ProcessContext(), Silent()
    )
    assert learned.metrics["train_accuracy"] > 0.9
    glove = tmp_path / "glove.txt"
    glove.write_text("fine 1 0 1\ndull -1 1 0\n! 0 1 0\n. 0 0 1\n")
    for penalty in ("vrex", "irm", "meta-irm"):
        given = job.config.with_options(objective=penalty, penalty_weight=1.0, glove=glove, **options)
        given.check()
        assert train(job, given, ProcessContext(), Silent()).metrics["ood_accuracy"] > 0.9, penalty


def test_the_table_of_punctuated_sst2_has_the_papers_rows(
    ray_cluster: None, output: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "punctuated-sst2", "table-6", "--seeds", "1", "--epochs", "1", "--data", str(data)]
    status, result = outcome(capsys, *words, "--output", str(output))
    assert (status, result["runs"]) == (0, 8)
    papers = {row["name"]: row["metrics"]["ood_accuracy"]["paper"] for row in result["rows"]}
    assert papers["meta-irm, η = 0"] == pytest.approx(0.73)


WITHOUT_TABLES = {"coinrun-expert", "flights", "heart-disease", "image-domains", "table"}


@pytest.mark.parametrize("job", sorted(set(built_in_jobs()) - WITHOUT_TABLES))
def test_every_configuration_of_every_table_is_right(job: str) -> None:
    plan = planned(load_job(job), [], ["--seeds", "1"], check=False)  # all seeds are planned alike
    assert plan.tables
    assert all(len(runs) >= len(plan.tables[name].configurations) for name, runs in plan.runs.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["colored-mnist", "--penalty-weight", "-1"], "--penalty-weight -1.0: must be a finite number, not below 0"),
        (["colored-mnist", "--flips", "0.1", "--examples", "50"], "--objective irm: compares training environments"),
        (["colored-mnist", "--objective", "vrex", "--aggregator", "and-mask"], "--aggregator and-mask: --objective"),
        (["colored-mnist", "--examples", "80"], "--examples 80: with --held-out 0.166667 that is 96 for each"),
        (["colored-mnist", "--objective", "irn"], "--objective"),
        (["colored-mnist", "--one-logit", "--classes", "5"], "--one-logit True: one output tells two classes apart"),
        (["punctuated-sst2", "--embedding-size", "7", "--glove", "GLOVE"], "line 1 has 3 numbers, expected 7"),
        (["punctuated-sst2", "--data", "/nowhere"], "--data /nowhere: train.tsv, test.tsv not there"),
        (["irm-regression", "--train-sigmas", "0"], "--train-sigmas 0.0: give standard deviations above 0"),
        (["irm-regression", "--train-sigmas", "1", "1"], "--train-sigmas 1.0 1.0: is the same in two environments"),
        (["room-runner", "--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["colored-mnist", "--similarity", "--observed-flips"], "--similarity True: compares with the first"),
        (["irm-regression", "--objective", "meta-irm", "--inner-lr", "0"], "--inner-lr 0.0: must be above 0"),
        (["distill-xor", "--validation-fraction", "1", "--no-resample-split"], "--validation-fraction 1.0: must lie"),
        (["distill-xor", "--unrolled-steps", "0"], "--unrolled-steps 0: must be at least 1"),
        (["distill-xor", "--teaching-weight", "-1"], "--teaching-weight -1.0: must be a finite number, not below 0"),
        (["distill-xor", "--student-steps", "32"], "--student-steps 32: with a split drawn anew: at most the 16"),
        (["distill-xor", "--batch-size", "10"], "batch_size: with a split drawn anew it has to divide every"),
        (["distill-xor", "--dimensions", "0"], "--dimensions 0: must be at least 1"),
        (["distill-xor", "--taught-units", "0"], "--taught-units 0: must be at least 1"),
        (["distill-xor", "--teacher-units", "-1"], "--teacher-units -1: must be at least 1"),
        (["distill-xor", "--auxiliary-weight", "1"], "--auxiliary-weight 1.0: --teacher meta has x* already; give"),
        (["distill-logits", "--entropy-weight", "-1"], "--entropy-weight -1.0: must be a finite number, not below 0"),
        (["distill-logits", "--logit-scale", "nan"], "--logit-scale nan: must be a finite number above 0"),
        (["distill-logits", "--validation-fraction", "0.99"], "--batch-size 32: more than the 10 examples that train"),
        (["distill-logits", "--resample-split"], "batch_size: with a split drawn anew it has to divide every"),
        (["distill-logits", "--meta-lr", "0"], "--meta-lr 0.0: must be a finite number above 0"),
        (["skip-toy", "--horizon", "0"], "--horizon 0: must be at least 1"),
        (["skip-toy", "--stride", "2"], "--stride 2: --skip adaptive finds its own; give --skip fixed"),
        (["skip-toy", "--exploration-steps", "-1"], "--exploration-steps -1: must not be negative"),
        (["skip-toy", "--skip", "fixed", "--stride", "90"], "frames; it needs 91 with --stride 90"),
        (["room-runner"], "no data of room-runner; concord data room-runner makes them"),
        (["distill-xor", "--optimizer", "temporal-and-mask"], "its steps cannot be unrolled; give adam or sgd"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_leaves_nothing(
    words: list[str], said: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    glove = tmp_path / "glove.txt"
    glove.write_text("fine 1 0 1\n")
    words = [str(glove) if word == "GLOVE" else word for word in words]
    where = [] if "--data" in words else ["--data", str(data)]
    output = tmp_path / "runs"
    status, result = outcome(capsys, "train", *words, *where, "--output", str(output))
    assert status == 2
    assert said in result["error"]
    assert "\n" not in result["error"]
    assert not output.exists()


def test_a_run_that_never_becomes_alike_says_so(data: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "colored-mnist", "--data", str(data), "--output", str(output), "--examples", "50"]
    options = ["--epochs", "4", "--batch-size", "25", "--objective", "meta-irm", "--stop-spread", "1e-12"]
    options += ["--hidden-units", "8"]
    assert main([*words, *options, "--evaluations", "4", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.strip().splitlines()[-1])
    assert result["metrics"]["spread_reached"] == 0.0
    kept = int(result["metrics"]["kept_epoch"])
    assert f"--stop-spread 1e-12: never reached; the model of epoch {kept} is kept" in printed.err
    assert result["champion"] == (result["metrics"]["worst_held_out_accuracy"] >= 0.625)  # however small its spread


def test_a_network_that_learned_nothing_is_no_champion_of_colored_mnist(data: Path) -> None:
    file = load_job("colored-mnist")
    job = file.job
    config = job.config.with_options(
        data=data, examples=50, batch_size=25, epochs=1, hidden_units=8, lr=1e-9, evaluations=1
    )
    metrics = train(job, config, ProcessContext(), Silent()).metrics
    assert preflight(file, config).criterion == ("held_out_spread", "min")
    short = shortfall(job, config, metrics)
    assert short is not None
    assert short.endswith("is below 0.625, which the job requires of a champion")
    invariant = {"held_out_spread": 1.0, "worst_held_out_accuracy": 0.67}  # what meta-IRM reaches
    assert shortfall(job, config, invariant) is None
    assert shortfall(job, config.with_options(classes=10), invariant) is None
    assert shortfall(job, config, {"held_out_spread": 0.0, "worst_held_out_accuracy": math.nan}) is not None
