"""Secrets are recognized by their names in every spelling, and do not appear in the files of runs and studies."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import described

from concord.cli import main
from concord.errors import InputError, TrainingFailedError
from concord.execution.run import run
from concord.options import option_values
from concord.record import RECORD, write_record
from concord.redaction import is_hidden, is_secret, is_secret_file, redact, redact_words, without_secrets
from concord.storage import Folder
from concord.studies.plan import plan_study
from concord.studies.study import run_study
from concord.studies.study_options import options_for
from concord.tracking import Store
from concord.training import load_job

SECRET = "hunter2-7f3a"
SECRETS = [
    "api key", "aws secret access key", "access key id", "account key", "authorization", "aws session token", "bearer",
    "client secret", "connection string", "credentials", "db password", "google application credentials", "hub token",
    "hub tokens", "github tokens",
    "passphrase", "password", "passwd", "private key", "refresh tokens", "secret", "signing key", "ssh key",
    "storage account key", "token", "x amz credential", "x amz security token", "x amz signature",
]  # fmt: skip
ORDINARY = [
    "author", "auth mode", "batch size", "class token", "credentials file", "eos token", "forward pass", "key",
    "key size", "keys", "lr", "mask token", "max tokens", "num tokens", "pad token id", "passes", "password file",
    "public key", "secret name", "secretary", "signature", "sort key", "token file", "token id", "tokenizer", "tokens",
    "vocabulary key",
]  # fmt: skip
WRITTEN: list[Callable[[list[str]], str]] = [
    "_".join,
    "-".join,
    ".".join,
    " ".join,
    lambda words: "_".join(words).upper(),
    lambda words: "-".join(words).title(),
    lambda words: "".join(word.title() for word in words),
    lambda words: words[0] + "".join(word.title() for word in words[1:]),
    lambda words: f"--{'-'.join(words)}",
]
BEFORE = st.lists(st.sampled_from(["my", "remote", "hospital", "v2"]), max_size=2)


@given(BEFORE, st.sampled_from(SECRETS), st.sampled_from(WRITTEN))
def test_a_secret_is_known_by_its_name_however_that_is_written(
    before: list[str], name: str, written: Callable[[list[str]], str]
) -> None:
    assert is_secret(written([*before, *name.split()]))


@given(BEFORE, st.sampled_from(ORDINARY), st.sampled_from(WRITTEN))
def test_ordinary_options_are_shown_however_they_are_written(
    before: list[str], name: str, written: Callable[[list[str]], str]
) -> None:
    assert not is_secret(written([*before, *name.split()]))


@pytest.mark.parametrize("name", ["apikey", "PGPASSWORD", "MYSQL_PWD", "AccountKey", "password2", "authtoken"])
def test_words_that_run_together_are_known_too(name: str) -> None:
    assert is_secret(name)


def test_no_option_of_concord_s_own_is_taken_for_a_secret() -> None:
    for name in ("synthetic", "coinrun-expert", "memorization", "punctuated-sst2"):
        config = load_job(name).job.config
        assert not [option for option in option_values(config) if is_secret(option)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://b/k?X-Amz-Credential=a%2Fb&X-Amz-Signature=ab12&x=1", "s3://b/k?X-Amz-Credential=***&X-Amz-Signature=***&x=1"),
        ("https://h/c?sv=2024&sig=a%2Bb%3D&se=1", "https://h/c?sv=2024&sig=***&se=1"),
        ("https://maps/api?key=AIza1&q=x", "https://maps/api?key=***&q=x"),
        ("AccountName=a;AccountKey=b==;EndpointSuffix=c", "AccountName=a;AccountKey=***;EndpointSuffix=c"),
        ("abfss://data@account.dfs.core.windows.net/x", "abfss://data@account.dfs.core.windows.net/x"),
        ("abfss://ann:hunter2@account.dfs.core.windows.net/x", "abfss://ann:***@account.dfs.core.windows.net/x"),
        ("train --hub-token=abc --lr=0.1", "train --hub-token=*** --lr=0.1"),
        ("--header 'Authorization: Bearer abc.def'", "--header 'Authorization: Bearer ***'"),
        ("no answer for {'api_key': 'a b', \"lr\": \"1\"}", "no answer for {'api_key': '***', \"lr\": \"1\"}"),
        (r"{'api_key': 'it\'s', 'lr': '1'}", "{'api_key': '***', 'lr': '1'}"),
        ("lr=0.01,max_tokens=512,key=a", "lr=0.01,max_tokens=512,key=a"),
        ("give it as a --header, Authorization", "give it as a --header, Authorization"),
        ("http://ann:hunter2@host:5000/x", "http://ann:***@host:5000/x"),
        ("to http://ann:hun:t@er2@host failed", "to http://ann:***@host failed"),
        ("https://hunter2@host", "https://***@host"),
        ("postgresql+psycopg2://ann:hunter2@host/db", "postgresql+psycopg2://ann:***@host/db"),
        ("postgresql://host/db?user=ann&password=hunter2&x=1", "postgresql://host/db?user=ann&password=***&x=1"),
        ("http://host/path?to=ann@host", "http://host/path?to=ann@host"),
        ("sqlite:////tmp/a@b/mlflow.db", "sqlite:////tmp/a@b/mlflow.db"),
    ],
)  # fmt: skip
def test_secrets_in_a_text_are_hidden_and_the_rest_is_not(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_values_are_hidden_by_their_name_wherever_they_stand() -> None:
    given = {"api_key": SECRET, "token": None, "use_token": True, "password": "", "layers": (1, 2)}
    given |= {"clouds": {"aws_secret_access_key": SECRET}, "sources": [f"s3://ann:{SECRET}@host"]}
    kept = without_secrets(given)
    assert SECRET not in repr(kept)
    assert {name for name, value in kept.items() if is_hidden(value)} == {"api_key", "clouds", "sources"}
    assert (kept["token"], kept["use_token"], kept["password"], kept["layers"]) == (None, True, "", (1, 2))
    assert redact_words(["--hub-tokens", SECRET, SECRET, "--lr", "1"]) == ["--hub-tokens", "***", "***", "--lr", "1"]
    assert redact_words(["train", "j", "--hub-token", SECRET, "--lr", "1"]) == [
        "train",
        "j",
        "--hub-token",
        "***",
        "--lr",
        "1",
    ]


@pytest.mark.parametrize(
    "name",
    ["credentials.json", "kubeconfig", "id_dsa", "server.PEM", "Server.Key", "prod.env", "hub_token.txt",
     "secrets.yaml", "client_secret_123.json", "service-account-a.json", "private_key", "token.json"],
)  # fmt: skip
def test_a_file_with_secrets_is_known_by_its_name(name: str) -> None:
    assert is_secret_file(Path("folder") / name)


@pytest.mark.parametrize(
    "name",
    ["credentials.py", "secrets.py", "tokenizer.json", "special_tokens_map.json", "tokens.txt", "public_key.txt",
     "key.py", "job.py", "north.npz", "monkey.json", "environment.yml"],
)  # fmt: skip
def test_programs_and_data_are_no_secrets(name: str) -> None:
    assert not is_secret_file(Path("folder") / name)


# --- the files of runs and studies


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    """A job that takes a token, and an address that may hold a password."""
    source = (Path(__file__).parent / "jobs" / "tiny_study.py").read_text()
    options = '    hub_token: str | None = None\n    """Of the hub."""\n    teacher: str = ""\n    """Its address."""\n'
    added, number = re.subn(
        r"(class Config\(TrainConfig\):\n    \"\"\".*?\"\"\"\n)", rf"\1\n{options}", source, flags=re.DOTALL
    )
    assert number == 1
    path = tmp_path / "job.py"
    path.write_text(added)
    return str(path)


GIVEN: dict[str, Any] = {"hub_token": SECRET, "teacher": f"https://ann:{SECRET}@host/t?sig={SECRET}", "epochs": 1}


def files_with_the_secret(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_run_leaves_no_secret_behind_and_needs_it_again(
    output: Path, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(job_file)
    report = run(job, job.job.config.with_options(**GIVEN, output=output, name="secret"), lambda _: None)
    assert files_with_the_secret(output) == []
    recorded = json.loads((report.folder.path / RECORD).read_text())["config"]
    assert (recorded["hub_token"], recorded["teacher"]) == ("***", "https://ann:***@host/t?sig=***")
    tracked = Store.open(output).run(report.run_id)
    assert tracked.parameters["hub_token"] == "***"
    words = ["train", job_file, "--name", "secret", "--resume", "--output", str(output)]
    assert main(words) == 2
    assert "--hub-token: the run secret was started with one, and secrets are not recorded; give it again" in (
        capsys.readouterr().err
    )
    assert main([*words, "--hub-token", SECRET]) == 2
    assert "was started with https://ann:***@host/t?sig=***" in capsys.readouterr().err
    # The token for the same hub may change; the address must be the same.
    assert main([*words, "--hub-token", "renewed", "--teacher", GIVEN["teacher"]]) == 0
    assert main([*words, "--hub-token", SECRET, "--teacher", "https://ann:p@elsewhere"]) == 2
    assert SECRET not in capsys.readouterr().err


REFUSES = f"""
ADDRESS = "https://ann:" + {SECRET!r} + "@host"


def refuses(*_):
    raise RuntimeError(ADDRESS + " refuses")


class Refuses(torch.nn.Linear):
    def forward(self, inputs):
        return refuses() if self.training else super().forward(inputs)


job = dataclasses.replace(job, %s)
"""


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("model=lambda config: Refuses(4, 2)", "Traceback"),
        ("figures=refuses", "the job's figures could not be drawn (RuntimeError: https://ann:***@host refuses, line "),
        ("final_measures=refuses", "the job's final measures are missing: RuntimeError: https://ann:***@host refuses"),
    ],
)
def test_an_error_of_a_jobs_own_code_shows_no_secret(
    output: Path, job_file: str, part: str, shown: str, recwarn: pytest.WarningsRecorder
) -> None:
    source = Path(job_file).read_text()
    Path(job_file).write_text(f"import dataclasses\n{source}{REFUSES % part}")
    job, lines = load_job(job_file), list[str]()
    with contextlib.suppress(TrainingFailedError):
        run(job, job.job.config.with_options(output=output, name="refused", epochs=1, register=False), lines.append)
    (line,) = (each for each in [*lines, *(str(each.message) for each in recwarn)] if shown in each)
    assert "https://ann:***@host refuses" in line
    assert SECRET not in line


def test_a_study_leaves_no_secret_behind_and_needs_it_again(
    ray_cluster: None, output: Path, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(job_file)
    options = GIVEN | {"trials": 1, "name": "s", "reruns": 0, "shortlist": 0, "register": False, "output": output}
    run_study(plan_study(job, options_for(job.job.config).with_options(**options), given=set(options)), lambda _: None)
    assert files_with_the_secret(output) == []
    words = ["tune", job_file, "--name", "s", "--output", str(output)]
    assert main(words) == 2
    assert "--hub-token: the study s was started with one, and secrets are not recorded" in capsys.readouterr().err
    assert main([*words, "--hub-token", "renewed", "--teacher", GIVEN["teacher"]]) == 0


def test_a_secret_is_not_varied(output: Path, job_file: str) -> None:
    job = load_job(job_file)
    options: dict[str, Any] = {"vary": (f"hub_token={SECRET},b",), "output": output}
    with pytest.raises(InputError, match="--vary hub_token: is named like a secret") as refused:
        plan_study(job, options_for(job.job.config).with_options(**options), given=set(options))
    assert SECRET not in str(refused.value)


def test_an_option_without_a_default_is_asked_for_by_name_again(
    output: Path, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(job_file)
    required = path.read_text().replace("hub_token: str | None = None", "hub_token: str")
    path.write_text(
        required.replace("config=Config()", "config=defaults_of(Config)").replace(
            "from concord.space", "from concord.options import defaults_of\nfrom concord.space", 1
        )
    )
    folder = output / "runs" / "old"
    folder.mkdir(parents=True)
    config = {"name": "old", "hub_token": "***"}
    write_record(Folder(folder), "run", described(job=load_job(job_file).name, run_id="0" * 32, config=config))
    assert main(["train", job_file, "--name", "old", "--resume", "--output", str(output)]) == 2
    assert "--hub-token: is required" in capsys.readouterr().err


def test_every_value_of_a_secret_option_is_hidden_and_an_address_that_was_a_path() -> None:
    words = ["--api-keys", "one", "two", "--lr", "1", "--hub-token", "--data", str(Path("s3://name:three@bucket/x"))]
    shown = redact_words(words)
    assert shown == ["--api-keys", "***", "***", "--lr", "1", "--hub-token", "--data", "s3://name:***@bucket/x"]
    for text in ("models:/sensors@champion", "C:/me@work", "path:/a:b@c"):
        assert redact_words([text]) == [text]
