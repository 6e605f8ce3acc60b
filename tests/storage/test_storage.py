"""Runs, studies and data on a real S3 server: the same as in a folder, and continued on a new machine."""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import s3_server
from mlflow_server import NOWHERE, Server
from recorded import comparable, report_of, without_time
from s3_server import BUCKET
from test_images import write_mnist
from tracked import points_of, tracked_runs

from concord.cli import main
from concord.environments import from_folder
from concord.environments.images import ImageOptions, image_dataset
from concord.errors import InputError, RunFailedError
from concord.execution.execute import RunTask, execute, last_checkpoint
from concord.execution.lifecycle import ActiveRun, Member
from concord.execution.run import run
from concord.execution.spec import RunSpec
from concord.options import option_values
from concord.record import EVENTS, RECORD, OpenRun, folder_of, require_run
from concord.storage import (
    Folder,
    StorageError,
    apply_credentials,
    display_path,
    filesystem,
    listing,
    local,
    resolve,
    storage_credentials,
)
from concord.studies.proposals import GroupRuns
from concord.tracking import Mirror, Store
from concord.training import ProcessContext, Silent, load_job, train
from concord_jobs.punctuated_sst2.data import SST2

JOBS = Path(__file__).parents[1] / "jobs"
# The way is given, not timed: a run at an address is to be the run in a folder to the last bit.
OPTIONS: dict[str, Any] = {
    "epochs": 8,
    "batch_size": 16,
    "lr": 5e-2,
    "threshold": 0.6,
    "evaluations": 4,
    "vectorize": "vmap",
}
ADDRESS = Path(f"s3://{BUCKET}")


@pytest.fixture
def storage(s3: s3_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> s3_server.Server:
    """The server as this process finds it, and an empty cache; without an answer it is asked twice, not for 15 s."""
    monkeypatch.setattr("concord.storage.filesystem._TRIES", 2)
    s3.use(monkeypatch)
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / "cache"))
    return s3


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Go on as on another machine, whose disk is empty."""
    return lambda: monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / f"cache-{time.monotonic_ns()}"))


def made(name: str) -> Folder:
    """A folder at an address, which this machine has a place for."""
    folder = Folder(ADDRESS / name)
    folder.make()
    return folder


class Logged(Silent):
    """A context that has every metric of a run, by name and step."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[tuple[str, int], float] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.metrics |= {(name, step): value for name, value in without_time(metrics).items()}


def trained_here(file: str, **options: Any) -> tuple[dict[str, float], dict[tuple[str, int], float]]:
    """The last metrics of the same training in this process, and all that it logs."""
    job, logged = load_job(str(JOBS / file)).job, Logged()
    outcome = train(job, job.config.with_options(**options), ProcessContext(), logged)
    for evaluation in outcome.history:
        logged.log(evaluation.metrics, evaluation.step)
    return without_time(outcome.metrics), logged.metrics


def in_mlflow(store: Store, run_id: str, names: set[str]) -> list[tuple[str, int, float]]:
    """Every point that MLflow has, also if it has two of a step."""
    points = (point for name in names for point in store.client.get_metric_history(run_id, name))
    return sorted((point.key, point.step, point.value) for point in points)


def continued(store: Store, run_id: str, names: set[str]) -> dict[tuple[str, int], float]:
    """The points of the branch that was continued, by name and step."""
    return {(name, step): value for name in names for step, value in points_of(store, run_id, name)}


def write_environments(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in "abc":
        np.savez(folder / name, inputs=random.normal(size=(20, 3)), targets=random.integers(2, size=20))


def upload(storage: s3_server.Server, folder: Path, prefix: str) -> Path:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            storage.client().upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(folder)}")
    return ADDRESS / prefix


def refusal(capsys: pytest.CaptureFixture[str], output: str, *words: str) -> str:
    """The error of a training with this folder at the address."""
    given = ["train", str(JOBS / "shared_rule.py"), "--output", str(ADDRESS / output), *words, "--json"]
    assert main(given) == 2
    return str(json.loads(capsys.readouterr().out)["error"])


# --- addresses


def test_a_file_address_is_the_folder_itself_and_an_address_stays_one() -> None:
    assert resolve(Path("file:///there/runs")) == Path("/there/runs")
    assert resolve(Path("runs")) == Path.cwd() / "runs"
    assert display_path(resolve(Path("s3://bucket/runs/")) / "a") == "s3://bucket/runs/a"
    assert Folder(Path("/there/runs")).path == Path("/there/runs")


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("output", "foo://x/y", "--output foo://x/y: the scheme foo:// is unknown"),
        ("output", "s3://ann:hunter2@bucket/x", "--output s3://***@bucket/x: holds a user or a password"),
        ("output", "s3://bucket/x?scheme=http&secret=hunter2", "--output s3://bucket/x?…: parameters are not allowed"),
        ("output", "s3:///", "--output s3://: names no bucket"),
        ("output", "s3://nowhere/x", "--output s3://nowhere/x: there is no bucket nowhere at http://127.0.0.1"),
        ("output", "az://box/x", "--output az://box/x: a package is missing (Install adlfs"),
        ("data", "s3://nowhere/x", "--data s3://nowhere/x: there is no bucket nowhere"),
        ("data", "foo://x/y", "--data foo://x/y: the scheme foo:// is unknown"),
    ],
)
@pytest.mark.parametrize("command", ["train", "tune"])
def test_an_unusable_address_is_refused_before_anything_starts(
    storage: s3_server.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    option: str, value: str, line: str, command: str,
) -> None:  # fmt: skip
    given = {"output": str(tmp_path / "runs"), option: value}
    words = [word for name, text in given.items() for word in (f"--{name}", text)]
    assert main([command, str(JOBS / "shared_rule.py"), *words, "--json"]) == 2
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert error.startswith(line), error
    assert "\n" not in error
    assert "hunter2" not in said.out + said.err
    assert not (tmp_path / "runs").exists()


def test_a_storage_that_does_not_answer_is_refused(
    storage: s3_server.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(filesystem, "_TRIES", 1)
    for name in ([], ["--name", "x", "--resume"]):
        refused = refusal(capsys, "x", *name, "--tracking-patience", "0")
        assert "no storage answers at http://127.0.0.1:9" in refused


def test_an_output_elsewhere_needs_a_tracking_server(
    storage: s3_server.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for tracking in ([], ["--tracking-uri", "postgresql://127.0.0.1:9/x"]):
        error = refusal(capsys, "untracked", *tracking)
        assert error.startswith(f"--output s3://{BUCKET}/untracked: MLflow cannot keep its store there"), error
    assert storage.keys("untracked") == []


def test_a_run_that_is_not_there_and_reports_elsewhere_are_refused(
    storage: s3_server.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = ["--output", str(ADDRESS / "empty"), "--json"]
    assert main(["train", "synthetic", "--name", "none", "--resume", *elsewhere]) == 2
    assert f"there is no such run in s3://{BUCKET}/empty" in capsys.readouterr().out
    refused = f"--output s3://{BUCKET}/empty: must be a folder on this machine's disk"
    assert main(["report", "synthetic", *elsewhere]) == 2
    assert refused in capsys.readouterr().out
    assert main(["data", "coinrun-clone", *elsewhere]) == 2
    assert refused in capsys.readouterr().out


# --- folders and growing files


def test_kept_files_are_on_another_machine_and_removed_ones_are_not(
    storage: s3_server.Server, elsewhere: Callable[[], None]
) -> None:
    folder = Folder(ADDRESS / "folders") / "a"
    folder.make()
    (folder.path / "figures").mkdir()
    for name in ("figures/one.png", "figures/two.png", "record"):
        (folder.path / name).write_text(name)
    folder.keep("figures")
    folder.keep("record")
    here = folder.path
    elsewhere()
    there = Folder(ADDRESS / "folders") / "a"
    assert there.path != here
    assert there.exists()
    assert there.names("figures") == ["one.png", "two.png"]
    there.fetch("record")
    assert (there.path / "record").read_text() == "record"
    there.remove("record")
    there.fetch("record")
    assert not (there.path / "record").exists()
    there.delete()
    assert not there.exists()


def test_a_storage_that_went_away_is_said_in_one_line(storage: s3_server.Server) -> None:
    folder = made("gone")
    (folder.path / "record").write_text("x")
    storage.stop()
    try:
        with pytest.raises(StorageError) as error:
            folder.keep("record")
        assert str(error.value).startswith(f"s3://{BUCKET}/gone: no storage answers at {storage.url}")
        assert folder.problem() == str(error.value)
    finally:
        storage.start()
    assert folder.problem() is None
    folder.keep("record")


def test_events_up_to_the_last_sync_are_there_on_another_machine(
    storage: s3_server.Server, elsewhere: Callable[[], None]
) -> None:
    folder = made("events")
    run = OpenRun(folder, {})
    for epoch in (1, 2):
        run.append("evaluated", epoch=epoch, step=epoch, metrics={"loss": 1 / epoch})
    run.sync()
    run.append("evaluated", epoch=3, step=3, metrics={"loss": 0.1})
    storage.stop()
    try:
        with pytest.raises(StorageError, match=f"^s3://{BUCKET}/events: no storage answers"):
            run.sync()
    finally:
        storage.start()
    elsewhere()
    folder.make()
    again = OpenRun(folder, {})
    assert again.evaluations == {(1, 1): {"loss": 1.0}, (2, 2): {"loss": 0.5}}
    again.append("checkpoint", name="checkpoint_2", step=2)
    again.sync()
    elsewhere()
    folder.make()
    third = OpenRun(folder, {})
    assert (third.evaluations, third.checkpoints) == (again.evaluations, ["checkpoint_2"])


def test_events_that_mlflow_has_and_the_address_lacks_do_not_stop_the_mirror(
    storage: s3_server.Server, elsewhere: Callable[[], None], store: Store, run_id: str
) -> None:
    folder = made("mirrored")
    run = OpenRun(folder, {"run_id": run_id})
    run.append("metrics", step=1, metrics={"loss": 1.0})
    run.sync()
    run.append("metrics", step=2, metrics={"loss": 0.5})
    mirror = Mirror(store)
    mirror.add(run)
    assert mirror.close(10.0) == 0  # which keeps how far it sent them
    elsewhere()
    folder.make()
    run, mirror = OpenRun(folder, {"run_id": run_id}), Mirror(store)
    mirror.add(run)
    for step in (3, 4):
        run.append("metrics", step=step, metrics={"loss": 1 / step})
    assert mirror.close(10.0) == 0
    assert points_of(store, run_id, "loss") == [(step, 1 / step) for step in (1, 2, 3, 4)]


def test_access_of_another_process_replaces_this_ones_keys_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(storage_credentials()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another login")
    apply_credentials({"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"})
    assert storage_credentials() == {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    apply_credentials({})
    assert storage_credentials() == {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name in list(storage_credentials()):
        os.environ.pop(name)


# --- data


def test_environments_from_a_storage_are_the_folders_and_fetched_alone(
    storage: s3_server.Server, tmp_path: Path
) -> None:
    write_environments(tmp_path / "data")
    address = upload(storage, tmp_path / "data", "environments")
    here, there = from_folder(tmp_path / "data", test=["c"]), from_folder(address, test=["c"])
    assert there.names == here.names
    for part in ("inputs", "targets"):
        assert (getattr(there["a"], part) == getattr(here["a"], part)).all()
    fetched = {file.name for file in (tmp_path / "cache").rglob("*.npz")}
    assert fetched == {"a.npz"}
    with pytest.raises(InputError, match=f"data=s3://{BUCKET}/none: there is no such folder"):
        from_folder(ADDRESS / "none")


def test_mnist_sst2_and_images_from_a_storage_are_the_local_ones(storage: s3_server.Server, tmp_path: Path) -> None:
    from PIL import Image

    write_mnist(tmp_path / "data" / "mnist", train=30, test=10)
    (tmp_path / "data" / "sst2").mkdir()
    for name in ("train", "dev", "test"):
        (tmp_path / "data" / "sst2" / f"{name}.tsv").write_text("good .\t1\nbad !\t0\n")
    for place in ("train/cat", "train/dog", "test/dog"):
        (tmp_path / "data" / "own" / place).mkdir(parents=True)
        Image.new("L", (4, 4), len(place)).save(tmp_path / "data" / "own" / place / "one.png")
    address = upload(storage, tmp_path / "data", "data")
    for data, there in (("mnist", "mnist"), (str(tmp_path / "data" / "own"), str(address / "own"))):
        ours, theirs = image_dataset(data, tmp_path / "data"), image_dataset(there, address)
        assert (ours.train.images == theirs.train.images).all()
        assert (ours.test.labels == theirs.test.labels).all()
        assert ours.classes == theirs.classes
    own = ImageOptions(dataset="folder").images(address / "own")
    assert (own.train.images == ours.train.images).all()
    assert SST2.read(address).train.words == SST2.read(tmp_path / "data").train.words
    with pytest.raises(InputError, match=f"data=s3://{BUCKET}/data: has neither cifar-10"):
        image_dataset("cifar10", address)
    with pytest.raises(InputError, match=f"data=s3://{BUCKET}/nothing: there is no such folder"):
        image_dataset(f"s3://{BUCKET}/nothing", None)


def test_a_file_is_fetched_again_if_it_changed_and_gone_if_removed(storage: s3_server.Server, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("one")
    address = upload(storage, tmp_path / "data", "changing")
    assert local(address / "x").read_text() == "one"
    (tmp_path / "data" / "x").write_text("two")  # of the same size, and perhaps within the same second
    upload(storage, tmp_path / "data", "changing")
    assert local(address / "x").read_text() == "two"
    old = time.time() - 3600
    local(address / "x").write_text("own")
    os.utime(local(address / "x"), (old, old))
    assert local(address / "x").read_text() == "two"
    storage.client().delete_object(Bucket=BUCKET, Key="changing/x")
    assert not local(address / "x").exists()


def test_a_file_is_fetched_again_where_the_storage_tells_no_time_of_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path))
    files, folder = fsspec.filesystem("memory"), Path("memory://bucket/runs")
    files.pipe("/bucket/runs/x", b"one")
    assert local(folder / "x").read_text() == "one"
    kept = local(folder / "x").stat().st_ino
    assert local(folder / "x").stat().st_ino == kept, "fetched again without a change"
    files.pipe("/bucket/runs/x", b"two")
    assert local(folder / "x").read_text() == "two"
    assert listing(folder) == ["x"]
    assert listing(folder / "x") is None


def test_a_file_whose_name_leads_out_of_the_cache_is_refused(storage: s3_server.Server, tmp_path: Path) -> None:
    storage.client().put_object(Bucket=BUCKET, Key="outside/../../../../../evil.txt", Body=b"1")
    with pytest.raises(InputError, match=r"s3://.*/outside: it holds .*evil\.txt"):
        local(ADDRESS / "outside")
    assert not list(tmp_path.rglob("evil.txt"))


def test_a_checkpoint_with_files_that_lead_out_of_it_is_refused(storage: s3_server.Server, tmp_path: Path) -> None:
    folder = Folder(ADDRESS / "runs" / "planted")
    for key in ("good/model.safetensors", "good/deep/x", "evil/model.safetensors", "evil/../../../../../evil.txt"):
        storage.client().put_object(Bucket=BUCKET, Key=f"runs/planted/checkpoints/{key}", Body=key.encode())
    good = folder.fetch("checkpoints/good")
    assert (good / "model.safetensors").read_text() == "good/model.safetensors"
    assert (good / "deep" / "x").exists()
    with pytest.raises(InputError, match=r"s3://.*/planted.*: it holds .*evil\.txt"):
        folder.fetch("checkpoints/evil")
    assert not list(tmp_path.rglob("evil.txt"))
    with pytest.raises(InputError, match="leads out of it"):
        folder.fetch("checkpoints/..")


def test_no_name_leads_out_of_a_folder_that_is_kept_elsewhere(storage: s3_server.Server, tmp_path: Path) -> None:
    folder = Folder(ADDRESS / "runs" / "names")
    storage.client().put_object(Bucket=BUCKET, Key="runs/names/checkpoints/../../../evil.txt", Body=b"1")
    with pytest.raises(InputError, match="it holds"):
        folder.fetch("checkpoints")
    for name in ("../evil.txt", "a/../../evil.txt", "/evil.txt"):
        for use in (folder.fetch, folder.remove):
            with pytest.raises(InputError, match="leads out of it"):
                use(name)
    with pytest.raises(InputError, match=r"must be one plain address, without \.\."):
        local(ADDRESS / "data" / ".." / ".." / ".." / "evil.txt")
    assert not list(tmp_path.rglob("evil.txt"))


def test_processes_that_fetch_the_same_file_at_once_all_read_it_whole(
    storage: s3_server.Server, tmp_path: Path
) -> None:
    content = np.random.default_rng(0).bytes(3 << 20)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large").write_bytes(content)
    address = upload(storage, tmp_path / "data", "at-once")
    program = (
        "import hashlib, pathlib, sys\nfrom concord.storage import local\n"
        "for _ in range(3): print(hashlib.sha256(local(pathlib.Path(sys.argv[1])).read_bytes()).hexdigest())"
    )
    command = [sys.executable, "-c", program, str(address / "large")]
    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(lambda _: subprocess.check_output(command, text=True), range(4)))
    assert len({line for text in said for line in text.split()}) == 1
    assert local(address / "large").read_bytes() == content
    assert list((tmp_path / "cache" / "drafts").iterdir()) == []


# --- runs and studies


def test_a_run_at_an_address_is_the_run_in_a_folder_metric_for_metric(
    ray_cluster: None, storage: s3_server.Server, server: Server, tmp_path: Path
) -> None:
    import ray

    job = load_job(str(JOBS / "shared_rule.py"))
    config = job.job.config.with_options(**OPTIONS, output=ADDRESS / "whole", name="there", tracking_uri=server.uri)
    there = run(job, config, lambda _: None)
    metrics, logged = trained_here("shared_rule.py", **OPTIONS)
    assert without_time(there.metrics) == metrics
    store = Store.open(tmp_path, server.uri)
    points = in_mlflow(store, str(there.run_id), {name for name, _ in logged})
    assert points == sorted((name, step, value) for (name, step), value in logged.items())
    assert report_of(there)["artifacts"] == f"s3://{BUCKET}/whole/runs/there"
    keys = storage.keys("whole/runs/there")
    for wanted in (RECORD, EVENTS, "metrics.json", "figures/curves.png"):
        assert f"whole/runs/there/{wanted}" in keys
    assert sum(key.endswith("model.safetensors") for key in keys) == 2
    assert store.run(str(there.run_id)).parameters["output"] == f"s3://{BUCKET}/whole"
    # The key that reached the workers is in nothing that Ray, MLflow or the storage keeps.
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    texts = [file.read_bytes() for file in logs.rglob("*") if file.is_file()]
    texts += [storage.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys]
    texts += [repr(store.run(str(there.run_id))).encode()]
    assert not any(storage.secret.encode() in text for text in texts)


def command(words: list[str], home: Path, storage: s3_server.Server) -> subprocess.Popen[str]:
    """A command of concord on a machine of its own, as far as its disk goes."""
    home.mkdir()
    others = ("CONCORD_", "XDG_", "MLFLOW_", "RAY_ADDRESS", "AWS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment = {**kept, **storage.environment, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", "from concord.cli import entry; entry()", *words, "--json"]
    return subprocess.Popen(
        program, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def lose(process: subprocess.Popen[str], home: Path) -> None:
    """The machine goes, with all that runs on it and its disk."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines())
    doomed = [process.pid]
    for pid in doomed:
        doomed += [child for child, parent in parents.items() if parent == pid]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    shutil.rmtree(home)


def wait_for(found: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def result(process: subprocess.Popen[str], seconds: float = 400) -> dict[str, Any]:
    said, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors[-3000:] + said
    return dict(json.loads(said.strip().splitlines()[-1]))


@pytest.mark.slow
def test_a_lost_machines_run_ends_elsewhere_with_every_metric_once(
    storage: s3_server.Server, server: Server, tmp_path: Path
) -> None:
    options = OPTIONS | {"checkpoints": 2}
    words = ["train", str(JOBS / "shared_rule.py"), "--output", str(ADDRESS / "lost"), "--name", "hit"]
    words += ["--tracking-uri", server.uri]
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    first = command([*words, *given, "--pause", "0.5"], tmp_path / "one", storage)
    store = Store.open(tmp_path, server.uri)

    def past_the_checkpoint() -> bool:
        runs = tracked_runs(store, "shared-rule", finished_only=False)
        # The checkpoint is at step 20; these are steps that come again.
        return bool([each for each in runs if each.name == "hit" and points_of(store, each.run_id, "step/loss")[23:]])

    wait_for(past_the_checkpoint, first)
    lose(first, tmp_path / "one")
    assert f"lost/runs/hit/{EVENTS}" in storage.keys("lost")
    report = result(command([*words, "--resume"], tmp_path / "two", storage))
    metrics, logged = trained_here("shared_rule.py", **options)
    assert without_time(report["metrics"]) == comparable(metrics)
    assert continued(store, report["run_id"], {name for name, _ in logged}) == logged


@pytest.mark.slow
def test_a_lost_machines_study_resumes_elsewhere_with_missing_trials(
    storage: s3_server.Server, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = tmp_path / "witness"
    words = ["tune", str(JOBS / "tiny_study.py"), "--output", str(ADDRESS / "studies"), "--name", "lost"]
    words += ["--tracking-uri", server.uri, "--method", "masked", "--trials", "6", "--search", "random"]
    words += ["--concurrent", "1", "--reruns", "0", "--shortlist", "0", "--no-register"]
    words += ["--pause", "0.1", "--epochs", "4", "--witness", str(witness)]
    first = command(words, tmp_path / "one", storage)

    def kept() -> GroupRuns:
        monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / f"look-{time.monotonic_ns()}"))
        return GroupRuns(require_run(folder_of(ADDRESS / "studies", "lost", "study"), "study"))

    study = f"studies/studies/lost/{EVENTS}"
    wait_for(lambda: study in storage.keys("studies") and len(kept().ended("trial")) >= 2, first)
    lose(first, tmp_path / "one")
    before, trained = kept().ended("trial"), len(witness.read_text().splitlines())
    report = result(command(words, tmp_path / "two", storage))
    assert report["finished"] == 6
    after = kept()
    assert [each.name for each in after.ended("trial")][: len(before)] == [each.name for each in before]
    checked = 1  # before anything starts, the model is made once
    assert len(witness.read_text().splitlines()) == trained + checked + 6 - len(before)
    for ended in after.ended("trial"):
        options = {name: value for name, value in ended.point.items() if name != "penalty"}
        metrics, _ = trained_here("tiny_study.py", epochs=4, **options)
        assert without_time(ended.metrics) == comparable(metrics)
    store = Store.open(tmp_path, server.uri)
    children = tracked_runs(store, "tiny-study-studies", finished_only=False)
    names = [each.tags["concord.run"] for each in children if each.parent]
    assert sorted(names) == sorted(each.name for each in after.begun("trial"))
    assert {each.status for each in children} == {"FINISHED"}


@pytest.mark.slow
def test_a_storage_lost_in_mid_run_fails_it_in_one_line_until_resumed(
    ray_cluster: None, storage: s3_server.Server, server: Server, tmp_path: Path
) -> None:
    job = load_job(str(JOBS / "shared_rule.py"))
    config = job.job.config.with_options(
        **OPTIONS, output=ADDRESS / "outage", name="cut", tracking_uri=server.uri, pause=0.3, max_failures=1
    )
    done = threading.Event()

    def stop_after_a_checkpoint() -> None:
        while not any(key.endswith("progress.json") for key in storage.keys("outage")) and not done.wait(0.2):
            pass
        storage.stop()

    watcher = threading.Thread(target=stop_after_a_checkpoint)
    watcher.start()
    with pytest.raises(RunFailedError) as error:
        run(job, config, lambda _: None)
    done.set()
    watcher.join()
    assert f"training failed: s3://{BUCKET}/outage/runs/cut: no storage answers at {storage.url}" in str(error.value)
    storage.start()
    report = run(job, job.job.config.with_options(**option_values(config) | {"resume": True}), lambda _: None)
    metrics, logged = trained_here("shared_rule.py", **OPTIONS)
    assert without_time(report.metrics) == metrics
    assert continued(Store.open(tmp_path, server.uri), str(report.run_id), {name for name, _ in logged}) == logged


@pytest.mark.slow
def test_an_expert_goes_on_from_its_checkpoint_on_another_machine(
    coinrun: None, ray_cluster: None, storage: s3_server.Server, server: Server, elsewhere: Callable[[], None]
) -> None:
    job, lines = load_job("coinrun-expert"), list[str]()
    options: dict[str, Any] = {
        "output": ADDRESS / "experts", "name": "agent", "environments": 4, "rollout": 16, "epochs": 1, "minibatches": 2,
        "steps": 256, "evaluations": 1, "final_episodes": 2, "checkpoints": 4, "levels": 50, "game": "bigfish",
        "tracking_uri": server.uri,
    }  # fmt: skip
    finished = run(job, job.job.config.with_options(**options), lines.append)
    assert report_of(finished)["artifacts"] == f"s3://{BUCKET}/experts/runs/agent"
    folder = Folder(ADDRESS / "experts" / "runs" / "agent")
    assert folder.names("checkpoints") == [f"checkpoint_{steps:012d}" for steps in (192, 256)]
    assert {"expert.safetensors", "metrics.json", "figures"} <= set(folder.names())
    # As it was when the machine was lost after the last checkpoint but one.
    folder.fetch(EVENTS)
    content = (folder.path / EVENTS).read_text().splitlines(keepends=True)
    (last,) = (place for place, line in enumerate(content) if "checkpoint_000000000192" in line)
    (folder.path / EVENTS).write_text("".join(content[: last + 1]))
    folder.keep(EVENTS)
    elsewhere()
    again = run(job, job.job.config.with_options(**options, resume=True), lines.append)
    assert again.metrics["steps"] == 256
    elsewhere()
    done = run(job, job.job.config.with_options(**options, resume=True), lines.append)
    assert report_of(done)["model"] == report_of(again)["model"]


def _wait(ready: Connection) -> None:
    ready.send(None)
    ready.recv()


def test_a_forked_process_that_lives_longer_does_not_keep_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_wait, args=(theirs,), daemon=True)
    with Folder(tmp_path).locked("run"):
        child.start()
        ours.recv()
    with Folder(tmp_path).locked("run"):
        assert child.is_alive()
    ours.send(None)
    child.join()


def test_an_unfinished_trial_continues_on_another_machine(
    storage: s3_server.Server, elsewhere: Callable[[], None], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job(str(JOBS / "tiny_study.py"))
    config = job.job.config.with_options(output=ADDRESS / "trials", epochs=8, evaluations=8, checkpoints=8).resolve()
    spec = RunSpec.of(job, config, None, name="s-trial-3")

    def begun() -> Member:
        """The trial in its group, on this machine."""
        group = ActiveRun("study", made("trials/studies/s"), store, None)
        group.run, group.mirror = (
            OpenRun(group.folder, {"run_id": "1", "tracking": {"experiment": "s"}}),
            Mirror(Store(NOWHERE, None)),
        )
        return Member(spec, group)

    def trained(member: Member, evaluations: int | None) -> list[int]:
        """The epochs of some evaluations, each of which has a checkpoint once the next one is asked for."""
        run = member.run

        def take(name: str, /, **fields: Any) -> None:
            run.append(name, **fields)
            run.sync()

        start = last_checkpoint(run, lambda _: None)
        task = RunTask(job.sent, option_values(config), run.folder, checkpoint_seconds=0.0)
        with contextlib.closing(execute(task, job, take, start)) as training:
            return [each.epoch for each in itertools.islice(training, evaluations)]

    first = begun()
    assert trained(first, 6) == [1, 2, 3, 4, 5, 6]
    elsewhere()
    monkeypatch.setattr("concord.storage.lease.SILENT_SECONDS", -1.0)  # as if it were later: the first says no more
    again = begun()
    assert (again.run.began or {})["resumed"]
    assert (again.run.checkpoints, again.run.evaluations) == (first.run.checkpoints, first.run.evaluations)
    assert trained(again, None) == [6, 7, 8]
    assert without_time(again.run.metrics) == trained_here("tiny_study.py", epochs=8, evaluations=8)[0]
    for each in (first, again):  # else their threads would ask for the store as long as this process lives
        each.mirror.discard()
