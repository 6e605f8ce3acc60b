"""Comparisons on real Ray with a real MLflow store: exact, trained once, resumable, beside a paper's numbers."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from forked import Command
from planned_comparison import planned
from test_study import comparable
from test_study import planned as planned_study
from waiting import wait_for

from concord.cli import main
from concord.environments import Environments
from concord.errors import ArgumentError, InputError, StoppedError
from concord.execution.execute import CHECKPOINTS
from concord.options import option_values
from concord.record import EVENTS, Run, folder_of, read_run, require_run
from concord.studies.comparison_plan import ComparisonPlan, plan_as_recorded, recorded_command
from concord.studies.comparison_run import ComparisonResult, read_comparison, run_comparison
from concord.studies.pool import open_group
from concord.tracking import Store
from concord.training import Comparison, Evaluation, ProcessContext, load_job, train
from concord.training.comparison import at_best
from concord.training.context import Silent
from documents import with_tables

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "tiny_compared.py")
NAME = "tiny-compared"
ROOT = Path(__file__).parents[2]


def plan_of(output: Path, tables: str, **options: Any) -> ComparisonPlan:
    words = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return planned(load_job(JOB_FILE), tables.split(), [*words, "--output", str(output)])


def compared(
    output: Path, tables: str, info: Callable[[str], None] = lambda _: None, **options: Any
) -> ComparisonResult:
    return run_comparison(plan_of(output, tables, **options), info)


def ended(output: Path) -> dict[str, tuple[str | None, list[Evaluation], float]]:
    """Of the ended runs that the comparison asked for: how and when they ended, and their evaluations."""
    group = read_run(folder_of(output, NAME, "comparison"), "comparison")
    names = dict.fromkeys(each["run"] for each in ([] if group is None else group.asked))
    runs = [read_run(folder_of(output, name)) for name in names]
    ended = [run for run in runs if run is not None and run.status in ("FINISHED", "FAILED")]
    return {run.name: (run.status, run.history, run.ended_at) for run in ended}


def trained_here(seed: int, **options: Any) -> Mapping[str, float]:
    """What the same training gives in this process, without Ray."""
    job = load_job(JOB_FILE).job
    return train(job, job.config.with_options(seed=seed, **options), ProcessContext(), Silent()).metrics


@pytest.fixture(scope="module")
def whole(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> ComparisonResult:
    """Two tables that share a row."""
    output = tmp_path_factory.mktemp("whole")
    return compared(output, "masks rates", witness=output / "witness")


def test_means_and_spreads_are_those_of_the_same_trainings_in_this_process(whole: ComparisonResult) -> None:
    rows = {(row["table"], row["name"]): row for row in whole.as_json()["rows"]}
    assert {key: row["seeds"] for key, row in rows.items()} == {
        ("masks", "average"): 3,
        ("masks", "and-mask"): 3,
        ("rates", "0.1"): 2,
        ("rates", "0.01"): 2,
    }
    options: dict[Any, Any] = {
        ("masks", "and-mask"): {"lr": 0.1, "threshold": 1.0},
        ("rates", "0.01"): {"lr": 0.01, "aggregator": "mean"},
    }
    for key, chosen in options.items():
        values = [trained_here(seed, **chosen)["ood_accuracy"] for seed in range(rows[key]["seeds"])]
        found = rows[key]["metrics"]["ood_accuracy"]
        assert found["mean"] == pytest.approx(statistics.fmean(values))
        assert found["std"] == pytest.approx(statistics.stdev(values))


def test_a_row_that_two_tables_have_is_trained_once(whole: ComparisonResult) -> None:
    output = whole.plan.base.run.output
    trained = (output / "witness").read_text().splitlines()
    # 6 runs of the one table and 2 of the other; the model is also made once to try it before anything starts
    assert len(trained) == 8 + 1
    assert len(ended(output)) == whole.finished == 8
    assert [run.metrics for run in whole.runs["rates"]["0.1"]] == [
        run.metrics for run in whole.runs["masks"]["average"][:2]
    ]


def test_the_papers_numbers_stand_below_ours_in_the_units_of_the_metric(whole: ComparisonResult) -> None:
    table = whole.tables[0]
    header, rows = table.cells()
    assert header == ["masks", "seeds", "o.o.d.", "at its peak", "of a"]
    assert [row[0] for row in rows] == ["average", "average, paper", "AND-mask", "best possible"]
    assert rows[1] == ["average, paper", "", "88.5 ± 1.5", "", "90.0"]
    ours = [100 * run.metrics["ood_accuracy"] for run in whole.runs["masks"]["average"]]
    assert rows[0][2] == f"{statistics.fmean(ours):.1f} ± {statistics.stdev(ours):.1f}"
    assert table.text().startswith("masks: few epochs\n")
    assert (whole.folder.path / "tables" / "masks.md").read_text().startswith("few epochs\n\n| | seeds |")
    average = table.as_json()[0]["metrics"]
    assert (average["ood_accuracy"]["paper"], average["ood_accuracy"]["paper_std"]) == pytest.approx((0.885, 0.015))
    assert average["accuracy/train/a"]["paper"] == pytest.approx(0.9)
    assert (whole.folder.path / "figures" / "dots.png").stat().st_size > 0


@pytest.mark.parametrize("criterion", [[math.nan, 0.5, 0.7], [0.7, math.nan, 0.5], [0.5, 0.7, math.nan]])
def test_a_column_at_the_best_evaluation_ranks_nan_last(criterion: list[float]) -> None:
    history = [Evaluation(epoch, epoch, {"of": value, "at": value}) for epoch, value in enumerate(criterion, 1)]
    run = Run.of(history, 0, {})
    assert at_best("at", "of", "max")(run) == 0.7
    assert at_best("at", "of", "min")(run) == 0.5
    never = Run.of([Evaluation(1, 1, {"of": math.nan, "at": 1.0})], 0, {})
    assert at_best("at", "of", "max")(never) == at_best("at", "of", "min")(never) == 1.0


def test_every_run_is_a_child_of_the_comparisons_run_in_mlflow(whole: ComparisonResult) -> None:
    client = Store.open(whole.plan.base.run.output).client
    parent = client.get_run(str(require_run(whole.folder, "comparison").run_id))
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'", max_results=100
    )
    assert parent.info.status == "FINISHED"
    assert len(children) == 8
    assert {run.info.status for run in children} == {"FINISHED"}
    by_row = {run.data.tags["concord.row"]: run for run in children}
    run = by_row["masks, and-mask, seed 2"]
    assert run.info.run_name == whole.runs["masks"]["and-mask"][2].name
    assert run.data.metrics["ood_accuracy"] == whole.runs["masks"]["and-mask"][2].metrics["ood_accuracy"]
    assert run.data.params["lr"] == "0.1"
    assert run.data.params["seed"] == "2"
    assert "penalty_weight" not in run.data.params
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} >= {"figures", "tables"}


def test_what_is_there_is_not_trained_again_and_more_seeds_are_added(whole: ComparisonResult) -> None:
    output, lines = whole.plan.base.run.output, list[str]()
    before = ended(output)
    again = compared(output, "rates", lines.append, seeds=3, first_seed=0, witness=output / "witness")
    assert any("rates; 6 runs, of which 5 are there" in line for line in lines)
    after = ended(output)
    assert {key: after[key] for key in before} == before
    assert len(after) == len(before) + 1  # seed 2 of the row that the other table does not have
    assert [row["seeds"] for row in again.as_json()["rows"]] == [3, 3]
    other = compared(output, "rates", lines.append, name="other", witness=output / "witness")
    assert any(line.startswith("comparison other: rates; 4 runs, of which 4 are there") for line in lines)
    assert other.as_json()["rows"] == [row for row in whole.as_json()["rows"] if row["table"] == "rates"]


def test_trials_of_a_study_are_cells_of_a_table(ray_cluster: None, output: Path) -> None:
    words = ["--method", "averaged", "--vary", "lr=0.1,0.01", "--search", "grid", "--name", "s", "--concurrent", "1"]
    words += ["--reruns", "0", "--shortlist", "0", "--no-register", "--output", str(output)]
    assert main(["tune", JOB_FILE, *words]) == 0
    lines: list[str] = []
    result = compared(output, "rates", lines.append, seeds=1)
    assert any("rates; 2 runs, of which 2 are there" in line for line in lines)
    assert {run.name for runs in result.runs["rates"].values() for run in runs} == {"s-trial-0", "s-trial-1"}


def test_a_plan_is_made_again_by_its_command_which_hides_secrets(tmp_path: Path) -> None:
    words = ["masks", "--only", "average", "and-mask", "--seeds", "2", "--output", str(tmp_path), "--name", "n"]
    words += ["--results", str(tmp_path / "a folder"), "--concurrent", "1", "--gpus-per-trial", "0.5", "--no-register"]
    words += ["--address", "ray://head:10001", "--tracking-uri", "https://me:pass@host/"]
    job = load_job(JOB_FILE)
    plan = planned(job, [], words, check=False)
    command = shlex.split(plan.command)
    assert command[:3] == ["concord", "compare", JOB_FILE]
    assert "https://me:***@host/" in command
    again = planned(job, [], [word.replace("***", "pass") for word in command[3:]], check=False)
    assert again == plan


def test_patterns_choose_rows_by_their_names_or_as_they_are_shown(tmp_path: Path) -> None:
    def rows(*words: str) -> dict[str, list[str]]:
        plan = planned(load_job(JOB_FILE), [], ["--only", *words, "--output", str(tmp_path)], check=False)
        assert plan.tables.keys() == plan.runs.keys()
        assert shlex.join(["--only", *words]) in plan.command
        return {name: [*dict.fromkeys(run.place["row"] for run in runs)] for name, runs in plan.runs.items()}

    assert rows("AND-mask") == {"masks": ["and-mask"]}
    assert rows("a*e", "0.01") == {"masks": ["average"], "rates": ["0.01"], "broken": ["average"]}


def test_rows_asked_for_are_trained_alone_and_a_report_shows_all(
    whole: ComparisonResult, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = whole.plan.base.run.output
    before = ended(output)
    some = compared(output, "masks", only="and-mask", witness=output / "witness")
    assert [row[0] for row in some.tables[0].cells()[1]] == ["AND-mask", "best possible"]
    assert (some.drawn, ended(output)) == ({}, before)
    words = ["report", JOB_FILE, "masks", "--output", str(output), "--results", str(tmp_path), "--json"]

    def reported(*more: str) -> tuple[list[tuple[str, int]], int]:
        assert main([*words, *more]) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]["masks"]["rows"]
        kept = (tmp_path / f"{NAME}-masks.jsonl").read_text().splitlines()
        return [(row["name"], row["seeds"]) for row in rows], len(kept)

    assert reported() == ([("average", 3), ("and-mask", 3)], 6)
    assert reported("--only", "aver*") == ([("average", 3)], 3)
    by_report = (tmp_path / f"{NAME}-masks.jsonl").read_bytes()
    words[0], words[6] = "compare", str(tmp_path / "compared")
    assert main([*words, "--witness", str(output / "witness"), "--only", "aver*"]) == 0
    assert (tmp_path / "compared" / f"{NAME}-masks.jsonl").read_bytes() == by_report


def test_a_run_is_found_where_a_newer_option_has_its_default(whole: ComparisonResult, output: Path) -> None:
    shutil.copytree(whole.plan.base.run.output, output)
    for file in output.glob("runs/*/record.json"):  # as a version wrote them that did not have the option
        record = json.loads(file.read_text())
        del record["config"]["width"]
        file.write_text(json.dumps(record))
    job = load_job(JOB_FILE)
    assert option_values(job.job.config)["width"] == 4

    def missing(*words: str) -> int:
        witness = str(whole.plan.base.run.output / "witness")  # an option of the job, as the runs were given it
        given = [*words, "--witness", witness, "--output", str(output)]
        plan = planned(job, ["rates"], given, check=False)
        return len(read_comparison(plan).missing.get("rates", []))

    assert (missing(), missing("--width", "6")) == (0, 4)


def test_a_table_with_a_rule_of_ones_own_is_found_without_the_rules_file(tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text("from concord.aggregation import AndMask\n\n\nclass Mine(AndMask):\n    pass\n")
    job = load_job(JOB_FILE)
    job = dataclasses.replace(
        job,
        job=dataclasses.replace(job.job, comparisons={"rates": Comparison({"1": {"lr": 1.0, "aggregator": "mean"}})}),
    )
    words = ["--aggregator", f"{rule}:Mine", "--seeds", "3", "--output", str(tmp_path)]
    plan = planned(job, ["rates"], words, check=False)
    assert f"--aggregator {rule}:Mine " in plan.command
    assert recorded_command(job, "rates", plan.given, {}).endswith(f"--aggregator {rule.name}:Mine")
    record = json.loads(json.dumps({"asked": {"rates": plan.given}, "sources": plan.base.sources()}))
    rule.write_text(rule.read_text().replace("AndMask", "GeometricMean"))
    other = planned(job, ["rates"], words, check=False)
    keys = {run.key.value for run in plan.runs["rates"]}
    assert len(keys) == 3
    assert not {run.key.value for run in other.runs["rates"]} & keys
    rule.unlink()
    recorded = plan_as_recorded(job, "rates", record, tmp_path, None)
    assert {run.key.value for run in recorded.runs["rates"]} == keys
    assert recorded.command == plan.command.replace(str(rule), rule.name)  # the record has no folders of a machine


def test_a_report_finds_runs_that_had_a_secret(ray_cluster: None, tmp_path: Path) -> None:
    source = Path(JOB_FILE).with_name("tiny_study.py").read_text()
    source = source.replace("    width: int = 4\n", "    hub_token: str | None = None\n    width: int = 4\n")
    source = source.replace("import Job", "import Comparison, Job")
    path = tmp_path / "mine.py"
    path.write_text(source.replace("loss=torch", 'comparisons={"one": Comparison({"a": {}})},\n    loss=torch'))
    job = load_job(str(path))
    plan = planned(job, ["one"], ["--hub-token", "my-secret", "--seeds", "1", "--output", str(tmp_path)])
    assert run_comparison(plan, lambda _: None).finished == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"my-secret" in file.read_bytes()]
    recorded = plan_as_recorded(job, "one", {"asked": json.loads(json.dumps(plan.asked))}, tmp_path, None)
    for each in (plan, recorded):
        assert read_comparison(each).missing == {}


def test_a_report_reads_alone_and_names_missing_runs_and_their_command(
    whole: ComparisonResult, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = (whole.folder.path / EVENTS).read_bytes()
    output = str(whole.plan.base.run.output)
    assert main(["report", JOB_FILE, "--output", output, "--results", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    shown = json.loads(printed.out.splitlines()[-1])["tables"]
    assert shown["masks"]["rows"] == [row for row in whole.as_json()["rows"] if row["table"] == "masks"]
    assert shown["broken"]["missing"] == 2
    assert f"concord compare {JOB_FILE} broken --output {output} makes them" in printed.err
    assert (whole.folder.path / EVENTS).read_bytes() == before
    lines = [json.loads(line) for line in (tmp_path / f"{NAME}-masks.jsonl").read_text().splitlines()]
    assert [(line["configuration"], line["seed"]) for line in lines][:2] == [("average", 0), ("average", 1)]
    assert set(lines[0]) == {"configuration", "seed", "values", "seconds", "command", "machine", "commit"}
    assert lines[0]["command"].startswith(f"concord compare {Path(JOB_FILE).name} masks")
    assert str(tmp_path.parent) not in lines[0]["command"]
    assert set(lines[0]["values"]) == {"o.o.d.", "at its peak", "of a"}


def test_a_run_that_fails_is_said_and_tried_again_and_the_others_are_kept(
    ray_cluster: None, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", JOB_FILE, "broken", "--output", str(output), "--json"]
    for _ in range(2):
        assert main(words) == 1
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["runs"], result["failed"], result["missing"]) == (1, 1, 0)
        assert "ArithmeticError: this model cannot be made" in result["error"]
    group = require_run(folder_of(output, NAME, "comparison"), "comparison")
    average, raises = (require_run(folder_of(output, each["run"])) for each in group.asked)
    assert (average.status, raises.status) == ("FINISHED", "FAILED")


@pytest.mark.slow
def test_kept_rows_stay_where_every_run_of_a_table_failed(ray_cluster: None, output: Path, tmp_path: Path) -> None:
    kept, other = (tmp_path / f"{NAME}-{table}.jsonl" for table in ("broken", "rates"))
    kept.write_text("rows of earlier runs\n")
    only = ("--only", "raises", "0.01", "--seeds", "1")
    words = ["compare", JOB_FILE, "rates", "broken", *only, "--output", str(output), "--results", str(tmp_path)]
    assert main(words) == 1
    assert kept.read_text() == "rows of earlier runs\n"
    assert json.loads(other.read_text())["configuration"] == "0.01"


def test_a_killed_comparison_resumes_and_trains_nothing_twice(
    whole: ComparisonResult, output: Path, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"
    address = ray.get_runtime_context().gcs_address  # of a cluster that outlives the driver
    words = [
        *("compare", JOB_FILE, "rates"),
        *("--output", str(output), "--address", address, "--concurrent", "1", "--witness", str(witness)),
        *("--pause", "0.05"),
    ]
    with Command(*words) as process:
        wait_for(lambda: process.poll() is not None or len(ended(output)) >= 1, 120)
        assert process.poll() is None, process.communicate()
        process.kill()
    before = ended(output)
    assert 1 <= len(before) < 4
    models = len(witness.read_text().splitlines())
    time.sleep(0.5)
    resumed = compared(output, "rates", pause=0.05, witness=witness, concurrent=1)
    assert len(ended(output)) == 4
    assert {name: ended(output)[name] for name in before} == before
    # the trial of the first look, and what had not ended
    assert len(witness.read_text().splitlines()) <= models + 1 + (4 - len(before)) + 1
    undisturbed = {name: [comparable(run.metrics) for run in runs] for name, runs in whole.runs["rates"].items()}
    assert {n: [comparable(run.metrics) for run in runs] for n, runs in resumed.runs["rates"].items()} == undisturbed


@pytest.mark.parametrize("kind", ["comparison", "study"])
def test_a_stopped_group_says_in_mlflow_how_far_it_is_until_it_goes_on(
    output: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("concord.studies.pool.ray_session", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("concord.studies.pool.trial_resources", lambda *_: SimpleNamespace(concurrent=2))
    plan = plan_of(output, "masks") if kind == "comparison" else planned_study(output, trials=7)

    def description() -> str:
        group = require_run(plan.folder, plan.kind)
        return str(Store.open(output).client.get_run(str(group.run_id)).data.tags.get("mlflow.note.content", ""))

    def work(error: type[BaseException] | None) -> None:
        with open_group(plan, plan.record, lambda _: None) as pool:
            if isinstance(plan, ComparisonPlan):
                pool.ask(plan.wanted.values())
            pool.group.run.append("note", part="beginning", text="what is compared")
            if error is not None:
                raise error

    with pytest.raises(StoppedError):
        work(KeyboardInterrupt)
    there = "0 of 6 trainings are there" if kind == "comparison" else "0 of 7 trials are there"
    assert description() == f"stopped: {there}; continue with `{plan.continuation}`\n\nwhat is compared"
    with pytest.raises(ZeroDivisionError):
        work(ZeroDivisionError)
    assert description() == "what is compared"
    work(None)
    assert description() == "what is compared"


@pytest.mark.slow
def test_a_stopped_run_continues_from_its_checkpoint(
    ray_cluster: None, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concord.studies.pool._CHECKPOINT_SECONDS", 0.0)
    options = {"epochs": 40, "evaluations": 20, "checkpoints": 10}
    asked = {**options, "only": "average", "seeds": 1, "pause": 0.03}
    (spec,) = plan_of(output, "masks", **asked).runs["masks"]
    folder = folder_of(output, str(spec.name))

    def stop() -> None:
        wait_for(lambda: len(folder.names(CHECKPOINTS)) == 2, 120)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor() as threads:
        stopped = threads.submit(stop)
        with pytest.raises(StoppedError) as stopping:
            compared(output, "masks", **asked)
        stopped.result()
    assert str(stopping.value).endswith(f"continue with {plan_of(output, 'masks', **asked).command}")
    before = require_run(folder).seconds
    said: list[str] = []
    result = compared(output, "masks", said.append, **asked)
    assert any(f"{spec.name} continues from its checkpoint" in line for line in said)
    (run,) = result.runs["masks"]["average"]
    assert [each.epoch for each in run.history] == list(range(2, 41, 2))
    assert comparable(run.metrics) == comparable(trained_here(0, aggregator="mean", lr=0.1, **options))
    assert run.seconds > before / 2
    assert folder.names(CHECKPOINTS) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["maskes"], "table maskes: job tiny-compared has no such table; did you mean masks?"),
        (["leave-one-ot"], "table leave-one-ot: job tiny-compared has no such table; did you mean leave-one-out?"),
        (["masks", "--only", "medians"], "--only medians: no row of masks has this name; there are average and-mask"),
        (["masks", "--only", "averages"], "--only averages: no row of masks has this name; did you mean average?"),
        (["masks", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["masks", "--first-seed", "-1"], "--first-seed -1: must not be negative"),
        (["masks", "--concurrent", "-1"], "--concurrent -1: must not be negative"),
        (["masks", "--gpus-per-trial", "0"], "--gpus-per-trial 0.0: must be above 0"),
        (["masks", "--seed", "3"], "--seed 3: a comparison trains several; give --first-seed and --seeds"),
        (["masks", "--treshold", "1"], "--treshold 1: there is no such option; did you mean --threshold?"),
        (["masks", "--broken", "raises"], "its model cannot be made (ArithmeticError: this model cannot be made"),
        (["masks", "--name", "no/name"], "--name no/name: must have letters, digits"),
        (["masks", "--results", "s3://a/b"], "--results s3://a/b: must be a folder on this machine's disk"),
        (["masks", "--results", __file__], f"--results {__file__}: is a file; give a folder"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(
    words: list[str], said: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", JOB_FILE, *words, "--output", str(output)]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def test_a_missing_row_of_a_job_with_hundreds_names_twelve(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "synthetic", "--only", "nothing", "--output", str(output)]) == 2
    said = capsys.readouterr().err
    rows, more = said.split("; there are ")[1].rsplit(" and ", 1)
    assert len(shlex.split(rows)) == 12
    assert re.fullmatch(r"\d+ more\n", more)


def test_a_report_does_not_keep_lines_at_an_address(
    output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(output.parent)
    assert main(["report", JOB_FILE, "--output", str(output), "--results", "s3://user:word@a/b"]) == 2
    assert "--results s3://***@a/b: must be a folder on this machine's disk" in capsys.readouterr().err
    assert not output.exists()
    assert not Path("s3:").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"treshold": 0.5}, "masks, odd: there is no option treshold; did you mean threshold?"),
        ({"threshold": 2.0}, "masks, odd: --threshold 2.0: the agreement threshold must lie in [0, 1]"),
        ({"threshold": "high"}, "masks, odd: --threshold high: must be a number"),
        ({"workers": 2}, "masks, odd: workers cannot differ between configurations"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused_where_it_stands(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    job = load_job(JOB_FILE)
    wrong = dataclasses.replace(job.job, comparisons={"masks": Comparison({"odd": options})})
    with pytest.raises(InputError) as error:
        planned(dataclasses.replace(job, job=wrong), ["masks"], ["--output", str(tmp_path)])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("six is too wide"), "its environments cannot be made (ValueError: six is too wide)"),
        (InputError("--width 6: is too wide"), "--width 6: is too wide"),
        (ArgumentError("width", 6, "is too wide"), "--width 6: is too wide"),
    ],
    ids=["ValueError", "InputError", "ArgumentError"],
)
def test_data_that_a_later_row_cannot_have_are_refused_by_its_name(tmp_path: Path, error: Exception, said: str) -> None:
    file = load_job(JOB_FILE)

    def environments(config: Any) -> Environments:
        if config.width == 6:
            raise error
        found: Environments = file.job.environments(config)
        return found

    rows = Comparison({"narrow": {}, "wide": {"width": 6}})
    job = dataclasses.replace(file.job, environments=environments, comparisons={"widths": rows})
    with pytest.raises(InputError) as refused:
        planned(dataclasses.replace(file, job=job), ["widths"], ["--output", str(tmp_path)])
    assert str(refused.value) == f"job tiny-compared: widths, wide: {said}"


def test_tables_may_stand_in_a_file_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    path = tmp_path / "mine.py"
    source = Path(JOB_FILE).with_name("tiny_study.py").read_text()
    path.write_text(source.replace("loss=torch", 'comparisons="tables/mine.py",\n    loss=torch'))
    (tmp_path / "tables" / "mine.py").write_text(
        "from concord.training import Comparison\ncomparisons = {'one': Comparison({'plain': {}})}\n"
    )
    job = load_job(str(path))
    assert planned(job, [], ["--output", str(tmp_path)]).tables.keys() == {"one"}
    (tmp_path / "tables" / "mine.py").unlink()
    assert load_job(str(path)).job.studies  # which a worker needs, and no tables
    with pytest.raises(InputError, match=r"comparisons tables/mine\.py: there is no such file"):
        planned(job, [], [])


# --- documents


def test_the_documents_tables_are_those_that_their_results_make() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        assert with_tables(text, ROOT / "docs" / "results") == text, f"{path}: run make tables"


def test_a_documents_table_follows_its_results(whole: ComparisonResult, tmp_path: Path) -> None:
    result = read_comparison(whole.plan)
    text = f"before\n<!-- results: {JOB_FILE} masks -->\nwrong\n<!-- end of results -->\nafter\n"
    tables = whole.folder.path / "tables"
    (tmp_path / "results").mkdir()
    target = tmp_path / "results" / f"{NAME}-masks.jsonl"
    target.write_bytes((tables / f"{NAME}-masks.jsonl").read_bytes())
    made = with_tables(text, tmp_path / "results")
    assert f"| average | 3 | {result.tables[0].cells()[1][0][2]} |" in made
    assert "wrong" not in made
    assert with_tables(made, tmp_path / "results") == made
    with pytest.raises(InputError, match="there is no"):
        with_tables(text, tmp_path)
