"""Jobs with their own loop can be searched and have data, like all jobs."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from tracked import tracked_runs

from concord.cli import main
from concord.errors import InputError
from concord.record import EVENTS, folder_of, require_run
from concord.studies.plan import StudyPlan, plan_study
from concord.studies.proposals import GroupRuns
from concord.studies.study import run_study
from concord.studies.study_options import options_for
from concord.tracking import Store
from concord.training import Evaluation, Job, JobFile, Loop, load_job
from concord.training.context import Silent

pytestmark = pytest.mark.usefixtures("without_figures")
FILE = load_job(str(Path(__file__).parents[1] / "jobs" / "descent.py"))
JOB: Job[Any] = FILE.job
assert JOB.loop is not None
LOOP = JOB.loop


def evaluations(config: Any) -> list[Evaluation]:
    return list(LOOP.run(config, Silent()))


def planned(output: Path, job: Job[Any] = JOB, **options: Any) -> StudyPlan:
    given = {"trials": 4, "name": "s", "output": output, "concurrent": 1, "reruns": 2} | options
    file = JobFile(job, FILE.path, FILE.source)
    return plan_study(file, options_for(job.config).with_options(**given), given=set(given))


def test_a_loop_of_ones_own_is_searched_and_its_winner_tracked(ray_cluster: None, tmp_path: Path) -> None:
    result = run_study(planned(tmp_path, vary=("lr=0.01,0.2,3.0,0.1",), search="grid"), lambda _: None)
    for ended in result.finished:
        expected = evaluations(JOB.config.with_options(lr=ended.point["lr"]))
        assert ended.history == expected
        assert ended.metrics == expected[-1].metrics
    assert [ended.point["lr"] for ended in result.finished] == [0.2, 0.1, 0.01]  # the least distance first
    assert [ended.failure for ended in result.failed] == ["--lr 3: goes to infinity"]
    assert result.criterion.metric == "distance"
    assert [each.trial for each in result.by_selection()] == [1]
    assert set(result.reruns) == {1, 2}
    store = Store.open(tmp_path)
    (winner,) = (run for run in tracked_runs(store, "descent-studies") if run.name == "s-trial-1")
    assert winner.metrics["distance"] == result.best.metrics["distance"]
    lineage = {"concord.study": "s", "concord.trial": "1", "concord.method": "rates", "concord.selection": "own"}
    assert winner.tags.items() >= lineage.items()


def test_a_loop_of_ones_own_is_compared(
    ray_cluster: None, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "compared.py"
    path.write_text(
        Path(FILE.path).read_text()
        + "from dataclasses import replace\n"
        + "from concord.training import Comparison\n"
        + "rates = Comparison({'slow': {'lr': 0.01}, 'fast': {'lr': 0.1}}, seeds=2, columns={'left': 'distance'})\n"
        + "job = replace(job, comparisons={'rates': rates})\n"
    )
    words = ["compare", str(path), "--epochs", "3", "--output", str(output), "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    for row, lr in zip(first["rows"], (0.01, 0.1), strict=True):
        configs = [JOB.config.with_options(lr=lr, epochs=3, seed=seed) for seed in range(2)]
        left = [evaluations(config)[-1].metrics["distance"] for config in configs]
        assert (row["seeds"], row["metrics"]["distance"]["mean"]) == (2, pytest.approx(statistics.fmean(left)))
    before = _runs(output)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == first["rows"]
    assert _runs(output) == before
    assert main(["report", str(path), "--output", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"]["rates"]["rows"] == first["rows"]


def _runs(output: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in output.glob(f"runs/*/{EVENTS}")}


def test_what_a_study_of_such_a_job_cannot_do_is_said(tmp_path: Path) -> None:
    def check(config: Any) -> None:
        config.require("epochs", config.epochs % 2 == 1, "an odd number of them")

    checked = dataclasses.replace(JOB, loop=dataclasses.replace(LOOP, check_trial=check))
    for options, said in (
        ({"selection": "held-out"}, "--selection held-out: the job's own loop decides what it evaluates; leave it out"),
        ({"metric": "accuracy"}, "--metric accuracy: the job does not report it; there are distance, steps"),
        ({"metric": "steps"}, "--metric steps: the job's measure has no mode"),
        ({"metric": "worst_distance"}, "the job does not evaluate worst_distance"),
        ({"method": "derived"}, "--method derived: there is no such method; there are rates"),
        ({"vary": ("rate=0.1,0.2",)}, "space: rate: the job has no such option"),
        ({"job": checked, "vary": ("lr=0.1,0.2",)}, "--epochs 4: an odd number of them"),
        ({"job": dataclasses.replace(JOB, studies={})}, "the space is empty: nothing is varied"),
    ):
        with pytest.raises(InputError) as refused:
            planned(tmp_path, **options)
        assert said in str(refused.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="the first has to be max or min"):
        Loop(lambda *_: iter(()), lambda _: 1, {"steps": None})


def test_such_a_job_makes_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "starts.txt"
    assert main(["data", FILE.path, "--output", str(output), "--json"]) == 0
    assert capsys.readouterr().out == '{"job": "descent", "starts": 3}\n'
    assert len(output.read_text().split()) == 3


def test_a_loop_that_gives_no_evaluation_fails_each_trial(ray_cluster: None, output: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    source = Path(FILE.path).read_text().replace("range(1, config.epochs + 1)", "range(0)")
    path.write_text(source)
    words = ["tune", str(path), "--vary", "lr=0.1,0.2", "--search", "grid", "--output", str(output)]
    assert main([*words, "--concurrent", "1", "--name", "s"]) == 1
    failed = GroupRuns(require_run(folder_of(output, "s", "study"), "study")).ended("trial")
    assert [each.failure for each in failed] == ["the loop of job empty gave no evaluation"] * 2


@pytest.mark.parametrize(("loads", "trained"), [(True, "1 2 3 3 4"), (False, "1 2 3 1 2 3 4")])
def test_a_run_whose_process_died_goes_on_from_its_checkpoint_if_that_loads(
    ray_cluster: None, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool, trained: str
) -> None:
    monkeypatch.setattr("concord.studies.pool._CHECKPOINT_SECONDS", 0.0)
    path, witness = tmp_path / "mortal.py", tmp_path / "witness"
    loop, read = "for epoch in epochs[done:]:", "done, place = json"
    dies = [
        "import os, signal",
        f"lines = open({str(witness)!r}, 'a+', buffering=1)",
        "lines.write(f'{epoch} ')",
        "lines.seek(0)",
        "if lines.read().count('3') == 1 and epoch == 3: os.kill(os.getpid(), signal.SIGKILL)",
    ]
    source = Path(FILE.path).read_text().replace(loop, "\n        ".join([loop, *dies]))
    path.write_text(source if loads else source.replace(read, f"raise InputError('of another time'); {read}"))
    words = ["tune", str(path), "--vary", "lr=0.1,0.2", "--search", "grid", "--output", str(output), "--name", "s"]
    assert main([*words, "--concurrent", "1", "--reruns", "0", "--no-register"]) == 0
    ends = GroupRuns(require_run(folder_of(output, "s", "study"), "study")).finished("trial")
    assert len(ends) == 2
    for ended in ends:
        assert list(ended.history) == evaluations(JOB.config.with_options(lr=ended.point["lr"]))
    assert witness.read_text() == f"{trained} 1 2 3 4 "
