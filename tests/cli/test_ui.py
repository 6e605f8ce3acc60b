"""``concord ui`` starts a server that ends with the command, and names only the dashboard of the user's own Ray."""

import contextlib
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Command
from ports import free_port
from process_table import linux, lives
from waiting import wait_for
from web_server import Quiet, serving

from concord.cli import main
from concord.execution.submission.profile import running_dashboard
from concord.tracking import Store

PATIENCE = 120.0


def processes_of(port: int) -> dict[int, str]:
    """The processes in the sessions of those that were started with this port, and their commands."""
    listed = subprocess.run(["ps", "-ewwo", "sid=,pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    sessions = {row[0] for row in rows if f"--port {port}" in row[2] and "mlflow" in row[2] and " ui " in row[2]}
    own = str(os.getsid(0))
    return {int(pid): words for session, pid, words in rows if session in sessions - {own}}


@pytest.mark.slow
@linux
def test_mlflows_processes_end_with_the_ui_and_none_shows_the_address(output: Path) -> None:
    Store.open(output)
    port = free_port()
    with Command("ui", "--output", output, "--port", port) as started:

        def answers() -> bool:
            assert started.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
            return False

        wait_for(answers)
        running = processes_of(port)
        assert any("uvicorn" in command for command in running.values())
        assert not any("sqlite" in command for command in running.values())
        started.send_signal(signal.SIGTERM)
        started.communicate(PATIENCE)
        wait_for(lambda: not any(map(lives, running)))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused_before_the_address_is_shown(
    refused: Callable[..., str], tmp_path: Path, host: str
) -> None:
    Store.open(tmp_path)
    with serving(Stranger, port := free_port()):
        line = refused("ui", "--output", tmp_path, "--host", host, "--port", port)
    assert line.startswith(f"--port {port}: no server can listen at {host}:{port} (Address already in use")


def test_a_host_of_another_machine_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    Store.open(tmp_path)
    line = refused("ui", "--output", tmp_path, "--host", "no.such.invalid")
    assert line.startswith("--host no.such.invalid: no server can listen at no.such.invalid:5000")


def test_the_address_is_shown_once_the_server_answers_and_a_long_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Store.open(tmp_path)
    port, shown = free_port(), list[str]()

    def has(line: str) -> bool:
        shown.append(capsys.readouterr().err)
        return line in "".join(shown)

    def slow_server(*_: object) -> int:
        wait_for(lambda: has(f"starting the MLflow UI on port {port}; it does not answer yet"))
        assert not has("MLflow UI: ")
        with serving(Quiet, port):
            wait_for(lambda: has("hint: "))
        return 0

    monkeypatch.setattr("concord.cli.models._USUAL_SECONDS", 0.0)
    monkeypatch.setattr("concord.cli.models.run_group", slow_server)
    assert main(["ui", "--output", str(tmp_path), "--port", str(port)]) == 0
    assert has(f"MLflow UI: http://127.0.0.1:{port}/#/experiments")


class Dashboard:
    """A process of this user that is a Ray's dashboard."""

    def __init__(self, port: int, cluster: str) -> None:
        self.port, self.cluster = port, cluster

    def uids(self) -> SimpleNamespace:
        return SimpleNamespace(real=os.getuid())

    def cmdline(self) -> list[str]:
        return ["python", "/ray/dashboard/dashboard.py", f"--port={self.port}", f"--gcs-address={self.cluster}"]

    def net_connections(self, _: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(status="LISTEN", laddr=SimpleNamespace(ip="127.0.0.1", port=self.port))]


@pytest.mark.parametrize("wanted", ["", "auto", "10.0.0.1:6379"])
def test_dashboards_that_answer_are_shown_and_of_a_given_cluster_only_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, wanted: str
) -> None:
    Store.open(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", wanted)
    monkeypatch.setattr("concord.cli.models.run_group", lambda *_: 0)
    with serving() as first, serving() as second:
        dead = free_port()
        clusters = {first: "10.0.0.1:6379", second: "10.0.0.2:6379", dead: "10.0.0.1:6379"}
        monkeypatch.setattr("psutil.process_iter", lambda: [Dashboard(*each) for each in clusters.items()])
        assert main(["ui", "--output", str(tmp_path), "--port", str(free_port())]) == 0
    ports = [first] if ":" in wanted else sorted([first, second])
    line = f"Ray dashboard: {', '.join(f'http://127.0.0.1:{port}' for port in ports)}"
    assert capsys.readouterr().err.splitlines()[0] == line


class Stranger(Quiet):
    """Says what a Ray dashboard says to who brings no token, and remembers what it was told."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:  # noqa: N802
        self.asked.append(f"{self.path} {self.headers}")
        self.send_response(401)
        self.end_headers()


def test_a_stranger_where_ray_s_dashboard_might_be_is_not_asked() -> None:
    with contextlib.ExitStack() as stack:
        for port in range(8265, 8269):  # another Ray of this machine may have some of them
            with contextlib.suppress(OSError):
                stack.enter_context(serving(Stranger, port))
                break
        else:
            pytest.skip("the ports are taken")
        assert running_dashboard() != f"http://127.0.0.1:{port}"
    assert Stranger.asked == []
