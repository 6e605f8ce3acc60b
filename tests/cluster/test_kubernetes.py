"""cluster/kubernetes and cluster/Dockerfile, against the published schemas, each other and the servers they start."""

import base64
import configparser
import copy
import functools
import importlib.resources
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import referencing
import referencing.jsonschema
import yaml
from forked import Command
from ports import free_port
from ray.autoscaler._private.kuberay.node_provider import IN_CLUSTER_TOKEN_PATH

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster" / "kubernetes"
KUBERNETES = "1.34"
DEFINITIONS = "/api/_definitions.json"
RAY = yaml.safe_load((Path(__file__).parents[1] / "schemas" / "kuberay.yaml").read_text())
KUBECTL = shutil.which("kubectl")
POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None)
Manifest = dict[str, Any]


@functools.cache
def _files() -> list[Manifest]:
    """The documents of the files that the kustomization names, and the job, with the kustomization's tags."""
    settings = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    documents = [d for name in settings["resources"] for d in yaml.safe_load_all((FOLDER / name).read_text())]
    tags = {each["name"]: each["newTag"] for each in settings["images"]}
    for document in documents:
        for _, _, container in _containers(document):
            if container.get("image") in tags:
                container["image"] += f":{tags[container['image']]}"
    return [*documents, yaml.safe_load((FOLDER / "train-job.yaml").read_text())]


@functools.cache
def _rendered() -> list[Manifest]:
    """What `kubectl apply --kustomize` would send, and the job."""
    if KUBECTL is None:
        pytest.skip("there is no kubectl")
    text = subprocess.run([KUBECTL, "kustomize", str(FOLDER)], check=True, capture_output=True, text=True).stdout
    return [*yaml.safe_load_all(text), yaml.safe_load((FOLDER / "train-job.yaml").read_text())]


@pytest.fixture(params=[_files, _rendered], ids=["files", "rendered"])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return request.param()


def _pods(manifest: Manifest) -> Iterator[tuple[str, dict[str, Any], Manifest]]:
    """Each pod that a manifest asks for: a name for messages, its labels and its specification."""
    spec = manifest.get("spec", {})
    if manifest["kind"] in ("Deployment", "StatefulSet"):
        yield manifest["metadata"]["name"], spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    elif manifest["kind"] == "RayCluster":
        # The labels are those that KubeRay gives.
        name = {"ray.io/cluster": manifest["metadata"]["name"]}
        yield "head", {**name, "ray.io/node-type": "head"}, spec["headGroupSpec"]["template"]["spec"]
        for group in spec["workerGroupSpecs"]:
            yield group["groupName"], {**name, "ray.io/node-type": "worker"}, group["template"]["spec"]


def _containers(manifest: Manifest) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Each container: a name for messages, its pod's specification and its own."""
    for name, _, pod in _pods(manifest):
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield f"{name}/{container['name']}", pod, container
    if manifest["kind"] == "RayCluster":
        # KubeRay puts it into the head's pod.
        yield (
            "head/autoscaler",
            manifest["spec"]["headGroupSpec"]["template"]["spec"],
            manifest["spec"]["autoscalerOptions"],
        )


def _one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    return next(each for each in manifests if each["kind"] == kind and each["metadata"].get("name") == name)


# ---- schemas


def _strict(schema: Any) -> Any:
    """Unknown fields refused, and Kubernetes' own types found in kubernetes-validate's definitions."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": f"{DEFINITIONS}#/$defs/{schema['$ref']}"}
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**closed, **{key: _strict(value) for key, value in schema.items()}}


def _validate(manifest: Manifest) -> None:
    if manifest["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    _ray_validator(manifest["kind"]).validate(manifest)


@functools.cache
def _ray_validator(kind: str) -> jsonschema.Draft202012Validator:
    folder = (
        importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{KUBERNETES}.0-local-strict"
    )
    definitions = json.loads((folder / "_definitions.json").read_text())
    resource = referencing.Resource.from_contents(definitions, referencing.jsonschema.DRAFT202012)
    registry = referencing.Registry().with_resource(DEFINITIONS, resource)
    return jsonschema.Draft202012Validator(_strict(RAY[kind]), registry=registry)


def test_every_manifest_is_valid_without_unknown_fields(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        _validate(manifest)
    assert {"RayCluster", "RayJob", "NetworkPolicy", "StatefulSet"} <= {each["kind"] for each in manifests}


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("Deployment", "mlflow", "spec/template/spec/containers/0/memory", "1Gi"),
        ("StatefulSet", "postgres", "spec/template/spec/containers/0/resources/limit", {"cpu": "1"}),
        ("NetworkPolicy", "mlflow", "spec/ingress/0/ports/0/ports", 5000),
        ("RayCluster", "concord", "spec/authOption", {"mode": "token"}),
        ("RayCluster", "concord", "spec/authOptions/mode", "tokens"),
        ("RayCluster", "concord", "spec/headGroupSpec/rayStartParams/num-cpus", 0),
        ("RayCluster", "concord", "spec/workerGroupSpecs/1/template/spec/toleration", []),
        ("RayCluster", "concord", "spec/autoscalerOptions/resources/limit", {}),
    ],
)
def test_a_slip_in_a_manifest_is_refused(kind: str, name: str, path: str, value: Any) -> None:
    manifest = copy.deepcopy(_one(_files(), kind, name))
    *way, last = path.split("/")
    place: Any = manifest
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        _validate(manifest)


# ---- what a pod may do


def test_every_container_runs_without_root_privileges_and_within_limits(manifests: list[Manifest]) -> None:
    seen = [found for manifest in manifests for found in _containers(manifest)]
    for name, pod, container in seen:
        context = {**pod["securityContext"], **container["securityContext"]}
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert "privileged" not in context, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert not any("hostPath" in volume for volume in pod.get("volumes", [])), name
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][bound].keys(), f"{name}: {bound}"
    assert {"head/ray", "head/autoscaler", "cpu/ray", "gpu/ray", "mlflow/mlflow"} <= {name for name, _, _ in seen}


def test_only_the_autoscaler_holds_a_token_of_the_kubernetes_api(
    manifests: list[Manifest],
) -> None:
    pods = {name: pod for manifest in manifests for name, _, pod in _pods(manifest)}
    assert all(pod["automountServiceAccountToken"] is False for pod in pods.values())
    with_token = {
        (name, volume["name"])
        for name, pod in pods.items()
        for volume in pod.get("volumes", [])
        if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", []))
    }
    assert with_token == {("head", "kubernetes-api")}
    mounted = {
        name: mount["mountPath"]
        for manifest in manifests
        for name, _, container in _containers(manifest)
        for mount in container.get("volumeMounts", [])
        if mount["name"] == "kubernetes-api"
    }
    # Where Ray's autoscaler looks for it.
    assert mounted == {"head/autoscaler": str(Path(IN_CLUSTER_TOKEN_PATH).parent)}


def test_servers_are_probed_and_images_are_of_one_version(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        for name, _, pod in _pods(manifest):
            assert all({"readinessProbe", "livenessProbe"} <= each.keys() for each in pod["containers"]), name
        for name, _, container in _containers(manifest):
            if "image" in container:
                assert re.search(r":\d+\.\d+[\w.-]*$", container["image"]), name


def test_gpu_nodes_are_asked_for_only_when_needed_and_may_be_spot() -> None:
    groups = {each["groupName"]: each for each in _one(_files(), "RayCluster", "concord")["spec"]["workerGroupSpecs"]}
    gpu = groups["gpu"]
    assert (gpu["minReplicas"], gpu["replicas"]) == (0, 0)
    assert gpu["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert any("spot" in each["key"] for each in gpu["template"]["spec"]["tolerations"])
    assert groups["cpu"]["maxReplicas"] > groups["cpu"]["minReplicas"]


# ---- who may speak with whom


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def _admitted(rules: list[Manifest], side: str, other: tuple[str, dict[str, str]], port: int) -> bool:
    namespace, labels = other
    for rule in rules:
        assert rule.keys() <= {side, "ports"}
        peers = [
            _selects(peer.get("podSelector", {}), labels)
            and (
                _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
                if "namespaceSelector" in peer
                else namespace == "concord"
            )
            for peer in rule.get(side, [])
        ]
        ports = [each["port"] for each in rule.get("ports", [])]
        if (any(peers) or side not in rule) and (port in ports or "ports" not in rule):
            return True
    return False


def _may_connect(
    manifests: list[Manifest], source: tuple[str, dict[str, str]], target: tuple[str, dict[str, str]], port: int
) -> bool:
    """What Kubernetes makes of the policies, for two pods given by namespace and labels."""
    policies = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]

    def through(own: tuple[str, dict[str, str]], other: tuple[str, dict[str, str]], kind: str, side: str) -> bool:
        if own[0] != "concord":
            return True
        bound = [p for p in policies if kind in p["policyTypes"] and _selects(p["podSelector"], own[1])]
        return not bound or any(_admitted(p.get(kind.lower(), []), side, other, port) for p in bound)

    return through(source, target, "Egress", "to") and through(target, source, "Ingress", "from")


HEAD = ("concord", {"ray.io/cluster": "concord", "ray.io/node-type": "head"})
WORKER = ("concord", {"ray.io/cluster": "concord", "ray.io/node-type": "worker"})
MLFLOW, DATABASE, STORAGE = (
    ("concord", {"app.kubernetes.io/name": name}) for name in ("mlflow", "postgres", "object-storage")
)
OPERATOR = ("ray-system", {"app.kubernetes.io/component": "kuberay-operator"})
STRANGER, NEIGHBOUR = ("default", {"app": "x"}), ("concord", {"app": "x"})
NAMES = ("kube-system", {"k8s-app": "kube-dns"})


@pytest.mark.parametrize(
    ("source", "target", "port", "allowed"),
    [
        (WORKER, HEAD, 6379, True),
        (HEAD, WORKER, 34567, True),
        (HEAD, MLFLOW, 5000, True),
        (WORKER, MLFLOW, 5000, True),
        (MLFLOW, DATABASE, 5432, True),
        (MLFLOW, STORAGE, 8333, True),
        (OPERATOR, HEAD, 8265, True),
        (MLFLOW, NAMES, 53, True),
        (WORKER, NAMES, 53, True),
        (WORKER, DATABASE, 5432, False),
        (WORKER, STORAGE, 8333, False),
        (MLFLOW, STORAGE, 8888, False),
        (MLFLOW, HEAD, 8265, False),
        (DATABASE, STRANGER, 443, False),
        (STORAGE, STRANGER, 443, False),
        (OPERATOR, HEAD, 6379, False),
        (OPERATOR, WORKER, 8265, False),
        (STRANGER, HEAD, 8265, False),
        (STRANGER, MLFLOW, 5000, False),
        (NEIGHBOUR, HEAD, 8265, False),
        (NEIGHBOUR, DATABASE, 5432, False),
    ],
)
def test_the_policies_admit_what_is_needed_and_no_more(
    manifests: list[Manifest], source: Any, target: Any, port: int, allowed: bool
) -> None:
    assert _may_connect(manifests, source, target, port) is allowed


def test_no_service_is_offered_outside_and_each_is_reached_by_something(manifests: list[Manifest]) -> None:
    pods = [(labels, pod) for manifest in manifests for _, labels, pod in _pods(manifest)]
    services = [each for each in manifests if each["kind"] == "Service"]
    assert {each["metadata"]["name"] for each in services} == {"mlflow", "postgres", "object-storage"}
    for service in services:
        spec = service["spec"]
        assert spec.get("type", "ClusterIP") == "ClusterIP"
        ports = {
            port["containerPort"]
            for labels, pod in pods
            if spec["selector"].items() <= labels.items()
            for container in pod["containers"]
            for port in container["ports"]
        }
        for port in spec["ports"]:
            assert port["port"] in ports
            assert any(
                _may_connect(manifests, ("concord", labels), ("concord", spec["selector"]), port["port"])
                for labels, _ in pods
            ), service["metadata"]["name"]
    head = _one(manifests, "RayCluster", "concord")["spec"]["headGroupSpec"]
    assert not {"enableIngress", "headService", "serviceType"} & head.keys()
    assert not any(each["kind"] == "Ingress" for each in manifests)


# ---- secrets


def _environment(container: Manifest) -> dict[str, Manifest]:
    return {each["name"]: each for each in container.get("env", [])}


def test_no_file_has_a_credential(manifests: list[Manifest]) -> None:
    assert not any(each["kind"] == "Secret" for each in manifests)
    for manifest in manifests:
        for name, _, container in _containers(manifest):
            for variable, entry in _environment(container).items():
                if re.search(r"PASSWORD|TOKEN|SECRET|ACCESS_KEY", variable):
                    assert entry["valueFrom"].keys() == {"secretKeyRef"}, f"{name}: {variable}"
    for path in sorted(each for each in (ROOT / "cluster").rglob("*") if each.is_file()):
        text = path.read_text()
        assert not re.search(r"://[^/\s:@]+:[^/\s@]+@", text), path
        assert not re.search(r"\b(?:[0-9a-f]{32,}|AKIA[0-9A-Z]{16})\b", text), path


def test_ray_asks_for_the_token_and_mlflow_for_a_password(manifests: list[Manifest]) -> None:
    cluster = _one(manifests, "RayCluster", "concord")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    for name, _, container in _containers(cluster):
        if name != "head/autoscaler":  # it has the token from KubeRay
            environment = _environment(container)
            assert environment["RAY_AUTH_MODE"]["value"] == "token"
            # KubeRay looks for the Secret by the cluster's name, and for this key.
            reference = {"name": cluster["metadata"]["name"], "key": "auth_token"}
            assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == reference
    (container,) = _one(manifests, "Deployment", "mlflow")["spec"]["template"]["spec"]["containers"]
    assert "--app-name=basic-auth" in container["command"]
    assert not any("no-serve-artifacts" in word or "disable-security" in word for word in container["command"])


# It keeps a secret in a file of its name, in place of a cluster.
_KUBECTL = """#!/usr/bin/env bash
set -eu
echo "kubectl $*" >>"$SECRETS.log"
case "$3 $4" in
    "get secret") [ -e "$SECRETS/$2.$5" ] ;;
    "create secret") cat "${7#--from-env-file=}" >"$SECRETS/$2.$6" ;;
esac
"""


def test_secrets_sh_makes_every_secret_once_and_shows_none(manifests: list[Manifest], tmp_path: Path) -> None:
    kubectl, folder = tmp_path / "bin" / "kubectl", tmp_path / "secrets"
    for needed in (kubectl.parent, folder):
        needed.mkdir()
    kubectl.write_text(_KUBECTL)
    kubectl.chmod(0o755)
    environment = {**os.environ, "PATH": f"{kubectl.parent}:{os.environ['PATH']}", "SECRETS": str(folder)}
    command = ["bash", str(FOLDER / "secrets.sh")]

    def kept() -> dict[str, dict[str, str]]:
        lines = {path.name: path.read_text().splitlines() for path in folder.iterdir()}
        return {name: dict(line.split("=", 1) for line in each) for name, each in lines.items()}

    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    made = kept()
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert made == kept()
    assert "left as it is" in second.stdout
    referred = {
        (reference["name"], reference["key"])
        for manifest in manifests
        for _, _, container in _containers(manifest)
        for entry in container.get("env", [])
        if (reference := entry.get("valueFrom", {}).get("secretKeyRef"))
    }
    assert referred == {(name.removeprefix("concord."), key) for name, values in made.items() for key in values}
    random = [value for values in made.values() for key, value in values.items() if not key.endswith("username")]
    assert len(set(random)) == len(random)
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in random)
    # Arguments are open to everybody on the machine.
    arguments = (tmp_path / "secrets.log").read_text()
    assert arguments.count(" create ") == len(made)
    assert not any(value in arguments + first.stdout + first.stderr + second.stdout + second.stderr for value in random)


# ---- versions and settings


def _pin(package: str) -> str:
    return re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def test_images_and_ray_s_version_are_those_of_the_constraints(manifests: list[Manifest]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ray, own = _pin("ray"), project["version"]
    cluster = _one(manifests, "RayCluster", "concord")
    assert cluster["spec"]["rayVersion"] == ray
    expected = {f"concord-cpu:{own}-ray{ray}", f"concord-gpu:{own}-ray{ray}", f"concord-mlflow:{_pin('mlflow')}"}
    used = {c["image"] for manifest in manifests for _, _, c in _containers(manifest) if "image" in c}
    assert {image for image in used if image.startswith("concord")} == expected
    dockerfile = (ROOT / "cluster" / "Dockerfile").read_text()
    assert all(image in dockerfile for image in expected)
    python = re.search(r"^ARG BASE=python:(3\.\d+)\.\d+-slim-", dockerfile, re.MULTILINE)
    assert python
    assert python[1] in ("3.11", "3.12")


def test_the_image_is_not_root_s_and_leaves_the_compilers_behind() -> None:
    stages = re.split(r"^FROM ", (ROOT / "cluster" / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    final = {stage.split()[2]: stage for stage in stages if stage.split()[2] in ("ray", "mlflow")}
    assert final.keys() == {"ray", "mlflow"}
    for stage in final.values():
        assert "USER 1000:1000" in stage
        assert not re.search(r"pip install|gcc|build-essential", stage)
    assert stages[-1].split()[2] == "ray"


def test_the_image_has_what_image_jobs_and_coinrun_need(tmp_path: Path) -> None:
    dockerfile = (ROOT / "cluster" / "Dockerfile").read_text().replace("\\\n", "")
    made = re.search(r'^RUN python -c "(import tomllib.+)"$', dockerfile, re.MULTILINE)
    assert made
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run([sys.executable, "-c", made[1]], cwd=tmp_path, check=True)
    listed = {re.split(r"[^\w-]", line)[0] for line in (tmp_path / "ray.txt").read_text().splitlines()}
    assert {"torch", "torchvision", "procgen-mirror", "mlflow"} <= listed


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "cluster" / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == kept
    assert all((ROOT / name).exists() for name in names)


def test_every_concord_variable_that_is_set_is_one_that_concord_reads(manifests: list[Manifest]) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "platform").rglob("*.py"))
    names = {v for m in manifests for _, _, c in _containers(m) for v in _environment(c) if v.startswith("CONCORD_")}
    names |= set(re.findall(r"\bCONCORD_\w+(?==)", (ROOT / "cluster" / "Dockerfile").read_text()))
    assert {"CONCORD_OUTPUT", "CONCORD_DATA"} <= names
    # What a job is started with is read by Ray's job supervisor, from the command that `concord submit` sends.
    assert all(re.search(rf"\b{name}\b", code) for name in names)


def test_what_ray_writes_is_on_the_volume_that_all_nodes_share(manifests: list[Manifest]) -> None:
    assert _one(manifests, "PersistentVolumeClaim", "shared")["spec"]["accessModes"] == ["ReadWriteMany"]
    for name, _, pod in _pods(_one(manifests, "RayCluster", "concord")):
        (container,) = pod["containers"]
        (mount,) = container["volumeMounts"]
        assert {"name": mount["name"], "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"], name
        for variable in ("CONCORD_OUTPUT", "CONCORD_DATA"):
            assert Path(_environment(container)[variable]["value"]).is_relative_to(mount["mountPath"]), name


def test_the_job_s_command_is_one_that_concord_takes() -> None:
    entrypoint = yaml.safe_load((FOLDER / "train-job.yaml").read_text())["spec"]["entrypoint"].split()
    assert entrypoint[:3] == ["python", "-m", "concord"]
    with Command(*entrypoint[3:], "--help") as shown:
        out, _ = shown.communicate()
    assert shown.returncode == 0
    assert all(word in out for word in entrypoint if word.startswith("--"))


# ---- the servers themselves


@pytest.fixture
def database() -> Iterator[tuple[int, str]]:
    """A PostgreSQL made as the image makes it, with the manifest's script: its port, and MLflow's password."""
    if POSTGRES is None:
        pytest.skip("there is no PostgreSQL")
    # The server refuses to run as root, and its socket's path must not be long.
    user = {"user": "postgres"} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    port, password = free_port(), f"it's \\ {secrets.token_hex(8)}"
    try:
        if user:
            shutil.chown(folder, "postgres")
        (spec,) = _one(_files(), "StatefulSet", "postgres")["spec"]["template"]["spec"]["containers"]
        options = _environment(spec)["POSTGRES_INITDB_ARGS"]["value"].split()
        quiet: Any = {"check": True, "cwd": "/", "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        initialize = [str(POSTGRES), "--pgdata", f"{folder}/data", "--username", "postgres", *options]
        subprocess.run([*initialize, "--auth-local=trust"], **quiet, **user)
        control = [str(POSTGRES.with_name("pg_ctl")), "--pgdata", f"{folder}/data", "--wait"]
        listening = f"-c listen_addresses=127.0.0.1 -c fsync=off -p {port} -k {folder}"
        subprocess.run([*control, "--options", listening, "--log", f"{folder}/log", "start"], **quiet, **user)
        try:
            settings = {"POSTGRES_USER": "postgres", "MLFLOW_PASSWORD": password, "PGHOST": str(folder)}
            environment = {**os.environ, **settings, "PGPORT": str(port)}
            subprocess.run([str(FOLDER / "postgres" / "create-databases.sh")], env=environment, **quiet)
            yield port, password
        finally:
            subprocess.run([*control, "--mode", "immediate", "stop"], **quiet, **user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_mlflow_has_its_two_databases_and_no_more(database: tuple[int, str]) -> None:
    port, password = database
    query = "SELECT current_user, rolsuper OR rolcreaterole OR rolcreatedb FROM pg_roles WHERE rolname = current_user"

    def ask(name: str, secret: str) -> subprocess.CompletedProcess[str]:
        command = ["psql", "--host=127.0.0.1", f"--port={port}", "--username=mlflow", "--no-password", "--tuples-only"]
        environment = {**os.environ, "PGPASSWORD": secret}
        return subprocess.run(
            [*command, f"--dbname={name}", "--command", query], env=environment, capture_output=True, text=True
        )

    for name in ("mlflow", "mlflow_auth"):
        assert ask(name, password).stdout.split() == ["mlflow", "|", "f"]
    assert "password authentication failed" in ask("mlflow", "wrong").stderr


def _status(port: int, user: str, password: str, host: str = "mlflow:5000") -> int:
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
    headers = {"Authorization": f"Basic {credentials}", "Content-Type": "application/json", "Host": host}
    address = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, b'{"max_results": 1}', headers), timeout=60
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_the_mlflow_server_of_the_manifest_lets_in_the_jobs_user_alone(
    database: tuple[int, str], tmp_path: Path
) -> None:
    database_port, database_password = database
    port = free_port()
    (container,) = _one(_files(), "Deployment", "mlflow")["spec"]["template"]["spec"]["containers"]
    here = {"@postgres:5432": f"@127.0.0.1:{database_port}", "--host=0.0.0.0": "--host=127.0.0.1"}
    here |= {"--port=5000": f"--port={port}", "s3://mlflow": str(tmp_path / "artifacts"), "--workers=2": "--workers=1"}
    command = "\n".join(container["command"])
    settings = (FOLDER / "mlflow" / "auth.ini").read_text()
    for there, replacement in here.items():
        assert there in command
        command, settings = command.replace(there, replacement), settings.replace(there, replacement)
    (tmp_path / "auth.ini").write_text(settings)
    assert configparser.ConfigParser().read_string(settings) is None
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")},
        **{entry["name"]: entry["value"] for entry in container["env"] if "value" in entry},
        "MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": "admin",
        "MLFLOW_AUTH_ADMIN_PASSWORD": secrets.token_hex(16),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16),
        "PGPASSWORD": database_password,
        "JOBS_USERNAME": "concord",
        "JOBS_PASSWORD": secrets.token_hex(16),
    }
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", *command.split("\n")],
        env=environment, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    try:
        renewed = secrets.token_hex(16)
        for password in (environment["JOBS_PASSWORD"], renewed):
            add = [sys.executable, str(FOLDER / "mlflow" / "add_user.py"), f"http://127.0.0.1:{port}"]
            subprocess.run(add, env={**environment, "JOBS_PASSWORD": password}, check=True, capture_output=True)
            assert _status(port, "concord", password) == 200
        assert _status(port, "concord", "wrong") == 401
        assert _status(port, "admin", "password1234") == 401
        assert _status(port, "concord", renewed, host="localhost:5000") == 200  # through kubectl port-forward
        assert _status(port, "concord", renewed, host="elsewhere.example") == 403
        end = time.monotonic() + 120  # the server's other processes may know the former password that long
        while _status(port, "concord", environment["JOBS_PASSWORD"]) != 401:
            assert time.monotonic() < end
            time.sleep(1)
    finally:
        os.killpg(server.pid, 9)
        server.wait()
        log.close()
