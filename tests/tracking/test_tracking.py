"""Tracking's guarantees on real MLflow stores: an SQLite file, and a server process that is killed."""

import contextlib
import json
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from forked import WITHOUT_CONCORD, run_processes, run_program
from mlflow.models import Model
from mlflow_server import NOWHERE, Server
from test_champion import the_best_of_those_at_once_is_the_champion
from tracked import points_of, tracked_runs
from unpickled import Program

from concord.errors import InputError, RunFailedError, UnansweredError
from concord.metric_name import metric_name
from concord.tracking import Store, load_program, log_model, models, promote, register, show
from concord.tracking import store as store_module
from concord.tracking.exported_model import load_predictor
from concord.tracking.registry import ModelVersion
from concord.tracking.run_search import Condition, find_runs

# Importing and opening


def _open_at_once(rank: int, folder: Path) -> None:
    (folder / f"ready {rank}").touch()
    while len(list(folder.glob("ready *"))) < 3:
        time.sleep(0.001)
    Store.open(folder / "new").start_run("tests", "a run", {}, {})


def test_several_runs_that_begin_at_once_in_a_new_folder_make_one_store(tmp_path: Path) -> None:
    run_processes(_open_at_once, 3, tmp_path)
    assert len(tracked_runs(Store.open(tmp_path / "new"), "tests", finished_only=False)) == 3


def test_importing_the_package_does_not_import_mlflow_or_torch() -> None:
    code = "import sys, concord.tracking; print(sorted({'mlflow', 'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_first_run_prints_nothing_and_leaves_no_file_behind(tmp_path: Path) -> None:
    code = """
        import pathlib, concord.tracking as t
        store = t.Store.open(pathlib.Path("out"))
        store.finish_run(store.start_run("e", "n", {}, {}))
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["artifacts", "mlflow.db", "out"]


def test_the_address_is_the_argument_the_environment_or_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    file = store.uri.removeprefix("sqlite:///")
    monkeypatch.chdir(Path(file).parent)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert Store.open(tmp_path).uri == store.uri  # and made absolute
    assert Store.open(tmp_path).artifacts == Path(file).parent / "artifacts"
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
    assert Store.open(tmp_path, store.uri).uri == store.uri
    with pytest.raises(InputError, match="from MLFLOW_TRACKING_URI"):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        (NOWHERE, "Connection refused"),
        ("http://ann:hunter2@127.0.0.1:9", "Connection refused"),
        ("https://hunter2@127.0.0.1:9", "Connection refused"),
        ("http://", "no host"),
        ("http://ann:hunter2@localhost:ninety", "Port"),
        ("ftp://ann:hunter2@somewhere", "scheme 'ftp'"),
        ("./mlruns", "not a URI"),
        ("sqlite://", "in memory"),
        ("sqlite:////proc/none/mlflow.db", "not a writable"),
        (f"sqlite:///{__file__}/mlflow.db", "not a writable"),
        (f"sqlite:///{__file__}", "not a writable"),
        ("postgresql://ann:hunter2@127.0.0.1:9/mlflow", "driver is not installed|no database answers"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_at_once_in_one_line(tmp_path: Path, uri: str, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=reason) as refused:
        Store.open(tmp_path, uri)
    line = str(refused.value)
    assert line.startswith("--tracking-uri ")
    assert "\n" not in line
    assert "hunter2" not in line
    assert time.monotonic() - start < 8


def test_a_server_that_takes_the_connection_and_is_silent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store_module.ANSWER_SECONDS == 15
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(InputError) as refused:
            Store.open(tmp_path, uri)
        assert time.monotonic() - start < 3  # asked once
    assert str(refused.value).startswith(
        f"--tracking-uri {uri}: it took the connection and did not answer within 1 s; give http(s)://HOST:PORT"
    )


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"])
def test_a_server_that_dies_in_mid_answer_is_named_so(tmp_path: Path, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as dying:

        def answers() -> None:
            taken, _ = dying.accept()
            with taken:
                taken.recv(65536)
                taken.sendall(answer)

        threading.Thread(target=answers, daemon=True).start()
        with pytest.raises(InputError, match=r"no MLflow server answers \(the connection broke in mid answer\); give"):
            Store.open(tmp_path, f"http://127.0.0.1:{dying.getsockname()[1]}")


def test_a_server_that_is_slow_to_answer_at_first_is_waited_for(server: Server, tmp_path: Path) -> None:
    os.killpg(server.pid, signal.SIGSTOP)  # connections are taken by the system, and nobody answers
    threading.Timer(2.0, os.killpg, (server.pid, signal.SIGCONT)).start()
    assert Store.open(tmp_path, server.uri).uri == server.uri


# Runs


def test_what_is_in_the_way_of_a_file_is_named_and_not_waited_for(store: Store, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "figure.txt").write_text("a figure")
    in_the_way = Path(unquote(urlsplit(store.client.get_run(run_id).info.artifact_uri).path)) / "figures"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("no folder")
    with pytest.raises(RunFailedError, match=re.escape(str(in_the_way))) as refused:
        store.log_files(run_id, tmp_path, "figures")
    assert not isinstance(refused.value, UnansweredError)


def test_a_run_keeps_what_it_is_given(store: Store, tmp_path: Path) -> None:
    (tmp_path / "figure.txt").write_text("a figure")
    run_id = store.start_run("kept", "named", {"lr": 0.1, "long": "x" * 9000, "widths": [8, 8]}, {"job": "synthetic"})
    store.log_metrics(run_id, {"accuracy": 0.5, "loss": math.inf, "accuracy@5": math.nan}, step=1)
    store.log_metrics(run_id, {"accuracy": 0.75, "loss": -math.inf}, step=2)
    store.log_metrics(run_id, {"accuracy": 0.8}, step=2)
    store.log_files(run_id, tmp_path, "figures")
    store.log_text(run_id, json.dumps({"best": 3}), "tables/best.json")
    assert tracked_runs(store, "kept") == []
    store.finish_run(run_id)

    (run,) = tracked_runs(store, "kept")
    assert repr(run) == repr(store.run(run_id))  # a NaN equals only itself in writing
    assert (run.name, run.status, run.tags) == ("named", "FINISHED", {"job": "synthetic"})
    assert (run.parameters["lr"], run.parameters["widths"]) == ("0.1", "8 8")
    assert abs(run.started.timestamp() - time.time()) < 60
    metrics = store.run(run_id).metrics
    assert math.isnan(metrics.pop("accuracy_5"))
    assert metrics == {"accuracy": 0.8, "loss": -math.inf}
    assert points_of(store, run_id, "accuracy") == [(1, 0.5), (2, 0.8)]
    assert store.artifacts is not None
    assert (store.artifacts / run_id / "artifacts" / "figures" / "figure.txt").read_text() == "a figure"
    assert json.loads((store.artifacts / run_id / "artifacts" / "tables" / "best.json").read_text()) == {"best": 3}


def test_runs_of_all_jobs_are_found_on_a_server_as_in_a_file(store: Store, server: Server) -> None:
    for each in (store, Store.open(Path("unused"), server.uri)):
        for job, accuracy in (("one", 0.5), ("two", 0.75), ("two", 0.25)):
            run_id = each.start_run(job, f"{job} {accuracy}", {"lr": 0.1}, {"concord.job": job})
            each.log_metrics(run_id, {"accuracy": accuracy})
        best = find_runs(each, 2, metric="accuracy", where=[Condition("lr", "=", "1e-1")])
        assert [run.metrics["accuracy"] for run in best] == [0.75, 0.5]
        assert [run.name for run in find_runs(each, 9, job="two")] == ["two 0.25", "two 0.75"]
        found = [run for run in each.search("tags.`concord.job` != ''", page=2) if run.experiment in ("one", "two")]
        assert len(found) == 3, "also where an answer has several pages"


def test_a_run_can_be_resumed_ended_and_deleted(store: Store) -> None:
    run_id = store.start_run("ended", "named", {}, {})
    store.finish_run(run_id, "KILLED")
    assert [run.status for run in tracked_runs(store, "ended", finished_only=False)] == ["KILLED"]
    store.resume_run(run_id)
    assert store.run(run_id).status == "RUNNING"
    store.delete_run(run_id)
    assert tracked_runs(store, "ended", finished_only=False) == []
    with pytest.raises(RunFailedError, match="could not log metrics"):
        store.log_metrics(run_id, {"a": 1.0})


def test_a_deleted_experiment_comes_back_for_a_new_run(store: Store) -> None:
    store.start_run("gone", "first", {}, {})
    store.client.delete_experiment(store.client.get_experiment_by_name("gone").experiment_id)
    store.start_run("gone", "second", {}, {})
    assert "second" in [run.name for run in tracked_runs(store, "gone", finished_only=False)]


def test_an_experiment_that_was_there_becomes_one_of_trainings(store: Store) -> None:
    made = store.client.create_experiment("made elsewhere")
    chosen = store.client.create_experiment("of agents", tags={"mlflow.experimentKind": "genai_development"})
    for name in ("made elsewhere", "of agents", "new"):
        store.start_run(name, "a run", {}, {})
    kinds = {
        name: store.client.get_experiment_by_name(name).tags["mlflow.experimentKind"]
        for name in ("made elsewhere", "of agents", "new")
    }
    ours = "custom_model_development"
    assert kinds == {"made elsewhere": ours, "of agents": "genai_development", "new": ours}
    assert made != chosen


def test_no_secret_is_tracked(store: Store) -> None:
    secret = {"api_key": "hunter2", "hub.token": "hunter2", "data": "s3://ann:hunter2@host/x", "tokens": 5}
    run = store.run(store.start_run("secrets", "named", secret, {"from": "http://hunter2@host"}))
    assert "hunter2" not in repr(run)
    assert run.parameters["tokens"] == "5"


# Metrics' names


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("a b/c.d-e:f_1", "a b/c.d-e:f_1"),
        ("acc@5", "acc_5"),
        ("/a//../b/", "a/b"),
        ("τ", "τ"),
        ("accuracy/北京", "accuracy/北京"),
        ("", "_"),
    ],
)
def test_any_name_becomes_one_that_mlflow_takes(store: Store, run_id: str, name: str, kept: str) -> None:
    assert metric_name(name) == kept
    store.log_metrics(run_id, {name: 1.0})
    assert kept in store.run(run_id).metrics


# Models


class Halves(torch.nn.Module):
    """Has what an export can get wrong: dropout and batch statistics, which evaluation mode switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(),
            torch.nn.Linear(16, 2),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class FixedBatch(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.reshape(2, 3, 2).flatten(1)


class Branches(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2 if inputs.sum() > 0 else inputs


PREDICT = """
    import mlflow.pyfunc, numpy, pandas
    model = mlflow.pyfunc.load_model("{model}")
    rows = numpy.linspace(-1, 1, 6000, dtype="float32").reshape(1000, 6)
    assert model.predict(rows[:1]).shape == (1, 2)
    answer = model.predict(rows)
    assert numpy.array_equal(model.predict(rows.astype("float64")), answer)
    assert numpy.array_equal(model.predict(pandas.DataFrame(rows.astype("float64"))).to_numpy(), answer)
    ones = numpy.ones((3, 6), int)
    assert numpy.array_equal(model.predict(ones), model.predict(ones.astype("float32")))
    numpy.save("answer.npy", answer)
    print(model.metadata.signature.outputs)
"""


def predict_elsewhere(uri: str, model: str, tmp_path: Path) -> tuple[torch.Tensor, str]:
    program = WITHOUT_CONCORD + textwrap.dedent(PREDICT).format(model=model)
    environment = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    printed = run_program(program, tmp_path, **environment)
    import numpy

    return torch.from_numpy(numpy.load(tmp_path / "answer.npy")), printed


def expected(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.linspace(-1, 1, 6000).reshape(1000, 6))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_logged_model_predicts_where_concord_is_not(store: Store, run_id: str, tmp_path: Path, rows: int) -> None:
    model = Halves().train()
    uri = log_model(store, run_id, model, torch.zeros(rows, 6))
    assert model.training
    assert store.artifacts is not None
    folder = store.artifacts / "models" / uri.removeprefix("models:/") / "artifacts"
    assert (folder / "data" / "model.pt2").exists()
    assert not list(folder.rglob("*.p*kl*"))
    assert not list(folder.rglob("*.pth"))
    if rows > 1:  # the subprocess costs seconds, and the other example is the harder one
        return
    register(store, uri, run_id, "predicts", {"accuracy": 0.5}, "accuracy", "max")
    answer, signature = predict_elsewhere(store.uri, "models:/predicts@champion", tmp_path)
    torch.testing.assert_close(answer, expected(model))
    assert "(-1, 2)" in signature
    version = show(store, "predicts")
    assert (version.inputs, version.outputs) == ("float32 (-1, 6)", "float32 (-1, 2)")
    assert (version.run, version.run_id) == ("a run", run_id)


def test_a_program_that_would_be_unpickled_is_not_loaded(store: Store, run_id: str, tmp_path: Path) -> None:
    model, rows = Halves().eval(), torch.zeros(2, 6)
    uri = log_model(store, run_id, model, rows)
    assert store.artifacts is not None
    folder = store.artifacts / "models" / uri.removeprefix("models:/") / "artifacts"
    archive, witness = folder / "data" / "model.pt2", tmp_path / "the program ran"
    with zipfile.ZipFile(archive) as whole:
        records = {name: whole.read(name) for name in whole.namelist()}
    (settings,) = (name for name in records if name.endswith("weights/model_weights_config.json"))
    weights = json.loads(records[settings])
    weight = next(iter(weights["config"].values()))
    weight["use_pickle"] = True
    records[settings] = json.dumps(weights).encode()
    records[f"{settings.rpartition('/')[0]}/{weight['path_name']}"] = pickle.dumps(Program(witness))
    with zipfile.ZipFile(archive, "w") as changed:
        for name, content in records.items():
            changed.writestr(name, content)
    register(store, uri, run_id, "spoiled", {"accuracy": 0.5}, "accuracy", "max")
    with pytest.raises(RunFailedError, match=r"cannot be loaded .*pickle"):
        load_program(store, show(store, "spoiled"))
    assert not witness.exists()
    assert "MLFLOW_ALLOW_PICKLE_DESERIALIZATION" not in os.environ
    with contextlib.suppress(Exception):  # that it is one which runs where nobody looks
        torch.export.load(archive)
    assert witness.exists()


def test_a_program_with_modules_beside_it_is_not_loaded(store: Store, run_id: str) -> None:
    uri = log_model(store, run_id, Halves().eval(), torch.zeros(2, 6))
    assert store.artifacts is not None
    folder = store.artifacts / "models" / uri.removeprefix("models:/") / "artifacts"
    (folder / "code").mkdir()
    (folder / "code" / "json.py").write_text("raise SystemExit('the code ran')")
    description = Model.load(folder)
    description.flavors["pytorch"]["code"] = "code"
    description.save(str(folder / "MLmodel"))
    register(store, uri, run_id, "with modules", {"accuracy": 0.5}, "accuracy", "max")
    before = [*sys.path]
    with pytest.raises(RunFailedError, match=r"^models:/with modules/1: cannot be loaded \(its folder code has"):
        load_program(store, show(store, "with modules"))
    assert sys.path == before


def test_models_are_kept_and_registered_through_a_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(tmp_path, server.uri)
    run_id = store.start_run("models", "named", {"lr": 1}, {})
    uri = log_model(store, run_id, Halves(), torch.zeros(4, 6))
    registered = register(store, uri, run_id, "served", {"accuracy": 0.5}, "accuracy", "max")
    assert (registered.version, registered.champion) == (1, True)
    found = [(each.aliases, each.metrics) for each in models(store) if each.name == "served"]
    assert found == [(("champion",), {"accuracy": 0.5})]
    kept = server.folder / "server-artifacts" / store.client.get_run(run_id).info.experiment_id
    assert len(list(kept.rglob("model.pt2"))) == 1
    store.finish_run(run_id)
    assert capsys.readouterr() == ("", "")  # standard output belongs to the command line
    the_best_of_those_at_once_is_the_champion([Store.open(tmp_path, server.uri) for _ in range(3)], "together")


def version_of_options(store: Store, options: dict[str, str]) -> ModelVersion:
    run_id = store.start_run("tests", "of options", options, {})
    uri = log_model(store, run_id, Halves(), torch.zeros(2, 6))
    made = register(store, uri, run_id, "of-options", {"loss": 1.0}, "loss", "min")
    return show(store, "of-options", made.version)


def test_metrics_of_a_logged_model_are_those_of_its_version_without_nan(store: Store) -> None:
    """MLflow's databases store NaN of a model as 0."""
    run_id = store.start_run("tests", "a run", {"aggregator": "mean"}, {})
    uri = log_model(store, run_id, Halves(), torch.zeros(2, 6), classes=["cat", "dog"], name="pets.small")
    metrics = {"auc": math.nan, "loss": math.inf, "accuracy": 0.5}
    for _ in range(2):  # as after a kill
        register(store, uri, run_id, "measured", metrics, "loss", "min", step=3, at=1_000)
    logged = store.client.get_logged_model(uri.removeprefix("models:/"))
    assert {(each.key, each.step) for each in logged.metrics} == {("loss", 3), ("accuracy", 3)}
    assert logged.name == "pets-small"
    version = show(store, "measured")
    assert version.metrics == {"loss": math.inf, "accuracy": 0.5}
    assert (version.aggregator, version.outputs) == ("mean", "cat, dog")
    for options, method in (
        ({"aggregator": "mean", "objective": "erm", "network": "mlp"}, "mean"),
        ({"aggregator": "and-mask", "objective": "irm"}, "and-mask, irm"),
        ({"network": "boosting"}, "boosting"),  # a baseline
        ({}, ""),
    ):
        assert version_of_options(store, options).trained_by == method
    assert math.isnan(store.run(run_id).metrics["auc"])


@pytest.mark.parametrize("model", [FixedBatch(), Branches()])
def test_a_model_that_cannot_be_exported_leaves_nothing(store: Store, run_id: str, model: torch.nn.Module) -> None:
    before = models(store)
    with pytest.raises(RunFailedError, match=f"torch.export cannot take this {type(model).__name__}: ") as failed:
        log_model(store, run_id, model, torch.ones(2, 6))
    assert "\n" not in str(failed.value)
    assert models(store) == before
    experiment = store.client.get_run(run_id).info.experiment_id
    kept = store.client.search_logged_models([experiment])
    assert not [each for each in kept if each.source_run_id == run_id]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            r"\(operator torchvision::nms does not exist\): .*pip uninstall --yes torchvision && .*\[images\]",
        ),
        ("1 / 0", r"\(division by zero\)$"),
    ],
)
def test_a_package_that_mlflow_cannot_import_is_the_reason_why_a_model_is_not_kept_or_loaded(
    line: str, reason: str, store: Store, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning, which MLflow imports where it is installed, fails beside a torchvision of another PyTorch."""
    (tmp_path / "pytorch_lightning.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("mlflow.pytorch", "pytorch_lightning"))]:
        monkeypatch.delitem(sys.modules, name)
    for call in (
        lambda: log_model(store, run_id, Halves(), torch.zeros(2, 6)),
        lambda: load_predictor(store, "models:/measured/1"),
    ):
        with pytest.raises(RunFailedError, match=rf"^mlflow.pytorch cannot be imported {reason}"):
            call()


@pytest.fixture(scope="module")
def model_uri(store: Store) -> str:
    return log_model(store, store.start_run("tests", "a model", {}, {}), Halves(), torch.zeros(2, 6))


def another_run(store: Store) -> str:
    return store.start_run("tests", "another", {}, {})


@pytest.mark.parametrize(
    ("mode", "values", "champions"),
    [
        ("max", [0.5, 0.5, 0.4, math.nan, 0.6], [1, 1, 1, 1, 5]),
        ("min", [0.5, 0.5, 0.6, math.nan, 0.4], [1, 1, 1, 1, 5]),
        ("max", [math.nan, -math.inf, 0.0], [None, 2, 3]),
    ],
)
def test_the_champion_moves_only_when_strictly_better(
    store: Store, model_uri: str, mode: str, values: list[float], champions: list[int | None]
) -> None:
    name = f"champion {mode} {len(values)}"
    for version, (value, champion) in enumerate(zip(values, champions, strict=True), start=1):
        became = register(
            store, model_uri, another_run(store), name, {"accuracy": value, "loss": 1.0}, "accuracy", mode
        )
        assert (became.name, became.version, became.champion) == (name, version, champion == version)
        if champion is None:
            with pytest.raises(InputError):
                show(store, name)
        else:
            assert show(store, name).version == champion
            assert show(store, name).metrics["accuracy"] == values[champion - 1]


def test_a_champion_without_the_criterion_stays_until_somebody_promotes(store: Store, model_uri: str) -> None:
    register(store, model_uri, another_run(store), "judged", {"accuracy": 0.5}, "accuracy", "max")
    other = register(store, model_uri, another_run(store), "judged", {"f1": 0.9, "accuracy": 0.9}, "f1", "max")
    assert not other.champion
    assert "has no f1, only accuracy" in other.reason
    assert promote(store, "judged", 2).aliases == ("champion",)
    assert promote(store, "judged", 2, or_better=True).version == 2
    third = register(store, model_uri, another_run(store), "judged", {"accuracy": 0.95}, "accuracy", "max")
    assert third.champion
    assert third.reason.startswith("accuracy 0.95 is better than 0.9")


def test_a_run_that_is_registered_again_has_one_version(store: Store, model_uri: str) -> None:
    """As after a kill between registering and the record of it, also of one that was no champion."""
    first, second = another_run(store), another_run(store)
    for version, (run_id, value, champion) in enumerate([(first, 0.5, True), (second, 0.4, False)], 1):
        for _ in range(2):
            became = register(store, model_uri, run_id, "once", {"accuracy": value}, "accuracy", "max")
            assert (became.version, became.champion) == (version, champion)
    assert [(each.version, each.run_id) for each in models(store) if each.name == "once"] == [(2, second), (1, first)]
    # Killed between the version and the alias of the champion.
    store.client.delete_registered_model_alias("once", "champion")
    became = register(store, model_uri, first, "once", {"accuracy": 0.5}, "accuracy", "max")
    assert (became.version, became.champion) == (1, True)


def test_what_is_not_in_the_registry_is_answered_with_what_is(store: Store, run_id: str, model_uri: str) -> None:
    register(store, model_uri, run_id, "present", {"accuracy": 0.5}, "accuracy", "max")
    assert show(store, "present", "1") == show(store, "present", "@champion") == show(store, "present", 1)
    with pytest.raises(InputError, match=r"no model 'absent' in the registry; it has .*present"):
        show(store, "absent")
    with pytest.raises(InputError, match="'present' has no version or alias '7'; it has 1, champion"):
        promote(store, "present", 7)
    with pytest.raises(RunFailedError, match=r"could not register 'a/b': .*cannot contain '/' or ':'"):
        register(store, model_uri, run_id, "a/b", {"accuracy": 0.5}, "accuracy", "max")


@pytest.mark.parametrize("stored", ["west north", "('west', 'north')", "['west', 'north']"])
@pytest.mark.parametrize("asked", ["west north", "west,north", "(west, north)", '["west", "north"]'])
def test_several_values_of_an_option_are_found_however_they_are_written(stored: str, asked: str) -> None:
    assert Condition.of("--where", f"test={asked}", "").holds(stored)
    assert not Condition.of("--where", f"test!={asked}", "").holds(stored)
    assert not Condition.of("--where", "test=west", "").holds(stored)
