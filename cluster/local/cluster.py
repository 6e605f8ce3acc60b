#!/usr/bin/env python3
"""A Ray cluster of several hosts on this machine, with MLflow and PostgreSQL: one command starts it, one ends it.

Every host has its own network namespace and its own address on a bridge that only this machine reaches; the namespaces
have no other route. Making namespaces needs root; their processes run as the user. Files are read and written with the
user's rights, so no link in the user's folder can lead root to another user's file.

    cluster.py up        cluster.py status      cluster.py kill 1     a node, as with a power cut
    cluster.py down      cluster.py env         cluster.py start 1    and back
    cluster.py backup FOLDER                    of MLflow's databases and artifacts; restore FOLDER into a new --folder
"""

import argparse
import contextlib
import json
import math
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# The ports of every Ray node; README.md lists them.
RAY_PORTS = {
    "node-manager-port": 7001,
    "object-manager-port": 7002,
    "runtime-env-agent-port": 7003,
    "dashboard-agent-grpc-port": 7004,
    "dashboard-agent-listen-port": 7005,
    "metrics-export-port": 7006,
    "min-worker-port": 10002,
    "max-worker-port": 10999,
}
# Ray chooses these ports for the metrics of the autoscaler and of the dashboard.
HEAD_METRICS_PORTS = (44217, 44227)
GCS_PORT, CLIENT_PORT, DASHBOARD_PORT, MLFLOW_PORT = 6379, 10001, 8265, 5000
STORE = "store"
_COMMANDS = ("up", "down", "status", "env", "kill", "start", "cut", "join", "backup", "restore")
_STARTING_SECONDS = 180.0
_ENDING_SECONDS = 15.0
# How long a submission may wait for resources; Ray's default is a quarter of an hour.
_QUEUED_SECONDS = 7 * 24 * 3600
_OBJECT_STORE_BYTES = 200 << 20
_USER_NAME, _PASSWORD = "concord", "mlflow-password"


class UsageError(Exception):
    """The request is invalid."""


@dataclass(frozen=True)
class LocalCluster:
    """A cluster on this machine: its hosts, addresses, files and processes.

    Attributes:
        name: prefix of the names of its namespaces and of its bridge.
        subnet: the first three numbers of its addresses.
        folder: holds its token, password, database, artifacts, runs and logs.
        user: owner of its processes.
        nodes: number of Ray nodes, the head included.
        cpus: number of CPUs of each node.
        memory: GiB of each node that commands can reserve; None is what Ray finds free.
        open_metrics: whether this machine may read Ray's metrics, which ask for no token.
    """

    name: str
    subnet: str
    folder: Path
    user: pwd.struct_passwd
    nodes: int = 3
    cpus: int = 1
    memory: float | None = None
    open_metrics: bool = False

    @property
    def hosts(self) -> dict[str, str]:
        """Address by name: ``head``, the workers ``1``, ``2``, …, and ``store``."""
        workers = {str(number): f"{self.subnet}.{2 + number}" for number in range(1, self.nodes)}
        return {"head": f"{self.subnet}.2", **workers, STORE: f"{self.subnet}.250"}

    @property
    def dashboard(self) -> str:
        """Address of the Ray dashboard, which takes submissions."""
        return f"http://{self.hosts['head']}:{DASHBOARD_PORT}"

    @property
    def tracking_uri(self) -> str:
        """Address of MLflow."""
        return f"http://{self.hosts[STORE]}:{MLFLOW_PORT}"

    @property
    def temporary(self) -> Path:
        """Folder for sockets, whose paths must be short."""
        return Path("/tmp") / f"{self.name}-{self.user.pw_uid}"

    def namespace(self, host: str) -> str:
        """The network namespace of a host."""
        return f"{self.name}-{host}"

    def environment(self) -> dict[str, str]:
        """The environment variables of a client. Raises UsageError if the cluster was never started."""
        with self._as_user():
            if not (self.folder / _PASSWORD).exists():
                raise UsageError(f"--folder {self.folder}: no cluster was started there; start one with up")
        return {
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            "MLFLOW_TRACKING_USERNAME": _USER_NAME,
            "MLFLOW_TRACKING_PASSWORD": self._read(_PASSWORD),
        }

    # Starting

    def up(self) -> None:
        """Start every host that is not running."""
        self._make_folders()
        self._make_bridge()
        for host in self.hosts:
            self._make_namespace(host)
        if not self.pids(STORE):
            self.start(STORE)
        for host in self.hosts:
            if not self.pids(host):
                self.start(host)

    def start(self, host: str) -> None:
        """Start a host's processes, and wait until they answer."""
        if self.pids(host):
            raise UsageError(f"start {host}: runs already")
        if host == STORE:
            self._start_store()
            return
        self._start_ray(host).wait(lambda: self.hosts[host] in self._alive_nodes())

    def _start_store(self) -> None:
        address = self._start_postgresql()
        # The address has no password: the environment passes it.
        self._write(
            "mlflow-auth.ini",
            f"[mlflow]\ndefault_permission = NO_PERMISSIONS\ndatabase_uri = {address.format('mlflow_auth')}\n"
            f"admin_username = {_USER_NAME}\nauthorization_function = "
            "mlflow.server.auth:authenticate_request_basic_auth\ngrant_default_workspace_access = false\n"
            # Comparing a password is slow by design, and training sends many requests.
            "auth_cache_ttl_seconds = 60\n",
        )
        environment = {
            "MLFLOW_AUTH_CONFIG_PATH": str(self.folder / "mlflow-auth.ini"),
            "MLFLOW_AUTH_ADMIN_USERNAME": _USER_NAME,
            "MLFLOW_AUTH_ADMIN_PASSWORD": self._read(_PASSWORD),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": self._read("mlflow-key"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        server = [
            *(sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "2"),
            # By default uvicorn kills processes that a busy machine keeps from answering it for five seconds.
            *("--uvicorn-opts", "--timeout-worker-healthcheck 60"),
            *("--host", self.hosts[STORE], "--port", str(MLFLOW_PORT), "--allowed-hosts", f"{self.hosts[STORE]}:*"),
            *("--cors-allowed-origins", self.tracking_uri),  # its own pages
            *("--backend-store-uri", address.format("mlflow")),
            *("--artifacts-destination", str(self.folder / "artifacts"), "--serve-artifacts"),
        ]
        started = self._spawn(STORE, server, environment, "mlflow")
        started.wait(lambda: _answers(f"{self.tracking_uri}/health"))

    def _start_postgresql(self) -> str:
        """Start PostgreSQL; return the address of a database, with ``{}`` for its name."""
        data, sockets, binaries = self.folder / "postgresql", self.temporary / "postgresql", _postgresql()
        owner = self._database_owner
        with self._as_user():
            # Left behind by a killed server; no server runs now.
            shutil.rmtree(sockets, ignore_errors=True)
            (data / "postmaster.pid").unlink(missing_ok=True)
            for folder in (data, sockets):
                folder.mkdir(mode=0o700, exist_ok=True)
                if owner != self.user:  # then the user is root, and no other user writes to these folders
                    os.chown(folder, owner.pw_uid, owner.pw_gid, follow_symlinks=False)
            made = (data / "PG_VERSION").exists()
        if not made:
            # Only this user reaches the socket, so PostgreSQL needs no password.
            make = [str(binaries / "initdb"), "--auth=peer", f"--username={self.user.pw_name}", "-D", str(data)]
            self._run(STORE, make, owner)
        postgres = [str(binaries / "postgres"), "-D", str(data), "-k", str(sockets), "-c", "listen_addresses="]
        started = self._spawn(STORE, postgres, {}, "postgresql", owner)

        def asked(database: str, what: str) -> bool:
            return self._succeeds(STORE, ["psql", "-h", str(sockets), "-d", database, "-Atc", what])

        started.wait(lambda: asked("postgres", "select 1"))
        for database in ("mlflow", "mlflow_auth"):
            if not asked(database, "select 1") and not asked("postgres", f"create database {database}"):
                raise RuntimeError(f"PostgreSQL: the database {database} could not be made")
        return self._store_address

    @property
    def _store_address(self) -> str:
        """The address of a database, with ``{}`` for its name."""
        return f"postgresql+psycopg2://{self.user.pw_name}@/{{}}?host={self.temporary / 'postgresql'}"

    @property
    def _database_owner(self) -> pwd.struct_passwd:
        """The user that runs PostgreSQL, which refuses to run as root."""
        return self.user if self.user.pw_uid else _account("postgres", "nobody")

    def _start_ray(self, host: str) -> "_Started":
        temporary = self.temporary / host
        with self._as_user():
            shutil.rmtree(temporary, ignore_errors=True)  # of the previous node
            temporary.mkdir(mode=0o700)
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        ray += ["--node-ip-address", self.hosts[host], "--temp-dir", str(temporary), "--num-cpus", str(self.cpus)]
        ray += ["--object-store-memory", str(_OBJECT_STORE_BYTES)]
        ray += ["--memory", str(round(self.memory * 2**30))] if self.memory is not None else []
        ray += [word for option, port in RAY_PORTS.items() for word in (f"--{option}", str(port))]
        if host == "head":
            ray += ["--head", "--port", str(GCS_PORT), "--ray-client-server-port", str(CLIENT_PORT)]
            ray += ["--dashboard-host", self.hosts[host], "--dashboard-port", str(DASHBOARD_PORT)]
        else:
            ray += ["--address", f"{self.hosts['head']}:{GCS_PORT}"]
        environment = self.environment() | {
            "CONCORD_PYTHON": sys.executable,
            "CONCORD_OUTPUT": str(self.folder / "runs"),
            "RAY_JOB_START_TIMEOUT_SECONDS": str(_QUEUED_SECONDS),
            # Without it Ray's actors search the machine's processes, which may belong to another cluster.
            "RAY_ADDRESS": f"{self.hosts['head']}:{GCS_PORT}",
            # All hosts have this machine's name, which resolves to none of their addresses.
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        del environment["RAY_API_SERVER_ADDRESS"]  # only for clients
        return self._spawn(host, ray, environment, host)

    # Ending

    def down(self) -> None:
        """End every process and remove the network; the folder's files stay."""
        hosts = self._existing()
        for host in hosts:
            self.kill(host, signal.SIGTERM if host != STORE else signal.SIGINT)
        end = time.monotonic() + _ENDING_SECONDS
        while any(self.pids(host) for host in hosts) and time.monotonic() < end:
            time.sleep(0.2)
        for host in hosts:
            self.kill(host)
            _ip("netns", "delete", self.namespace(host), check=False)  # another "down" may have removed it
        if _links(self._bridge):
            _ip("link", "delete", self._bridge)
        with self._as_user():
            shutil.rmtree(self.temporary, ignore_errors=True)

    def kill(self, host: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to every process of a host; after SIGKILL wait for their end."""
        while pids := self.pids(host):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            if number != signal.SIGKILL:
                return
            time.sleep(0.1)

    def cut(self, host: str, up: bool) -> None:
        """Pull a host's network cable, or plug it in again."""
        _ip("link", "set", self._cable(host), "up" if up else "down")

    def pids(self, host: str) -> list[int]:
        """The processes of a host."""
        found = _ip("netns", "pids", self.namespace(host), check=False)
        return [int(pid) for pid in found.split()]

    def status(self) -> dict[str, object]:
        """Hosts, processes and addresses of the cluster, and which hosts answer."""
        existing = self._existing()
        alive = self._alive_nodes() if "head" in existing else []
        hosts = {
            host: {
                "address": address,
                "processes": len(self.pids(host)) if host in existing else 0,
                "answers": _answers(f"{self.tracking_uri}/health") if host == STORE else address in alive,
            }
            for host, address in self.hosts.items()
        }
        return {"dashboard": self.dashboard, "mlflow": self.tracking_uri, "folder": str(self.folder), "hosts": hosts}

    # Backups

    def backup(self, folder: Path) -> None:
        """Back up MLflow's databases, artifacts and password; the cluster may run."""
        if not self.pids(STORE):
            raise UsageError(f"backup {folder}: the store does not run; start it with up")
        self._backup("backup", folder)
        with self._as_user():
            shutil.copy2(self.folder / _PASSWORD, folder / _PASSWORD)

    def restore(self, folder: Path) -> None:
        """Restore a backup into a folder that had no cluster; start it afterwards with up."""
        if self._existing():
            raise UsageError(f"restore {folder}: a cluster of this --name runs; end it with down")
        with self._as_user():
            if (self.folder / "postgresql").exists():
                raise UsageError(f"--folder {self.folder}: has a store; give a new folder")
            if not (folder / _PASSWORD).is_file():
                raise UsageError(f"restore {folder}: is not a complete backup")
            password = (folder / _PASSWORD).read_text()
        self._make_folders()
        self._write(_PASSWORD, password, 0o600)
        self._make_bridge()
        self._make_namespace(STORE)
        try:
            self._start_postgresql()
            self._backup("restore", folder)
        finally:
            self.down()

    def _backup(self, command: str, folder: Path) -> None:
        program = Path(__file__).resolve().parents[1] / "backup.py"
        stores = (self._store_address.format(database) for database in ("mlflow", "mlflow_auth"))
        words = [sys.executable, str(program), command, str(folder), "--artifacts", str(self.folder / "artifacts")]
        self._run(STORE, [*words, *(word for store in stores for word in ("--store", store))], self.user)

    # The machine

    @property
    def _bridge(self) -> str:
        return self.name

    def _cable(self, host: str) -> str:
        return f"{self.name}-{host}"[:15]

    def _existing(self) -> list[str]:
        spaces = [line.split()[0] for line in _ip("netns", "list").splitlines() if line]
        return [space.removeprefix(f"{self.name}-") for space in spaces if space.startswith(f"{self.name}-")]

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        """Run the body with the user's rights, not with root's."""
        if os.geteuid() != 0 or self.user.pw_uid == 0:
            yield
            return
        groups = os.getgroups()
        os.setgroups(os.getgrouplist(self.user.pw_name, self.user.pw_gid))
        os.setegid(self.user.pw_gid)
        os.seteuid(self.user.pw_uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)

    def _read(self, name: str) -> str:
        with self._as_user():
            return (self.folder / name).read_text()

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        """Write a new file that the user owns; replaces an existing one."""
        path = self.folder / name
        with self._as_user():
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "w") as file:
                file.write(text)

    def _make_folders(self) -> None:
        for folder in (self.folder, self.folder / "logs", self.folder / "runs", self.temporary):
            with self._as_user():
                try:
                    # The database's owner must be able to enter; the secrets are readable only by the user.
                    folder.mkdir(mode=0o711, parents=folder == self.folder, exist_ok=True)
                    # Another user may have put a link of this name into /tmp: check the owner of the link itself.
                    about = folder.lstat() if folder == self.temporary else folder.stat()
                except OSError as error:
                    raise UsageError(f"{folder}: cannot be made by {self.user.pw_name} ({error.strerror})") from error
            if about.st_uid != self.user.pw_uid:  # the owner may change the folder's files
                raise UsageError(f"{folder}: belongs to another user")
        for secret in ("token", _PASSWORD, "mlflow-key"):
            with self._as_user():
                there = (self.folder / secret).exists()
            if not there:
                self._write(secret, secrets.token_hex(24), 0o600)

    def _make_bridge(self) -> None:
        if not _links(self._bridge):
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.subnet}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def _make_namespace(self, host: str) -> None:
        space, cable = self.namespace(host), self._cable(host)
        if host in self._existing():
            return
        _ip("netns", "add", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", self._bridge, "up")
        for words in (("link", "set", "lo", "up"), ("link", "set", "eth0", "up")):
            _ip("-n", space, *words)
        # No other route: requests from other networks get no answer, even if this machine forwards them.
        _ip("-n", space, "address", "add", f"{self.hosts[host]}/24", "dev", "eth0")
        # This machine has other users, so it reaches only ports that ask for a token or a password.
        outside = ("iif", "eth0", "from", f"{self.subnet}.1")
        for port in self._open_ports(host):
            tcp = ("ipproto", "tcp", "dport", str(port))
            _ip("-n", space, "rule", "add", "pref", "100", *outside, *tcp, "lookup", "local")
        for protocol in ("tcp", "udp"):
            _ip("-n", space, "rule", "add", "pref", "200", *outside, "ipproto", protocol, "prohibit")
        _ip("-n", space, "rule", "add", "pref", "300", "lookup", "local")
        _ip("-n", space, "rule", "delete", "pref", "0")

    def _open_ports(self, host: str) -> tuple[int, ...]:
        """Ports of a host that this machine reaches from outside the cluster."""
        if host == STORE:
            return (MLFLOW_PORT,)
        metrics = (RAY_PORTS["metrics-export-port"], *(HEAD_METRICS_PORTS if host == "head" else ()))
        return (*((DASHBOARD_PORT,) if host == "head" else ()), *(metrics if self.open_metrics else ()))

    def _words(self, host: str, command: Sequence[str], owner: pwd.struct_passwd | None = None) -> list[str]:
        user, within = owner or self.user, ["ip", "netns", "exec", self.namespace(host)]
        if user.pw_uid != 0:
            within += ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]
        return [*within, *command]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": self.user.pw_dir, "USER": self.user.pw_name, "PATH": path, "LANG": "C.UTF-8", **more}

    def _spawn(
        self,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        owner: pwd.struct_passwd | None = None,
    ) -> "_Started":
        path = self.folder / "logs" / f"{name}.log"
        with self._as_user():
            log = self._log(path)
        with log:
            process = subprocess.Popen(
                self._words(host, command, owner),
                cwd="/" if owner else self.folder,
                env=self._environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return _Started(name, process, path)

    @staticmethod
    def _log(path: Path) -> BinaryIO:
        """Open the log for appending; replaces a link or another user's file."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            return open(os.open(path, flags, 0o644), "ab")
        except OSError:
            path.unlink()
            return open(os.open(path, flags | os.O_EXCL, 0o644), "ab")

    def _run(self, host: str, command: Sequence[str], owner: pwd.struct_passwd) -> None:
        words = self._words(host, command, owner)
        done = subprocess.run(words, cwd="/", env=self._environment({}), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")

    def _succeeds(self, host: str, command: Sequence[str]) -> bool:
        words = self._words(host, command)
        return not subprocess.run(words, cwd="/", env=self._environment({}), capture_output=True).returncode

    def _alive_nodes(self) -> list[str]:
        """Addresses of the Ray nodes that the head node sees."""
        request = urllib.request.Request(
            f"{self.dashboard}/nodes?view=summary",
            headers={"Authorization": f"Bearer {self._read('token')}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                nodes = json.load(answer)["data"]["summary"]
        except (OSError, ValueError):
            return []
        return [node["raylet"]["nodeManagerAddress"] for node in nodes if node["raylet"].get("state") == "ALIVE"]


@dataclass(frozen=True)
class _Started:
    """A process that was started and does not answer yet."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, answers: Callable[[], bool]) -> None:
        end = time.monotonic() + _STARTING_SECONDS
        while not answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.name} did not start; see {self.log}")
            time.sleep(0.3)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:  # the server answers, even if it asks for a password
        return True
    except OSError:
        return False


def _postgresql() -> Path:
    """The folder of the newest PostgreSQL's binaries; Debian does not put the server's on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: -float(path.parts[-3]))
    on_path = shutil.which("postgres")
    if found or on_path:
        return found[0].parent if found else Path(str(on_path)).parent
    raise UsageError("PostgreSQL is not installed: apt-get install postgresql")


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _links(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def _account(*names: str) -> pwd.struct_passwd:
    for name in names:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise UsageError(f"called as root, and there is no account {' or '.join(names)}: call it through sudo")


def _user() -> pwd.struct_passwd:
    """The owner of the processes: the user who called sudo, or the current user."""
    return pwd.getpwuid(int(os.environ.get("SUDO_UID", "0")) if os.geteuid() == 0 else os.geteuid())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*_COMMANDS])
    parser.add_argument(
        "place", nargs="?", help="of kill, start, cut, join: head, 1, 2, … or store; of others a folder"
    )
    parser.add_argument("--name", default="concord", help="several clusters need several names, and subnets")
    parser.add_argument("--subnet", default="10.77.0", help="the first three numbers of the addresses")
    parser.add_argument("--folder", type=Path, help="for its secrets, database, artifacts, runs and logs")
    parser.add_argument("--nodes", type=int, default=3, help="Ray nodes, the head among them")
    parser.add_argument("--cpus", type=int, default=1, help="that each node offers")
    parser.add_argument("--memory", type=float, help="GiB that each node offers; by default what is free")
    parser.add_argument("--open-metrics", action="store_true", help="let this machine's Prometheus read Ray's metrics")
    return parser.parse_args()


def _cluster(options: argparse.Namespace) -> LocalCluster:
    if not re.fullmatch(r"[a-z][a-z0-9]{0,8}", options.name):
        raise UsageError(f"--name {options.name}: up to nine small letters and digits, a letter first")
    numbers = options.subnet.split(".")
    if len(numbers) != 3 or not all(number.isdecimal() and int(number) < 256 for number in numbers):
        raise UsageError(f"--subnet {options.subnet}: three numbers, such as 10.77.0")
    if not 1 <= options.nodes <= 200:
        raise UsageError(f"--nodes {options.nodes}: must lie between 1 and 200")
    if options.cpus < 1:
        raise UsageError(f"--cpus {options.cpus}: must be at least 1")
    if options.memory is not None and not 0 < options.memory < math.inf:
        raise UsageError(f"--memory {options.memory:g}: must be a number of GiB above 0")
    user = _user()
    default = Path(user.pw_dir) / "concord-cluster" if user.pw_uid else Path("/var/lib/concord-cluster")
    folder = (options.folder or default).absolute()
    settings = (options.nodes, options.cpus, options.memory, options.open_metrics)
    cluster = LocalCluster(options.name, options.subnet, folder, user, *settings)
    if options.command in {"kill", "start", "cut", "join"} and options.place not in cluster.hosts:
        raise UsageError(f"{options.command} {options.place}: give one of {', '.join(cluster.hosts)}")
    if options.command in {"backup", "restore"} and not options.place:
        raise UsageError(f"{options.command}: give a folder for the backup")
    return cluster


def main() -> int:
    """Run the command line; return the exit status."""
    options = _arguments()
    try:
        cluster = _cluster(options)
        if options.command == "env":  # needs no root: the files are the user's own
            for name, value in cluster.environment().items():
                print(f"export {name}={shlex.quote(value)}")
            return 0
        if options.command in {"up", "start"} and not Path(sys.executable).with_name("ray").exists():
            raise UsageError(f"{sys.executable}: has no Ray; call it with the environment's, such as .venv/bin/python")
        if os.geteuid() != 0:
            raise UsageError(f"{options.command}: making networks needs root, call it through sudo")
        match options.command:
            case "up":
                cluster.up()
            case "down":
                cluster.down()
            case "kill":
                cluster.kill(options.place)
            case "start":
                cluster.start(options.place)
            case "backup":
                cluster.backup(Path(options.place).absolute())
            case "restore":
                cluster.restore(Path(options.place).absolute())
            case "cut" | "join":
                cluster.cut(options.place, up=options.command == "join")
        if options.command in {"up", "status"}:
            print(json.dumps(cluster.status(), indent=1))
    except (UsageError, RuntimeError, OSError) as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
