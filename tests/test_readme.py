"""The README's code does what the README says."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_program

from concord.errors import InputError
from concord.runs.run import run
from concord.training import load_job

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = "".join(path.read_text() for path in PAGES)


def snippet(name: str) -> str:
    found = re.search(rf"<!-- tested: {name} -->\n```python\n(.*?)```", DOCUMENTS, re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.parametrize("name", ["aggregator", "stacked", "per-example", "temporal", "objective", "own-rule"])
def test_a_snippet_runs_as_it_stands(tmp_path: Path, name: str) -> None:
    run_program(snippet(name), tmp_path)


def test_the_snippet_on_procgen_runs_as_it_stands(coinrun: None, tmp_path: Path) -> None:
    run_program(snippet("procgen"), tmp_path)


def test_the_hook_snippet_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "this_file.py").write_text(snippet("hook"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "this_file.py")], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kept = [float(number) for number in re.findall(r"\d\.\d{3}", done.stdout)]  # lines may run together
    assert len(kept) == 2
    assert kept[0] == kept[1]
    assert 0 <= kept[0] <= 1


@pytest.mark.parametrize("name", ["reviews-stacked", "reviews-per-example", "reviews-hook"])
def test_a_snippet_trains_the_classifier_of_the_readme_in_a_plain_loop(tmp_path: Path, name: str) -> None:
    (tmp_path / "reviews.py").write_text(snippet("reviews"))
    # One process stands for torchrun's: port 0 is none that another program has.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}
    printed = run_program("import torch; torch.manual_seed(0)\n" + snippet(name), tmp_path, **alone)
    found = re.search(r"tensor\((\d\.\d+)", printed)
    assert found, printed
    assert float(found[1]) < 0.4  # a guess has 0.69


def test_the_classifier_of_the_readme_is_a_job(tmp_path: Path) -> None:
    from concord.runs.run import preflight
    from concord.training import ProcessContext, train
    from concord.training.loop import Silent

    (tmp_path / "reviews.py").write_text(snippet("reviews"))
    job = load_job(str(tmp_path / "reviews.py"))
    config = job.job.config.with_options(
        epochs=5, batch_size=32, lr=3e-3, threshold=0.6, evaluations=1, output=tmp_path
    )
    assert "ood_accuracy" in preflight(job, config).reported
    metrics = train(job.job, config, ProcessContext(), Silent()).metrics
    assert metrics["ood_accuracy"] > 0.9


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
    ray_cluster: None, output: Path, tmp_path: Path, hospitals: Path
) -> None:
    text = snippet("job")
    assert len(text.splitlines()) < 30
    (tmp_path / "my_job.py").write_text(text)
    job = load_job("my_job.py")
    config = job.job.config.with_options(
        data_dir=Path("hospitals"), output=Path("runs"), threshold=0.6, epochs=10, lr=1e-2
    )
    report = run(job, config, lambda _: None)
    assert (tmp_path / "runs" / "runs" / report.name / "metrics.jsonl").exists()
    assert report.model == "models:/my-job/1"
    assert report.metrics["ood_accuracy"] > 0.8
    # A run without a name of its own is resumed by the name it was given.
    again = run(job, config.with_options(name=report.name, resume=True), lambda _: None)
    assert again.run_id == report.run_id


def test_the_study_of_the_readme_runs_and_its_toml_is_the_same_space(
    ray_cluster: None, output: Path, tmp_path: Path, hospitals: Path
) -> None:
    from concord.space import Space
    from concord.studies.options import options_for
    from concord.studies.plan import make_plan
    from concord.studies.study import run_study

    text = snippet("job")
    (tmp_path / "my_job.py").write_text(text[: text.index("job = Job(")] + snippet("study"))
    found = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert found
    (tmp_path / "space.toml").write_text(found[1])
    job = load_job("my_job.py")
    assert Space.read(tmp_path / "space.toml").as_json() == job.job.studies["and-mask"].space.as_json()
    options = options_for(job.job.config).with_options(
        data_dir=Path("hospitals"),
        output=Path("runs"),
        name="s",
        trials=2,
        epochs=2,
        method="average",
        shortlist=0,
        reruns=0,
        register=False,
    )
    result = run_study(make_plan(job, options, {"trials", "epochs"}), lambda _: None)
    assert len(result.finished) == 2
    assert all("threshold" not in task.point for task, _ in result.finished)


def test_nothing_is_left_to_fill_in_and_every_linked_file_exists() -> None:
    assert re.findall(r"\b[A-Z]+_[A-Z]+\b", re.sub(r"MLFLOW_TRACKING_URI|RAY_ADDRESS", "", README)) == []
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_every_command_of_the_readme_exists() -> None:
    from concord.cli import COMMANDS

    named = set(re.findall(r"`concord ([a-z]+)", README)) | set(re.findall(r"^concord ([a-z]+)", README, re.MULTILINE))
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
    from concord.cli import COMMANDS, cluster
    from concord.cli.parsing import job_and_words, parse, with_own_rule
    from concord.studies.options import combined
    from concord.studies.report import StudyReport

    def parsed(*arguments: Any, **given: Any) -> None:
        parse(*arguments, **given)
        raise Parsed

    words = ["synthetic" if word == "JOB" else word for word in words if word != "…"]
    command, rest = words[0], words[1:]
    if command == "submit":
        mine, rest = cluster._divided(rest)
        parse(cluster._Submit, mine, "concord submit")
        command, rest = rest[0], rest[1:]
    if command in ("train", "tune"):
        job, own = with_own_rule(*job_and_words(rest, command))
        cluster._checked(command, job, own, rest[0])
    elif command in ("report", "data"):
        job, own = job_and_words(rest, command)
        options = getattr(job.job, command).options
        parse(combined(options, StudyReport) if command == "report" else options, own, f"concord {command}")
    else:
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules[COMMANDS[command].__module__], "parse", parsed)
            with pytest.raises(Parsed):
                COMMANDS[command](rest, False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_right(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commands(page, "bash", tmp_path / "shell")
    assert found
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_job.py").write_text(snippet("job"))
    (tmp_path / "my_rule.py").write_text(snippet("own-rule"))
    for words in found:
        try:
            check_command(words, monkeypatch)
        except InputError as error:
            pytest.fail(f"concord {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_zsh_reads_the_commands_of_a_page_as_bash_does(page: Path, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here")
    assert commands(page, "zsh", tmp_path / "zsh") == commands(page, "bash", tmp_path / "bash")


def test_options_that_the_text_names_can_be_pasted() -> None:
    for option in re.findall(r"`(--[a-z][^`|…]* [^`|…]*)`", DOCUMENTS):
        assert not {"<", ">"} & set(shlex.shlex(option, posix=True, punctuation_chars="<>")), option
