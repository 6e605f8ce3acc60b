"""Runs of the command against a server that errs, is slow, and goes away: MLflow has each run and value once."""

import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import ViewType
from mlflow_server import Server
from ports import free_port
from web_server import Quiet, serving

from concord.record import EVENTS, Event, folder_of, read_events
from concord.tracking import Store, models

JOB = Path(__file__).parents[1] / "jobs" / "shared_rule.py"
RUNS, AT_ONCE, EPOCHS = 10, 5, 60
# Some 150 s of training, so that each outage ends before the next begins.
WORDS = [
    "train",
    JOB.name,
    "--batch-size",
    "16",
    "--epochs",
    str(EPOCHS),
    "--evaluations",
    str(EPOCHS),
    "--pause",
    "0.5",
]
# The command; see torchvision_operators.py.
COMMAND = (
    f"import sys; sys.path += {sys.path!r}; import torchvision_operators; import concord.cli as c; sys.exit(c.main())"
)
AWAY_SECONDS, DELAY_SECONDS, ERRORS, DELAYED = 60.0, 5.0, 0.2, 0.1


class Flaky(Quiet):
    """Passes requests on to a server. A fifth gets an error, half of these after the server has done the work."""

    port: int
    chance: random.Random
    lock: threading.Lock
    counts: Counter[str]

    def pass_on(self) -> None:
        with self.lock:
            draw, delayed = self.chance.random(), self.chance.random() < DELAYED
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind, status, content, media = "answered", 503, b"{}", "application/json"
        if draw < ERRORS / 2:
            kind = "refused"
        else:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as server:
                server.request(self.command, self.path, body, {**self.headers, "Accept-Encoding": "identity"})
                answer = server.getresponse()
                content, status = answer.read(), answer.status
                media = answer.headers.get("Content-Type", media)
            if draw < ERRORS:
                kind, content, status = "done and lost", b"{}", 500
        if delayed:
            time.sleep(DELAY_SECONDS)
        with self.lock:
            self.counts.update([kind, *(["delayed"] if delayed else [])])
        with contextlib.suppress(OSError):  # the client has given up
            self.send_response(status)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on  # noqa: N815


class Way:
    """The way to a server, which can be away."""

    def __init__(self, port: int) -> None:
        self.counts: Counter[str] = Counter()
        about = {"port": port, "chance": random.Random(0), "lock": threading.Lock(), "counts": self.counts}
        self._handler = type("Handler", (Flaky,), about)
        self._port = free_port()
        self.uri = f"http://127.0.0.1:{self._port}"

    def open(self) -> contextlib.AbstractContextManager[int]:
        """Passes requests on while the body runs; otherwise connections are refused."""
        return serving(self._handler, self._port)


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    Store.open(tmp_path, server.database)
    server.start()
    yield server
    server.kill()


def events(output: Path, name: str) -> list[Event]:
    path = folder_of(output, name).path / EVENTS
    return list(read_events(path)) if path.exists() else []


def reach(output: Path, names: list[str], until: float) -> None:
    """Wait until the foremost of the runs has come to an epoch."""
    while epoch(output, names) < until:
        time.sleep(2)


def epoch(output: Path, names: list[str]) -> float:
    """How far the foremost of the runs has come."""
    found = (event.fields["metrics"].get("epoch", 0) for name in names for event in events(output, name)
             if "metrics" in event.fields)  # fmt: skip
    return max(found, default=0)


@pytest.mark.slow
def test_ten_runs_through_errors_delays_and_outages_are_tracked_once(behind: Server, output: Path) -> None:
    way, names = Way(behind.port), [f"run-{number}" for number in range(RUNS)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "RAY_", "CONCORD_"))}

    def train(name: str) -> subprocess.CompletedProcess[str]:
        words = [*WORDS, "--name", name, "--output", str(output), "--tracking-uri", way.uri, "--json"]
        done = subprocess.run([sys.executable, "-c", COMMAND, *words], cwd=JOB.parent, env=clean, text=True,
                              capture_output=True, check=False, start_new_session=True)  # fmt: skip
        print(f"{name}: status {done.returncode} after {time.monotonic() - began:.0f} s\n{done.stderr}")
        return done

    finished = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for group in (names[start : start + AT_ONCE] for start in range(0, RUNS, AT_ONCE)):
            began = time.monotonic()
            running = pool.map(train, group)
            for until in (EPOCHS // 3, EPOCHS, None):
                time.sleep(AWAY_SECONDS)
                with way.open():
                    print(f"the server is there after {time.monotonic() - began:.0f} s")
                    if until is None:
                        finished += list(running)
                    else:
                        reach(output, group, until)
                print(f"the server is away after {time.monotonic() - began:.0f} s")
    print(f"requests: {dict(way.counts)}")
    assert [done.returncode for done in finished] == [0] * RUNS

    store = Store.open(output, behind.uri)
    experiment = store.client.get_experiment_by_name("shared-rule").experiment_id
    tracked = store.client.search_runs([experiment])
    assert sorted(run.info.run_name for run in tracked) == sorted(names)
    print(f"deleted runs: {len(store.client.search_runs([experiment], run_view_type=ViewType.DELETED_ONLY))}")
    compared = 0
    for run in tracked:
        name, run_id = run.info.run_name, run.info.run_id
        assert run.info.status == "FINISHED"
        recorded = {
            (key, event.fields["step"]): value
            for event in events(output, name)
            for key, value in event.fields.get("metrics", {}).items()
        }
        points = [
            ((key, point.step), point.value)
            for key in run.data.metrics
            for point in store.client.get_metric_history(run_id, key)
        ]
        assert len(points) == len(recorded)
        assert dict(points) == pytest.approx(recorded)
        compared += len(points)
        files: set[Any] = {file.path for file in store.client.list_artifacts(run_id)}
        assert {"config.json", "environments.json", "figures"} <= files
    print(f"{compared} values are equal")
    reports = {name: json.loads(done.stdout.splitlines()[-1]) for name, done in zip(names, finished, strict=True)}
    versions = [version for version in models(store) if version.name == "shared-rule"]
    assert sorted(str(version.run) for version in versions) == sorted(names)
    assert {version.run: version.uri for version in versions} == {name: each["model"] for name, each in reports.items()}
    kept = store.client.search_logged_models([experiment])
    assert sorted(str(model.source_run_id) for model in kept) == sorted(run.info.run_id for run in tracked)
