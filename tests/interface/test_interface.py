"""The public interface: what a command does, done from Python; jobs that a program makes; what is returned."""

import os
import pickle
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from command_line import Concord
from hypothesis import given
from hypothesis import strategies as st
from made_job import made_job, model
from recorded import without_time
from test_readme import PYTHON, snippet

import concord
from concord.cli import main
from concord.environments import Environments
from concord.interface.frames import FrameFiles
from concord.interface.surroundings import left_as_found
from concord.options import options_of
from concord.record import FOLDERS, folder_of, read_run
from concord.space import Choice, Integers, LogUniform, OneOf, Uniform, format_entry, parse_entry

TINY = Path(__file__).parents[1] / "jobs" / "tiny_study.py"
COMPARED = TINY.with_name("tiny_compared.py")
README = Path(__file__).parents[2] / "README.md"
QUICK = {"shortlist": 0, "reruns": 0, "register": False}

pytestmark = pytest.mark.usefixtures("without_figures")


def test_the_package_imports_neither_torch_nor_ray_nor_mlflow() -> None:
    code = "import sys, concord; dir(concord); print({'torch', 'ray', 'mlflow', 'numpy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_every_exported_name_exists() -> None:
    assert {*concord.__all__} <= {*dir(concord)}
    assert all(getattr(concord, name) is not None for name in concord.__all__)


# --- the same as the command line


COMMANDS = {"train": concord.train, "tune": concord.tune, "compare": concord.compare}


def commands_of_the_readme() -> list[str]:
    lines = [line.partition("#")[0].strip() for line in README.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.startswith(tuple(f"concord {name} " for name in COMMANDS))]


def as_call(words: list[str], kind: type[Any]) -> tuple[list[str], dict[str, Any]]:
    """The tables and the options of a command, as Python has them."""
    tables: list[str] = []
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            options[name] = []
        else:
            (options[name] if name else tables).append(word)
    kinds = {name: str(option.hint) for name, option in options_of(kind).items()}
    for name, values in options.items():
        numbers = [float(each) if re.fullmatch(r"[\d.]+", each) else each for each in values]
        numbers = [int(each) if str(kinds.get(name)) == "<class 'int'>" else each for each in numbers]
        several = "tuple" in kinds.get(name, "") or name == "vary"
        options[name] = numbers if several else numbers[0] if numbers else True
    return tables, options


def recorded(output: Path) -> dict[str, Any]:
    """All runs and groups of a folder, without what is different at any two moments or in two folders."""
    found: dict[str, Any] = {}
    for kind, folder in FOLDERS.items():
        for path in sorted((output / folder).glob("*")):
            run = read_run(folder_of(output, path.name, kind), kind)
            assert run is not None
            config = {name: value for name, value in run.record["config"].items() if name != "output"}
            metrics = [(*moment, without_time(each)) for moment, each in run.evaluations.items()]
            tags = {k: v for k, v in run.record["tracking"]["tags"].items() if not k.startswith("mlflow")}
            asked = [(each["kind"], each.get("point"), each["key"]) for each in run.asked]
            found[f"{kind} {path.name}"] = (run.status, config, run.record["key"], tags, metrics, asked)
    return found


def one_of_each_kind(commands: list[str]) -> list[Any]:
    """The first command of each kind; the others, whose options go the same way, are for ``make test-slow``."""
    seen: set[str] = set()
    cases = []
    for command in commands:
        kind = command.split()[1]
        cases.append(pytest.param(command, marks=[pytest.mark.slow] if kind in seen else []))
        seen.add(kind)
    return cases


@pytest.mark.parametrize("command", one_of_each_kind(commands_of_the_readme()))
def test_a_command_of_the_readme_is_the_same_call(
    ray_cluster: None, hospitals_of_the_readme: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, verb, job, *words = shlex.split(command)
    small = {
        "train": ["--epochs", "1"],
        "tune": ["--epochs", "1", "--trials", "2", "--shortlist", "0", "--reruns", "0", "--no-register"],
        "compare": ["--epochs", "1", "--seeds", "1", "--methods", "mean"],
    }[verb]
    for name in [word for word in small if word.startswith("--")]:  # the command's own value of these is replaced
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    by_words, by_call = hospitals_of_the_readme / "words", hospitals_of_the_readme / "call"
    assert main([verb, job, *words, *small, "--name", "same", "--output", str(by_words)]) == 0
    loaded = concord.training.load_job(job)  # type: ignore[attr-defined]
    tables, options = as_call([*words, *small], type(loaded.job.config))
    if "no_register" in options:
        options["register"] = not options.pop("no_register")
    for name in ("trials", "shortlist", "reruns", "seeds", "epochs"):
        options |= {name: int(options[name])} if name in options else {}
    options |= {"methods": ["mean"]} if "methods" in options else {}
    COMMANDS[verb](job, *([tables] if tables else []), name="same", output=by_call, **options)
    assert recorded(by_call) == recorded(by_words)


@pytest.fixture
def hospitals_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data and the job of the README, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_job.py").write_text(snippet("job"))
    (tmp_path / "hospitals").mkdir()
    generator = np.random.default_rng(0)
    rows = []
    for name in ("north", "south", "east", "west"):
        inputs = generator.normal(size=(60, 10))
        died = (inputs[:, 0] > 0).astype(int)
        np.savez(tmp_path / "hospitals" / f"{name}.npz", inputs=inputs, targets=died)
        rows.append(pandas.DataFrame({"age": inputs[:, 0], "lab": inputs[:, 1], "died": died, "hospital": name}))
    pandas.concat(rows).to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--lr", "wide"], {"lr": "wide"}),
        (["--epochs", "0"], {"epochs": 0}),
        (["--threshold", "2"], {"threshold": 2}),
        (["--leave-out", "e"], {"leave_out": "e"}),
        (["--aggregator", "none.py:Rule"], {"aggregator": "none.py:Rule"}),
        (["--significance", "0.1", "--threshold", "0.5"], {"significance": 0.1, "threshold": 0.5}),
        (["--name", "no", "--resume"], {"name": "no", "resume": True}),
        (["--config", "none.yaml"], {"config": "none.yaml"}),
    ],
)
def test_a_wrong_option_has_the_line_of_the_command(
    concord_: Concord, words: list[str], options: Mapping[str, Any]
) -> None:
    line = concord_("train", TINY, *words).err.strip().removeprefix("concord: ")
    with pytest.raises(concord.InputError) as error:
        concord.train(TINY, **options)
    from concord.errors import format_for_cli

    assert format_for_cli(error.value).replace("'", "").replace("2:", "2.0:") == line.replace("2:", "2.0:")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: concord.train("synthetic", learning_rate=1),
            "learning_rate: there is no such option; did you mean lr?",
        ),
        (lambda: concord.train("synthetic", epochs="3"), "--epochs '3': must be a whole number"),
        (lambda: concord.train("synthetic", epochs=2.5), "--epochs 2.5: must be a whole number"),
        (lambda: concord.train("synthetic", output=3), "--output 3: must be a path"),
        (lambda: concord.train("no-job"), "job no-job: there is no such job"),
        (lambda: concord.train(3), "job 3: is of type int; give a name, a Python file, or a Job"),
        (lambda: concord.train(made_job(model=torch.nn.Linear(4, 2))), "model is of type Linear; expected a function"),
        (lambda: concord.tune(TINY, vary={"rate": LogUniform(1e-4, 1)}), "rate: the job has no such option"),
        (lambda: concord.tune(TINY, vary={"lr": OneOf({"a": {}})}), "vary lr: OneOf("),
        (lambda: concord.compare(TINY, "nothing"), "job tiny-study: has no tables to compare"),
        (lambda: concord.compare(TINY, "methds"), "job tiny-study has no such table; did you mean methods?"),
        (lambda: concord.compare(TINY, {"a": {"rate": 1}}), "rate: there is no such option"),
        (lambda: concord.compare(COMPARED, ["masks", "methods"]), "methods is not a table of the job; give it alone"),
        (lambda: concord.load("nothing", output="/nowhere"), "nothing: no run, study or comparison in /nowhere"),
        (lambda: concord.load(cast(Any, 3)), "name 3: must be text; concord.runs() lists names"),
        (lambda: concord.tune(TINY, vary=cast(Any, 5)), "vary 5: must be a dictionary such as {'lr': LogUniform("),
        (
            lambda: concord.train(made_job(model=lambda _: torch.nn.Linear(4, 2, dtype=torch.complex64))),
            "parameter weight: is complex (torch.complex64), and gradients must be real; keep its real and imaginary",
        ),
        (
            lambda: concord.train(made_job(model=lambda _: torch.nn.Linear(4, 2, device="meta"))),
            "parameter weight: is on the device meta, without values; call model.to_empty(device=…) and initialize it",
        ),
        (
            lambda: concord.compare(TINY, {}),
            "configurations {}: has no row to compare; give the options of each row by",
        ),
        (lambda: concord.compare(TINY, cast(Any, {"a": 3})), "configurations a=3: must be a dictionary; give the"),
        (lambda: concord.compare(TINY, "methods", methods=[""]), "--methods '': names no method; leave it out for"),
        (
            lambda: concord.compare(TINY, {"small": {"lr": 0.1}}, lr=0.2),
            "lr 0.2: the configuration small has it, too; give it in one of them",
        ),
        (
            lambda: concord.compare(TINY, cast(Any, [{"lr": 0.1}])),
            "table {'lr': 0.1}: must be the name of a table",
        ),
        (lambda: concord.train("synthetic", aggregator="and_mask"), "trimmed-mean; did you mean and-mask?"),
        (lambda: concord.train("synthetic", optimizer="Adam"), "did you mean adam?"),
        (lambda: concord.train("table", data={"age": [1]}), "--data {'age': [1]}: must be a path or a pandas frame"),
        (lambda: concord.train(TINY, callbacks=cast(Any, [3])), "callbacks: 3 is no Callback"),
        (
            lambda: concord.tune(TINY, metric="held_out_accuracy"),
            "on one part of the data; give --metric accuracy",
        ),
        (lambda: concord.runs(where="lr = 1 and epochs = 2"), "is more than one condition; give each as a text of its"),
        (lambda: concord.runs(top=cast(Any, "2")), "top '2': must be a whole number"),
        (lambda: concord.runs(where=cast(Any, [("lr", 1)])), "where ('lr', 1): must be text"),
        (lambda: concord.runs(metric=cast(Any, ["loss"])), "metric ['loss']: must be text"),
        (lambda: concord.load("a", kind="model"), "kind 'model': must be one of run, study, comparison"),
        (lambda: concord.runs(status="finnished"), "--status finnished: must be one of running, interrupted, finished"),
        (lambda: concord.runs(metric="loss", mode="maximum"), "--mode maximum: must be one of max, min"),
        (lambda: concord.runs(output="/nowhere"), "--output /nowhere: has no MLflow store"),
    ],
)
def test_a_wrong_call_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(concord.InputError) as error:
        call()
    assert line in str(error.value)
    assert not list(tmp_path.iterdir())


@given(st.sampled_from([float, int, np.float32, np.float64, lambda value: torch.tensor(float(value))]))
def test_numbers_of_any_library_are_options(kind: Callable[[Any], Any]) -> None:
    from concord.interface.command_options import command_of
    from concord.interface.frames import FrameFiles
    from concord.training.job import JobFile

    values = {"lr": kind(1), "l2": kind(0), "milestones": [0.5]}
    command = command_of("train", JobFile.of(made_job()), values, FrameFiles())
    assert (command.options.optimizer.lr, command.options.schedule.milestones) == (1, (0.5,))
    assert command.given == {"lr", "l2", "milestones"}


def test_what_was_begun_in_python_is_continued_by_a_call(output: Path) -> None:
    from concord.training.job import JobFile, load_job

    options = {"name": "s", "output": output, "trials": 2}
    call = f"'{TINY}', name='s', output='{output}', trials=2)"
    assert JobFile.of(str(TINY)).continuation("tune", options=options) == f"concord.tune({call}"
    command = f"concord tune {TINY} --name s --output {output} --trials 2"
    assert load_job(str(TINY)).continuation("tune", options=options) == command
    made = JobFile.of(made_job()).continuation("compare", "methods", options={"trials": 2})
    assert made == "concord.compare(job, 'methods', trials=2)"


VALUES = st.one_of(
    st.booleans(), st.none(), st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False)
)


@given(
    st.one_of(
        st.lists(VALUES, min_size=2, max_size=4, unique_by=lambda value: (type(value) is bool, value)).map(
            lambda values: Choice(*values)
        ),
        st.tuples(st.integers(-99, 9), st.integers(10, 99)).map(lambda bounds: Integers(*bounds)),
        st.tuples(st.floats(-1e6, 1.0), st.floats(1.5, 1e6)).map(lambda bounds: Uniform(*bounds)),
        st.tuples(st.floats(1e-9, 1.0), st.floats(1.5, 1e6)).map(lambda bounds: LogUniform(*bounds)),
    )
)
def test_a_domain_of_python_is_the_one_of_the_command_line(domain: Any) -> None:
    name, _, text = format_entry("lr", domain).partition("=")
    assert (name, parse_entry("lr", text)) == ("lr", domain)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (np.array([0.001, 0.01, 0.1]), "0.001,0.01,0.1"),
        (range(1, 4), "1,2,3"),
        (Choice(*np.array([16, 32])), "16,32"),
        (torch.tensor([1, 2]), "1,2"),
        (LogUniform(np.float64(0.001), np.float64(0.1)), "log:0.001:0.1"),
    ],
)
def test_numbers_of_any_library_are_varied(entry: Any, text: str) -> None:
    assert format_entry("lr", entry) == f"lr={text}"


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([1, "x"], "column b: cannot be kept in a Parquet file (Could not convert 'x'"),
        ([{1}, {2}], "column b: cannot be kept in a Parquet file (unhashable type: 'set')"),
        (None, "a is the name of two columns; rename one"),
    ],
)
def test_a_frame_that_parquet_cannot_keep_is_refused_by_its_column(column: Any, expected: str, output: Path) -> None:
    frame = pandas.DataFrame({"a": ["x", "y"], "b": column or [1, 2]})
    if column is None:
        frame.columns = pandas.Index(["a", "a"])
    with pytest.raises(concord.InputError) as refused:
        concord.train("table", data=frame, target="a", environment="a", output=output)
    assert str(refused.value).startswith(f"--data: {expected}")
    assert "\n" not in str(refused.value)
    assert not output.exists()


def test_a_frame_is_the_table_that_a_file_has(hospitals_of_the_readme: Path) -> None:
    frame = pandas.read_csv("patients.csv")
    frame.to_parquet("patients.parquet")
    options: dict[str, Any] = {"environment": "hospital", "target": "died", "epochs": 1, "register": False}
    given = concord.train("table", data=frame, name="frame", **options)
    read = concord.train("table", data="patients.parquet", name="file", **options)
    assert given.history.drop(columns="steps_per_second").equals(read.history.drop(columns="steps_per_second"))
    again = concord.train("table", data=frame.copy(), name="frame", resume=True, **options)
    assert again.options["data"] == given.options["data"]
    assert len(list((hospitals_of_the_readme / "concord-runs" / "frames").iterdir())) == 1
    with pytest.raises(concord.InputError, match="environment=hospital: no such column"):
        concord.train("table", data=frame.drop(columns="hospital"), **options)
    with pytest.raises(concord.InputError, match="--name frame"):  # its file is the earlier run's
        concord.train("table", data=frame, name="frame", **options)
    assert len(list((hospitals_of_the_readme / "concord-runs" / "frames").iterdir())) == 1


@pytest.mark.parametrize("call", COMMANDS.values(), ids=COMMANDS)
def test_a_refused_call_keeps_no_file_of_its_frame(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame({"site": ["a", "b"] * 20, "age": range(40), "died": [0, 1, 1, 0] * 10})
    for options in ({"target": "dead"}, {}, {"target": "died", "test": ["c"]}, {"target": "died", "lr": -1.0}):
        with pytest.raises(concord.InputError):
            call("table", data=frame, environment="site", **options)
        assert not list(tmp_path.iterdir())


def test_a_run_that_failed_keeps_the_file_of_its_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame({"site": ["a", "b", "c"] * 40, "age": range(120), "died": [0, 1, 1, 0] * 30})

    class Fails(concord.Callback):
        def on_evaluation(self, _: Any) -> None:
            raise RuntimeError("the disk of the laboratory")

    with pytest.raises(concord.RunFailedError):
        concord.train("table", data=frame, environment="site", target="died", callbacks=[Fails()], epochs=2)
    assert len(list(Path("concord-runs", "frames").iterdir())) == 1


def test_the_frame_that_was_trained_on_is_predicted_as_it_is(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = {"site": ["a", "b", "c"] * 40, "age": np.arange(120) % 50, "ill": ["y", "n"] * 60, "died": [0, 1, 1, 0] * 30}
    frame = pandas.DataFrame(rows)
    run = concord.train(
        "table", data=frame, environment="site", target="died", test=frame.site.unique()[2:], epochs=1, output=tmp_path
    )  # fmt: skip
    capfd.readouterr(), recwarn.clear()
    predicted = run.predict(frame)
    assert "site" not in capfd.readouterr().err + "".join(str(each.message) for each in recwarn)
    assert len(predicted) == 120
    assert run.predict(frame[["ill", "age"]]).equals(predicted)
    with pytest.raises(Exception, match="column ill is missing; the model needs age, ill"):
        run.predict(frame[["age", "site"]])


def test_a_frame_of_any_library_and_with_any_names_of_columns_is_trained_on_and_predicted(tmp_path: Path) -> None:
    """scikit-learn's examples have numbers as names; a CSV may have spaces around them."""
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(generator.normal(size=(120, 2))).assign(died=[0, 1, 1, 0] * 30)
    frame[" ward "] = pandas.to_datetime(generator.choice(["2019-01-01", "2019-05-01", "2020-01-01"], 120))
    frame[" ward "] = frame[" ward "].dt.to_period("Q")
    run = concord.train(
        "table", data=frame, environment="ward", target="died", test="2020Q1", epochs=1, output=tmp_path, name="a"
    )  # fmt: skip
    predicted = run.predict(frame)
    again = pickle.loads(pickle.dumps(run))
    assert (again.name, again.metrics, again.options) == (run.name, run.metrics, run.options)
    named = frame.set_axis(frame.columns.map(str), axis=1).astype({" ward ": str})
    table = pyarrow.Table.from_pandas(named)
    assert run.predict(table).equals(predicted)
    with pytest.raises(concord.InputError, match=r"inputs of type ndarray: must be a frame with the columns 0, 1$"):
        run.predict(frame[[0, 1]].to_numpy())
    options = {"environment": "ward", "target": "died", "test": "2020Q1", "epochs": 1, "output": tmp_path}
    concord.train("table", data=table, name="b", **options)
    loaded = concord.load("b", output=tmp_path)
    assert loaded.metrics["ood_loss"] == run.metrics["ood_loss"]  # type: ignore[union-attr]


def test_a_comparison_that_finds_its_runs_there_knows_their_data(ray_cluster: None, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"site": ["a", "b", "c"] * 40, "age": np.arange(120) % 50, "died": [0, 1, 1, 0] * 30})
    options = {"data": frame, "environment": "site", "target": "died", "test": "c", "epochs": 1, "output": tmp_path}
    run = concord.train("table", lr=0.01, seed=0, register=False, name="same", **options)
    comparison = concord.compare("table", {"small": {"lr": 0.01}}, seeds=1, first_seed=0, name="same", **options)
    assert comparison.runs.values.tolist()[0][-1] == pytest.approx(run.metrics["ood_accuracy"])
    page = comparison.html(tmp_path / "page.html").read_text()
    assert "data have changed" not in page
    assert "relation with died" in page
    with pytest.raises(concord.InputError, match="same: is the name of a run and of a comparison; give kind='run'"):
        concord.load("same", output=tmp_path)
    assert concord.load("same", kind="comparison", output=tmp_path).frame().equals(comparison.frame())  # type: ignore[union-attr]


def test_calls_of_several_threads_wait_for_one_another() -> None:
    inside: list[int] = []

    def call(number: int) -> bool:
        with left_as_found():
            inside.append(number)
            time.sleep(0.01)
            alone = inside == [number]
            with left_as_found():  # a call within a call
                inside.remove(number)
        return alone

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(8)))


def test_frames_of_other_types_or_indices_are_other_files(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"ward": [1, 2], "died": ["0", "1"]})
    others = [
        frame.astype({"ward": "category"}),
        frame.astype({"died": "category"}),
        frame.assign(ward=pandas.to_datetime(frame.ward)),
        frame.assign(ward=pandas.to_timedelta(frame.ward)),
        frame.rename_axis("patient"),
    ]
    files = {FrameFiles().keep("data", each, tmp_path) for each in [frame, *others]}
    assert len(files) == 6
    assert FrameFiles().keep("data", frame.copy(), tmp_path) in files


@pytest.mark.parametrize("name", PYTHON)
def test_the_page_on_python_runs_as_it_stands(
    ray_cluster: None, hospitals_of_the_readme: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A table's own number of epochs takes half a minute; tests/recipes/test_table_defaults.py trains by it.
    train = concord.train
    monkeypatch.setattr(concord, "train", lambda job, **options: train(job, **{"epochs": 2} | options))
    exec(compile(snippet(name), f"{name}.py", "exec"), {"__name__": "__main__"})
    runs = recorded(hospitals_of_the_readme / "concord-runs")
    assert runs
    assert {status for status, *_ in runs.values()} == {"FINISHED"}


# --- a job that a program makes


def test_a_made_job_trains_resumes_and_says_what_it_did(output: Path) -> None:
    first = concord.train(made_job(), output=output, name="one")
    assert first.status == "FINISHED"
    assert first.metrics["ood_accuracy"] > 0.5
    assert first.history.index.tolist() == [1, 2]
    assert first.history["ood_accuracy"].iloc[-1] == first.metrics["ood_accuracy"]
    assert first.environments.loc[("ood", "d"), "accuracy"] == first.metrics["ood_accuracy"]
    assert {name for _, name in first.environments.index} == {"a", "b", "c", "d"}
    assert first.frame().loc["one", "lr"] == 0.1
    assert first.options["batch_size"] == 16
    assert (output / "runs" / "one" / "job.py").read_text().count("nn.Linear(4, 2)") == 1
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(torch.from_numpy(first.predict(inputs.numpy())), first.model()(inputs).detach())
    again = concord.train(made_job(), output=output, name="one", resume=True)
    assert again.history.equals(first.history)
    assert concord.load("one", made_job(), output=output).history.equals(first.history)  # type: ignore[union-attr]
    with pytest.raises(concord.InputError, match="not built in; give load"):
        concord.load("one", output=output).model()  # type: ignore[union-attr]
    assert "ood_accuracy" in first._repr_html_()
    found = concord.runs(output=output, where="ood_accuracy > 0.5", metric="ood_accuracy")
    assert found.names == ["one"]
    assert found[0].metrics == first.metrics
    assert found.frame().loc["one", "job"] == "made"


@pytest.mark.parametrize(
    ("metric", "largest"),
    [
        ("ood_accuracy", True),
        ("r2/ood/error", True),
        ("worst_ood_mse", False),
        ("mse_weight", False),
        ("loss/ood/west", False),
        ("ood_brier", False),
        ("validation_poisson_deviance", False),
    ],
)
def test_runs_are_ordered_by_what_is_good_of_a_metric(
    metric: str, largest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find_runs(*_: Any, **options: Any) -> list[Any]:
        asked.append(options["largest"])
        return []

    monkeypatch.setattr("concord.interface.commands.Store.existing", lambda *_: None)
    monkeypatch.setattr("concord.interface.commands.find_runs", find_runs)
    concord.runs(output=tmp_path, metric=metric)
    concord.runs(output=tmp_path, metric=metric, mode="min")
    assert asked == [largest, False]


def test_a_model_that_was_not_registered_can_be_later(output: Path) -> None:
    run = concord.train(made_job(), output=output, name="one", register=False)
    assert concord.runs(output=output).names == ["one"]
    assert run.register() == "models:/made/1"
    loaded = concord.load("one", made_job(), output=output)
    assert loaded.register() == "models:/made/1"  # type: ignore[union-attr]


def test_another_definition_is_named_when_a_run_goes_on(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    concord.train(made_job(), output=output, name="one", register=False)

    def wider(config: Any) -> torch.nn.Module:
        return torch.nn.Sequential(model(config), torch.nn.Identity())

    capsys.readouterr()
    concord.train(made_job(model=wider), output=output, name="one", resume=True)
    assert "warning: the job has changed since" in capsys.readouterr().err


def test_a_made_job_trains_alike_on_ray_train_and_in_studies(ray_cluster: None, output: Path) -> None:
    alone = concord.train(made_job(), output=output, name="alone", register=False)
    several = concord.train(made_job(), output=output, name="several", workers=2, register=False)
    pandas.testing.assert_frame_equal(
        several.history.drop(columns="steps_per_second"), alone.history.drop(columns="steps_per_second"), rtol=1e-4
    )
    study = concord.tune(made_job(), output=output, name="study", trials=2, vary={"lr": LogUniform(1e-3, 1.0)}, **QUICK)
    assert study.frame()["lr"].between(1e-3, 1.0).all()
    assert study.best.metrics == {**study.best.metrics, **study.metrics}
    assert concord.load("study", output=output).frame().equals(study.frame())  # type: ignore[union-attr]
    table = concord.compare(
        made_job(), {"average": {"aggregator": "mean"}, "masked": {"aggregator": "and-mask"}}, seeds=2, output=output
    )
    assert list(table.frame().index) == ["average", "masked"]
    assert len(table.runs) == 4
    assert "o.o.d. accuracy" in table.markdown()
    assert table.table.numbers("average", "o.o.d. accuracy") == list(
        table.runs.query("configuration == 'average'")["o.o.d. accuracy"]
    )
    assert (
        concord.load("made", output=output)
        .frame()["o.o.d. accuracy"]
        .equals(  # type: ignore[union-attr]
            table.frame()["o.o.d. accuracy"]
        )
    )


def test_a_call_leaves_the_process_as_it_was(output: Path) -> None:
    def state() -> tuple[Any, ...]:
        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), handlers, drawn

    tiny = torch.tensor(1e-40)
    before = state()
    first = concord.train(made_job(), output=output, name="one", register=False)
    assert state() == before
    assert float(tiny * 1.0) > 0
    second = concord.train(made_job(), output=output, name="two", register=False)
    assert state() == before
    assert second.metrics == {**first.metrics, "steps_per_second": second.metrics["steps_per_second"]}
    with pytest.raises(concord.InputError):
        concord.train(made_job(), output=output, name="two")
    assert state() == before


def test_names_of_environments_are_taken_from_the_class_that_is_exported() -> None:
    assert concord.Environments is Environments
