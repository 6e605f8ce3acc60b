"""The examples of CONTRIBUTING.md do what it says, and its files to copy exist."""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_comparison import planned

from concord.execution.failures import is_outage
from concord.execution.run import run
from concord.studies.comparison_run import run_comparison
from concord.training import ProcessContext, load_job, train
from concord.training.context import Silent

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- tested: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page, in the working folder."""
    modules = []
    for name, text in EXAMPLES.items():
        file = text.splitlines()[0].removeprefix("# ")
        assert file.endswith(".py"), f"{name}: its first line names the file"
        (tmp_path / file).write_text(text)
        modules.append(Path(file).stem)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in modules:
        sys.modules.pop(module, None)


def test_there_are_four_examples() -> None:
    assert list(EXAMPLES) == ["penalty", "dataset", "table", "failure"]
    assert PAGE.count("```python") == 4


def test_the_penalty_brings_the_risks_of_the_environments_together(folder: Path) -> None:
    import risk_gap

    job = load_job("stations_job.py").job
    worst, gap = {}, {}
    for name, objective in (("penalty", risk_gap.objective), ("mean", None)):
        mine = replace(job, objective=objective)
        config = mine.config.with_options(epochs=30, lr=0.1, evaluations=1)
        config = config if objective else config.with_options(aggregator="mean")
        metrics = train(mine, config, ProcessContext(), Silent()).metrics
        losses = [value for metric, value in metrics.items() if metric.startswith("loss/train/")]
        assert len(losses) == 5
        worst[name], gap[name] = max(losses), max(losses) - min(losses)
    assert gap["penalty"] < 0.2 < gap["mean"]
    assert worst["penalty"] < worst["mean"]


def test_the_dataset_is_the_same_in_every_process(folder: Path) -> None:
    from stations import stations

    data = stations(examples=50)
    first, again = data["coast"], stations(examples=50).load(["city", "coast"])[1]
    assert torch.equal(first.inputs, again.inputs)
    assert first.inputs.shape == (50, 2)
    assert not torch.equal(first.inputs[:, 0], data["valley"].inputs[:, 0])
    assert set(data.names) == {"coast", "valley", "forest", "lake", "city", "island"}


def test_new_workers_mend_the_failure_that_was_added(folder: Path, output: Path) -> None:
    (folder / "lossy_job.py").write_text(LOSSY)
    job = load_job("lossy_job.py")
    config = job.job.config.with_options(
        output=output, name="a", epochs=2, evaluations=1, checkpoints=1, register=False
    )
    report = run(job, config, lambda _: None)
    assert (folder / "failed").exists()
    assert report.metrics["ood_loss"] > 0
    assert not is_outage(OSError("a file that never was there"))


def test_the_table_is_trained_and_the_mask_drops_the_broken_sensor(
    ray_cluster: None, folder: Path, output: Path
) -> None:
    words = ["--epochs", "20", "--lr", "0.1", "--output", str(output)]
    assert f"concord compare stations_job.py stations {' '.join(words[:4])}\n" in PAGE
    plan = planned(load_job("stations_job.py"), ["stations"], [*words, "--seeds", "1"])
    result = run_comparison(plan, lambda _: None)
    found = {row["name"]: row["metrics"]["ood_accuracy"] for row in result.as_json()["rows"]}
    assert found["AND-mask"]["mean"] > 0.7 > 0.5 > found["average"]["mean"]
    assert "75" in next((result.folder.path / "tables").iterdir()).read_text()


LOSSY = """
import errno
from pathlib import Path
import stale_files
import torch
from concord.environments import Environments
from concord.training import Job
from stations import stations

FAILED = Path(__file__).with_name("failed")


def load(name):
    if name == "city" and not FAILED.exists():
        FAILED.touch()
        raise OSError(errno.ESTALE, "Stale file handle")
    return stations()[name].data


job = Job(
    environments=lambda config: Environments(load, train=["coast", "city"], test=["island"]),
    model=lambda config: torch.nn.Linear(2, 2),
    loss=torch.nn.functional.cross_entropy,
)
"""


def test_every_room_of_the_package_is_in_the_table_of_places_or_needs_none() -> None:
    """A newcomer who adds one of these finds the file to copy: it exists, and so does what it has to be named in."""
    places = re.findall(r"^\| (a[n]? .*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert len(places) >= 12
    for _, copy, after in places:
        for target in re.findall(r"\]\(([^)#]+)\)", copy + after):
            assert (ROOT / target).exists(), target


def test_github_runs_the_checks_on_every_supported_python() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run\n" in workflow
    tested = re.findall(r'"(\d\.\d+)"', re.findall(r"python: \[(.*)\]", workflow)[0])
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert allowed == f">={tested[0]},<3.{int(tested[-1].split('.')[1]) + 1}"
