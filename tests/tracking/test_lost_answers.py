"""What a server carried out and answered by an error is there once: behind a proxy that loses answers."""

import http.client
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from made_job import made_job
from mlflow_server import Server
from tracked import tracked_runs
from web_server import Quiet, serving

import concord
from concord.record import OpenRun, write_record
from concord.storage import Folder
from concord.tracking import Mirror, Store, log_model, models, register
from concord.tracking import store as store_module
from concord.tracking.mirror import track, tracking_key

_CREATE = ("/create", "/logged-models")  # how the addresses of such requests end


class Lossy(Quiet):
    """Passes requests on to a server. The answer to each new kind of creation, and every fifth answer, is an error."""

    port: int
    created: set[str]
    count: Iterator[int]

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = http.client.HTTPConnection("127.0.0.1", self.port)
        server.request(self.command, self.path, body, {**self.headers, "Accept-Encoding": "identity"})
        answer = server.getresponse()
        content, status = answer.read(), answer.status
        first = self.path.endswith(_CREATE) and self.path not in self.created
        if first or next(self.count) % 5 == 4:
            self.created.add(self.path)
            content, status = b"{}", 500
        self.send_response(status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on  # noqa: N815


@pytest.fixture
def lossy(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The server's store behind the proxy; nobody waits between requests."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    monkeypatch.setattr(store_module, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr("concord.tracking.mirror._CLOSING_PAUSE_SECONDS", 0.0)
    handler = type("Handler", (Lossy,), {"port": server.port, "created": set(), "count": itertools.count()})
    with serving(handler) as port:
        yield Store.open(tmp_path, f"http://127.0.0.1:{port}")


def recorded(folder: Path, experiment: str) -> OpenRun:
    tracking = {"experiment": experiment, "parameters": {"lr": "0.1"}, "tags": {}, "key": tracking_key()}
    made = write_record(Folder(folder), "run", {"job": "j", "config": {}, "tracking": tracking})
    return OpenRun(Folder(folder), made)


def test_a_group_and_its_runs_are_made_once(lossy: Store, server: Server, tmp_path: Path) -> None:
    group = recorded(tmp_path / "group", "lost")
    track(lossy, group)
    mirror = Mirror(lossy)
    mirror.add(group)
    for number in range(6):
        run = recorded(tmp_path / f"trial-{number}", "lost")
        mirror.add(run, group)
        run.append("began", resumed=False)
        run.append("evaluated", epoch=1, step=1, metrics={"a": float(number)})
        run.append("ended", status="FINISHED")
        mirror.finish(run)
    assert mirror.close(60.0) == 0
    found = tracked_runs(Store.open(tmp_path, server.uri), "lost", finished_only=False)
    assert sorted((run.name, run.status, run.metrics.get("a")) for run in found) == [
        ("group", "RUNNING", None),
        *((f"trial-{number}", "FINISHED", float(number)) for number in range(6)),
    ]


class Away(Lossy):
    """Refuses the first four questions about a registered model: MLflow's client asks so often before it gives up."""

    asked: Iterator[int]

    def pass_on(self) -> None:
        if "/registered-models/get?" in self.path and next(self.asked) < 4:
            self.send_error(503)
        else:
            super().pass_on()

    do_GET = pass_on  # noqa: N815


def test_a_server_that_is_away_while_a_run_is_registered_is_waited_for(
    server: Server, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setattr("concord.execution.patience._FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("concord.execution.finish._draw", lambda *_: [])
    counts = {"created": set[str](), "count": itertools.count(), "asked": itertools.count()}
    handler = type("Handler", (Away,), {"port": server.port, **counts})
    with serving(handler) as port:
        uri = f"http://127.0.0.1:{port}"
        concord.train(made_job(name="away"), epochs=1, name="away", output=output, tracking_uri=uri)
    assert "could not register 'away': " in capsys.readouterr().err
    store = Store.open(output, server.uri)
    assert [version.run for version in models(store) if version.name == "away"] == ["away"]
    experiment = [store.client.get_experiment_by_name("away").experiment_id]
    (tracked,), (kept,) = store.client.search_runs(experiment), store.client.search_logged_models(experiment)
    assert [each.model_id for each in tracked.outputs.model_outputs] == [kept.model_id]
    assert tracked.info.status == "FINISHED"


def test_a_model_under_the_same_key_is_completed(server: Server, tmp_path: Path) -> None:
    store = Store.open(tmp_path, server.uri)
    run_id = track(store, recorded(tmp_path / "run", "same key"))
    kept = [log_model(store, run_id, torch.nn.Linear(2, 1), torch.zeros(3, 2), key="a key") for _ in range(2)]
    assert kept[0] == kept[1]
    run = store.client.get_run(run_id)
    assert [f"models:/{each.model_id}" for each in run.outputs.model_outputs] == kept[:1]
    found = store.client.search_logged_models([run.info.experiment_id])
    assert [f"models:/{each.model_id}" for each in found] == kept[:1]


def test_a_model_is_kept_and_registered_once(lossy: Store, server: Server, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", "lost models")
    run_id = track(lossy, run)
    uri = log_model(lossy, run_id, torch.nn.Linear(2, 1), torch.zeros(3, 2))
    done = register(lossy, uri, run_id, "lost", {"a": 1.0}, "a", "max")
    assert (done.version, done.champion) == (1, True)
    store = Store.open(tmp_path, server.uri)
    assert [version.version for version in models(store) if version.name == "lost"] == [1]
    experiment = store.client.get_experiment_by_name("lost models").experiment_id
    assert [f"models:/{each.model_id}" for each in store.client.search_logged_models([experiment])] == [uri]
