"""Whole runs on real Ray workers and a real MLflow store: kept, found again, and the same after a kill."""

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import WITHOUT_CONCORD, Command, run_program
from mlflow_server import Server
from recorded import report_of, without_time
from safetensors.torch import load_file
from tracked import points_of, tracked_runs
from waiting import wait_for

from concord.cli import main
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, RunFailedError, StoppedError
from concord.execution.preflight import preflight
from concord.execution.run import run
from concord.execution.trained_model import model_of_run
from concord.record import EVENTS, RECORD, Run, read_events
from concord.storage import read_lines
from concord.tracking import Store, load_program, models, show
from concord.tracking.registry import delete_version
from concord.training import load_job

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")
OPTIONS: dict[str, Any] = {
    "epochs": 8,
    "batch_size": 16,
    "lr": 5e-2,
    "threshold": 0.6,
    "evaluations": 4,
    "vectorize": "vmap",
    "workers": 2,
}


PREDICT = """
import json
import mlflow, numpy
mlflow.set_tracking_uri("sqlite:///{folder}/mlflow.db")
batch = {{name: numpy.array(rows) for name, rows in json.load(open("{folder}/batch.json")).items()}}
answer = mlflow.pyfunc.load_model("{model}").predict(batch)
print(json.dumps({{name: rows.tolist() for name, rows in answer.items()}}))
"""


def start(output: Path, **changes: Any) -> Run:
    job = load_job(JOB_FILE)
    return run(job, job.job.config.with_options(**(OPTIONS | {"output": output} | changes)), lambda _: None)


@pytest.fixture(scope="module")
def calm(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing disturbs."""
    return start(tmp_path_factory.mktemp("calm") / "runs", name="calm")


def test_a_run_learns_the_shared_rule_and_reports_by_contract(calm: Run) -> None:
    said = dict(report_of(calm))
    assert set(said) >= {"job", "run_id", "seconds", "model", "artifacts", "metrics"}
    assert said["job"] == "shared-rule"
    assert said["metrics"]["ood_accuracy"] > 0.9
    assert said["model"] == "models:/shared-rule/1"
    assert json.loads(json.dumps(said)) == said


def test_mlflow_has_parameters_metrics_figures_and_code_version(calm: Run) -> None:
    store = Store.open(calm.folder.path.parent.parent, None)
    (kept,) = tracked_runs(store, "shared-rule")
    assert kept.run_id == calm.run_id
    assert kept.parameters["threshold"] == "0.6"
    assert kept.parameters["aggregator"] == "and-mask"
    assert json.loads((calm.folder.path / RECORD).read_text())["config"]["aggregator"] == "and-mask"
    # Of the methods that it does not use it has no parameters, and its record has them, for a resumed run.
    assert not kept.parameters.keys() & {"momentum", "beta3", "temporal_threshold", "penalty_warmup", "inner_lr"}
    assert kept.parameters.keys() >= {"beta1", "lr", "rescale", "milestones", "decay"}
    assert json.loads((calm.folder.path / RECORD).read_text())["config"]["momentum"] == 0.9
    assert kept.tags["concord.version"]
    assert len(kept.tags["concord.commit"].removesuffix("-dirty")) == 40
    steps = points_of(store, str(calm.run_id), "step/loss")
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == 8 * 5
    for name in ("accuracy/train/a", "accuracy/held_out/c", "accuracy/ood/d", "kept_fraction/weight"):
        assert name in kept.metrics
    assert without_time(kept.metrics) == pytest.approx(
        without_time(json.loads((calm.folder.path / "metrics.json").read_text()))
        | {name: value for name, value in kept.metrics.items() if name.startswith("step/")}
    )
    artifacts = {str(path.relative_to(store.artifacts)) for path in store.artifacts.rglob("*") if path.is_file()}
    for wanted in ("config.json", "environments.json", "figures/curves.png"):
        assert any(path.endswith(wanted) for path in artifacts), wanted


def test_mlflow_has_the_data_and_the_job_file(calm: Run) -> None:
    client = Store.open(calm.folder.path.parent.parent, None).client
    entry = client.get_run(str(calm.run_id))
    logged = {
        each.dataset.name: (each.tags[0].key, each.tags[0].value, json.loads(each.dataset.profile)["num_rows"])
        for each in entry.inputs.dataset_inputs
    }
    job = load_job(JOB_FILE).job
    environments = job.environments(job.config.with_options(**OPTIONS))
    sizes = {name: len(environments[name]) for name in "abcd"}
    held_out = {name: max(round(0.1 * sizes[name]), 1) for name in "abc"}
    context = "mlflow.data.context"
    assert logged == {
        **{name: (context, "train", sizes[name] - held_out[name]) for name in "abc"},
        **{f"{name}, held out": (context, "held-out", held_out[name]) for name in "abc"},
        "d": (context, "ood", sizes["d"]),
    }
    assert len({each.dataset.digest for each in entry.inputs.dataset_inputs}) == 7
    assert entry.data.tags["mlflow.source.name"] == "tests/jobs/shared_rule.py"
    source = json.loads(entry.inputs.dataset_inputs[0].dataset.source)["tags"]
    assert source["mlflow.source.git.commit"] == entry.data.tags["mlflow.source.git.commit"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_stopped_after_its_training_has_its_data_in_mlflow_once_it_is_resumed(
    ray_cluster: None, output: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("concord.execution.run.finish", stop)
        with pytest.raises(StoppedError):
            start(output, name="stopped", epochs=1, workers=workers)
    done = start(output, name="stopped", epochs=1, workers=workers, resume=True)
    logged = Store.open(output, None).client.get_run(str(done.run_id)).inputs.dataset_inputs
    assert {each.dataset.name for each in logged} == {*"abcd", *(f"{name}, held out" for name in "abc")}


@pytest.mark.parametrize("default", [False, True], ids=["output", "working-folder"])
def test_a_stopped_run_continues_where_its_folder_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: bool
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def train(folder: Path, *more: str) -> int:
        monkeypatch.chdir(folder if default else tmp_path)
        place = [] if default else ["--output", str(folder / DEFAULT_OUTPUT)]
        return main(["train", JOB_FILE, "--name", "a", "--epochs", "1", *place, *more])

    before, after = tmp_path / "before", tmp_path / "äfter #2"
    before.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("concord.execution.run.finish", stop)
        assert train(before) == 1
    store = Store.open(before / DEFAULT_OUTPUT)
    (stopped,) = tracked_runs(store, "shared-rule", finished_only=False)
    before.rename(after)
    assert train(after, "--resume") == 0
    store = Store.open(after / DEFAULT_OUTPUT)
    (finished,) = tracked_runs(store, "shared-rule", finished_only=False)
    assert (finished.run_id, stopped.status, finished.status) == (stopped.run_id, "KILLED", "FINISHED")
    assert load_program(store, show(store, "shared-rule")) is not None
    assert [path.name for path in tmp_path.iterdir()] == [after.name]


def test_a_run_that_does_not_register_keeps_its_model(calm: Run) -> None:
    output = calm.folder.path.parent.parent
    before = models(Store.open(output, None))
    kept = start(output, name="unregistered", epochs=1, workers=1, register=False)
    model, registration = (report_of(kept)[name] for name in ("model", "registration"))
    assert registration is None
    assert models(Store.open(output, None)) == before
    client = Store.open(output, None).client
    assert client.get_logged_model(model.removeprefix("models:/")).source_run_id == kept.run_id
    again = start(output, name="unregistered", epochs=1, workers=1, resume=True)  # it is finished, also so
    assert report_of(again) == report_of(kept)


def test_the_registered_model_predicts_where_concord_is_not_imported(calm: Run, tmp_path: Path) -> None:
    program = (
        "import json, numpy, mlflow\n"
        f"mlflow.set_tracking_uri({calm.record['store']!r})\n"
        f"model = mlflow.pyfunc.load_model({report_of(calm)['model']!r})\n"
        "rows = numpy.random.default_rng(0).normal(size=(50, 4))\n"  # float64
        "print(json.dumps(model.predict(rows).argmax(1).tolist()))\n"
    )
    predicted = np.array(json.loads(run_program(WITHOUT_CONCORD + program, tmp_path)))
    rows = np.random.default_rng(0).normal(size=(50, 4))
    assert (predicted == (rows[:, 0] + rows[:, 1] > 0)).mean() > 0.9


def test_the_champion_moves_only_to_a_better_version(calm: Run) -> None:
    output = calm.folder.path.parent.parent
    worse = start(output, name="worse", epochs=1, lr=1e-6, workers=1)
    store = Store.open(output, None)
    assert not report_of(worse)["champion"]
    fold = start(output, name="fold", workers=1, leave_out="a")
    assert report_of(fold)["registration"] == "a was left out of its training; promote it by hand"
    assert show(store, "shared-rule").version == 1
    assert {version.version for version in models(store)} == {1, 2, 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 3},  # a process an environment: the hook of DDP
        pytest.param({"workers": 2}, marks=pytest.mark.slow),
        pytest.param({"workers": 2, "per_example": True, "threshold": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_a_job_with_a_risk_trains_on_dictionaries_and_is_registered(
    ray_cluster: None, output: Path, changes: dict[str, Any]
) -> None:
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "dictionaries.py"))
    options = OPTIONS | {"name": "words", "output": output, "epochs": 12} | changes
    said: list[str] = []
    done = run(job, job.job.config.with_options(**options), said.append)
    assert done.metrics["ood_accuracy"] > 0.9
    assert done.metrics["worst_train_accuracy"] > 0.9
    store = Store.open(output, None)
    (version,) = models(store)
    assert version.uri == report_of(done)["model"]
    assert version.inputs == "words int64 (-1, 5), mask int64 (-1, 5)"  # and no labels
    batch = job.job.environments(None)["d"].take(slice(7))
    own = model_of_run(job, output, "words").model.eval()(**batch)["logits"].detach().numpy()
    (output / "batch.json").write_text(json.dumps({name: batch[name].tolist() for name in ("words", "mask")}))
    predicted = json.loads(
        run_program(WITHOUT_CONCORD + PREDICT.format(folder=str(output), model=report_of(done)["model"]), output)
    )
    np.testing.assert_allclose(predicted["logits"], own, atol=1e-6)
    logged = {each.dataset.name: each.dataset for each in store.client.get_run(str(done.run_id)).inputs.dataset_inputs}
    assert [each["name"] for each in json.loads(json.loads(logged["d"].schema)["mlflow_tensorspec"]["features"])] == [
        "words",
        "mask",
        "labels",
    ]
    delete_version(store, version)
    again = run(job, job.job.config.with_options(**options, resume=True), said.append)
    assert again.metrics == done.metrics  # it is finished
    assert report_of(again)["model"] is None
    assert said[-1] == f"its version {version.uri} was deleted from the registry; MLflow keeps the model with its run"


def test_the_objective_of_a_job_is_recorded_by_its_class(output: Path) -> None:
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "calibrated.py"))
    lines: list[str] = []
    run(job, job.job.config.with_options(output=output, name="own", epochs=1), lines.append)
    assert "run own: Tempered, 1 worker" in lines
    store = Store.open(output)
    (tracked,) = tracked_runs(store, "calibrated")
    assert tracked.parameters["objective"] == "Tempered"
    (version,) = models(store)
    assert version.objective == "Tempered"


def test_a_model_that_cannot_be_exported_keeps_its_weights(output: Path, tmp_path: Path) -> None:
    source = (Path(__file__).parents[1] / "jobs" / "dictionaries.py").read_text()
    branch = "weights = mask[..., None].float() * (2 if float(mask.sum()) > 3 else 1)"
    file = tmp_path / "branching.py"
    file.write_text(source.replace("weights = mask[..., None].float()", branch))
    job, said = load_job(str(file)), list[str]()
    options = OPTIONS | {"name": "words", "output": output, "epochs": 1, "workers": 1, "vectorize": "one-by-one"}
    done = run(job, job.job.config.with_options(**options), said.append)
    assert (report_of(done)["model"], report_of(done)["registration"]) == (None, None)
    assert any("the model is not registered: torch.export cannot take this Classifier" in line for line in said)
    store = Store.open(output, None)
    assert models(store) == []
    assert "weights/model.safetensors" in store.client.get_run(str(done.run_id)).data.tags["mlflow.note.content"]
    weights = store.client.download_artifacts(str(done.run_id), "weights/model.safetensors")
    assert load_file(weights).keys() == job.job.model(None).state_dict().keys()
    # The run is finished, so its model can be analyzed.
    trained = model_of_run(job, output, "words").model.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in load_file(weights).items())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('risk = lambda model, batch, step: model(**batch)["logits"]', r"risk: gives \(2, 2\); expected a scalar"),
        ("risk = lambda model, batch, step: model(**batch).loss", "model and risk cannot take a batch .* words"),
        ("risk = lambda model, batch, step: torch.ones(())", "the risk has no gradient"),
        (
            "correct = lambda outputs, batch: batch['labels'].sum()",
            r"measure accuracy gave shape \(\), expected \(2,\)",
        ),
        ("correct = lambda outputs, targets: outputs.argmax(1)", "measure accuracy cannot take the model's output"),
    ],
)
def test_a_wrong_risk_is_refused_before_anything_starts(tmp_path: Path, line: str, problem: str) -> None:
    text = (Path(__file__).parents[1] / "jobs" / "dictionaries.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(text.replace("\njob = ", f"\n{line}\njob = "))
    job = load_job(str(path))
    with pytest.raises(InputError, match=problem) as caught:
        preflight(job, job.job.config.with_options(output=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_run_of_the_same_name_is_refused_and_a_finished_one_kept(calm: Run) -> None:
    output = calm.folder.path.parent.parent
    with pytest.raises(InputError, match="--name calm: there is a run of this name"):
        start(output, name="calm")
    again = start(output, name="calm", resume=True)
    assert (again.run_id, again.report, again.metrics) == (calm.run_id, calm.report, calm.metrics)
    with pytest.raises(InputError, match=r"--lr 0\.5: the run calm was started with 0\.05"):
        start(output, name="calm", resume=True, lr=0.5)
    with pytest.raises(InputError, match="--name never: there is no such run"):
        start(output, name="never", resume=True)


@pytest.mark.parametrize(
    ("trouble", "line"),
    [
        pytest.param(
            "shape",
            r"environment c: one example of its inputs is \(3,\) float32, but \(4,\) float32 in environment a",
            marks=pytest.mark.slow,
        ),
        pytest.param("empty", "environment c: it is empty", marks=pytest.mark.slow),
        ("target", "environment c: target 2 is out of range"),
    ],
)
def test_wrong_data_found_by_a_worker_leave_nothing_behind(
    ray_cluster: None,
    output: Path,
    trouble: str,
    line: str,
) -> None:
    with pytest.raises(InputError, match=line):
        start(output, trouble=trouble, name="wrong")
    assert not (output / "runs" / "wrong").exists()
    assert tracked_runs(Store.open(output, None), "shared-rule", finished_only=False) == []


def test_an_example_that_one_worker_cannot_read_ends_the_run_at_once(ray_cluster: None, output: Path) -> None:
    """The other worker waits for it in a collective, which gives up after half an hour."""
    raised: list[Exception] = []

    def train() -> None:
        try:
            start(output, trouble="unreadable", name="wrong")
        except Exception as error:
            raised.append(error)

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(120)
    assert [(type(error), str(error)) for error in raised] == [(InputError, "environment c: an example cannot be read")]
    assert not (output / "runs" / "wrong").exists()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_non_finite_gradient_fails_the_run_at_once_and_says_where(
    ray_cluster: None, output: Path, workers: int
) -> None:
    with pytest.raises(RunFailedError, match="gradient of environment c is not finite at step 0"):
        start(output, trouble="infinite", name="failed", workers=workers)
    (kept,) = tracked_runs(Store.open(output, None), "shared-rule", finished_only=False)
    assert kept.status == "FAILED"


@pytest.mark.slow
def test_a_server_that_dies_in_mid_training_costs_no_metric(ray_cluster: None, output: Path, server: Server) -> None:
    def kill_after_first_checkpoint() -> None:
        wait_for(lambda: recorded_checkpoints(output / "runs" / "outage"), 120)
        server.kill()

    watcher = threading.Thread(target=kill_after_first_checkpoint)
    watcher.start()
    lines: list[str] = []
    job = load_job(JOB_FILE)
    config = job.job.config.with_options(**OPTIONS, output=output, name="outage", pause=0.1, tracking_uri=server.uri)
    done = run(job, config, lines.append)
    watcher.join()
    assert done.report is None  # until MLflow has it
    assert done.metrics["ood_accuracy"] > 0.9
    assert any("events are kept in" in line for line in lines), lines
    server.start()
    again = run(job, config.with_options(resume=True), lines.append)
    assert report_of(again)["model"].startswith("models:/shared-rule/")  # other tests register there, too
    assert without_time(again.metrics) == without_time(done.metrics)
    store = Store.open(output, server.uri)
    steps = [step for step, _ in points_of(store, str(done.run_id), "step/loss")]
    assert steps == list(range(1, 41))
    assert store.run(str(done.run_id)).status == "FINISHED"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_in_the_job_ends_the_run_with_one_traceback(
    ray_cluster: None, output: Path, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    lines: list[str] = []
    job = load_job(JOB_FILE)
    options = OPTIONS | {"output": output, "trouble": "bug", "name": "bug", "workers": workers, "max_failures": 2}
    with pytest.raises(RunFailedError) as failed:
        run(job, job.job.config.with_options(**options), lines.append)
    assert re.fullmatch(r"training failed: ZeroDivisionError: [^\n]*, line \d+", str(failed.value))
    (shown,) = (line for line in lines if "Traceback" in line)
    assert "targets = targets[: 1 // (len(targets) - 80)]" in shown
    assert "concord/training" not in shown
    assert "ZeroDivisionError" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["in the first batch", "later"])
def test_a_job_that_calls_exit_fails_with_a_line(ray_cluster: None, output: Path, where: str, workers: int) -> None:
    kind, line = (InputError, "SystemExit: 0") if where == "in the first batch" else (RunFailedError, "SystemExit: 0")
    with pytest.raises(kind, match=line):
        start(output, trouble="exit" if where == "in the first batch" else "late exit", name="exit", workers=workers)
    assert (output / "runs" / "exit").exists() == (where == "later")


def command(output: Path, *options: str) -> list[str]:
    given = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", JOB_FILE, *given, "--output", str(output), "--json", *options]


def children_named(parent: int, name: str) -> list[int]:
    """The processes with this in their command line that the parent started, or those that it started."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    parents = {int(pid): int(ppid) for pid, ppid, _ in rows}

    def descends(pid: int) -> bool:
        while pid in parents and pid != parent:
            pid = parents[pid]
        return pid == parent

    return [int(pid) for pid, _, args in rows if name in args and descends(int(pid)) and int(pid) != parent]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["one worker", "on Ray Train"])
def test_a_run_whose_process_is_killed_ends_with_the_same_metrics(
    calm: Run, output: Path, killed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on with another number of workers."""
    before, after = ("1", 2) if killed == "one worker" else ("2", 1)
    slow = ["--name", "hit", "--pause", "0.15", "--workers", before]
    process = Command(*command(output, *slow))
    wait_for_checkpoints(output)
    process.kill()
    process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL
    events = output / "runs" / "hit" / EVENTS
    with events.open("ab") as file:
        file.write(b'{"event":"evaluated","at":17952')  # as if the machine had died with it
    (listed,) = listed_runs(output, capsys)
    assert (listed["name"], listed["status"]) == ("hit", "interrupted")
    resumed = start(output, name="hit", pause=0.15, resume=True, workers=after)
    check_resumed(calm, output, resumed)
    assert [event.name for event in read_events(events) if event.name in ("began", "ended")] == ["began"] * 2 + [
        "ended"
    ]
    (listed,) = listed_runs(output, capsys)
    assert listed["status"] == "finished"


def listed_runs(output: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main(["runs", "--output", str(output), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_a_run_whose_worker_is_killed_ends_with_the_same_metrics(calm: Run, output: Path) -> None:
    def kill() -> None:
        wait_for_checkpoints(output)
        os.kill(children_named(os.getpid(), "ray::RayTrainWorker")[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    resumed = start(output, name="hit", pause=0.15)
    killer.join()
    check_resumed(calm, output, resumed)


@pytest.mark.slow
def test_a_worker_that_always_dies_is_replaced_as_often_as_is_said(ray_cluster: None, output: Path) -> None:
    with pytest.raises(RunFailedError, match=r"^training failed: "):
        start(output, trouble="killed", max_failures=1)
    assert list(read_lines(output / "attempts")) == ["c"] * 2


def test_ray_train_passes_on_variables_by_a_list_that_can_be_added_to() -> None:
    """Not public: where it moves, ``concord.execution.ray_train`` has to follow."""
    from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

    assert isinstance(ENV_VARS_TO_PROPAGATE, set)


def test_a_run_with_a_spoiled_checkpoint_resumes_from_the_previous_one(calm: Run, output: Path) -> None:
    with pytest.raises(RunFailedError):
        start(output, name="hit", workers=1, trouble="late exit")
    checkpoints = sorted((output / "runs" / "hit" / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    model = bytearray((checkpoints[-1] / "model.safetensors").read_bytes())
    model[-1] ^= 1
    (checkpoints[-1] / "model.safetensors").write_bytes(model)
    lines: list[str] = []
    job = load_job(JOB_FILE)
    options = OPTIONS | {"output": output, "name": "hit", "workers": 1, "trouble": "late exit", "resume": True}
    report = run(job, job.job.config.with_options(**options), lines.append)
    assert without_time(report.metrics) == pytest.approx(without_time(calm.metrics), rel=1e-6)
    (line,) = (line for line in lines if "the previous checkpoint is used" in line)
    assert "model.safetensors" in line
    assert any("training resumes from epoch" in each for each in lines)


def recorded_checkpoints(run: Path) -> int:
    """The number of recorded checkpoints. The last event is left out: the run may not have counted it yet."""
    events = run / EVENTS
    return [event.name for event in read_events(events)][:-1].count("checkpoint") if events.exists() else 0


def wait_for_checkpoints(output: Path) -> None:
    wait_for(lambda: recorded_checkpoints(output / "runs" / "hit") > 1, 240)


def check_resumed(calm: Run, output: Path, resumed: Run) -> None:
    assert without_time(resumed.metrics) == pytest.approx(without_time(calm.metrics), rel=1e-6)
    store = Store.open(output, None)
    assert [step for step, _ in points_of(store, str(resumed.run_id), "step/loss")] == list(range(1, 41))
    ((_, cost),) = points_of(store, str(resumed.run_id), "resumed/seconds")
    assert 0 < cost < 300
