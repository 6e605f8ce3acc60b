"""The files that start clusters: `cluster/vms` for Ray's cluster launcher, `cluster/slurm` for Slurm."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.aws.config import _configure_security_group
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.tags import TAG_RAY_CLUSTER_NAME
from s3_server import BUCKET, Server
from waiting import wait_for

ROOT = Path(__file__).parents[2]
CLOUDS = ("aws", "gcp")
FILES = sorted(path for folder in ("vms", "slurm") for path in (ROOT / "cluster" / folder).iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix in {".sh", ".sbatch"}]
SBATCH = ROOT / "cluster" / "slurm" / "concord.sbatch"


@pytest.fixture(params=CLOUDS)
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A launcher file as it is written."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "vms" / f"{request.param}.yaml").read_text())
    return loaded


def commands(cluster: dict[str, Any]) -> str:
    return "\n".join(line for name, lines in cluster.items() if name.endswith("_commands") for line in lines)


def is_spot(node_type: dict[str, Any]) -> bool:
    config = node_type["node_config"]
    aws = config.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
    return aws or config.get("scheduling", {}).get("provisioningModel") == "SPOT"


def test_ray_s_own_schema_takes_the_file(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(cluster))


def test_the_schema_refuses_what_it_does_not_know(cluster: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="max_wrokers"):
        validate_config(prepare_config({**cluster, "max_wrokers": 3}))


def test_the_head_stays_and_workers_are_spot(cluster: dict[str, Any]) -> None:
    types = dict(cluster["available_node_types"])
    assert not is_spot(types.pop(cluster["head_node_type"]))
    assert len(types) == 2
    assert all(is_spot(worker) for worker in types.values())


def test_workers_come_and_go(cluster: dict[str, Any]) -> None:
    workers = [t for name, t in cluster["available_node_types"].items() if name != cluster["head_node_type"]]
    assert [worker["min_workers"] for worker in workers] == [0, 0]
    assert sum(worker["max_workers"] for worker in workers) == cluster["max_workers"]
    assert cluster["idle_timeout_minutes"] > 0
    assert sorted("GPU" in worker["resources"] for worker in workers) == [False, True]


def test_what_is_sent_to_the_nodes_is_in_the_repository(cluster: dict[str, Any]) -> None:
    mounts = dict(cluster["file_mounts"])
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert all((ROOT / local).exists() and remote == f"~/concord/{local}" for remote, local in mounts.items())
    sent = [ROOT / local for local in mounts.values()]
    for word in re.findall(r"~/concord/(\S+)", commands(cluster)):
        assert any((ROOT / word) == path or path in (ROOT / word).parents for path in sent), word
        assert os.access(ROOT / word, os.X_OK), word


def test_concord_can_be_built_from_what_is_sent(cluster: dict[str, Any]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    built_from = {"PYPI.md", "LICENSE", "platform", "jobs", "tests/benchmarks"}
    assert all(f'"{name}"' in project or f'"{name}/concord"' in project for name in built_from)
    assert built_from | {"pyproject.toml", "constraints.txt"} <= set(cluster["file_mounts"].values())


def test_nodes_have_the_versions_that_concord_is_tested_with() -> None:
    setup = (ROOT / "cluster" / "vms" / "setup.sh").read_text()
    assert "--constraint ~/concord/constraints.txt" in setup
    python = re.findall(r"^python=(.+)$", setup, re.MULTILINE)
    assert python == [f"{sys.version_info.major}.{sys.version_info.minor}"] or sys.version_info[:2] != (3, 11)
    assert not re.search(r"\b(ray|torch|mlflow)(\[\w+\])?[=<>~]", setup)


def test_tokens_are_on_and_the_dashboard_is_on_loopback(cluster: dict[str, Any]) -> None:
    assert "export RAY_AUTH_MODE=token" in (ROOT / "cluster" / "vms" / "node.sh").read_text()
    start = "\n".join(cluster["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in start
    assert "mlflow.sh start" in start
    assert "tracking $HEAD" in start
    assert "tracking $RAY_HEAD_IP" in "\n".join(cluster["worker_start_ray_commands"])


def test_the_firewall_opens_nothing_but_ssh(cluster: dict[str, Any]) -> None:
    assert "IpPermissions" not in cluster["provider"].get("security_group", {})
    if cluster["provider"]["type"] == "gcp":
        for node_type in cluster["available_node_types"].values():
            assert node_type["node_config"]["tags"] == {"items": ["concord"]}
            assert node_type["node_config"]["networkInterfaces"][0]["subnetwork"].endswith("/concord")


def test_on_aws_ray_makes_no_firewall_of_its_own() -> None:
    cluster = prepare_config(yaml.safe_load((ROOT / "cluster" / "vms" / "aws.yaml").read_text()))
    # Without an account of Amazon's at hand: where a group is missing this would ask for one.
    assert _configure_security_group(cluster) == cluster


def test_the_head_on_aws_may_do_what_the_autoscaler_does_and_no_more() -> None:
    cluster = yaml.safe_load((ROOT / "cluster" / "vms" / "aws.yaml").read_text())
    policy = json.loads((ROOT / "cluster" / "vms" / "aws-head-policy.json").read_text())["Statement"]
    allowed = {action: each for each in policy for action in [each["Action"]] if isinstance(action, str)}
    actions = {
        action
        for each in policy
        for action in ([each["Action"]] if isinstance(each["Action"], str) else each["Action"])
    }
    assert all(each["Effect"] == "Allow" for each in policy)
    assert not any("*" in action for action in actions)
    assert [each["Sid"] for each in policy if each["Resource"] == "*"] == ["SeeWhatThereIs"]
    # What Ray's provider asks of EC2 in the head's name.
    assert {"ec2:CreateTags", "ec2:RunInstances", "ec2:StartInstances", "ec2:StopInstances"} <= actions
    assert {"ec2:TerminateInstances", "ec2:DescribeInstances", "ec2:DescribeImages", "iam:PassRole"} <= actions
    workers = {name: each["node_config"] for name, each in cluster["available_node_types"].items() if name != "head"}
    launch = next(each for each in policy if each["Sid"] == "LaunchWorkersOfThisCluster")["Condition"]
    assert launch["StringEquals"][f"aws:RequestTag/{TAG_RAY_CLUSTER_NAME}"] == cluster["cluster_name"]
    assert set(launch["StringEquals"]["ec2:InstanceType"]) == {each["InstanceType"] for each in workers.values()}
    (role,) = {each["IamInstanceProfile"]["Name"] for each in workers.values()}
    assert allowed["iam:PassRole"]["Resource"].endswith(f":role/{role}")
    own = next(each for each in policy if "ec2:TerminateInstances" in each["Action"])["Condition"]["StringEquals"]
    assert own == {f"aws:ResourceTag/{TAG_RAY_CLUSTER_NAME}": cluster["cluster_name"]}
    (group,) = workers["cpu"]["SecurityGroupIds"]
    assert any(group in str(each["Resource"]) for each in policy)
    assert f"s3://{re.findall('s3:::([a-z-]+)', str(policy))[0]}/mlflow" in commands(cluster)


def test_the_commands_name_the_place_and_project_of_the_cluster(cluster: dict[str, Any]) -> None:
    provider = cluster["provider"]
    place = provider["region"] if provider["type"] == "aws" else provider["project_id"]
    assert set(re.findall(r"tracking \S+ (\S+) (\S+) concord-mlflow", commands(cluster))) == {(provider["type"], place)}
    if provider["type"] == "gcp":
        text = yaml.safe_dump(cluster["available_node_types"])
        projects = set(re.findall(r"projects/([^/\s]+)/regions|@([^.\s]+)\.iam", text))
        assert {name for pair in projects for name in pair if name} == {place}


SECRET = re.compile(
    r"\b[0-9a-fA-F]{32,}\b|AKIA[0-9A-Z]{16}|-----BEGIN|://[^/\s:]+:[^/\s@$]+@"  # keys, and addresses with passwords
    r"|(?i:password|token|secret)\w*\s*[=:]\s*[\"']?(?=[\w+/-]*\d)[\w+/-]{8,}"  # values, with a digit
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_holds_a_secret(path: Path) -> None:
    assert not SECRET.search(path.read_text())
    for example in ("MLFLOW_TRACKING_PASSWORD=hunter2hunter2", "token: 0123456789ab", "postgresql://me:secret@host/db"):
        assert SECRET.search(example)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_takes_the_script(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_server_without_an_account_is_not_started(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_TRACKING")}
    script = ROOT / "cluster" / "vms" / "mlflow.sh"
    words = [str(script), "start", str(tmp_path / "mlflow"), str(tmp_path / "artifacts")]
    started = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert started.returncode == 2
    assert not (tmp_path / "mlflow").exists()


def bash_function(name: str, call: str) -> str:
    """What a function of the batch script prints."""
    source = re.search(rf"^{name}\(\) \{{\n.*?^\}}$", SBATCH.read_text(), re.MULTILINE | re.DOTALL)
    assert source
    done = subprocess.run(
        ["bash", "-uc", f"{source.group()}\n{call}"], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize("words", [["--name", "my-run"], ["--name=my-run"], ["--workers", "2", "--name", "my-run"]])
def test_the_batch_script_finds_the_name_of_a_run(words: list[str]) -> None:
    assert bash_function("option", f"option --name train synthetic {shlex.join(words)}") == "my-run"
    assert bash_function("option", f"option --output train synthetic {shlex.join(words)}") == ""


def test_the_route_to_loopback_begins_on_loopback() -> None:
    assert bash_function("route", "route src 127.0.0.1; route dev 127.0.0.1").split() == ["127.0.0.1", "lo"]


def ports(job: int) -> str:
    program = re.search(r"^PORT=\$\(\"\$PYTHON\" -c '(.*?)' \"\$HEAD\"", SBATCH.read_text(), re.MULTILINE | re.DOTALL)
    assert program
    words = [sys.executable, "-c", program.group(1), "127.0.0.1", str(job)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_two_jobs_on_a_node_have_different_ports_and_one_job_one() -> None:
    assert ports(1234567) == ports(1234567) != ports(1234568)


def test_a_port_that_is_taken_is_passed_over() -> None:
    first = int(ports(4321))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        assert int(ports(4321)) > first


STUBS = {
    "scontrol": 'case "$*" in requeue*) echo "$@" >>$TMP/scontrol ;; *) echo NodeAddr=127.0.0.1 ;; esac',
    "srun": "echo $$ >$TMP/srun; exec sleep 600",
    "scancel": "kill $(cat $TMP/srun)",
    # Takes the words of the command in place of Concord, and waits for the time limit.
    "python": f"""case "$1 $2" in
"-m concord") sleep 0.2; echo "${{@:3}}" >>$TMP/concord; exec sleep 600 ;;
"- 1") ;;  # one node has joined
*) exec {sys.executable} "$@" ;;
esac""",
}


def interrupted_job(folder: Path, *words: str, **more: str) -> tuple[str, str, str]:
    """A job of one node at its time limit: the command that it ran, its requests to Slurm, its errors."""
    binaries = folder / "bin"
    binaries.mkdir()
    for name, text in STUBS.items():
        (binaries / name).write_text(f"#!/bin/bash\n{text}\n")
        (binaries / name).chmod(0o755)
    environment = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMP": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node",
        "SLURM_CPUS_ON_NODE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with subprocess.Popen(
        ["bash", str(SBATCH), *words],
        env=environment | more,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as job:
        wait_for(lambda: (folder / "concord").exists() or job.poll() is not None, 60)
        job.terminate()
        errors = job.communicate(timeout=60)[1]
    asked = folder / "scontrol"
    return (
        (folder / "concord").read_text().strip(),
        asked.read_text().strip() if asked.exists() else "",
        errors,
    )


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        ("train synthetic", "train synthetic --name slurm-7"),
        ("compare synthetic fig-15", "compare synthetic fig-15"),
    ],
)
def test_a_job_at_its_time_limit_is_queued_again(tmp_path: Path, words: str, ran: str) -> None:
    assert interrupted_job(tmp_path, *words.split(), CONCORD_REQUEUE="yes")[:2] == (ran, "requeue 7")


def test_a_job_that_is_not_queued_again_names_the_words_that_continue_it(tmp_path: Path) -> None:
    words = ["compare", "synthetic", "fig-15", "--only", "IRM, 100"]
    *_, errors = interrupted_job(tmp_path, *words)
    (line,) = re.findall(r"^interrupted; to go on: sbatch --nodes 1 \[options\] concord.sbatch (.*)$", errors, re.M)
    assert shlex.split(line) == words


def test_a_restarted_job_resumes_its_run_at_an_address(s3: Server, tmp_path: Path) -> None:
    s3.client().put_object(Bucket=BUCKET, Key="runs/runs/slurm-7/record.json", Body=b"{}")
    output = ["--output", f"s3://{BUCKET}/runs"]
    ran, *_ = interrupted_job(tmp_path, "train", "synthetic", *output, **s3.environment, SLURM_RESTART_COUNT="1")
    assert ran == f"train synthetic --output s3://{BUCKET}/runs --name slurm-7 --resume"


def test_a_restarted_job_begins_a_run_without_a_record(tmp_path: Path) -> None:
    ran, *_ = interrupted_job(tmp_path, "train", "synthetic", SLURM_RESTART_COUNT="1")
    assert ran == "train synthetic --name slurm-7"


def test_the_batch_script_asks_for_a_command(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CONCORD_PYTHON": sys.executable}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "1"}
    started = subprocess.run(
        ["bash", str(SBATCH)], env=environment | slurm, capture_output=True, text=True, check=False
    )
    assert (started.returncode, started.stdout) == (2, "")
    assert "no command given" in started.stderr
    assert list(tmp_path.iterdir()) == []
