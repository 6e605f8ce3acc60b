"""Jobs on a cluster: the address and token in use, the uploaded files, and a real head node that runs a job."""

import contextlib
import json
import math
import os
import re
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import ray
from command_line import outcome
from forked import run_processes
from ray._private.runtime_env.packaging import create_package
from ray.job_submission import JobSubmissionClient
from ray_head import Head
from ray_workers import QUIET
from test_readme import snippet
from tracked import tracked_runs
from waiting import wait_for
from web_server import Quiet, serving

import concord
from concord.cli import main
from concord.cli.job_options import read_command
from concord.cli.parsing import parse_known
from concord.cli.submit import SentFiles, Submit, _require_success, check_command, environment_for_code
from concord.errors import InputError, RunFailedError
from concord.execution.submission import admission
from concord.execution.submission.admission import Submission, wait_for_admission
from concord.execution.submission.cluster import Cluster
from concord.execution.submission.earlier import earlier_submissions
from concord.execution.submission.package import inside, packed
from concord.execution.submission.profile import Profile, described, running_dashboard
from concord.execution.submission.runtime_environment import runtime_environment, variables_of
from concord.interface.command_options import JobCommand
from concord.record import EVENTS, folder_of, read_events, require_run
from concord.studies.proposals import GroupRuns
from concord.submitted import submit_variables
from concord.tracking import Store
from concord.tracking.alive import ALIVE
from concord.tracking.store import PARENT
from concord.training import load_job

JOB = Path(__file__).parents[1] / "jobs" / "shared_rule.py"


@pytest.fixture(autouse=True)
def _nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CONCORD_PROFILES", str(tmp_path / "profiles.toml"))


def profiles(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(text)
    path.chmod(0o600)


def read(command: str, job: str, *words: str) -> JobCommand:
    return read_command(command, load_job(job), words, f"concord submit {command} {job}")


# --- which cluster


def test_an_option_goes_before_the_environment_and_that_before_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-the-profile\n")
    profiles(
        tmp_path,
        f"[default]\naddress = 'https://profile'\ntoken-file = '{tmp_path / 'token'}'\noutput = '/shared/runs'\n",
    )
    found = Profile.find()
    assert (found.address, found.token, found.output) == ("https://profile", "of-the-profile", "/shared/runs")
    assert found.headers == {"Authorization": "Bearer of-the-profile"}
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://environment:8265/")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    found = Profile.find("default")
    assert (found.address, found.token) == ("http://environment:8265", "of-the-environment")
    (tmp_path / "own").write_text("given")
    found = Profile.find("default", address="given:8265", token_file=tmp_path / "own")
    assert (found.address, found.token) == ("http://given:8265", "given")


def test_the_default_profile_s_credentials_go_to_its_own_cluster_only(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-the-profile\n")
    profiles(tmp_path, f"[default]\naddress = 'https://profile'\ntoken-file = '{tmp_path / 'token'}'\n")
    assert Profile.find().token == "of-the-profile"
    assert Profile.find(address="http://elsewhere:8265").token is None
    assert Profile.find("default", address="http://tunnel:8265").token == "of-the-profile"


def test_the_token_of_ray_is_found_by_itself_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "home" / ".ray").mkdir(parents=True)
    (tmp_path / "home" / ".ray" / "auth_token").write_text("secret-token")
    found = Profile.find()
    assert found.token == "secret-token"
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        ("", {"name": "lab"}, "--profile lab: "),
        ("[lab]\nadress = 'x'\n", {"name": "lab"}, "adress is unknown; give one of address, token-file"),
        ("[lab]\naddress = 3\n", {"name": "lab"}, "address 3: must be a text"),
        ("[lab\n", {"name": "lab"}, "cannot be read as TOML"),
        ("", {"token_file": Path("/nowhere")}, "--token-file /nowhere: cannot be read (FileNotFoundError)"),
        ("", {"address": "ray://host:10001"}, "--address ray://host:10001: must be the dashboard's"),
        ("", {"address": "http://me:secret@host"}, "--address http://me:***@host: must hold no password"),
        ("[lab.headers]\nX = 3\n", {"name": "lab"}, "headers is unknown; give one of address, token-file"),
        ("[lab.address]\nX = 'x'\n", {"name": "lab"}, "address {'X': 'x'}: must be a text"),
        ("[lab.env]\nX = 3\n", {"name": "lab"}, "env {'X': 3}: must be a table of texts by name"),
        ("[lab]\npip = 'einops'\n", {"name": "lab"}, "pip einops: must be a list of texts"),
        ("", {"verify": "/nowhere.pem"}, "--verify /nowhere.pem: there is no such file; give the certificates"),
    ],
)
def test_what_is_wrong_with_a_profile_is_one_line(
    text: str, asked: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    profiles(tmp_path, text)
    with pytest.raises(InputError) as refused:
        Profile.find(**asked)
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


# --- what goes along


def test_what_goes_along_is_what_git_takes_without_keys_and_results(tmp_path: Path) -> None:
    work = tmp_path / "work"
    files = ["job.py", "data/north.npz", "ignored.bin", "server.pem", ".env", "concord-runs/mlflow.db", "venv/lib.py"]
    files += ["local.env", "id_rsa", ".ssh/known_hosts", ".netrc", "credentials.json", "kubeconfig", "keys/id_dsa"]
    files += ["SERVER.PEM", "hub_token.txt"]
    for name in files:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    with packed(work, 100) as package:
        assert package.working_dir is not None
        sent = {str(path.relative_to(package.working_dir)) for path in package.working_dir.rglob("*") if path.is_file()}
        assert sent == {"job.py", "data/north.npz", "ignored.bin"}
        modules = package.modules[0].parent
        assert (modules / "concord" / "VERSION").read_text() == concord.__version__
        own = {str(path.relative_to(modules)) for path in modules.rglob("*") if path.is_file()}
        assert {"concord/__main__.py", "concord/cli/submit.py", "concord/py.typed"} <= own
        assert {"concord_jobs/__init__.py", "concord_jobs/synthetic/job.py", "concord_jobs/tumours.py"} <= own
        assert not any(name.endswith(".pyc") for name in own)
    assert not modules.exists()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    (work / ".gitignore").write_text("*.bin\n*.npz\n")
    subprocess.run(["git", "-C", str(work), "add", "--force", "data/north.npz"], check=True)
    with packed(work, 100) as package:
        assert package.working_dir is not None
        # What Ray makes of it, which looks at ignore files again.
        create_package(str(package.working_dir), tmp_path / "ray.zip", include_gitignore=True)
    assert set(zipfile.ZipFile(tmp_path / "ray.zip").namelist()) >= {"job.py", "data/north.npz"}
    assert not any("ignored" in name for name in zipfile.ZipFile(tmp_path / "ray.zip").namelist())
    with pytest.raises(InputError, match=r"ignored\.bin: would not be sent: it is ignored by git"):
        packed(work, 100, [Path("ignored.bin")]).__enter__()


def test_links_out_of_the_folder_stay_and_a_home_is_not_sent(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "job.py").write_text("1")
    (tmp_path / "elsewhere.txt").write_text("theirs")
    (work / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    (work / ".env").write_text("PASSWORD=theirs")
    (work / "settings.txt").symlink_to(".env")
    (work / "more.txt").symlink_to("settings.txt")
    (work / "same.py").symlink_to("job.py")
    (work / "loop").symlink_to("loop")
    with packed(work, 100) as package:
        assert package.working_dir is not None
        assert sorted(path.name for path in package.working_dir.iterdir()) == ["job.py", "same.py"]
    (tmp_path / "home").mkdir(exist_ok=True)
    with pytest.raises(InputError, match="is your home"):
        packed(tmp_path / "home", 100).__enter__()


def test_a_package_over_the_limit_names_what_is_large(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("1")
    (tmp_path / "large.npz").write_bytes(bytes(3 << 20))
    with pytest.raises(InputError, match=r"exceed --size-limit 3; the largest are large.npz \(3.0 MiB\), small.py"):
        packed(tmp_path, 3).__enter__()


def sent(work: Path, **options: Any) -> set[str]:
    with packed(work, 100, **options) as package:
        assert package.working_dir is not None
        files = (path for path in package.working_dir.rglob("*") if path.is_file())
        return {str(path.relative_to(package.working_dir)) for path in files}


def test_repositories_inside_the_folder_go_along_by_their_own_rules(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("job.py", "library/code.py", "library/made.bin", "library/deep/more.py", "library/deep/.env"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    for folder in ("library/deep", "library", "."):
        subprocess.run(["git", "init", "-q", str(work / folder)], check=True)
    (work / "library" / ".gitignore").write_text("*.bin\n")
    assert sent(work) == {"job.py", "library/code.py", "library/deep/more.py"}
    settings = ["-c", "user.email=a@b.c", "-c", "user.name=a", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(work / "library"), "add", "code.py"], check=True)
    subprocess.run(["git", "-C", str(work / "library"), *settings, "commit", "-qm", "one"], check=True)
    submodule = ["submodule", "--quiet", "add", str(work / "library"), "as-module"]
    subprocess.run(["git", "-C", str(work), *settings, *submodule], check=True)
    assert "as-module/code.py" in sent(work)


def test_a_gitignore_counts_without_a_repository(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("job.py", "data/large.bin", "data/kept.bin", "notes/a.txt"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    (work / ".gitignore").write_text("*.bin\n!kept.bin\n/notes/\n")
    assert sent(work) == {"job.py", "data/kept.bin"}
    assert not (work / ".git").exists()


@pytest.mark.parametrize("repository", [False, True])
@pytest.mark.parametrize(
    ("name", "said"), [(b"caf\xe9.txt", r"caf\\xe9\.txt is not UTF-8"), (b"a\\b.txt", r"a\\b\.txt has a backslash")]
)
def test_a_name_that_would_be_lost_is_refused(tmp_path: Path, repository: bool, name: bytes, said: str) -> None:
    (tmp_path / "job.py").write_text("1")
    Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"_" + name)).write_text("2")
    if repository:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(InputError, match=rf"the name of d_{said}; rename the file, or list it") as refused:
        sent(tmp_path)
    str(refused.value).encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes a user who may not read a folder")
@pytest.mark.parametrize("repository", [False, True])
def test_a_folder_that_cannot_be_read_is_named(repository: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        work = Path(name)
        (work / "closed").mkdir(0o700)
        (work / "closed" / "data.csv").write_text("1")
        (work / "job.py").write_text("1")
        if repository:
            subprocess.run(["git", "init", "-q", name], check=True)
        os.chown(work, _NOBODY, _NOBODY)
        run_processes(_send_as_nobody, 1, work)


_NOBODY = 65534


def _send_as_nobody(_: int, work: Path) -> None:
    # git refuses repositories of other users.
    settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    os.environ.update({"HOME": "/nowhere", **settings})
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    with pytest.raises(InputError, match=r"closed.*Permission denied"):
        sent(work)


def test_more_files_than_the_limit_are_refused_with_their_folder(tmp_path: Path) -> None:
    for name in ("job.py", "images/1.png", "images/2.png", "more/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with pytest.raises(InputError, match=r"4 files exceed --file-limit 3; most are in images \(2\), "):
        sent(tmp_path, most_files=3)
    assert len(sent(tmp_path, most_files=4)) == 4


def test_a_job_outside_the_working_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert inside(tmp_path / "in" / "job.py", tmp_path / "in") == Path("job.py")
    with pytest.raises(InputError, match="lies outside the working directory"):
        inside(tmp_path / "job.py", tmp_path / "in")


def test_options_of_the_submission_may_stand_anywhere() -> None:
    words = ["--address", "a", "train", "synthetic", "--lr", "-1", "--no-wait", "--size-limit=5", "--xs", "1", "--help"]
    mine, rest = parse_known(Submit, words, "concord submit")
    assert mine == Submit(address="a", wait=False, size_limit=5.0)
    assert rest == ["train", "synthetic", "--lr", "-1", "--xs", "1", "--help"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "submit: no command given; give train, tune or compare"),
        (["bench"], "submit bench: cannot be submitted; give train, tune or compare"),
        (["train"], "submit train: no job is named"),
        (["train", "nothing"], "job nothing: there is no such job"),
        (["train", "synthetic", "--lr", "-1"], "--lr -1.0: "),
        (["train", "synthetic", "--epoch", "1"], "--epoch 1: there is no such option; did you mean --epochs?"),
        (["tune", "synthetic", "--trials", "0"], "--trials 0: must be at least 1"),
        (["train", "synthetic", "--config", "/nowhere.yaml"], "--config /nowhere.yaml: there is no such file"),
        (["tune", "coinrun-expert", "--lr", "0"], "--lr 0.0: must be a finite number above 0"),
        (["compare", "coinrun-expert"], "job coinrun-expert: has no tables to compare; give it comparisons="),
        (["train", str(JOB), "--working-dir", "/nowhere"], "--working-dir /nowhere: there is no such folder"),
        (["train", "synthetic", "--tracking-uri", "http://me:word@host"], "--tracking-uri http://me:***@host: holds"),
        (["train", "synthetic", "--address", "127.0.0.1:1"], "--address http://127.0.0.1:1: no Ray cluster answers"),
        (["train", "synthetic", "--address", "http://me:word@h"], "--address http://me:***@h: must hold no password"),
        (["train", "synthetic", "--output", "runs"], "--output runs: is relative; give the absolute path"),
        (
            ["compare", "synthetic", "papers-best", "--seeds", "1", "--results", "rows"],
            "--results rows: is relative; give the absolute path",
        ),
        (["train", "synthetic", "--submission-id", "../x"], "--submission-id ../x: must have letters, digits"),
        (["train", "synthetic", "--file-limit", "0"], "--file-limit 0: must be at least 1"),
        (["train", "synthetic", "--size-limit", "101"], "--size-limit 101: must lie above 0 and not above 100"),
        (["train", "synthetic", "--driver-gpus", "-1"], "--driver-gpus -1: must be a finite number, at least 0"),
        (["--env", "A=1", "train", "synthetic"], "--env train: must be NAME=VALUE; a command and its job stand before"),
        (["--pip", "einops", "train", "synthetic"], "--pip einops train synthetic: names packages; a command and"),
        (["train", "synthetic", "--env", "1A=1"], "--env 1A: is no name of a variable"),
        (["train", "synthetic", "--env", "HF_TOKEN=word"], "--env HF_TOKEN: is named like a secret; everybody who may"),
        (["train", "synthetic", "--env", "URL=https://me:word@host"], "--env URL: holds a password; everybody"),
        (["train", "synthetic", "--env", "MLFLOW_TRACKING_URI=x"], "MLFLOW_TRACKING_URI: cannot be given; give --tra"),
        (["train", "synthetic", "--env", "CONCORD_SUBMISSION=x"], "CONCORD_SUBMISSION: cannot be given; concord subm"),
        (["train", "synthetic", "--pip", "a.txt", "b"], "--pip a.txt b: give packages, or one file of requirements"),
        (["train", "synthetic", "--pip", "/nowhere.txt"], "--pip /nowhere.txt: there is no such file"),
        (["train", "synthetic", "--pip", "a", "--extra-index-url=https://me:word@h"], "there is no such option"),
        (["train", "synthetic", "--runtime-env", "/nowhere.yaml"], "--runtime-env /nowhere.yaml: there is no such"),
        (["tune", "synthetic", "--resume"], "--resume: the same --name continues a study"),
        (["tune", "synthetic", "--workers", "2", "--min-workers", "1"], "--min-workers 1: a trial that loses its"),
        (["tune", "synthetic", "--method", "none"], "--method none: "),
        (["tune", "synthetic", "--space", "/nowhere/space.toml"], "/nowhere/space.toml: lies outside the working"),
    ],
)
def test_what_cannot_be_submitted_is_one_line_here(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = outcome(capsys, "submit", *words)
    assert status == 2
    assert said in result["error"]
    assert "\n" not in result["error"]
    assert "word" not in result["error"].replace("password", "")


def test_two_runs_submitted_in_one_second_have_names_of_their_own() -> None:
    names = {check_command(read("train", "synthetic")) for _ in range(20)}
    assert len(names) == 20
    assert check_command(read("train", "synthetic", "--name", "mine")) == "mine"


def test_a_secret_is_not_put_into_a_command_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        JOB.read_text().replace(
            '    trouble: str = ""\n', '    hub_token: str = ""\n    """Of the hub."""\n    trouble: str = ""\n'
        )
    )
    with pytest.raises(InputError, match="--hub-token: would be shown on the cluster") as refused:
        check_command(read("train", str(path), "--hub-token", "hf_secret"))
    assert "hf_secret" not in str(refused.value)


def test_the_environment_of_code_is_the_options_before_the_profile_s_before_the_file_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ray.yaml").write_text(
        "env_vars: {A: file, B: file, C: 'file'}\npip: [in-file]\nconfig: {eager_install: false}\n"
    )
    profiles(tmp_path, "[lab]\nruntime-env = 'ray.yaml'\npip = ['in-profile']\nenv = {B = 'profile', C = 'profile'}\n")
    for words, packages in (
        (["--env", "C=x=y"], ["in-profile"]),
        (["--env", "C=x=y", "--pip", "a", "b>1"], ["a", "b>1"]),
    ):
        options, _ = parse_known(Submit, ["train", "synthetic", *words], "concord submit")
        made = environment_for_code(options, Profile.find("lab"), variables_of(options.env))
        kept = {"pip": packages, "config": {"eager_install": False}}
        assert made == (kept, {"A": "file", "B": "profile", "C": "x=y"})
    Path("needed.txt").write_text("einops\n")
    assert runtime_environment({}, "", {}, ["needed.txt"]) == ({"pip": "needed.txt"}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("working_dir: .", "working_dir cannot be given; give --working-dir"),
        ("py_modules: [lib]", "py_modules cannot be given; Concord sends itself by it"),
        ("pipp: [a]", "Ray has no pipp; did you mean pip?"),
        ("pip: 3", "Ray refuses it: runtime_env['pip'] must be of type str or List[str]"),
        ("pip: [a, --index-url=https://me:word@host]", "holds a password or a token; everybody who may look at the"),
        ("env_vars: {WANDB_API_KEY: word}", "env_vars WANDB_API_KEY: is named like a secret"),
        ("env_vars: {A: 3}", "env_vars must have texts, as in NAME: 'value'"),
        ("- pip", "holds list; expected a mapping of options by name"),
    ],
)
def test_what_a_submission_sets_itself_and_secrets_are_refused_in_a_runtime_environment(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ray.yaml").write_text(text)
    status, result = outcome(capsys, "submit", "train", "synthetic", "--runtime-env", str(tmp_path / "ray.yaml"))
    assert status == 2
    assert result["error"].startswith(f"--runtime-env {tmp_path}/ray.yaml: ")
    assert said in result["error"]
    assert "word" not in result["error"].replace("password", "")


class Dashboard(Quiet):
    """Says which version it has, and that there are no jobs."""

    def do_GET(self) -> None:  # noqa: N802
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]" if self.path == "/api/jobs/" else json.dumps({"ray_version": ray.__version__}).encode())


def test_a_certificate_is_trusted_by_its_authority_s_file_or_not_checked_if_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate)]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "30"]
    subprocess.run([*make, *names], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "any")
    with serving(Dashboard, tls=tls) as port:
        address = f"https://127.0.0.1:{port}"
        status, refused = outcome(capsys, "submissions", "--address", address)
        said = (
            f"--address {address}: its certificate is not trusted; give --verify FILE of the authority that signed it"
        )
        assert (status, refused["error"]) == (2, said)
        for verify in (str(certificate), "no"):
            assert outcome(capsys, "submissions", "--address", address, "--verify", verify) == (0, {"submissions": []})
        profiles(tmp_path, f"[lab]\naddress = '{address}'\nverify = '{certificate}'\n")
        assert outcome(capsys, "submissions", "--profile", "lab") == (0, {"submissions": []})


class Forgetful(Dashboard):
    """Knows the job ``mine`` at the first question alone, as a head node that ends and begins again."""

    asked = 0
    job: ClassVar[dict[str, Any]] = {
        "type": "SUBMISSION",
        "submission_id": "mine",
        "status": "RUNNING",
        "entrypoint": "python",
        "metadata": {"command": "train", "job": "digits", "name": "d", "again": "concord submit train digits --name d"},
    }

    def do_GET(self) -> None:  # noqa: N802
        if not self.path.startswith("/api/jobs/"):
            super().do_GET()
            return
        type(self).asked += 1
        self.send_response(200 if self.asked == 1 else 404)
        self.end_headers()
        self.wfile.write(json.dumps(self.job).encode() if self.asked == 1 else b"Job mine does not exist")


def test_a_submission_that_its_cluster_forgot_is_told_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "any")
    with serving(Forgetful) as port:
        cluster = Cluster(Profile.find(address=f"127.0.0.1:{port}"))
        with pytest.raises(RunFailedError) as lost:
            cluster.follow("mine", print)
    assert str(lost.value) == (
        f"mine: http://127.0.0.1:{port} no longer knows it, as after a restart of its head node; "
        "concord submit train digits --name d continues it"
    )


@pytest.mark.parametrize(("exit_status", "told"), [(-9, True), (137, True), (None, False), (1, False)])
def test_who_followed_a_command_that_was_killed_is_told_how_to_continue(exit_status: int | None, told: bool) -> None:
    again = "concord submit train digits --name d --resume"
    ended = Submission("mine", "failed", "train", "digits", "d", "ann", 1.0, 2.0, exit_status, "", again)
    with pytest.raises(RunFailedError) as failed:
        _require_success(ended, "see its log")
    assert str(failed.value).endswith(f"see its log; {again} continues it") == told


class Queued(Dashboard):
    """Has the job ``mine``, which waits, and takes a request to stop it."""

    def do_GET(self) -> None:  # noqa: N802
        if not self.path.startswith("/api/jobs/"):
            super().do_GET()
            return
        self._answer(Forgetful.job | {"status": "PENDING"})

    def do_POST(self) -> None:  # noqa: N802
        self._answer({"stopped": True})

    def _answer(self, what: Mapping[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())


def test_who_stops_a_submission_that_waits_is_told_that_it_ends_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("concord.execution.submission.cluster._PENDING_SECONDS", 0.0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "any")
    with serving(Queued) as port:
        assert main(["stop", "mine", "--address", f"http://127.0.0.1:{port}"]) == 0
    assert capsys.readouterr().out == "mine: pending; it ends when the head node admits it, before it works\n"


class Busy(Dashboard):
    """Answers no question about a job."""

    def do_GET(self) -> None:  # noqa: N802
        if self.path.startswith("/api/jobs/"):
            self.send_error(503)
        else:
            super().do_GET()


def test_a_server_too_busy_to_say_whether_a_command_began_has_accepted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concord.execution.submission.cluster._PENDING_SECONDS", 0.0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "any")
    with serving(Busy) as port:
        assert Cluster(Profile.find(address=f"127.0.0.1:{port}")).await_beginning("mine") == (None, "")


def test_submissions_that_the_cluster_forgot_are_listed_from_their_runs(tmp_path: Path) -> None:
    store, here = Store.open(tmp_path), "http://head:8265"

    def submitted(identity: str, address: str = here, **tags: str) -> str:
        tags = {"ray.submission": identity, "ray.dashboard": f"{address}/#/jobs/{identity}", "concord.job": "j", **tags}
        return store.start_run("e", f"run-{identity}", {}, tags)

    for identity in ("finished", "known"):
        store.finish_run(submitted(identity))
    submitted("elsewhere", "http://another:8265")
    study = submitted("study", **{"concord.study": "s"})
    submitted("study", **{"concord.study": "s", PARENT: study})
    submitted("died", **{ALIVE: "1000"})
    listed = {each.id: each for each in earlier_submissions(store, here, {"known"})}
    assert {identity: (each.status, each.command, each.name) for identity, each in listed.items()} == {
        "finished": ("finished", "train", "run-finished"),
        "study": ("running", "tune", "run-study"),
        "died": ("interrupted", "train", "run-died"),
    }


def test_another_version_of_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setenv("CONCORD_CLIENT_PYTHON", "3.10")
    ended = subprocess.run([sys.executable, "-m", "concord", "jobs"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("concord: submitted from Python 3.10, the cluster has Python 3.1")


def test_a_submitted_command_names_commands_that_its_submitter_can_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "rules").mkdir(parents=True)
    (tmp_path / "in" / JOB.name).write_text(JOB.read_text())
    (tmp_path / "in" / "rules" / "mine.py").write_text(snippet("own-rule"))
    monkeypatch.chdir(tmp_path / "in")
    variables = submit_variables("mine-1", Path("jobs of mine"), ["--profile", "lab", "--pip", "a>1"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = read("train", JOB.name, "--aggregator", "rules/mine.py:TrimmedSign")
    options = {"name": "s", "data": tmp_path / "in" / "d.csv", "output": Path("/shared/runs")}
    assert command.job.command("tune", options=options) == (
        f"concord submit tune 'jobs of mine/{JOB.name}' --name s --data 'jobs of mine/d.csv' --output /shared/runs "
        "--profile lab --pip 'a>1'"
    )
    rule = command.job.for_command({"aggregator": "mine.py:TrimmedSign"})
    assert rule == {"aggregator": "jobs of mine/rules/mine.py:TrimmedSign"}
    assert load_job("digits").command("compare", "methods").startswith("concord submit compare digits methods --pro")
    assert command.job.command("report") == f"concord report 'jobs of mine/{JOB.name}'"  # which reads on a machine
    for name in variables:
        monkeypatch.delenv(name)
    assert command.job.command("tune") == f"concord tune {tmp_path / 'in' / JOB.name}"


# --- a real cluster


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    head = Head(tmp_path_factory.mktemp("head"))
    head.variables = QUIET
    head.start()
    yield head
    head.stop()


def job_that_requires(condition: str) -> str:
    """The job, whose environments can only be loaded where this holds."""
    load = "    def load(name: str) -> Any:\n"
    return JOB.read_text().replace(load, f"{load}        assert {condition}\n")


@pytest.mark.slow
def test_more_memory_than_a_head_node_has_is_refused_by_one_that_has_just_started(
    head: Head, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    status, result = outcome(capsys, "submit", "train", "synthetic", "--driver-memory", "1000", *where)
    assert status == 2
    assert re.fullmatch(
        r"--driver-memory 1000: the head node has [\d.]+ GiB for commands; give less", result["error"]
    ), result["error"]


def test_a_token_is_asked_for_and_a_wrong_one_named(
    head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = outcome(capsys, "submissions", "--address", head.address)
    assert status == 2
    assert result["error"].startswith(f"--address {head.address}: the cluster needs a token; give RAY_AUTH_TOKEN")
    (tmp_path / "wrong").write_text("f" * 32)
    status, result = outcome(capsys, "submissions", "--address", head.address, "--token-file", str(tmp_path / "wrong"))
    assert status == 2
    assert result["error"] == f"--address {head.address}: the cluster refuses the token of --token-file " + str(
        tmp_path / "wrong"
    )


def test_a_wrong_address_is_told_the_right_one(
    head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("concord.execution.submission.cluster._USUAL_PORT", head.dashboard)
    right = f"; a Ray dashboard answers at {head.address}"
    secure = head.address.replace("http:", "https:")
    for address, said in (
        (secure, f"--address {secure}: the server there speaks no TLS"),
        (f"http://127.0.0.1:{head.port}", f"--address http://127.0.0.1:{head.port}: no Ray cluster answers there"),
        ("http://127.0.0.1:1", "--address http://127.0.0.1:1: no Ray cluster answers there"),
    ):
        assert outcome(capsys, "submissions", "--address", address) == (2, {"error": said + right})
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.port}")
    monkeypatch.setattr(psutil, "process_iter", list)
    status, result = outcome(capsys, "submissions")
    assert status == 2
    assert result["error"].startswith(f"RAY_ADDRESS 127.0.0.1:{head.port}: is no dashboard's address")
    assert right in result["error"]


def test_the_dashboard_of_an_own_ray_is_found_and_no_token_is_shown(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/somewhere/token")
    assert head.process is not None
    own = psutil.Process(head.process.pid)  # not a Ray of another test
    monkeypatch.setattr(psutil, "process_iter", lambda: own.children(recursive=True))
    assert running_dashboard() == head.address
    monkeypatch.setattr("concord.execution.submission.profile.ANSWER_SECONDS", 30.0)
    assert described(head.address) == f"{head.address} (enter the token in /somewhere/token)"


def test_a_submitted_run_takes_its_rule_along_and_ends_as_it_does_here(
    head: Head, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "work" / "rules").mkdir(parents=True)
    sent = "(os.environ['SITE'], os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))"
    (tmp_path / "work" / JOB.name).write_text(job_that_requires(f"{sent} == ('this place', 'passive', None)"))
    (tmp_path / "work" / "rules" / "my_rule.py").write_text(snippet("own-rule"))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("CONCORD_USER", "ann")
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    run = ["submit", "train", JOB.name, "--epochs", "1", "--batch-size", "16", "--name", "first", *where]
    run += ["--aggregator", "rules/my_rule.py:TrimmedSign", "--dead-zone", "1e-3"]
    run += ["--env", "SITE=this place", "OMP_WAIT_POLICY=passive"]
    status = main([*run, "--json"])
    printed = capfd.readouterr()
    result = json.loads(printed.out.strip().splitlines()[-1])
    assert status == 0, printed.err
    assert (result["status"], result["exit_status"], result["name"]) == ("succeeded", 0, "first")
    assert result["submission"].startswith("first-")
    assert "data: 3 environments for training" in printed.err
    record = json.loads((head.folder / "runs" / "runs" / "first" / "record.json").read_text())
    assert (require_run(folder_of(head.folder / "runs", "first")).report or {})["metrics"]["epoch"] == 1.0
    assert (record["config"]["aggregator"], record["config"]["dead_zone"]) == ("my_rule.py:TrimmedSign", 1e-3)
    assert record["tracking"]["tags"]["mlflow.user"] == "ann"  # not the head's user
    assert head.token_file.read_text() not in printed.err + printed.out
    kept = [path.read_bytes() for path in (head.folder / "runs").rglob("*") if path.is_file()]
    assert not any(b"this place" in text for text in [*kept, (printed.err + printed.out).encode()])
    # The same name again is refused there, as it would be here, with the same exit status.
    assert main([*run, "--no-wait", "--json"]) == 2
    said = f"invalid input; --name first: there is a run of this name in {head.folder / 'runs'}; add --resume"
    assert said in json.loads(capfd.readouterr().out)["error"]
    assert main(["submissions", "--mine", *where, "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["submissions"]
    assert [(each["name"], each["owner"], each["status"], each["exit_status"]) for each in listed] == [
        ("first", "ann", "failed", 2),
        ("first", "ann", "succeeded", 0),
    ]
    monkeypatch.setenv("CONCORD_USER", "bob")
    assert main(["submissions", "--mine", *where, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["submissions"] == []
    assert main(["logs", result["submission"], *where]) == 0
    assert "data: 3 environments for training" in capfd.readouterr().out


@pytest.mark.slow
def test_who_waits_for_a_command_that_is_refused_on_the_cluster_has_its_exit_status(
    head: Head, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = head.folder / "runs" / "runs" / "taken"
    taken.mkdir(parents=True)
    (taken / "notes").write_text("mine")
    monkeypatch.chdir(JOB.parent)
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    assert main(["submit", "train", JOB.name, "--name", "taken", *where, "--json"]) == 2
    assert "ended with exit status 2" in capfd.readouterr().err


@pytest.mark.slow
def test_a_submitted_comparison_takes_its_tables_and_options_along(
    head: Head, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    (work / "tables").mkdir(parents=True)
    elsewhere.mkdir()
    rule = 'comparisons="tables/masks.py")'
    text = job_that_requires("os.environ['GOMP_SPINCOUNT'] == '2000'")
    (work / JOB.name).write_text(text.removesuffix(", config=Config)\n") + f", config=Config, {rule}\n")
    (work / "tables" / "masks.py").write_text(
        "from concord.training import Comparison\n"
        "rows = {'average': {'aggregator': 'mean'}, 'mask': {'aggregator': 'and-mask', 'threshold': 1.0}}\n"
        "comparisons = {'masks': Comparison(rows, columns={'epochs': 'epoch', 'o.o.d.': 'ood_accuracy'})}\n"
    )
    # The file stays where it is; what it says is in the command.
    (elsewhere / "quick.yaml").write_text(
        "epochs: 2\nbatch_size: 16\nseeds: 1\nmilestones: [0.25, 0.5]\nrescale: false\n"
    )
    monkeypatch.chdir(work)
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    words = ["submit", "compare", JOB.name, "masks", "--config", str(elsewhere / "quick.yaml"), "--epochs", "1"]
    status = main([*words, *where, "--json"])
    printed = capfd.readouterr()
    assert status == 0, printed.err
    ended = json.loads(printed.out.strip().splitlines()[-1])
    assert ended["status"] == "succeeded"
    assert ended["submission"].startswith("shared-rule-")  # the same command may be submitted again
    folder = folder_of(head.folder / "runs", "shared-rule", "comparison")
    lines = [json.loads(line) for line in (folder.path / "tables" / "shared-rule-masks.jsonl").read_text().splitlines()]
    assert [(line["configuration"], line["values"]["epochs"]) for line in lines] == [("average", 1.0), ("mask", 1.0)]
    said = {"batch_size": 16, "milestones": (0.25, 0.5), "rescale": False}
    first, *_ = require_run(folder, "comparison").asked
    assert said.items() <= require_run(folder_of(head.folder / "runs", first["run"])).options.items()


def test_files_in_options_and_option_files_go_along_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text("lr = [0.1, 0.2]\n")
    (tmp_path / "study.yaml").write_text("space: space.toml\ntrials: 3\n")
    (tmp_path / "secret.yaml").write_text("hub_token: hf_secret\n")
    path = tmp_path / "job.py"
    path.write_text(
        JOB.read_text().replace(
            '    trouble: str = ""\n', '    hub_token: str = ""\n    """Of the hub."""\n    trouble: str = ""\n'
        )
    )
    status, result = outcome(capsys, "submit", "tune", "job.py", "--config", "secret.yaml", "--address", "127.0.0.1:1")
    assert (status, "--hub-token: would be shown on the cluster" in result["error"]) == (2, True)
    assert "hf_secret" not in result["error"]
    command = read("tune", "synthetic", "--config", "study.yaml", "--lr", "1")
    assert command.words() == ["--trials", "3", "--space", "space.toml", "--lr", "1.0"]
    (tmp_path / "glove.txt").write_text("the 1\n")
    taken = SentFiles(None)
    words = ["--glove", "glove.txt", "--data", "glove.txt", "--output", "/glove.txt"]
    command = read("train", "punctuated-sst2", *words)
    assert taken.take_options(command, command.given_values()) == {"glove": "glove.txt", "data": "glove.txt"}
    assert {*taken.needed} == {Path("glove.txt")}
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "mine.py").write_text("")
    words = ["methods", "--methods", "mean,rules/mine.py:Mine", "vrex"]
    command = read("compare", "synthetic", *words)
    methods = ("mean", "rules/mine.py:Mine", "vrex")
    assert taken.take_options(command, command.given_values()) == {"methods": methods}
    assert {*taken.needed} == {Path("glove.txt"), Path("rules/mine.py")}


class Tunnel:
    """A way to a server on this machine, as ``ssh -L`` makes one, that can be cut."""

    def __init__(self, port: int) -> None:
        self._port, self._ends = port, []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._server.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, origin: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := origin.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        for end in (self._server, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.mark.slow
def test_a_log_whose_connection_breaks_says_how_to_look_again(head: Head) -> None:
    submit = ray_jobs(head).submit_job
    identity, end = "", time.monotonic() + 60
    while not identity and time.monotonic() < end:
        try:
            identity = submit(entrypoint="sh -c 'echo first line; sleep 600'")
        except RuntimeError as error:
            if "No available agent" not in str(error):  # of a head that has just started
                raise
            time.sleep(0.5)
    tunnel = Tunnel(head.dashboard)
    cluster = Cluster(Profile.find(address=tunnel.address, token_file=head.token_file))
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if "first line" in text:
            tunnel.cut()

    with pytest.raises(RunFailedError, match=f"the job may continue there, concord logs {identity} --follow shows"):
        cluster.follow(identity, show)
    assert "".join(shown).count("\nfirst line\n") == 1
    assert (
        Cluster(Profile.find(address=head.address, token_file=head.token_file)).stop(identity, 60).status == "stopped"
    )


@pytest.mark.slow
def test_submissions_beyond_the_head_s_memory_wait_and_say_for_what(
    head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admission, "_STARTING_SECONDS", 0.0)
    cluster, jobs = Cluster(Profile.find(address=head.address, token_file=head.token_file)), ray_jobs(head)
    wait_for(lambda: cluster._head_memory() is not None, 120)
    memory = int(0.6 * (cluster._head_memory() or math.nan))

    def submit(identity: str) -> None:
        labels = {"job": "sleeping", "memory": str(memory)}
        where = {"node:__internal_head__": 1e-4}
        jobs.submit_job(
            entrypoint="sleep 600", submission_id=identity, entrypoint_memory=memory, entrypoint_resources=where,
            metadata=labels,
        )  # fmt: skip

    def waits() -> dict[str, str]:
        found = {each.id: each for each in cluster.submissions() if each.job == "sleeping"}
        return {identity: found[identity].waits.split(" GiB ")[0].split(" for ")[0] for identity in found}

    submit("a")
    wait_for(lambda: cluster.status("a") == "running", 120)
    submit("b")
    submit("c")
    assert waits() == {"a": "", "b": "1 of 2", "c": "2 of 2"}
    lines: list[str] = []

    def let_in(line: str) -> None:
        lines.append(line)
        cluster.stop("a", 60)

    wait_for_admission(cluster, "b", let_in)
    assert cluster.status("b") == "running"
    (line,) = lines
    assert line.startswith("b: waits as 1 of 2 for ")
    assert line.endswith(" are reserved by 1 running")
    assert waits()["c"] == "1 of 1"
    monkeypatch.setattr("concord.execution.submission.cluster._PENDING_SECONDS", 0.0)
    monkeypatch.chdir(JOB.parent)
    words = ["train", JOB.name, "--name", "waits", "--no-wait", "--driver-memory", str(memory / 2**30)]
    assert main(["submit", *words, "--address", head.address, "--token-file", str(head.token_file)]) == 0
    said = capsys.readouterr()
    assert f"{said.out.strip()}: waits as 2 of 2 for " in said.err
    assert cluster.stop("c", 60).status == "pending"  # Ray tells it when it is admitted
    assert cluster.stop(said.out.strip(), 60).status == "pending"
    cluster.stop("b", 60)
    wait_for(lambda: cluster.status("c") == cluster.status(said.out.strip()) == "stopped", 120)


def ray_jobs(head: Head) -> JobSubmissionClient:
    """Ray's own client."""
    return JobSubmissionClient(head.address, headers={"Authorization": f"Bearer {head.token_file.read_text()}"})


class Silent(Quiet):
    """Says which version it has, and answers nothing else for a while."""

    answers: str | None = "/api/version"

    def do_GET(self) -> None:  # noqa: N802
        if self.path != self.answers:
            time.sleep(5)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"ray_version": ray.__version__}).encode())


@pytest.mark.parametrize("slow", ["ANSWER_SECONDS", "_VERSION_SECONDS"])
def test_a_cluster_that_does_not_answer_is_not_waited_for_without_end(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"concord.execution.submission.cluster.{slow}", 0.5)
    monkeypatch.setattr(Silent, "answers", "/api/version" if slow == "ANSWER_SECONDS" else None)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "any")
    with serving(Silent) as port, pytest.raises(RunFailedError, match="a busy head node answers later"):
        Cluster(Profile.find(address=f"127.0.0.1:{port}")).submissions()


class Closing(Silent):
    """Says which version it has, and closes every other connection."""

    def do_GET(self) -> None:  # noqa: N802
        if self.path == self.answers:
            super().do_GET()


def test_a_cluster_that_closes_the_connection_is_called_busy_not_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "any")
    with serving(Closing) as port, pytest.raises(RunFailedError, match="closed the connection without an answer; a "):
        Cluster(Profile.find(address=f"127.0.0.1:{port}")).submissions()


def test_a_submission_is_stopped_once(
    head: Head, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(JOB.parent)
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    endless = ["--epochs", "10000", "--pause", "0.1", "--name", "endless"]
    status, result = outcome(capsys, "submit", "train", JOB.name, *endless, "--no-wait", *where)
    assert (status, result["status"]) == (0, "running")  # the cluster has found its name, data and store right
    status, refused = outcome(capsys, "submit", "train", JOB.name, *endless, "--no-wait", *where)
    assert status == 2
    assert refused["error"].startswith(f"--name endless: {result['submission']} has this name and is at work; concord")
    assert Cluster(Profile.find(address=head.address, token_file=head.token_file)).find(result["submission"]).again == (
        f"concord submit train {JOB.name} --name endless --resume {' '.join(where)}"
    )
    elsewhere = {"command": "train", "name": "endless", "output": "/another/folder"}
    Cluster(Profile.find(address=head.address, token_file=head.token_file)).require_free("another-id", elsewhere)
    again = ["--submission-id", result["submission"], *where]
    status, refused = outcome(capsys, "submit", "train", JOB.name, *endless, "--no-wait", *again)
    assert (status, refused["error"]) == (
        2,
        f"--submission-id {result['submission']}: the cluster has this id; give another",
    )
    events = head.folder / "runs" / "runs" / "endless" / EVENTS
    end = time.monotonic() + 120
    while not (events.exists() and any(each.name == "metrics" for each in read_events(events))):
        assert time.monotonic() < end, outcome(capsys, "submissions", *where)
        time.sleep(0.1)
    (found,) = (each for each in outcome(capsys, "submissions", *where)[1]["submissions"] if each["name"] == "endless")
    assert found["status"] == "running"
    assert outcome(capsys, "stop", result["submission"], *where) == (
        0,
        {"submission": result["submission"], "status": "stopped"},
    )
    runs = tracked_runs(Store.open(head.folder / "runs"), "shared-rule", finished_only=False)
    assert [run.status for run in runs if run.name == "endless"] == ["KILLED"]
    status, refused = outcome(capsys, "stop", result["submission"], *where)
    assert (status, refused["error"]) == (2, f"{result['submission']}: has ended already (stopped)")
    status, refused = outcome(capsys, "stop", "nothing", *where)
    assert status == 2
    assert "nothing: there is no such submission" in refused["error"]


@pytest.mark.slow
def test_a_run_reads_a_file_beside_its_job_and_is_stopped_within_a_step_that_does_not_end(
    head: Head, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("beside.txt").write_text("here")
    load = "    def load(name: str) -> Any:\n"
    Path(JOB.name).write_text(
        JOB.read_text().replace(load, f"{load}        assert open('beside.txt').read() == 'here'\n")
    )
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    words = ["--workers", "2", "--pause", "10000", "--name", "one-step"]
    status, result = outcome(capsys, "submit", "train", JOB.name, *words, "--no-wait", *where)
    assert status == 0, result
    wait_for(lambda: "data: " in outcome(capsys, "logs", result["submission"], *where)[1]["log"], 120)
    assert outcome(capsys, "stop", result["submission"], *where)[1]["status"] == "stopped"
    log = outcome(capsys, "logs", result["submission"], *where)[1]["log"].splitlines()
    assert log[-1] == "concord: stopped before the first checkpoint; --name one-step --resume begins again"
    assert not [line for line in log if "\x1b" in line or "PreemptionWatcher" in line or "c10d" in line]
    kept = head.temporary.glob("session_2*/logs/concord-*.log")  # of other tests' jobs as well
    assert any("PreemptionWatcher" in path.read_text() for path in kept)
    (advice,) = (line.partition("better method: ")[2] for line in log if "to find a better method: " in line)
    assert advice == f"concord submit compare {JOB.name} methods --pause 10000.0 {' '.join(where)}"
    runs = tracked_runs(Store.open(head.folder / "runs"), "shared-rule", finished_only=False)
    assert [run.status for run in runs if run.name == "one-step"] == ["KILLED"]


@pytest.mark.slow
def test_a_study_stopped_while_its_winner_is_registered_runs_no_longer(
    head: Head, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(JOB.parent)
    where = ["--address", head.address, "--token-file", str(head.token_file)]
    study = ["tune", "slow_figures.py", "--name", "slow", "--trials", "2", "--shortlist", "0", "--reruns", "0"]
    study += ["--no-wait"]
    status, submitted = outcome(capsys, "submit", *study, *where)
    assert status == 0
    output = head.folder / "runs"
    wait_for(lambda: [*output.glob("runs/slow-trial-*/being-registered")], 240)
    status, stopped = outcome(capsys, "stop", submitted["submission"], *where)
    assert (status, stopped["status"]) == (0, "stopped")
    assert require_run(folder_of(output, "slow", "study"), "study").status == "KILLED"
    assert {require_run(folder_of(output, f"slow-trial-{number}")).status for number in range(2)} == {"FINISHED"}
    of_study = [each for each in Store.open(output).search("") if each.name.startswith("slow")]
    assert sorted((each.name, each.status) for each in of_study) == [
        ("slow", "KILLED"),
        ("slow-trial-0", "FINISHED"),
        ("slow-trial-1", "FINISHED"),
    ]


@pytest.mark.slow
def test_a_head_node_killed_during_a_study_loses_no_finished_trial(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head(tmp_path_factory.mktemp("killed"))
    monkeypatch.chdir(JOB.parent)
    study = ["submit", "tune", "tiny_study.py", "--name", "s", "--trials", "12", "--pause", "0.05", "--shortlist", "0"]
    study += ["--reruns", "0", "--no-register", "--address", head.address, "--token-file", str(head.token_file)]
    folder = folder_of(head.folder / "runs", "s", "study")

    def finished() -> dict[str, Any]:
        trials = GroupRuns(require_run(folder, "study")).finished("trial") if folder.names() else []
        return {each.name: (each.history, each.ended) for each in trials}

    try:
        head.start()
        assert main([*study, "--no-wait", "--json"]) == 0
        end = time.monotonic() + 240
        while len(finished()) < 3 and time.monotonic() < end:
            time.sleep(0.2)
        head.stop()  # -9, with all its processes
        before = finished()
        assert 3 <= len(before) < 12
        head.start()
        assert main([*study, "--json"]) == 0, capfd.readouterr().err
    finally:
        head.stop()
    after = finished()
    assert len(after) == 12
    assert {key: after[key] for key in before} == before
