"""Runs, studies and data on a real S3 server: the same as in a folder, and continued where nothing of them is."""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
from mlflow_server import Server
from s3_server import BUCKET

from concord.errors import InputError
from concord.storage import Folder, local
from concord.tracking import Store
from concord.training import load_job
from concord.training.run import FinishedRun, run

JOB_FILE = str(Path(__file__).parent / "jobs" / "shared_rule.py")
OPTIONS: dict[str, Any] = {"epochs": 8, "batch_size": 16, "lr": 5e-2, "threshold": 0.6, "evaluations": 4, "workers": 2}
ADDRESS = Path(f"s3://{BUCKET}")


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.Server]:
    """A running S3 server with a bucket."""
    started = s3_server.Server()
    started.start()
    started.make_bucket()
    yield started
    started.stop()


@pytest.fixture
def storage(s3: s3_server.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> s3_server.Server:
    """The server as this process finds it, and an empty cache."""
    s3.use(monkeypatch)
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / "cache"))
    return s3


def start(output: Path, **changes: Any) -> FinishedRun:
    job = load_job(JOB_FILE)
    return run(job, job.job.config(**(OPTIONS | {"output": output} | changes)), lambda _: None)


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "steps_per_second"}


def test_a_run_at_an_address_is_the_run_in_a_folder_metric_for_metric(
    ray_cluster: None, storage: s3_server.Server, server: Server, tmp_path: Path
) -> None:
    there = start(ADDRESS / "runs-a", name="there", tracking_uri=server.uri)
    here = start(tmp_path / "runs", name="here", tracking_uri=server.uri)
    assert comparable(there.metrics) == comparable(here.metrics)
    assert there.as_json()["artifacts"] == f"s3://{BUCKET}/runs-a/runs/there"
    print(storage.keys("runs-a"))
