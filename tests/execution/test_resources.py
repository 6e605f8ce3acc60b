"""A growing cluster: runs and studies ask Ray's autoscaler for missing resources, and wait for them."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from mlflow_server import Server
from ray_head import GrowingHead

from concord.errors import InputError
from concord.execution.session import require_resources, wait_for_resources, waiting_minutes
from concord.record import EVENTS, folder_of, read_events
from concord.training import RunConfig, TrainConfig

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")
RUN = ("--epochs", "2", "--evaluations", "1", "--batch-size", "16", "--lr", "5e-2", "--no-register")
# A driver of its own: this process may be connected to another Ray.
GPU = """
import sys, time
import ray
from concord.execution.session import ray_session
from concord.studies.study_options import SharingOptions
from concord.studies.trial import trial_resources
from concord.training import TrainConfig

config = TrainConfig().with_options(address=sys.argv[1], device="cuda")
with ray_session(config):
    print(trial_resources(SharingOptions(), config, print))
    end = time.monotonic() + 120
    while (gpus := ray.cluster_resources().get("GPU", 0)) and time.monotonic() < end:
        time.sleep(0.2)
    print(f"{gpus:g} GPUs are left")
"""


def requested() -> list[dict[str, float]]:
    """The bundles that the autoscaler of the connected Ray is asked for."""
    from ray.experimental.internal_kv import _internal_kv_get

    return list(json.loads(_internal_kv_get("autoscaler_resource_request") or b"[]"))


BUNDLES: Sequence[dict[str, float]] = [{"CPU": 1.0}, {"CPU": 1.0}]


def test_what_is_lacking_is_asked_for_until_it_is_there(ray_cluster: None) -> None:
    lines: list[str] = []
    looks: list[list[dict[str, float]]] = []

    def check() -> int:
        looks.append(requested())
        if len(looks) < 4:
            raise InputError(f"there are {len(looks)} of 4")
        return len(looks)

    config = RunConfig().with_options(address="10.0.0.1:6379", wait_for_resources=1)
    assert wait_for_resources(check, BUNDLES, config, lines.append) == 4
    assert lines == ["there are 1 of 4; its autoscaler is asked for more, for up to 1 minutes (--wait-for-resources)"]
    assert looks == [[], *[BUNDLES] * 3]
    assert requested() == []
    assert wait_for_resources(check, BUNDLES, config, lines.append) == 5  # at once
    assert len(lines) == 1


def test_what_does_not_come_is_refused_after_the_wait(ray_cluster: None) -> None:
    lines: list[str] = []
    config = TrainConfig().with_options(workers=3, min_workers=3, wait_for_resources=0.02)
    lacking = "--min-workers 3: each takes a CPU; the Ray cluster has 2"
    with pytest.raises(InputError) as refused:
        require_resources(config, lines.append)
    assert str(refused.value) == f"{lacking}, after 0.02 minutes"
    assert lines == [f"{lacking}; its autoscaler is asked for more, for up to 0.02 minutes (--wait-for-resources)"]
    assert requested() == []
    with pytest.raises(InputError) as refused:
        require_resources(config.with_options(wait_for_resources=0), lines.append)
    assert str(refused.value) == lacking
    assert len(lines) == 1


# --- a cluster that grows


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrowingHead]:
    """A cluster without CPUs and GPUs, which gets a node with each when it is asked."""
    head = GrowingHead(tmp_path_factory.mktemp("growing"), {"cpu": {"CPU": 2}, "gpu": {"CPU": 1, "GPU": 1}})
    head.start()
    yield head
    head.stop()


def on(head: GrowingHead, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token_file.read_text()}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


def command_lines(text: str) -> list[str]:
    """The lines, without those of Ray's autoscaler and of Ray's own processes.

    Two threads of Ray may print at once: then an empty line follows one that has both messages.
    """
    return [line for line in text.splitlines() if line and "(autoscaler +" not in line and "(pid=" not in line]


def train(head: GrowingHead, output: Path, server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    place = ("--address", head.gcs_address, "--output", str(output), "--tracking-uri", server.uri)
    return on(head, "-m", "concord", "train", JOB_FILE, *RUN, *place, *words)


@pytest.mark.slow  # nodes come and go by the minute
def test_a_run_waits_for_cpus_from_zero_and_trains(head: GrowingHead, output: Path, server: Server) -> None:
    done = train(head, output, server, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    waits = [line for line in command_lines(done.stderr) if "autoscaler" in line]
    assert waits == [
        "--workers 1: at least one CPU is needed; the Ray cluster has 0; its autoscaler is asked for more, "
        "for up to 30 minutes (--wait-for-resources)"
    ]
    result = json.loads(done.stdout)
    assert result["metrics"]["epoch"] == 2
    at = {event.name: event.at for event in reversed([*read_events(folder_of(output, result["name"]).path / EVENTS)])}
    appeared = node_started(head)
    begun, trained = ((at[name] - appeared) / 1000 for name in ("began", "metrics"))
    print(f"after the node appeared the run began in {begun:.1f} s, and its first epoch ended in {trained:.1f} s")
    assert 0 < begun < 30


def node_started(head: GrowingHead) -> float:
    """When the node beside the head appeared, in milliseconds of Unix time."""
    request = urllib.request.Request(
        f"{head.address}/api/v0/nodes?detail=1", headers={"Authorization": f"Bearer {head.token_file.read_text()}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        nodes = json.load(answer)["data"]["result"]["result"]
    (started,) = (node["start_time_ms"] for node in nodes if not node["is_head_node"])
    return float(started)


@pytest.mark.slow
def test_trials_wait_for_gpus_from_zero_and_the_cluster_shrinks_again(head: GrowingHead) -> None:
    done = on(head, "-c", GPU, head.gcs_address)
    assert command_lines(done.stdout) == [
        "--device cuda: the Ray cluster has no GPU; its autoscaler is asked for more, for up to 30 minutes "
        "(--wait-for-resources)",
        "TrialResources(concurrent=1, cpus=1.0, gpus=1.0)",
        "0 GPUs are left",
    ], done.stderr[-2000:]


@pytest.mark.slow
def test_more_gpus_than_the_cluster_can_get_are_refused_after_the_wait(
    head: GrowingHead, output: Path, server: Server
) -> None:
    done = train(head, output, server, "--device", "cuda", "--workers", "2", "--wait-for-resources", "0.05")
    assert done.returncode == 2
    waits, refusal = command_lines(done.stderr)
    lacking = "--device cuda: 2 workers want a GPU each; the Ray cluster has"
    assert waits.startswith(f"{lacking} 0; its autoscaler is asked for more, for up to 0.05 minutes")
    # The one that it can get may have come.
    assert refusal in [f"concord: {lacking} {gpus}, after 0.05 minutes" for gpus in (0, 1)]
    assert not output.exists()


def test_a_ray_of_this_machine_is_not_waited_for() -> None:
    assert waiting_minutes(RunConfig()) == waiting_minutes(RunConfig().with_options(address="local")) == 0
    assert waiting_minutes(RunConfig().with_options(address="10.0.0.1:6379")) == 30
    assert waiting_minutes(RunConfig().with_options(address="10.0.0.1:6379", wait_for_resources=2.5)) == 2.5


def test_workers_share_cpus_unless_they_are_to_wait_for_one_each() -> None:
    config = TrainConfig().with_options(workers=8)
    assert config.cpu_request()[0] == 1
    assert config.with_options(min_workers=2).cpu_request()[0] == 2
    assert config.with_options(wait_for_resources=5).cpu_request()[0] == 8


def test_a_negative_wait_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--wait-for-resources -1\.0: must be a number of minutes, not negative$"):
        RunConfig().with_options(wait_for_resources=-1.0).check()
