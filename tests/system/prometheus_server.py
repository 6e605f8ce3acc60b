"""A real Prometheus on loopback, which scrapes the metrics of a Ray head node."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from ports import free_port

CONFIGURATION = Path(__file__).parents[2] / "cluster" / "grafana" / "prometheus.yml"
PROGRAM = shutil.which("prometheus")


class Prometheus:
    """Prometheus with the configuration of ``cluster/grafana``, another list of targets and a scrape every second."""

    def __init__(self, folder: Path, ray: Path) -> None:
        assert PROGRAM is not None
        self.address = f"http://127.0.0.1:{free_port()}"
        self.folder = folder
        text = CONFIGURATION.read_text().replace("/tmp/ray/", f"{ray}/")
        (folder / "prometheus.yml").write_text(re.sub(r"scrape_interval: \S+", "scrape_interval: 1s", text))
        shutil.copy(CONFIGURATION.with_name("alerts.yml"), folder)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(PROGRAM),
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={self.address.removeprefix('http://')}",
        ]
        log = (self.folder / "prometheus.log").open("ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.address}/-/ready", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError((self.folder / "prometheus.log").read_text()[-2000:])

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The present value of an expression; AssertionError with Prometheus's message for an invalid one."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/query?{query}", timeout=30) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return result

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None
