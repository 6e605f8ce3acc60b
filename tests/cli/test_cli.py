"""The command line for its users: one line for each mistake, JSON by contract, quick answers without work."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Concord
from recorded import described
from web_server import Quiet, serving

import concord
from concord.options import option_values
from concord.record import RECORD, write_record
from concord.storage import Folder
from concord.tracking import Store
from concord.training import load_job

SHARED_RULE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")

GOOD = """
import torch
from torch import nn
from concord.environments import Environments
from concord.training import Job, TrainConfig

def data(examples=8, features=3, targets=2):
    return torch.randn(examples, features), torch.arange(examples) % targets

environments = lambda config: Environments.from_arrays({"a": data(), "b": data()})
model = lambda config: nn.Linear(3, 2)
loss = nn.functional.cross_entropy
rest = {}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., str]:
    """A job file: a good one, and then these lines, which may spoil it."""

    def write(lines: str = "", name: str = "mine.py", beginning: str = GOOD) -> str:
        ending = "\njob = Job(environments=environments, model=model, loss=loss, **rest)\n"
        (tmp_path / name).write_text(beginning + lines + ending)
        return str(tmp_path / name)

    return write


# --- wrong words

OWN_LOOP = Path(__file__).parents[1] / "jobs" / "descent.py"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "no command given; the commands are jobs, train, tune, compare, report, .*concord --help"),
        ("trian synthetic", "command trian: there is no such command; did you mean train?"),
        ("tain --help", "command tain: there is no such command; did you mean train?"),
        ("status", "command status: there is no such command; did you mean submissions?"),
        ("xyzzy", "command xyzzy: there is no such command; there are jobs, train, "),
        ("stop", "stop: needs ID, the id of a submission; concord submissions lists them"),
        ("logs", "logs: needs ID, the id of a submission; concord submissions lists them"),
        ("train synthetic --use-gpu", "--use-gpu: there is no such option; did you mean --device?"),
        ("train synthetic --data-dir x", "--data-dir x: there is no such option; did you mean --data?"),
        ("train table --data-dir x", "--data-dir x: there is no such option; did you mean --data?"),
        ("train synthetic --run-name x", "--run-name x: there is no such option; did you mean --name?"),
        ("train synthetic --experiment-name x", "--experiment-name x: there is no such option; .* --experiment?"),
        ("submit train synthetic --follow", "--follow: there is no such option; did you mean --wait?"),
        (f"train {OWN_LOOP} --patience 3", "--patience: job descent has its own loop, without this; .* --help lists"),
        ("train --epochs 3", "train: no job is named"),
        ("train sythetic", "job sythetic: there is no such job; did you mean synthetic?"),
        ("train lung", "job lung: there is no such job; give one of .*synthetic.*, or a Python file"),
        ("train nowhere.py", "job nowhere.py: there is no such file"),
        ("report nothing", "job nothing: there is no such job"),
        ("train synthetic --treshold 0.5", "--treshold 0.5: there is no such option; did you mean --threshold?"),
        ("train synthetic --clip-grad-norm 1", "--clip-grad-norm 1: there is no such option; did you mean --clip?"),
        ("train synthetic --clip_grad_norm=1", "--clip_grad_norm=1: there is no such option; did you mean --clip?"),
        ("train synthetic --shortcuts 3", "--shortcuts 3: there is no such option; .*concord train synthetic --help"),
        ("train synthetic 0.5", "0.5: is not an option; concord train synthetic --help"),
        ("train synthetic --threshold high", "--threshold high: must be a number"),
        ("train synthetic --lr=high", "--lr high: must be a number"),
        ("train synthetic --epochs 1.5", "--epochs 1.5: must be a whole number"),
        ("train synthetic --epochs=ten", "--epochs ten: must be a whole number"),
        ("train synthetic --milestones half end", "--milestones half end: must be numbers"),
        (
            "train synthetic --milestones 0.5 --milestones=0.7",
            "--milestones: is given twice; give all values after one",
        ),
        ("compare synthetic --only a --lr 1 --only b", "--only: is given twice; give all values after one --only"),
        ("runs --compare a --compare b", "--compare: is given twice; give all values after one --compare"),
        ("train synthetic --epochs", "--epochs: needs a value, a whole number"),
        ("train synthetic --epochs --lr 1", "--epochs: needs a value, a whole number"),
        ("train synthetic --output", "--output: needs a value, a path"),
        ("train synthetic --aggregator mode", "--aggregator mode: must be one of auto, mean, and-mask"),
        ("tune synthetic --mode sideways", "--mode sideways: must be one of max, min"),
        ("train synthetic --optimizer lion", "--optimizer lion: must be one of adam, adamw, sgd"),
        ("demo --workers some", "--workers some: must be a whole number"),
        ("demo --aggregator mean", "--aggregator mean: there is no such option"),
        ("jobs --all", "--all: there is no such option"),
        ("models remove", "models remove: must be one of list, show, promote, delete"),
        ("models show", "models show: no model is named"),
        ("models promote x", "models promote x: no version is given; give the version's number"),
        ("models promote x newest", "models promote x: version newest: is not a number; give the version's number"),
        ("ui --port http", "--port http: must be a whole number"),
        ("ui --port 70000", "--port 70000: must lie between 1 and 65535"),
        ("bench --only nothing", "--only nothing: no benchmark of this name"),
    ],
)
def test_a_mistake_in_the_words_is_one_line_that_says_what_would_be_right(
    refused: Callable[..., str], words: str, line: str
) -> None:
    assert re.match(re.sub(r"([?.])(?!\*)", r"\\\1", line), refused(*words.split()))


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("threshold", "nan", "must lie in [0, 1]"),
        ("milestones", "0.5 1.5", "in (0, 1)"),
        ("name", "../up", "letters, digits"),
        ("environments", "0", "at least 1"),
        ("examples", "0", "at least 1"),
        ("shortcut-dimensions", "-1", "must not be negative"),
        ("hidden-layers", "0", "at least 1"),
        ("dropout", "1.0", "must lie in [0, 1)"),
        ("workers", "33", "more than the 32 training environments"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(
    refused: Callable[..., str], option: str, value: str, expected: str
) -> None:
    line = refused("train", "synthetic", f"--{option}", *value.split())
    assert line.startswith(f"--{option} {value}: ")
    assert expected in line


def test_the_demo_refuses_before_it_starts_ray(refused: Callable[..., str]) -> None:
    assert refused("demo", "--workers", "33").startswith("--workers 33: more than the 32 training environments")
    assert refused("demo", "--seed", "-1") == "--seed -1: must not be negative"


def test_gpus_that_are_not_there_are_refused_before_ray_starts(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert refused("train", "synthetic", "--device", "cuda", "--workers", "2") == (
        "--device cuda: 2 workers want a GPU each; this machine has 0"
    )


def test_gpus_that_a_running_ray_does_not_have_are_refused(ray_cluster: None, refused: Callable[..., str]) -> None:
    import ray

    if ray.cluster_resources().get("GPU", 0) >= 32:
        pytest.skip("there are so many")
    assert refused("train", "synthetic", "--device", "cuda", "--workers", "32").startswith(
        "--device cuda: 32 workers want a GPU"
    )


# --- closed pipes


@pytest.mark.parametrize("words", ["ui --help", "train --help", "jobs", "jobs --json"])
@pytest.mark.parametrize("merged", [False, True], ids=["output", "output and errors"])
def test_a_command_ends_quietly_when_nobody_reads_on(words: str, merged: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as ``head`` does after its lines
    program = [sys.executable, "-m", "concord", *words.split()]
    errors = writing if merged else subprocess.PIPE
    done = subprocess.run(program, stdout=writing, stderr=errors, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr or "") == (1, "")


def with_closed(streams: str, *words: str) -> None:
    """Run a command to its end, which is a success, in a process without these standard streams."""
    program = shlex.join([sys.executable, "-m", "concord", *words])
    done = subprocess.run(f"{program} {streams}", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize(
    "closed", [">&-", *(pytest.param(closed, marks=pytest.mark.slow) for closed in ("<&-", "2>&-"))]
)
def test_a_closed_standard_stream_changes_no_exit_status(tmp_path: Path, closed: str) -> None:
    """The watchdog's pipe, which is opened next, would have the stream's number."""
    rows = [f"{place},{age},{age % 2}" for place in ("north", "south", "west") for age in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["place,age,died", *rows]))
    table = ["table", "--environment", "place", "--target", "died"]  # checked without imports of seconds
    with_closed(closed, "data", *table, "--check", str(tmp_path / "rows.csv"))


@pytest.mark.slow
def test_a_run_without_standard_streams_ends_as_any(job_file: Callable[..., str], output: Path) -> None:
    Store.open(output)  # has tables; the process would create them for seconds
    with_closed("<&- >&- 2>&-", "train", job_file(), "--output", str(output), "--epochs", "1", "--name", "a")
    assert (output / "runs" / "a" / RECORD).exists()


@pytest.mark.parametrize("words", [("jobs",), ("train", "synthetic", "--lr", "viél")])
def test_a_terminal_without_a_letter_shows_its_number(words: tuple[str, ...]) -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    program = [sys.executable, "-m", "concord", *words]
    done = subprocess.run(program, env=ascii_only, capture_output=True, check=False)
    assert done.returncode == (0 if words == ("jobs",) else 2), done.stderr
    assert b"Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()


# --- names of runs


def test_to_resume_needs_the_name_of_a_run_that_is_there(refused: Callable[..., str]) -> None:
    assert refused("train", "synthetic", "--resume") == "--resume: needs the name of the run; give --name"
    for name in (["--name", "lost"], ["--name=lost"]):
        assert refused("train", "synthetic", *name, "--resume") == "--name lost: there is no such run in concord-runs"
    elsewhere = refused("train", "synthetic", "--resume", "--name", "lost", "--output=there")
    assert elsewhere == "--name lost: there is no such run in there"


@pytest.fixture
def recorded(output: Path) -> Path:
    """What a run of shared-rule called ``old`` has left, as far as the command line looks at it."""
    folder = output / "runs" / "old"
    folder.mkdir(parents=True)
    config = option_values(load_job(SHARED_RULE).job.config.resolve())
    kept = {name: value for name, value in config.items() if isinstance(value, (str, int, float, bool, tuple))}
    record = described(job="shared-rule", run_id="0" * 32, config=kept | {"name": "old"})
    write_record(Folder(folder), "run", record)
    return output


def test_a_name_that_is_taken_is_refused(refused: Callable[..., str], recorded: Path) -> None:
    line = refused("train", SHARED_RULE, "--name", "old", "--output", recorded)
    assert line == f"--name old: there is a run of this name in {recorded}; add --resume to continue it"


def test_a_run_is_resumed_as_the_job_that_it_is_and_with_its_options(
    refused: Callable[..., str], recorded: Path
) -> None:
    assert refused("train", "synthetic", "--name", "old", "--resume", "--output", recorded).startswith(
        "--name old: is a run of job shared-rule, not of synthetic"
    )
    assert refused("train", SHARED_RULE, "--name=old", "--resume", f"--output={recorded}", "--lr", "0.5") == (
        "--lr 0.5: the run old was started with 0.001; a resumed run keeps its options"
    )


def test_the_folder_and_the_name_of_a_run_may_stand_in_a_file(
    refused: Callable[..., str], recorded: Path, tmp_path: Path
) -> None:
    file = tmp_path / "where.yaml"
    file.write_text("name: 7\n")
    line = refused("tune", "synthetic", "--config", file, "--output", recorded)
    assert line == f"--config {file}: name 7: must be text"
    file.write_text(f"output: {recorded}\nname: old\n")
    assert refused("train", SHARED_RULE, "--config", file, "--resume", "--lr", "0.5") == (
        "--lr 0.5: the run old was started with 0.001; a resumed run keeps its options"
    )


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"job": "shared-rule"}'])
def test_a_record_that_is_damaged_is_refused(refused: Callable[..., str], recorded: Path, text: str) -> None:
    (recorded / "runs" / "old" / RECORD).write_text(text)
    line = refused("train", SHARED_RULE, "--name", "old", "--resume", "--output", recorded)
    assert re.match(r"--name old: .*record\.json cannot be read", line)


# --- job files


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def broken(:\n", r"cannot be loaded \(SyntaxError: .*line 1\)"),
        (
            "import torch\nimport no_such_module\n",
            r"cannot be loaded \(ModuleNotFoundError: .*no_such_module.*, line 2\)",
        ),
        ("raise SystemExit('no')\n", r"cannot be loaded \(SystemExit: no, line 1\)"),
        ("raise ValueError('two\\nlines')\n", r"cannot be loaded \(ValueError: two, line 1\)"),
        ("environments = 3\n", r"defines no job; add a line job = Job\("),
        ("job = 'synthetic'\n", r"defines no job; add a line job = Job\("),
        (b"\xff\xfe", r"cannot be read \(UnicodeDecodeError"),
    ],
)
def test_a_file_that_is_no_job_file_is_refused_with_the_line(
    refused: Callable[..., str], tmp_path: Path, text: str | bytes, line: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert re.match(rf"job {re.escape(str(path))}: {line}", refused("train", path))


@pytest.mark.parametrize(
    ("spoilt", "line"),
    [
        (
            "environments = Environments.from_arrays({'a': data()})",
            "environments is of type Environments; expected a f",
        ),
        ("model = nn.Linear(3, 2)", "model is of type Linear; expected a function"),
        ("rest = {'config': 'fast'}", "config is 'fast'; expected an instance of a class from TrainConfig"),
        *(
            (
                f"rest = {{'name': {name!r}}}",
                re.escape(f"its name is {name!r}; expected text without '/', ':', '@' and"),
            )
            for name in ("team/task", "a:b", "a@b", "a?b", "-a", "..", ".", "a\nb", " ")
        ),
        (
            "rest = {'measures': [len]}",
            r"measures map names to Measure\(function, mode=…\), found \[<built-in function len>.*",
        ),
        ("rest = {'mode': 'up'}", "mode is 'up'; expected max or min"),
    ],
)
def test_a_job_of_wrong_parts_is_refused(
    refused: Callable[..., str], job_file: Callable[..., str], spoilt: str, line: str
) -> None:
    path = job_file(spoilt)
    assert re.match(f"job {re.escape(path)}: {line}", refused("train", path))


@pytest.mark.parametrize(
    ("spoilt", "line"),
    [
        (
            "environments = lambda config: 1 / 0",
            "its environments cannot be made (ZeroDivisionError: division by zero, l",
        ),
        ("environments = lambda config: {'a': data()}", "environments gave dict, expected Environments"),
        (
            "environments = lambda config: Environments(lambda name: None, ['a'])",
            "environment a: data is of type NoneType; expected a tensor",
        ),
        (
            "environments = lambda config: Environments(lambda name: data()[0], ['a'])",
            "environment a: it holds data, not the inputs and targets that a loss needs",
        ),
        (
            "environments = lambda config: Environments(lambda name: open('no'), ['a'])",
            "environment a cannot be loaded (FileNotFoundError",
        ),
        ("model = lambda config: undefined", "its model cannot be made (NameError: name 'undefined' is not defined, l"),
        ("model = lambda config: 'linear'", "model gave str, expected a torch.nn.Module"),
        (
            "model = lambda config: nn.Linear(5, 2)",
            "model and loss cannot take a batch of environment a, inputs (2, 3)",
        ),
        ("model = lambda config: nn.LSTM(3, 2)", "the model's outputs are tuple, expected a tensor"),
        ("model = lambda config: nn.Identity()", "the loss has no gradient; no parameter of the model changes it"),
        ("loss = lambda outputs, targets: 1 / 0", "model and loss cannot take a batch of environment a"),
        ("loss = nn.CrossEntropyLoss(reduction='none')", "the loss has shape (2,), expected a scalar"),
        ("loss = lambda outputs, targets: 0.5", "the loss is of type float, expected a scalar tensor"),
        ("loss = lambda outputs, targets: outputs.detach().sum()", "the loss has no gradient"),
        ("rest = {'measures': {'top': lambda o, t: 1 / 0}}", "measure top cannot take outputs (2, 2) of a batch of"),
        ("rest = {'measures': {'top': lambda o, t: o.sum()}}", "measure top gave shape (), expected (2,)"),
        ("rest = {'criterion': 'validation_f1'}", "criterion validation_f1 is not reported; give one of train_loss, "),
        ("rest = {'criterion': 'ood_loss'}", "criterion ood_loss is not reported"),
        (
            "rest = {'criterion': 'validation_rmse', 'measures': {'rmse': lambda o, t: o[:, 0]}}",
            "criterion validation_rmse has no mode; give Job(mode=…), or its",
        ),
        (
            "rest = {'criterion': 'train_loss', 'mode': 'max'}",
            "mode max of criterion train_loss: its measure has min; leave it out",
        ),
    ],
)
def test_failing_functions_of_a_job_are_refused_before_anything_starts(
    refused: Callable[..., str], job_file: Callable[..., str], spoilt: str, line: str
) -> None:
    assert refused("train", job_file(spoilt)).removeprefix("job mine: ").startswith(line)


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ("{}", "environments: there is no training environment"),
        ("{'a': data(0), 'b': data()}", "environment a: it is empty; each environment needs at least one example"),
        ("{'a': data(), 'b': data(0)}", "environment b: it is empty; each environment needs at least one example"),
        ("{'a': data(1)}", "--held-out 0.1: environment a has one example, which cannot be split; join it with others"),
        (
            "{'a': data(), 'b': data(features=4)}",
            "environment b: one example of its inputs is (4,) float32, but (3,) float32 in environment a",
        ),
        ("{'a': (data()[0], data(4)[1])}", "environment a: 8 inputs and 4 targets; the numbers must be equal"),
        (
            "{'a': (data()[0] / 0, data()[1])}",
            "environment a: its inputs hold values that are not finite, 24 of 24: inputs[0, 0] is ",
        ),
        (
            "{'a': data(targets=3)}",
            "environment a: target 2 is out of range; the model has 2 outputs, so targets go from",
        ),
        ("{'a': (data()[0], data()[1] - 1)}", "environment a: target -1 is out of range; the model has 2 outputs"),
        ("{'a': (['x', 'y'], [0, 1])}", "environment a: its inputs are of type <U1; expected numbers"),
    ],
)
def test_unusable_data_are_refused_by_the_name_of_their_environment(
    refused: Callable[..., str], job_file: Callable[..., str], arrays: str, line: str
) -> None:
    path = job_file(f"environments = lambda config: Environments.from_arrays({arrays})")
    assert refused("train", path).startswith(line)


def test_more_workers_than_environments_are_refused(refused: Callable[..., str], job_file: Callable[..., str]) -> None:
    line = "--workers 3: more than the 2 training environments; a worker needs at least one of its own"
    assert refused("train", job_file(), "--workers", "3") == line


# --- data folders

FROM_FOLDER = (
    GOOD
    + """
from concord.environments import from_folder
environments = lambda config: from_folder(config.data.data, test=["d"])
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three environments in files."""
    path = tmp_path / "data"
    path.mkdir()
    for name in "abd":
        np.savez(path / name, inputs=np.ones((8, 3), np.float32), targets=np.arange(8) % 2)
    return path


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda folder: folder.rename(folder.with_name("moved")), "--data FOLDER: there is no such folder"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "--data FOLDER: has no .npz or"),
        (lambda folder: (folder / "d.npz").unlink(), "environment d: there is none of this name; there are a, b"),
        (lambda folder: (folder / "a.npz").write_bytes(b""), "environment a: FOLDER/a.npz cannot be read ("),
        (lambda folder: (folder / "a.npz").write_bytes(b"PK\3\4 cut"), "environment a: FOLDER/a.npz cannot be read ("),
        (lambda folder: np.savez(folder / "a", x=[1]), "environment a: FOLDER/a.npz has no array inputs; it has x"),
        (lambda folder: np.savez(folder / "a", inputs=[], targets=[]), "environment a: it is empty"),
        (lambda folder: (folder / "a.parquet").write_bytes(b"x"), "--data FOLDER: has both a.npz and a.parquet"),
    ],
)
def test_a_data_folder_that_is_missing_or_damaged_is_refused(
    refused: Callable[..., str],
    job_file: Callable[..., str],
    folder: Path,
    spoil: Callable[[Path], object],
    line: str,
) -> None:
    spoil(folder)
    path = job_file(beginning=FROM_FOLDER)
    assert refused("train", path, "--data", folder).startswith(line.replace("FOLDER", str(folder)))


def test_no_data_folder_at_all_is_refused(refused: Callable[..., str], job_file: Callable[..., str]) -> None:
    assert refused("train", job_file(beginning=FROM_FOLDER)).startswith("--data: is required; give a folder")


# --- stores


@pytest.fixture(scope="module")
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        ("http://127.0.0.1:PORT", "no MLflow server answers (Connection refused); give http(s)://HOST:PORT"),
        ("ftp://127.0.0.1", "the scheme 'ftp' is unknown; give http(s)://HOST:PORT"),
        ("http://", "the URI has no host"),
        ("http://127.0.0.1:99999", "Port out of range"),
        ("nonsense", "not a URI"),
        ("sqlite:///:memory:", "a database in memory cannot be shared"),
        ("sqlite:////dev/null/x.db", "not a writable SQLite file"),
    ],
)
@pytest.mark.parametrize("words", [("train", SHARED_RULE), ("models",), ("ui",)], ids=lambda words: words[0])
def test_a_tracking_uri_that_leads_to_no_store_is_refused(
    refused: Callable[..., str], closed_port: int, words: tuple[str, ...], uri: str, line: str
) -> None:
    uri = uri.replace("PORT", str(closed_port))
    if words[0] == "train":
        words = (*words, "--tracking-patience", "0")
    assert refused(*words, "--tracking-uri", uri).startswith(f"--tracking-uri {uri}: {line}")


def test_a_tracking_uri_of_the_environment_is_named_as_such(
    refused: Callable[..., str], closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    assert refused("models").startswith("--tracking-uri (from MLFLOW_TRACKING_URI) http://127.0.0.1:")


@pytest.mark.parametrize("words", [("train", SHARED_RULE), ("demo",)], ids=lambda words: words[0])
def test_an_output_folder_that_cannot_be_written_is_refused(
    refused: Callable[..., str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    line = refused(*words, "--output", tmp_path / "file" / "runs")
    assert line.startswith("--output ")
    assert str(tmp_path / "file" / "runs") in line


@pytest.mark.parametrize("words", ["models", "models show x", "models promote x 1", "ui"])
def test_without_a_store_there_is_nothing_to_look_at(refused: Callable[..., str], words: str) -> None:
    line = "--output concord-runs: has no MLflow store; a run of concord train makes one"
    assert refused(*words.split()) == line


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one model of two versions, the first of them the champion."""
    import torch

    from concord.tracking import log_model, register

    folder = tmp_path_factory.mktemp("store")
    opened = Store.open(folder)
    for accuracy in (0.75, float("nan")):
        run_id = opened.start_run("mine", "one", {"aggregator": "and-mask", "objective": "irm"}, {})
        uri = log_model(opened, run_id, torch.nn.Linear(3, 2).eval(), torch.ones(2, 3))
        register(opened, uri, run_id, "mine", {"validation_accuracy": accuracy}, "validation_accuracy", "max")
    return folder


def test_a_model_that_is_not_there_is_refused(refused: Callable[..., str], store: Path) -> None:
    assert refused("models", "show", "nothing", "--output", store) == (
        "no model 'nothing' in the registry; it has mine"
    )
    assert refused("models", "show", "mine", "best", "--output", store) == (
        "model 'mine' has no version or alias 'best'; it has 1, 2, champion"
    )
    assert refused("models", "promote", "nothing", "1", "--output", store).startswith("no model 'nothing'")
    assert refused("models", "promote", "mine", "7", "--output", store).startswith("model 'mine' has no version")


def test_models_follow_the_contract(concord_: Concord, store: Path) -> None:
    first = {"name": "mine", "version": 1, "aliases": ["champion"], "metrics": {"validation_accuracy": 0.75}}
    second = {"name": "mine", "version": 2, "aliases": [], "metrics": {"validation_accuracy": None}}  # JSON has no NaN
    both = concord_("models", "--json", "--output", store).json["models"]
    assert [{key: each[key] for key in first} for each in both] == [second, first]
    (shown,) = concord_("models", "show", "mine", "--json", "--output", store).json["models"]
    assert shown == both[1]
    assert {key: shown[key] for key in ("criterion", "aggregator", "objective", "run", "inputs", "outputs")} == {
        "criterion": "validation_accuracy",
        "aggregator": "and-mask",
        "objective": "irm",
        "run": "one",
        "inputs": "float32 (-1, 3)",
        "outputs": "float32 (-1, 2)",
    }
    assert abs(datetime.fromisoformat(shown["created"]) - datetime.now(UTC)) < timedelta(minutes=10)
    assert (shown["promoted"], len(shown["run_id"]), shown["data"]) == (False, 32, None)
    table = concord_("models", "--output", store).out
    for text in ("champion", "validation_accuracy 0.7500", "and-mask, irm", "float32 (-1, 3) → float32 (-1, 2)", "one"):
        assert text in table
    page = concord_("models", "show", "mine", "--output", store).out
    for text in ("and-mask, irm", "float32 (-1, 3)", f"{datetime.now(UTC):%Y-%m-}", shown["run_id"]):
        assert text in page


def test_or_better_belongs_to_promote(refused: Callable[..., str], store: Path) -> None:
    assert refused("models", "show", "mine", "--or-better", "--output", store) == (
        "--or-better: applies to models promote, not show; leave it out"
    )


# --- passwords


@pytest.mark.parametrize("scheme", ["http", "postgresql", "ftp"])
@pytest.mark.parametrize("user", ["reader:pa55word", "pa55word"])
@pytest.mark.parametrize("option", ["--tracking-uri", "--traking-uri"])
def test_no_password_of_a_tracking_uri_is_shown(
    refused: Callable[..., str], scheme: str, user: str, option: str
) -> None:
    where = f"{scheme}://{user}@127.0.0.1:1/dev/null/x"
    line = refused("train", SHARED_RULE, option, where, "--tracking-patience", "0")
    assert "pa55word" not in line
    assert option in line


class Empty(Quiet):
    """A tracking server with nothing in it."""

    def do_POST(self) -> None:  # noqa: N802
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")


def test_the_ui_shows_the_address_of_a_server_without_its_password(concord_: Concord) -> None:
    with serving(Empty) as port:
        said = concord_("ui", "--tracking-uri", f"http://reader:pa55word@127.0.0.1:{port}", "--json")
    assert said.status == 0
    assert said.json["mlflow"] == f"http://reader:***@127.0.0.1:{port}"
    assert "pa55word" not in said.out + said.err


def test_a_mistake_of_ours_is_json_too_and_shows_no_password(
    concord_: Concord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(words: object, as_json: bool) -> Any:
        raise AssertionError("cannot reach http://reader:pa55word@host")

    monkeypatch.setattr("concord.cli.running.jobs", fail)
    said = concord_("jobs", "--json")
    assert said.status == 1
    assert said.json == {"error": "AssertionError: cannot reach http://reader:***@host"}
    assert "Traceback" in said.err
    assert "pa55word" not in said.err


# --- what is asked for without training


def test_a_report_is_made_only_of_a_job_that_has_one_or_of_studies(
    refused: Callable[..., str], concord_: Concord, job_file: Callable[..., str]
) -> None:
    path = job_file()
    said = refused("report", path)
    assert said == f"report: job mine has no study in concord-runs; concord tune {path} makes one"
    assert "--shortcut-scale" in concord_("report", "synthetic", "--help").out


def test_the_version_is_the_package_s(concord_: Concord) -> None:
    assert concord_("--version").out == f"{concord.__version__}\n"
    assert concord_("--version", "--json").json == {"version": concord.__version__}


def test_jobs_follow_the_contract(concord_: Concord) -> None:
    said = concord_("jobs", "--json")
    assert (said.status, said.err) == (0, "")
    (synthetic,) = (job for job in said.json["jobs"] if job["name"] == "synthetic")
    assert set(synthetic) == {"name", "reproduces"}
    assert "§3.1" in synthetic["reproduces"]
    assert "synthetic" in concord_("jobs").out


# --- job files from anywhere


def test_a_job_file_is_found_from_the_users_folder_with_its_neighbours(
    concord_: Concord, job_file: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("WIDTH = 5\n")
    job_file("from neighbour_of_mine import WIDTH\nmodel = lambda config: nn.Linear(WIDTH, 2)")
    said = concord_("train", "../mine.py", "--output", "there")
    assert said.status == 2
    assert "model and loss cannot take a batch of environment a, inputs (2, 3)" in said.err


def test_a_users_file_keeps_its_path_where_a_built_in_job_has_its_name(tmp_path: Path) -> None:
    built_in = load_job("digits")
    mine = tmp_path / "digits.py"
    mine.write_text(built_in.source)
    assert load_job(str(mine)).reference == str(mine)
    assert load_job(built_in.path).reference == built_in.reference == "digits"


def test_a_whole_run_prints_its_json_only_whatever_the_job_prints(
    concord_: Concord, job_file: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "talking_neighbour.py").write_text("print('the neighbour talks')\n")
    job_file(
        "import talking_neighbour\n"
        "def model(config):\n    print('the model talks')\n    return nn.Linear(3, 2)\n"
        "rest = {'figures': lambda *a: 1 / 0}"
    )
    options = ("--epochs", "1", "--evaluations", "1", "--checkpoints", "1", "--lr", "1e30", "--optimizer", "sgd")
    said = concord_("train", "../mine.py", *options, "--output", "there", "--name", "talked", "--json")
    assert said.status == 0, said.err
    assert set(said.json) >= {"job", "run_id", "seconds", "model", "artifacts", "metrics"}
    assert said.json["job"] == "mine"
    assert "the neighbour talks" in said.err
    assert "data: 2 environments for training (0.1 of each held out)\naverage: gradients are averaged" in said.err
    assert "\nchampion: the version with the " in said.err
    assert "the model talks" in said.err
    assert "the job's figures could not be drawn (ZeroDivisionError: division by zero, line " in said.err
    again = concord_("train", "../mine.py", "--name=talked", "--resume", "--output=there", "--json")
    assert again.json["run_id"] == said.json["run_id"]
    (listed,) = concord_("runs", "--output", "there", "--where", "lr=1e30", "--json").json["runs"]
    assert (listed["run_id"], listed["job"], listed["status"]) == (said.json["run_id"], "mine", "finished")


def test_an_environment_that_only_a_worker_finds_damaged_is_one_line_too(
    concord_: Concord, job_file: Callable[..., str], folder: Path
) -> None:
    np.savez(folder / "b", inputs=np.ones((8, 4), np.float32), targets=np.arange(8) % 2)
    words = ("train", job_file(beginning=FROM_FOLDER), "--data", folder, "--output", "there", "--json")
    said = concord_(*words, "--name", "wrong")
    assert said.status == 2
    line = "environment b: one example of its inputs is (4,) float32, but (3,) float32 in environment a"
    assert said.json == {"error": line}
    assert said.err.splitlines()[-1] == f"concord: {line}"
    assert not Path("there", "runs", "wrong").exists()
    assert concord_("models", "--output", "there", "--json").json == {"models": []}
