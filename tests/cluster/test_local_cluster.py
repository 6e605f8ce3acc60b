"""The cluster of cluster/local: hosts with their own addresses, killed and disconnected while they train."""

import base64
import contextlib
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from concord.execution.submission import admission
from concord.execution.submission import cluster as submission
from concord.execution.submission.profile import Profile
from concord.record import EVENTS, Event, read_events

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cluster" / "local" / "cluster.py"
JOBS = Path(__file__).parents[1] / "jobs"
# Some 25 s of training: 24 epochs of five batches that each take 0.2 s longer.
RUN = ["train", "shared_rule.py", "--batch-size", "16", "--epochs", "24", "--pause", "0.2", "--checkpoints", "24"]
RUN += ["--evaluations", "24", "--workers", "3"]
# Of numbers that were added in another order.
ROUNDING = 1e-4

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or not Path("/usr/lib/postgresql").exists(),
    reason="network namespaces need root and iproute2, the store needs PostgreSQL",
)


@dataclass(frozen=True)
class Cluster:
    """A running one of three Ray nodes, with a CPU each."""

    options: tuple[str, ...]
    folder: Path
    environment: dict[str, str]

    def do(self, *words: str) -> str:
        done = subprocess.run([sys.executable, str(SCRIPT), *words, *self.options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def concord(self, *words: str, timeout: float = 300) -> tuple[int, dict[str, Any], str]:
        """Exit status, JSON and standard error of a command."""
        done = subprocess.run(
            [sys.executable, "-m", "concord", *words, "--json"],
            cwd=JOBS,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return done.returncode, json.loads(done.stdout.strip().splitlines()[-1]), done.stderr

    def submit(self, name: str, *words: str) -> str:
        """Submit a run; gives its id."""
        status, said, shown = self.concord("submit", *RUN, "--no-wait", "--name", name, *words)
        assert status == 0, shown
        submission: str = said["submission"]
        return submission

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / "runs" / name

    def events(self, name: str) -> list[Event]:
        """The events with metrics that are recorded so far."""
        path = self.run_folder(name) / EVENTS
        return [event for event in read_events(path) if "metrics" in event.fields] if path.exists() else []

    def epoch(self, name: str) -> int:
        """How far a run has come."""
        return int(max((event.fields["metrics"].get("epoch", 0) for event in self.events(name)), default=0))

    def wait(self, what: Callable[[], bool], seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end
            time.sleep(0.2)

    def metrics(self, name: str) -> dict[str, float]:
        found: dict[str, float] = json.loads((self.run_folder(name) / "metrics.json").read_text())
        return {key: value for key, value in found.items() if key not in {"workers", "steps_per_second"}}

    def ended(self, submission: str, seconds: float = 400) -> tuple[int, str]:
        """Follow a submission to its end; gives the exit status and what it showed."""
        status, _, shown = self.concord("logs", submission, "--follow", timeout=seconds)
        return status, shown


@contextlib.contextmanager
def started(name: str, *sizes: str) -> Iterator[Cluster]:
    """A cluster of its own, ended and forgotten afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/var/tmp"))
    options = ("--name", name, "--folder", str(folder / "c"), *sizes)
    folder.chmod(0o711)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_", "CONCORD_"))}
    running = Cluster(options, folder / "c", clean | {"HOME": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true"})
    try:
        running.do("up")
        said = running.do("env")
        for line in said.splitlines():
            name, value = line.removeprefix("export ").split("=", 1)
            running.environment[name] = value.strip("'")
        yield running
    finally:
        running.do("down")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started("ctest", "--subnet", "10.79.0") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[str, float]:
    """The metrics of the run, left alone."""
    status, shown = cluster.ended(cluster.submit("undisturbed"))
    assert status == 0, shown
    return cluster.metrics("undisturbed")


def same(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    return ours == pytest.approx(theirs, abs=ROUNDING)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kill", "7"], "kill 7: give one of head, 1, 2, store"),
        (["up", "--name", "a b"], "--name a b: up to nine small letters and digits"),
        (["up", "--subnet", "10.0"], "--subnet 10.0: three numbers"),
        (["up", "--nodes", "0"], "--nodes 0: must lie between 1 and 200"),
        (["up", "--cpus", "0"], "--cpus 0: must be at least 1"),
        (["up", "--memory", "0"], "--memory 0: must be a number of GiB above 0"),
        (["backup"], "backup: give a folder for the backup"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_environment_of_a_cluster_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "env", "--folder", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"cluster.py: --folder {tmp_path}: no cluster was started there; start one with up\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="what root does is tried as root")
def test_a_link_in_the_users_folder_leads_root_to_nobody_elses_files() -> None:
    user = pwd.getpwnam("nobody")
    outer = Path(tempfile.mkdtemp(prefix="cluster-", dir="/var/tmp"))  # the user does not get through pytest's own
    try:
        outer.chmod(0o711)
        theirs, folder = outer / "theirs", outer / "users"
        theirs.mkdir()
        folder.mkdir()
        os.chown(folder, user.pw_uid, user.pw_gid)
        (folder / "runs").symlink_to(theirs)
        words = [sys.executable, str(SCRIPT), "up", "--name", f"c{os.getpid()}", "--folder", str(folder)]
        sudo = os.environ | {"SUDO_UID": str(user.pw_uid)}
        done = subprocess.run(words, env=sudo, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (2, f"cluster.py: {folder}/runs: belongs to another user\n")
        assert list(theirs.iterdir()) == []
        assert {path.lstat().st_uid for path in folder.iterdir()} == {user.pw_uid, 0}  # the link alone is root's
    finally:
        shutil.rmtree(outer)
        shutil.rmtree(f"/tmp/c{os.getpid()}-{user.pw_uid}", ignore_errors=True)


def test_a_python_without_ray_is_refused_before_anything_starts(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    done = subprocess.run([python, str(SCRIPT), "up"], capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr == f"cluster.py: {python}: has no Ray; call it with the environment's, such as .venv/bin/python\n"
    )


@needs_namespaces
@pytest.mark.slow
def test_a_node_killed_in_mid_training_changes_no_metric_and_comes_back(
    cluster: Cluster, undisturbed: dict[str, float]
) -> None:
    submission = cluster.submit("killed", "--min-workers", "1", "--epochs", "96")  # long enough to take the node back
    cluster.wait(lambda: cluster.epoch("killed") >= 6)  # there is a checkpoint of epoch 4
    cluster.do("kill", "2")
    cluster.wait(lambda: 2 in workers(cluster, "killed"))
    cluster.do("start", "2")
    status, shown = cluster.ended(submission)
    assert status == 0, shown
    print(*re.findall(r"training goes on from .*", shown), sep="\n")  # what it cost
    assert re.search(r"^node .+ \([\d.]+\) died, or was taken away$", shown, re.MULTILINE)
    assert "\x1b" not in shown
    assert workers(cluster, "killed") == [3, 2, 3]
    assert re.search(r"training resumes from epoch \d+ with 2 workers, \d+ s after that checkpoint", shown)
    assert re.search(r"training resumes from epoch \d+ with 3 workers, \d+ s after that checkpoint", shown)
    whole = cluster.submit("whole", "--epochs", "96", "--pause", "0")
    assert cluster.ended(whole)[0] == 0
    assert same(cluster.metrics("killed"), cluster.metrics("whole"))


def workers(cluster: Cluster, name: str) -> list[int]:
    """The numbers of workers that trained, one after the other."""
    seen: list[int] = []
    for event in cluster.events(name):
        count = int(event.fields["metrics"].get("workers", 0))
        if count and seen[-1:] != [count]:
            seen.append(count)
    return seen


def processes_of(cluster: Cluster, pattern: str) -> list[psutil.Process]:
    """The cluster's processes whose command line matches, those of another cluster left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is not ours to look into
            environment = process.environ() if re.search(pattern, " ".join(process.cmdline())) else {}
            if environment.get("RAY_AUTH_TOKEN_PATH") == cluster.environment["RAY_AUTH_TOKEN_PATH"]:
                found.append(process)
    return found


PROCESSES = {"driver": r"-m concord train .*{name}", "worker": "^ray::.*TrainWorker", "GCS": "gcs_server"}
HOSTS = {"raylet": "1", "head": "head", "MLflow": "store"}
TRAINED = {"begins": 0, "trains": 6, "ends": 23}  # epochs of 24


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("moment", TRAINED)
@pytest.mark.parametrize("who", [*PROCESSES, *HOSTS, "frozen worker"])
def test_whoever_dies_at_any_moment_the_status_is_told_and_the_run_is_equal(
    cluster: Cluster, undisturbed: dict[str, float], who: str, moment: str
) -> None:
    name = f"{who}-{moment}".replace(" ", "-").lower()
    submission = cluster.submit(name)
    cluster.wait(lambda: cluster.epoch(name) >= TRAINED[moment] and bool(processes_of(cluster, PROCESSES["worker"])))
    if who in HOSTS:
        cluster.do("kill", HOSTS[who])
    elif who == "frozen worker":
        frozen = processes_of(cluster, PROCESSES["worker"])[-1]
        frozen.suspend()
        line = r"no step since [\d:]+: worker \d on \S+ \(environments: [^)]+\) has not answered"
        cluster.wait(lambda: re.search(line, cluster.concord("logs", submission)[1]["log"]) is not None)
        frozen.resume()
    else:
        for process in processes_of(cluster, PROCESSES[who].format(name=name)):
            process.kill()
    began = time.monotonic()
    if who in ("raylet", "MLflow"):
        cluster.do("start", HOSTS[who])

    def told() -> list[str]:
        """The run's status for a client: the tracking server's, and the submission's if the head node answers."""
        runs = cluster.concord("runs")[1].get("runs", [])
        sent = cluster.concord("submissions")[1].get("submissions", [])
        found = [run["status"] for run in runs if run["name"] == name]
        return found + [each["status"] for each in sent if each["id"] == submission]

    cluster.wait(lambda: not {"running", "pending"} & {*told()})
    print(f"{who}, {moment}: {told()} after {time.monotonic() - began:.0f} s")
    if who in ("GCS", "head"):
        for host in ("head", "1", "2"):
            cluster.do("kill", host)
        cluster.do("up")
    if "finished" not in told():
        status, shown = cluster.ended(cluster.submit(name, "--resume"))
        assert status == 0, shown
    assert same(cluster.metrics(name), undisturbed)


@needs_namespaces
@pytest.mark.slow
def test_a_run_of_fixed_size_waits_for_its_node(cluster: Cluster, undisturbed: dict[str, float]) -> None:
    submission = cluster.submit("fixed")
    cluster.wait(lambda: cluster.epoch("fixed") >= 4)
    cluster.do("kill", "1")
    cluster.do("start", "1")
    status, shown = cluster.ended(submission)
    assert status == 0, shown
    assert same(cluster.metrics("fixed"), undisturbed)


@needs_namespaces
@pytest.mark.slow
def test_a_cut_of_20_seconds_is_survived(cluster: Cluster, undisturbed: dict[str, float]) -> None:
    submission = cluster.submit("cut", "--min-workers", "1")
    cluster.wait(lambda: cluster.epoch("cut") >= 4)
    cluster.do("cut", "1")
    time.sleep(20)
    cluster.do("join", "1")
    status, shown = cluster.ended(submission)
    assert status == 0, shown
    assert same(cluster.metrics("cut"), undisturbed)
    if not cluster_answers(cluster, "1"):  # Ray had given it up, and it itself
        cluster.do("kill", "1")
        cluster.do("start", "1")


def cluster_answers(cluster: Cluster, host: str) -> bool:
    answers: bool = json.loads(cluster.do("status"))["hosts"][host]["answers"]
    return answers


@needs_namespaces
@pytest.mark.slow
def test_a_store_gone_for_30_seconds_loses_no_metric_and_no_artifact(cluster: Cluster) -> None:
    submission = cluster.submit("outage", "--epochs", "48")
    cluster.wait(lambda: cluster.epoch("outage") >= 4)
    cluster.do("kill", "store")
    before = cluster.epoch("outage")
    time.sleep(30)
    assert cluster.epoch("outage") > before + 4  # training does not wait for it
    cluster.do("start", "store")
    status, shown = cluster.ended(submission)
    assert status == 0, shown
    kept = {
        (key, event.fields["step"]): value
        for event in cluster.events("outage")
        for key, value in event.fields["metrics"].items()
    }
    run_id = json.loads((cluster.run_folder("outage") / "record.json").read_text())["run_id"]
    script = (
        "import json, sys; from mlflow import MlflowClient; client = MlflowClient(); run = sys.argv[1]\n"
        "names = client.get_run(run).data.metrics\n"
        "print(json.dumps([[[name, point.step, point.value] for name in names for point in "
        "client.get_metric_history(run, name)], [file.path for file in client.list_artifacts(run)], "
        "client.get_run(run).info.status]))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", script, run_id], env=cluster.environment, capture_output=True, text=True, check=True
    )
    points, artifacts, state = json.loads(asked.stdout.splitlines()[-1])
    assert {(name, step): value for name, step, value in points} == pytest.approx(kept)
    assert len(points) == len(kept)
    assert {"config.json", "environments.json", "figures"} <= set(artifacts)
    assert state == "FINISHED"


# What a browser or a load balancer has to get without asking for anything: pages without content, and "I am alive".
WITHOUT_CREDENTIALS = {"/", "/api/authentication_mode", "/api/gcs_healthz", "/health", "/static-files/index.html"}
PATHS = ["/", "/api/jobs/", "/api/version", "/nodes?view=summary", "/api/cluster_status", "/logs", "/metrics"]
PATHS += ["/api/authentication_mode", "/api/gcs_healthz", "/health", "/version", "/graphql", "/get-artifact"]
PATHS += ["/static-files/index.html", "/api/2.0/mlflow/experiments/search?max_results=1"]
PATHS += ["/ajax-api/2.0/mlflow/experiments/search?max_results=1", "/api/2.0/mlflow-artifacts/artifacts"]


def answered(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


@needs_namespaces
@pytest.mark.slow
def test_every_port_refuses_who_brings_no_token_and_no_password(cluster: Cluster) -> None:
    hosts: dict[str, Any] = json.loads(cluster.do("status"))["hosts"]
    reached = set()
    for host, about in hosts.items():
        # What listens is read within the host; whether it answers is tried from outside.
        listening = subprocess.run(
            ["ip", "netns", "exec", f"ctest-{host}", "ss", "-Hltn"], capture_output=True, text=True, check=True
        ).stdout
        ports = {int(line.split()[3].rsplit(":", 1)[1]) for line in listening.splitlines()}
        assert ports
        for port in ports:
            try:
                socket.create_connection((about["address"], port), timeout=2).close()
            except OSError:
                continue
            reached.add((host, port))
            for path in PATHS:
                status = answered(f"http://{about['address']}:{port}{path}")
                assert status in {401, 403, 404, 405} or path in WITHOUT_CREDENTIALS, (host, port, path, status)
    assert reached == {("head", 8265), ("store", 5000)}


@needs_namespaces
@pytest.mark.slow
def test_a_browser_that_has_the_password_sees_the_runs(cluster: Cluster) -> None:
    address, user = cluster.environment["MLFLOW_TRACKING_URI"], cluster.environment["MLFLOW_TRACKING_USERNAME"]
    password = cluster.environment["MLFLOW_TRACKING_PASSWORD"]
    # A page of the server's own asks as a browser does: with its origin, which the server has to know for its own.
    asked = urllib.request.Request(
        f"{address}/ajax-api/2.0/mlflow/runs/search",
        data=json.dumps({"experiment_ids": ["0"]}).encode(),
        headers={
            "Origin": address,
            "Content-Type": "application/json",
            "Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode(),
        },
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.status == 200
    asked.add_header("Origin", "http://elsewhere.example")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(asked, timeout=30)


@needs_namespaces
@pytest.mark.slow
def test_down_leaves_no_process_and_no_network_behind(cluster: Cluster) -> None:
    cluster.do("down")
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "ctest-" not in spaces
    assert not Path("/sys/class/net/ctest").exists()
    left = subprocess.run(["pgrep", "-f", str(cluster.folder)], capture_output=True, text=True).stdout
    assert not left
    cluster.do("up")
    assert all(host["answers"] for host in json.loads(cluster.do("status"))["hosts"].values())


# The head of fifty submissions: commands reserve 2 GiB each, so that it admits four at a time.
HEAD_GIB, COMMAND_GIB, SUBMISSIONS = 8, 2, 50
# Fifty commands at once, each a process of its own, forked from one that has imported Concord.
AT_ONCE = f"""
import contextlib, io, json, multiprocessing
import concord.execution.submission.cluster, concord.training
from concord.cli import main

def submit(number):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main([*words, '--name', f'run-{{number}}', '--json'])
    return status, json.loads(out.getvalue().splitlines()[-1]), err.getvalue()

words = ['submit', '--no-wait', 'train', 'shared_rule.py', '--epochs', '2', '--checkpoints', '1']
with multiprocessing.get_context('fork').Pool({SUBMISSIONS}) as pool:
    print(json.dumps(pool.map(submit, range({SUBMISSIONS}), chunksize=1)))
"""


class HeadWatch:
    """The memory of the head node, and when each command there began, looked at until the watch ends.

    Attributes:
        peak: the most memory of its processes, in GiB; pages that several share are counted once.
        begun: Unix time at which the command of each run began.
    """

    def __init__(self, cluster: Cluster, host: str) -> None:
        self._cluster, self._host = cluster, host
        self.peak, self.begun = 0.0, dict[str, float]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "HeadWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def memory(self) -> float:
        """GiB of the head node's processes now."""
        pids = subprocess.run(["ip", "netns", "pids", self._host], capture_output=True, text=True, check=True).stdout
        total = 0
        for pid in map(int, pids.split()):
            with contextlib.suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                total += process.memory_full_info().pss
                if found := re.search(r" -m concord train .*--name (run-\d+)", " ".join(process.cmdline())):
                    self.begun.setdefault(found[1], process.create_time())
        return total / 2**30

    def _watch(self) -> None:
        while not self._over.wait(5.0):
            self.peak = max(self.peak, self.memory())


@needs_namespaces
@pytest.mark.slow
def test_fifty_submissions_at_once_run_in_order_within_the_head_s_memory() -> None:
    size = ("--nodes", "2", "--cpus", "2", "--memory", str(HEAD_GIB))
    with started("cmany", "--subnet", "10.80.0", *size) as cluster, HeadWatch(cluster, "cmany-head") as head:
        idle, began = head.memory(), time.monotonic()
        submitted = subprocess.run(
            [sys.executable, "-c", AT_ONCE], cwd=JOBS, env=cluster.environment, capture_output=True, text=True
        )
        assert submitted.returncode == 0, submitted.stderr
        answers = json.loads(submitted.stdout)
        assert [status for status, _, _ in answers] == [0] * SUBMISSIONS, answers
        waiting = [shown for _, result, shown in answers if result["status"] == "pending"]
        told_as = re.compile(rf": waits as \d+ of \d+ for {COMMAND_GIB} GiB of the head node, of which ")
        print(f"{sum(map(bool, map(told_as.search, waiting)))} of {len(waiting)} that wait were told their position")
        took = sorted(result["seconds"] for _, result, _ in answers)
        print(
            f"{SUBMISSIONS} submitted after {time.monotonic() - began:.0f} s; one took {took[25]:.1f} s, at most ",
            end="",
        )
        print(f"{took[-1]:.1f} s; {len(waiting)} wait")

        token = Path(cluster.environment["RAY_AUTH_TOKEN_PATH"])
        jobs = submission.Cluster(Profile.find(address=cluster.environment["RAY_API_SERVER_ADDRESS"], token_file=token))

        def listed() -> list[admission.Submission]:
            """In the order in which the cluster received them."""
            return sorted(jobs.submissions(), key=lambda each: each.started or 0)

        told: list[list[str]] = []

        def ended() -> bool:
            now = listed()
            told.append([each.waits for each in now if each.waits])
            return not {"pending", "running"} & {each.status for each in now}

        while not ended():
            assert time.monotonic() - began < 4800
            time.sleep(5)
        print(f"all had ended after {time.monotonic() - began:.0f} s")
        print(f"the head node's memory: {idle:.2f} GiB idle, at most {head.peak:.2f} GiB")
        print(*max(told, key=len)[:2], *max(told, key=len)[-1:], sep="\n")
        assert [each.status for each in listed()] == ["succeeded"] * SUBMISSIONS
        # Each command and its processes within what it reserved, and no more commands than fit.
        assert head.peak < idle + HEAD_GIB
        at_a_time = HEAD_GIB // COMMAND_GIB
        for lines in told:
            assert [line.split(" of ")[0] for line in lines] == [str(place + 1) for place in range(len(lines))]
            assert all(f"for {COMMAND_GIB} GiB of the head node, of which " in line for line in lines)
            assert all(f" of {HEAD_GIB} GiB are reserved by " in line for line in lines)
        # Those that are admitted at the same moment may begin in any order, and nobody else goes before another.
        order = [each.name for each in listed()]
        begun = sorted(head.begun, key=lambda name: head.begun[name])
        assert sorted(begun) == sorted(order)
        moved = [begun.index(name) - place for place, name in enumerate(order)]
        print(f"places between submission and beginning: {moved}")
        assert max(map(abs, moved)) < at_a_time
