"""The job `table`: from a CSV file to a champion that takes raw rows, without Python and without Concord."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from forked import WITHOUT_CONCORD, run_program
from ports import free_port
from sklearn.linear_model import LinearRegression
from test_table_environments import patients

from concord.cli import main
from concord.environments.table import from_table
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.execution.trained_model import model_of_run
from concord.models.table_network import TableNetwork
from concord.studies.trial import share_data
from concord.tracking import Store
from concord.tracking.exported_model import ExportError, log_model
from concord.training import ProcessContext, load_job
from concord.training.worker_data import prepare

TABLE = ["--environment", "hospital", "--target", "died", "--test", "west"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table and what a run on it has left."""
    folder = tmp_path_factory.mktemp("table")
    frame = patients()
    frame["died"] = frame.died.map({0: "no", 1: "yes"})
    frame.to_csv(folder / "patients.csv", index=False)
    where = ["--data", str(folder / "patients.csv"), "--output", str(folder / "out")]
    assert main(["train", "table", *where, *TABLE, "--epochs", "2", "--name", "first"]) == 0
    return folder


PREDICT = """
import contextlib, io, json
import mlflow, pandas
mlflow.set_tracking_uri("sqlite:///out/mlflow.db")
model = mlflow.pyfunc.load_model("models:/table@champion")
rows = pandas.read_csv("patients.csv")
found = {"rows": model.predict(rows).to_dict("list"), "refused": []}
strange = rows.head(2).assign(smokes="sometimes")
with contextlib.redirect_stderr(io.StringIO()) as said:
    found["strange"] = model.predict(strange).to_dict("list")
found["stderr"] = said.getvalue()
for wrong in (rows.head(2).drop(columns="age"), rows.head(2).assign(age="old")):
    try:
        model.predict(wrong)
    except Exception as error:
        found["refused"].append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def predicted(trained: Path) -> Mapping[str, Any]:
    """What another process, without Concord, has of the champion."""
    found: Mapping[str, Any] = json.loads(run_program(WITHOUT_CONCORD + PREDICT, trained))
    return found


def test_a_network_that_does_not_fit_the_tables_classes_is_not_exported(store: Store, run_id: str) -> None:
    found = from_table(patients(), target="died", environment="hospital").fitted(0.1, 0)
    assert found.encoder is not None
    rows, network = torch.from_numpy(found.encoder.encode(patients())), TableNetwork(*found.encoder.widths, 1)
    said = r"^this TableNetwork gives \(1,\) for each row, and the table needs \(2,\), for 0, 1$"
    with pytest.raises(ExportError, match=said):
        log_model(store, run_id, network, rows, found.raw)


def test_a_champion_of_raw_rows_predicts_what_the_run_does(trained: Path, predicted: Mapping[str, Any]) -> None:
    found = model_of_run(load_job("table"), trained / "out", "first")
    table = found.job.job.environments(found.config).fitted(found.config.data.held_out, found.config.run.seed)
    rows = pd.read_csv(trained / "patients.csv")
    with torch.no_grad():
        own = found.model.eval()(torch.from_numpy(table.encoder.encode(rows))).softmax(1).numpy()
    np.testing.assert_allclose(np.array([predicted["rows"][name] for name in ("no", "yes")]).T, own, atol=1e-6)


def test_rows_that_a_champion_cannot_take_get_one_line(predicted: Mapping[str, Any]) -> None:
    missing, other_type = predicted["refused"]
    assert missing.startswith("column age is missing; the model needs age")
    assert other_type.startswith("column age: expected numbers")
    assert "\n" not in missing + other_type
    assert "column smokes: unknown or rare in training: sometimes" in predicted["stderr"]
    assert sum(values[0] for values in predicted["strange"].values()) == pytest.approx(1)


def test_the_program_of_the_page_predicts_for_raw_rows(trained: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (program,) = re.findall(r"<!-- tested: raw-rows -->\n```python\n(.*?)```", page, re.DOTALL)
    (trained / "concord-runs").symlink_to("out")
    pd.read_csv(trained / "patients.csv").drop(columns="died").to_csv(trained / "new_patients.csv")
    *setting, predict = program.splitlines()
    printed = run_program("\n".join([*setting, f"print(({predict.partition('#')[0]}).shape)"]), trained)
    assert "(" + str(len(patients())) + ", 2)" in printed


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_table_that_was_edited_is_read_again(kind: str, tmp_path: Path) -> None:
    frame = patients()
    parts = {"all": frame} if kind == "file" else dict(iter(frame.groupby("hospital")))
    for name, rows in parts.items():
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
    data = tmp_path / "all.csv" if kind == "file" else tmp_path
    job = load_job("table").job
    config = job.config.with_options(data=data, environment="hospital", target="died", test=("west",))
    first, width = job.environments(config), len(job.model(config).state_dict())
    assert job.environments(config) is first
    for name, rows in parts.items():
        ward = np.resize(["a", "b"], len(rows))
        rows.assign(ward=ward, died=1 - rows.died).to_csv(tmp_path / f"{name}.csv", index=False)
    again = job.environments(config)
    assert again.version != first.version
    assert again.table.frame.died.tolist() == [1 - died for died in first.table.frame.died]
    assert again.table.kinds == {**first.table.kinds, "ward": "category"}
    assert len(job.model(config).state_dict()) > width
    if kind == "folder":
        frame[frame.hospital == "west"].assign(hospital="mars").to_csv(tmp_path / "mars.csv", index=False)
        assert "mars" in job.environments(config).names


def ask(port: int, rows: list[dict[str, Any]]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations",
        json.dumps({"dataframe_records": rows}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow  # two interpreters with MLflow; that a champion predicts for raw rows is claimed above
def test_mlflow_serves_a_champion_of_raw_rows(trained: Path, predicted: Mapping[str, Any]) -> None:
    port = free_port()
    words = ["models", "serve", "--model-uri", "models:/table@champion", "--env-manager", "local", "--port", str(port)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    place = {"MLFLOW_TRACKING_URI": f"sqlite:///{trained}/out/mlflow.db", "PATH": path}
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words], env={**os.environ, **place}, cwd=trained, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while server.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        row = json.loads(pd.read_csv(trained / "patients.csv").head(1).to_json(orient="records"))
        status, answer = ask(port, row)
        assert status == 200
        assert answer["predictions"][0] == pytest.approx({name: each[0] for name, each in predicted["rows"].items()})
        status, answer = ask(port, [{"smokes": "yes"}])
        assert status == 400
        assert "column age is missing; the model needs age" in answer["message"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_check_says_what_is_understood_of_a_table(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "table", "--check", str(trained / "patients.csv"), *TABLE, "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["environments"]["west"]["purpose"] == "test"
    assert {name: each["kind"] for name, each in found["columns"].items()} == {
        "age": "numeric", "smokes": "category", "admitted": "date", "chest pain": "category",
    }  # fmt: skip
    assert 0.1 < found["columns"]["age"]["missing"]["east"] < 0.4


def test_a_column_without_a_value_is_ignored_and_infinities_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = patients().assign(empty=np.nan)
    frame["age"] = frame.age.fillna(50.0).where(frame.hospital != "east", np.inf)
    frame.to_csv(tmp_path / "patients.csv", index=False)
    assert main(["data", "table", "--check", str(tmp_path / "patients.csv"), *TABLE]) == 0
    lines = capsys.readouterr().err
    assert re.search(r"^ +age +numeric .* east 100% +\d+% *$", lines, re.MULTILINE)
    assert "column age: 60 infinite values count as missing\n" in lines
    assert "240 rows, a classification\n" in lines
    assert "rows have no died" not in lines
    assert lines.count("empty") == 1
    assert "column empty is ignored: it has no value in the training environments\n" in lines


def test_a_check_says_once_that_rows_have_no_target_and_that_a_column_may_name_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = patients()[["hospital", "age", "died"]].assign(number=range(240))
    frame["died"] = frame.died.where(frame.index % 10 > 0)
    frame.to_csv(tmp_path / "patients.csv", index=False)
    assert main(["data", "table", "--check", str(tmp_path / "patients.csv"), *TABLE]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "left out" in line] == ["warning: 24 of 240 rows have no died and are left out"]
    assert sum("may name the rows" in line for line in lines) == 1


def test_a_table_reports_the_measures_of_its_field_and_accuracy_compares_models(tmp_path: Path) -> None:
    frame = patients()
    frame["stay"] = np.where(frame.died == 1, "long", np.where(frame.age > 50, "short", "none"))
    frame.to_csv(tmp_path / "patients.csv", index=False)
    job = load_job("table")
    own = {"auc", "average_precision", "brier", "calibration_error", "recall", "specificity", "majority_share"}
    for target, expected in (("died", own), ("stay", {"f1", "brier", "calibration_error", "majority_share"})):
        table = {"data": tmp_path / "patients.csv", "environment": "hospital", "test": ("west",), "target": target}
        config = job.job.config.with_options(**table)
        checked = preflight(job, config)
        assert checked.measures.keys() == {"loss", "accuracy"} | expected
        assert checked.criterion == ("validation_accuracy", "max")
        assert "worst_ood_brier" in checked.reported
    with pytest.raises(InputError, match=r"--cutoff 0.3: the target does not have two classes; leave it out"):
        preflight(job, config.with_options(cutoff=0.3))


@pytest.mark.parametrize(("target", "ignored"), [("died", "age"), ("age", "smokes")])
def test_a_fold_predicts_rows_by_their_place_in_the_file_in_the_targets_values(
    trained: Path, target: str, ignored: str
) -> None:
    where = ["--data", str(trained / "patients.csv"), "--output", str(trained / "folds"), "--no-register"]
    words = [
        "--environment",
        "hospital",
        "--target",
        target,
        "--columns",
        f"{ignored}=ignore",
        "--name",
        f"of-{target}",
    ]
    assert main(["train", "table", *where, *words, "--epochs", "2", "--leave-out", "east"]) == 0
    found = pd.read_parquet(trained / "folds" / "runs" / f"of-{target}" / "predictions.parquet")
    rows = pd.read_csv(trained / "patients.csv").dropna(subset=[target])
    last = found[found.step == found.step.max()]
    assert last.row.tolist() == rows.index[rows.hospital == "east"].tolist()
    report = json.loads((trained / "folds" / "runs" / f"of-{target}" / "metrics.json").read_text())
    if target == "age":
        assert last.target.to_numpy() == pytest.approx(rows.age[last.row].to_numpy(), rel=1e-5)
        assert ((last.prediction - last.target) ** 2).mean() == pytest.approx(report["validation_mse"], rel=1e-4)
    else:
        assert last.target.tolist() == rows.died[last.row].tolist()
        assert (last.prediction == last.target).mean() == pytest.approx(report["validation_accuracy"])


def test_a_run_warns_of_options_and_averages_without_effect(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data", str(trained / "patients.csv"), "--output", str(trained / "warned"), "--no-register"]
    idle = ["--penalty-weight", "3", "--representation", "nowhere", "--average", "ema:0.999"]
    assert main(["train", "table", *where, *TABLE, "--epochs", "2", *idle]) == 0
    lines = capsys.readouterr().err
    assert "warning: --penalty-weight, --representation: of no effect in this run" in lines
    assert "warning: --average ema:0.999: averages about 1000 steps, and the run has " in lines


def test_a_column_that_names_the_environment_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = patients()
    frame.assign(machine=frame.hospital.map({"east": 1, "north": 2, "south": 3, "west": 4})).to_csv(
        tmp_path / "t.csv", index=False
    )
    assert main(["data", "table", "--check", str(tmp_path / "t.csv"), *TABLE, "--json"]) == 0
    columns = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["columns"]
    assert columns["machine"]["identifies"] == 1.0
    assert columns["age"]["identifies"] < 0.5


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "--data: needed; give a CSV or Parquet file"),
        (["--data", "TABLE"], "--target: needed; give the column to predict"),
        (["--data", "TABLE", "--target", "dead"], "--environment: needed; a column of"),
        (["--data", "TABLE", "--environment", "ward", "--target", "died"], "--environment ward: no such column"),
        (
            ["--data", "TABLE", *TABLE, "--columns", "age=number"],
            "--columns age=number: expected NAME=KIND, with a kind of",
        ),
        (["--data", "TABLE", *TABLE, "--columns", "ago=numeric"], "--columns ago: no such column"),
        (["--data", "s3://me:secret@bucket/t.csv", *TABLE], "--data s3://***@bucket/t.csv: holds a user or a password"),
        (["--data", "nothing.csv", *TABLE], "nothing.csv: there is no such file"),
    ],
)
def test_wrong_options_of_a_table_are_one_line(
    words: list[str], line: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(trained / "patients.csv") if word == "TABLE" else word for word in words]
    assert main(["train", "table", *given, "--output", str(tmp_path / "new")]) == 2
    problem = capsys.readouterr().err.strip().splitlines()
    assert line in problem[-1]
    assert "secret" not in "".join(problem)
    assert not (tmp_path / "new").exists()


def test_validation_environments_are_refused_where_the_one_left_out_validates(
    trained: Path, refused: Callable[..., str]
) -> None:
    words = ["leave-one-out", "--data", str(trained / "patients.csv"), *TABLE[:4], "--validation", "west"]
    assert refused("compare", "table", *words) == (
        "--validation west: the environment left out validates; leave this option out"
    )


def test_a_fold_does_not_share_what_was_fitted_with_its_environment(trained: Path, ray_cluster: None) -> None:
    job = load_job("table").job
    config = job.config.with_options(
        data=trained / "patients.csv", environment="hospital", target="died", test=("west",)
    ).resolve()
    shared = share_data(job, config, ["lr"])
    assert shared is not None
    assert shared.fits(config)
    assert not shared.fits(config.with_options(leave_out="south"))
    whole, fold = (
        prepare(job, config.with_options(leave_out=left_out), ProcessContext()).training[0]
        for left_out in (None, "south")
    )
    assert whole.training.name == fold.training.name
    assert not torch.equal(whole.training.inputs, fold.training.inputs)


@pytest.fixture(scope="module")
def regressed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with prices around 430,000, and the report of linear regression on them."""
    folder = tmp_path_factory.mktemp("prices")
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(800, 3))
    prices = 430_000 + inputs @ [60_000, -25_000, 10_000] + draw.normal(scale=8_000, size=800)
    frame = pd.DataFrame(inputs, columns=["area", "age", "floor"]).assign(
        town=np.repeat(list("abcd"), 200), price=prices
    )
    frame.to_csv(folder / "prices.csv", index=False)
    where = ["--data", str(folder / "prices.csv"), "--output", str(folder / "out")]
    about = ["--environment", "town", "--target", "price", "--test", "d"]
    method = ["--network", "linear", "--aggregator", "mean", "--epochs", "80", "--lr", "0.03", "--name", "first"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["train", "table", *where, *about, *method, "--json"]) == 0
    return folder, json.loads(printed.getvalue().splitlines()[-1])


def test_a_regression_has_the_errors_of_least_squares_in_the_targets_units(
    regressed: tuple[Path, dict[str, Any]],
) -> None:
    folder, report = regressed
    frame = pd.read_csv(folder / "prices.csv")
    columns, test = ["area", "age", "floor"], frame.town == "d"
    moved = LinearRegression().fit(frame.loc[~test, columns], frame.price[~test]).predict(frame[columns]) - frame.price
    found = report["metrics"]
    assert found["ood_mse"] == pytest.approx((moved[test] ** 2).mean(), rel=0.05)
    assert found["ood_mae"] == pytest.approx(moved[test].abs().mean(), rel=0.05)
    assert found["ood_constant_mse"] == pytest.approx(frame.price[test].var(), rel=0.05)
    assert found["ood_loss"] == pytest.approx(found["ood_mse"] / frame.price[~test].var(), rel=0.1)


def test_a_champion_of_a_regression_predicts_in_the_targets_units(regressed: tuple[Path, dict[str, Any]]) -> None:
    folder, report = regressed
    program = """
import mlflow, pandas
mlflow.set_tracking_uri("sqlite:///out/mlflow.db")
rows = pandas.read_csv("prices.csv")
moved = (mlflow.pyfunc.load_model("models:/table@champion").predict(rows).price - rows.price)[rows.town == "d"]
print((moved ** 2).mean())
"""
    found = float(run_program(WITHOUT_CONCORD + program, folder).strip().splitlines()[-1])
    assert found == pytest.approx(report["metrics"]["ood_mse"], rel=1e-5)


def test_a_regression_that_learns_nothing_says_so(
    regressed: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = regressed
    words = ["--environment", "town", "--target", "price", "--epochs", "1", "--lr", "3", "--no-register"]
    where = ["--data", str(folder / "prices.csv"), "--output", str(folder / "lost")]
    assert main(["train", "table", *where, *words, "--aggregator", "mean"]) == 0
    line = "warning: no better than the mean of the training target: mse on held-out examples"
    assert line in capsys.readouterr().err


def test_a_check_shows_what_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patients().assign(pressure=lambda rows: ["?", *map(str, range(len(rows) - 1))]).to_csv(tmp_path / "east.csv")
    (tmp_path / ".west.csv").write_text("hidden")
    words = ["data", "table", "--check", str(tmp_path), *TABLE, "--json"]
    for _ in range(2):  # the table is not kept from before
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["warnings"]
        assert len(found) == 2
        assert "other files: 1, such as .west.csv (hidden); they are left out" in found[0]
        assert "column pressure: 1 of 180 cells are no plain numbers, such as '?'; give --missing '?'" in found[1]
    assert main([*words, "--missing", "?"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (found["columns"]["pressure"]["kind"], len(found["warnings"])) == ("numeric", 1)


def test_a_check_lists_what_is_ignored_odd_or_misspelt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = patients().assign(
        note=[f"patient {number} came in" for number in range(240)],
        number=np.random.default_rng(0).permutation(240),
        ward=["surgery"] * 100 + ["Surgery"] * 20 + ["medicine"] * 118 + ["medecine", "typing"],
        cholesterol=[0] * 30 + [150 + number % 100 for number in range(210)],
        grade=["A-"] * 100 + ["A+"] * 130 + ["A"] * 10,
        lab=["7"] * 237 + ["unknown", "unknown", "n/k"],
    )
    frame.insert(0, "", range(240))
    frame.to_csv(tmp_path / "patients.csv", index=False)
    words = ["data", "table", "--check", str(tmp_path / "patients.csv"), "--environment", "hospital"]
    assert main([*words, "--target", "died", "--columns", "age=ignore", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["notes"] == [
        "column Unnamed: 0 is ignored: it has no name, so it counts the rows",
        "column age is ignored: as --columns says",
        "column note is ignored: text with 240 different values in 240 training rows, such as 'patient 0 came in'; "
        "--text note makes inputs of it",
        "column admitted: dates become the inputs year, month, day, weekday and hour",
        "column number has another whole number in nearly every row, so it may name the rows; --columns number=ignore "
        "leaves it out",
        "column ward: 'Surgery' (20×) looks like 'surgery' (100×), 'medecine' (1×) looks like 'medicine' (118×)",
        "column cholesterol: 30 cells are 0, far from all others (east 50%); if it means missing, empty these cells",
    ]
    assert "column lab: 3 of 240 cells are no plain numbers, such as 'unknown'; give --missing 'unknown' 'n/k'" in str(
        found["warnings"]
    )


def test_a_check_refuses_values_of_another_kind(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "table", "--check", str(trained / "patients.csv"), *TABLE, "--columns", "smokes=numeric"]
    assert main(words) == 2
    assert "column smokes: expected numbers (" in capsys.readouterr().err


def test_a_leaked_identifier_is_named_and_many_environments_are_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    school = np.repeat([f"s{number:03d}" for number in range(160)], 20)
    passed, large = random.integers(0, 2, len(school)), school == "s007"
    passed[large] = 1
    frame = pd.DataFrame(
        {"school": school, "case": 10_000 * passed + random.permutation(len(school)), "passed": passed}
    )
    frame.assign(size=random.normal(size=len(school))).to_csv(tmp_path / "pupils.csv", index=False)
    words = ["data", "table", "--check", str(tmp_path / "pupils.csv"), "--environment", "school", "--target", "passed"]
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 24
    assert "160 environments: 160 train; least, quartiles and most:" in lines
    assert "  rows: 20 20 20 20 20" in lines
    assert any(re.fullmatch(r"  target 1: .*; s007 1.* stand out", line) for line in lines)
    assert "warning: one class in s007" in lines
    assert "warning: column case alone gives the target away; is it known when you predict?" in lines
    assert not any("column size" in line for line in lines)


@pytest.mark.usefixtures("without_figures")
def test_an_analysis_of_a_tables_run_is_of_its_columns(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", "table", "--output", str(trained / "out")]
    found = {}
    for which in (["--name", "first"], ["--model", "table@champion"]):
        assert main([*words, *which, "--json"]) == 0
        found[which[0]] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    report, of_version = found["--name"], found["--model"]
    assert report["table"]["purposes"]["west"] == "test"
    assert [each["column"] for each in report["table"]["columns"]] == ["age", "smokes", "admitted", "chest pain"]
    for own, other in zip(report["table"]["columns"], of_version["table"]["columns"], strict=True):
        assert own["use"]["shuffled"] == pytest.approx(other["use"]["shuffled"], abs=1e-6)
    assert report["figures"].keys() == {"columns"}
    kept = json.loads((trained / "out" / "runs" / "first" / "consistency" / "consistency.json").read_text())
    assert kept["table"] == report["table"]

    assert main([*words, "--name", "first"]) == 0
    said = capsys.readouterr()
    assert "first: was analyzed before with these options" in said.err
    assert "loss if shuffled" in said.out
    assert "columns that break by more than chance: none" in said.out
    assert "I at least" not in said.out
    assert main([*words, "--name", "first", "--parts", "signs", "columns"]) == 0
    assert "sign agreement" in capsys.readouterr().out
