"""The README's code does what the README says."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from concord.training import load_job
from concord.training.run import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = README + "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def snippet(name: str) -> str:
    found = re.search(rf"<!-- tested: {name} -->\n```python\n(.*?)```", DOCUMENTS, re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.parametrize("name", ["aggregator", "stacked", "per-example", "temporal", "objective"])
def test_a_snippet_runs_as_it_stands(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", snippet(name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_snippet_on_procgen_runs_as_it_stands(coinrun: None) -> None:
    test_a_snippet_runs_as_it_stands("procgen")


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
    config = job.job.config(data_dir=Path("hospitals"), output=Path("runs"), threshold=0.6, epochs=10, lr=1e-2)
    report = run(job, config, lambda _: None)
    assert (tmp_path / "runs" / "runs" / report.name / "metrics.jsonl").exists()
    assert report.model == "models:/my-job/1"
    assert report.metrics["ood_accuracy"] > 0.8
    # A run without a name of its own is resumed by the name it was given.
    again = run(job, dataclasses.replace(config, name=report.name, resume=True), lambda _: None)
    assert again.run_id == report.run_id


def test_the_study_of_the_readme_runs_and_its_toml_is_the_same_space(
    ray_cluster: None, output: Path, tmp_path: Path, hospitals: Path
) -> None:
    from concord.space import Space
    from concord.tuning.options import options_for
    from concord.tuning.plan import make_plan
    from concord.tuning.study import run_study

    text = snippet("job")
    (tmp_path / "my_job.py").write_text(text[: text.index("job = Job(")] + snippet("study"))
    found = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert found
    (tmp_path / "space.toml").write_text(found[1])
    job = load_job("my_job.py")
    assert Space.read(tmp_path / "space.toml").as_json() == job.job.studies["and-mask"].space.as_json()
    options = options_for(job.job.config)(
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
