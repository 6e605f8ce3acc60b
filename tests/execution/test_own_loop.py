"""A job with its own loop is a run like any other: recorded, tracked, killed and resumed, reported as JSON."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Concord
from forked import Command
from tracked import points_of

from concord.record import folder_of, read_events, require_run
from concord.tracking import Store
from concord.training import Evaluation, Silent, load_job

FILE = Path(__file__).parents[1] / "jobs" / "descent.py"


def evaluations(**options: Any) -> list[Evaluation]:
    """What the loop gives where nothing is kept."""
    job = load_job(str(FILE)).job
    return list(job.loop.run(job.config.with_options(**options), Silent()))


def test_its_run_is_recorded_tracked_and_reported(concord_: Concord, output: Path) -> None:
    said = concord_("train", FILE, "--name", "down", "--output", output, "--lr", "0.1", "--json")
    assert said.status == 0, said.err
    expected = evaluations(lr=0.1)
    report = said.json
    assert report.pop("seconds") > 0
    run_id = report.pop("run_id")
    assert report == {
        "job": "descent", "name": "down", "model": None, "champion": False, "registration": None,
        "artifacts": str(output / "runs" / "down"), "metrics": expected[-1].metrics,
    }  # fmt: skip
    assert said.err.splitlines()[0] == "run down: descent"
    store = Store.open(output)
    assert store.run(run_id).status == "FINISHED"
    assert points_of(store, run_id, "distance") == [(each.step, each.metrics["distance"]) for each in expected]
    assert [step for step, _ in points_of(store, run_id, "slope")] == list(range(1, 21))
    assert [each.path for each in store.client.list_artifacts(run_id) if each.path == "end.json"]
    assert require_run(folder_of(output, "down")).history == expected
    again = concord_("train", FILE, "--name", "down", "--output", output, "--resume", "--json")
    assert again.json["metrics"] == expected[-1].metrics
    assert "run down is finished" in again.err


def test_after_kill_9_it_resumes_from_its_checkpoint(concord_: Concord, output: Path, tmp_path: Path) -> None:
    words = ["train", FILE, "--name", "down", "--output", output, "--epochs", "6", "--pause", "0.4"]
    with Command(*words, folder=tmp_path) as process:
        events = output / "runs" / "down" / "events.jsonl"
        deadline = time.monotonic() + 120
        while not events.exists() or sum(each.name == "checkpoint" for each in read_events(events)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    killed = require_run(folder_of(output, "down"))
    assert killed.status is None
    begun = len(killed.checkpoints)
    assert 2 <= begun < 6
    expected = evaluations(epochs=6)

    said = concord_("train", FILE, "--name", "down", "--output", output, "--resume", "--json")
    assert said.status == 0, said.err
    assert said.json["metrics"] == expected[-1].metrics
    folder = output / "runs" / "down"
    run = require_run(folder_of(output, "down"))
    assert (run.status, run.history) == ("FINISHED", expected)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == run.checkpoints[-2:]
    steps = [each.fields["step"] for each in read_events(folder / "events.jsonl") if each.name == "metrics"]
    after = steps[len(steps) - 5 * (6 - begun) :]
    assert after == list(range(5 * begun + 1, 31))  # from the checkpoint on, and nothing before it
    assert json.loads((folder / "end.json").read_text()) == pytest.approx(expected[-1].metrics["distance"])


def test_a_loop_that_gives_no_evaluation_fails_in_one_line(concord_: Concord, output: Path, tmp_path: Path) -> None:
    file = tmp_path / "silent.py"
    file.write_text(
        "from concord.training import Job, Loop, RunConfig\n"
        "loop = Loop(lambda config, context: iter(()), lambda config: 1, {'loss': 'min'})\n"
        "job = Job(loop=loop, config=RunConfig())\n"
    )
    said = concord_("train", file, "--name", "none", "--output", output)
    assert (said.status, said.out) == (1, "")
    problem = "training failed: the loop of job silent gave no evaluation"
    assert said.err.splitlines()[-1] == f"concord: {problem}"
    as_json = concord_("train", file, "--name", "none", "--output", output, "--resume", "--json")
    assert (as_json.status, as_json.json) == (1, {"error": problem})
    assert "Traceback" not in said.err + as_json.err


def test_what_its_loop_raises_is_one_line(concord_: Concord, output: Path) -> None:
    said = concord_("train", FILE, "--name", "up", "--output", output, "--lr", "3")
    assert (said.status, said.err.splitlines()[-1]) == (2, "concord: --lr 3: goes to infinity")
    assert not (output / "runs" / "up").exists()
