"""A real MLflow server for tests, which can be killed and started again."""

import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from forked import start_server
from ports import free_port

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


class Server:
    """An `mlflow server` on loopback that can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.database = f"sqlite:///{folder}/server.db"
        self.process: BaseProcess | None = None

    def start(self) -> None:
        start_server()
        words = [
            *("server", "--workers", "1", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--backend-store-uri", self.database),
            *("--artifacts-destination", str(self.folder / "server-artifacts")),
        ]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_serve, args=(words, self.folder, environment), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        for _ in range(1200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise TimeoutError("the MLflow server did not start")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.join()
            self.process = None


def _serve(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    """The command ``mlflow``, whose server runs in this process, not in a new interpreter."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    import mlflow.server
    import uvicorn
    from mlflow.cli import cli

    def here(command: list[str], extra_env: dict[str, str], **_: object) -> None:
        os.environ.update(extra_env)
        uvicorn.main(command[command.index("uvicorn") + 1 :])

    mlflow.server._exec_cmd = here
    cli(words)
