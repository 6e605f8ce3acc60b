"""A real Ray head node with a token, as made by `ray start --head`, for tests of submissions."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import ray
import ray_workers
from ports import free_port

_HEAD_ID = "f" * 51 + "00000"  # the provider's first node

# What `concord` imports.
_LIBRARIES = ("mlflow", "mlflow.store.tracking.sqlalchemy_store", "matplotlib.pyplot")

_NO_COMMANDS_AND_FILES = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
)


class Head:
    """A head node on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token_file = folder / "token"
        self.token_file.write_text(secrets.token_hex(16))
        self.port, self.dashboard, client, agent = (free_port() for _ in range(4))
        self.address = f"http://127.0.0.1:{self.dashboard}"
        # Ray's sockets are in this folder, and their paths must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))
        self.command = [
            # The command `ray`; workers and drivers are forked from a process without Concord, which jobs bring along.
            *(sys.executable, ray_workers.__file__, ray_workers.NODE),
            *("start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address", "127.0.0.1", "--port", str(self.port), "--ray-client-server-port", str(client)),
            # Another Ray on this machine may use the default port, and submitting jobs needs this one.
            *("--dashboard-agent-listen-port", str(agent)),
            *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(self.dashboard)),
            *("--num-cpus", "2", "--object-store-memory", str(100 << 20), "--temp-dir", str(self.temporary)),
        ]
        self.variables: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._template = contextlib.ExitStack()

    def start(self) -> None:
        self.temporary.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CONCORD_"))}
        forks = self._template.enter_context(ray_workers.template(self.temporary, _LIBRARIES))
        environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token_file.read_text(),
            "CONCORD_PYTHON": str(ray_workers.python(self.temporary / "python") if forks else sys.executable),
            "CONCORD_OUTPUT": str(self.folder / "runs"),
            **forks,
            **self.variables,
        }
        log = (self.folder / "head.log").open("ab")
        self.process = subprocess.Popen(
            self.command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        request = urllib.request.Request(
            f"{self.address}/api/jobs/", headers={"Authorization": f"Bearer {self.token_file.read_text()}"}
        )
        end = time.monotonic() + 180
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        self.stop()
        raise RuntimeError((self.folder / "head.log").read_text()[-2000:])

    def stop(self) -> None:
        """End the node and all processes that it started."""
        if self.process is None:
            return
        # Ray's own processes have its session; processes of a job are recognized by their working folder.
        subprocess.run(["pkill", "-KILL", "-s", str(self.process.pid)], check=False)
        subprocess.run(["pkill", "-KILL", "-f", str(self.temporary)], check=False)
        self._template.close()
        self.process.wait()
        self.process = None
        shutil.rmtree(self.temporary, ignore_errors=True)


class GrowingHead(Head):
    """A head node without a CPU, whose autoscaler starts nodes on this machine, as in Ray's own tests.

    Ray's ``AutoscalingCluster`` is not used, since it kills every Ray of the machine at its start and end.
    """

    def __init__(self, folder: Path, node_types: dict[str, dict[str, float]]) -> None:
        super().__init__(folder)
        self.gcs_address = f"{ray.util.get_node_ip_address()}:{self.port}"  # Ray's drivers use it for 127.0.0.1
        types = {
            name: {
                "resources": {**resources, "object_store_memory": 100 << 20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 1,
            }
            for name, resources in node_types.items()
        }
        config = {
            "cluster_name": "growing",
            "max_workers": len(types),
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.gcs_address,
                "head_node_id": _HEAD_ID,
                **dict.fromkeys(("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check"), True),
            },
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                **types,
            },
            "head_node_type": "ray.head.default",
            # Longer than a busy machine needs to place a run on its new node.
            "idle_timeout_minutes": 0.3,
            "upscaling_speed": 1.0,
            "file_mounts_sync_continuously": False,
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            **{key: [] for key in _NO_COMMANDS_AND_FILES},
        }
        file = folder / "autoscaling.json"
        file.write_text(json.dumps(config))
        where = self.command.index("--node-ip-address")
        del self.command[where : where + 2]
        self.command[self.command.index("--num-cpus") + 1] = "0"
        self.command += ["--autoscaling-config", str(file)]
        self.variables = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
            "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        }
