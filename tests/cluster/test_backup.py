"""A backup of an MLflow server, restored: every run, version, alias and artifact is as it was."""

import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import mlflow
import pytest
import test_local_cluster
from test_kubernetes import database  # noqa: F401 (a fixture)

SCRIPT = Path(__file__).parents[2] / "cluster" / "backup.py"


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True)


def fill(client: mlflow.MlflowClient, file: Path, location: str | None = None) -> None:
    """Two experiments with a run each, of which one is deleted; a model with two versions and aliases."""
    file.write_text("weights")
    client.create_registered_model("mine", tags={"concord.promoted": "1"})
    for number in (1, 2):
        experiment = client.create_experiment(f"e{number}", artifact_location=location and f"{location}/e{number}")
        run = client.create_run(experiment, run_name=f"r{number}", tags={"mlflow.user": "ann"})
        for step in range(3):
            client.log_metric(run.info.run_id, "loss", number / (step + 1), timestamp=step, step=step)
        client.log_param(run.info.run_id, "lr", number)
        client.log_artifact(run.info.run_id, str(file), "models")
        client.create_model_version("mine", f"{run.info.artifact_uri}/models", run.info.run_id, tags={"n": str(number)})
        client.set_terminated(run.info.run_id)
    client.set_registered_model_alias("mine", "champion", "2")
    client.delete_run(run.info.run_id)


def everything(client: mlflow.MlflowClient, folder: Path) -> dict[str, Any]:
    """All that the store has, with the artifacts' content."""
    found: dict[str, Any] = {}
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], run_view_type=mlflow.entities.ViewType.ALL):
            history = [each.to_dictionary() for each in client.get_metric_history(run.info.run_id, "loss")]
            found[run.info.run_name] = (experiment.name, run.to_dictionary(), history)
    for version in client.search_model_versions("name = 'mine'"):
        found[f"version {version.version}"] = dict(version)
    found["aliases"] = client.get_registered_model("mine").aliases
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    found["artifacts"] = {str(each.relative_to(folder)): each.read_bytes() for each in files}
    return found


def connect(uri: str) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def test_an_sqlite_store_is_restored_with_everything_in_it(tmp_path: Path) -> None:
    store, artifacts = f"sqlite:///{tmp_path}/server/mlflow.db", tmp_path / "server" / "artifacts"
    artifacts.mkdir(parents=True)
    client = connect(store)
    fill(client, tmp_path / "model.bin", artifacts.as_uri())
    before, place = everything(client, artifacts), ("--store", store, "--artifacts", artifacts)
    assert len(before["artifacts"]) == 2
    kept = tmp_path / "kept"
    assert call("backup", kept, *place).returncode == 0
    assert (kept.stat().st_mode & 0o077) == 0
    for words, line in (
        (("backup", kept, *place), f"backup.py: {kept}: exists; give a new folder"),
        (("restore", kept, *place), f"backup.py: --artifacts {artifacts}: has files; give an empty folder"),
        (("restore", tmp_path / "no", *place), f"backup.py: {tmp_path}/no: is not a complete backup"),
        (("restore", kept, *place, "--store", store), "backup.py: --store: the backup has 0.sqlite, and 0.sqlite, 1."),
    ):
        done = call(*words)
        assert (done.returncode, done.stderr.startswith(line)) == (2, True), done.stderr
    assert everything(client, artifacts) == before
    (tmp_path / "server").rename(tmp_path / "lost")
    assert call("restore", kept, *place).returncode == 0
    assert everything(connect(store), artifacts) == before


@pytest.mark.slow  # MLflow makes its tables statement by statement
def test_a_postgresql_store_is_restored_with_everything_in_it(
    database: tuple[int, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    port, password = database
    secret = urllib.parse.quote(password, safe="")
    first, second = (
        f"postgresql+psycopg2://mlflow:{secret}@127.0.0.1:{port}/{name}" for name in ("mlflow", "mlflow_auth")
    )
    artifacts, restored, kept = tmp_path / "artifacts", tmp_path / "restored", tmp_path / "kept"
    artifacts.mkdir()
    client = connect(first)
    fill(client, tmp_path / "model.bin", artifacts.as_uri())
    before = everything(client, artifacts)
    assert call("backup", kept, "--store", first, "--artifacts", artifacts).returncode == 0
    done = call("restore", kept, "--store", second, "--artifacts", restored)
    assert done.returncode == 0, done.stderr
    assert everything(connect(second), restored) == before
    again = call("restore", kept, "--store", first, "--artifacts", tmp_path / "other")
    assert again.returncode == 1
    assert "already exists" in again.stderr
    assert password not in again.stderr
    assert everything(client, artifacts) == before


@test_local_cluster.needs_namespaces
@pytest.mark.slow
def test_a_local_cluster_is_restored_into_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with test_local_cluster.started("cback", "--subnet", "10.80.0", "--nodes", "1") as cluster:

        def client() -> mlflow.MlflowClient:
            for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
                monkeypatch.setenv(name, cluster.environment[name])
            return connect(cluster.environment["MLFLOW_TRACKING_URI"])

        kept, artifacts = cluster.folder.parent / "kept", cluster.folder / "artifacts"
        fill(client(), tmp_path / "model.bin")
        before = everything(client(), artifacts)
        assert len(before["artifacts"]) == 2
        cluster.do("backup", str(kept))
        cluster.do("down")
        cluster.folder.rename(cluster.folder.parent / "lost")
        cluster.do("restore", str(kept))
        cluster.do("up")
        assert everything(client(), artifacts) == before
