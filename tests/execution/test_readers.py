"""Runs that read images while they train: equal with any number of readers, after a kill, and in a study."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Concord
from forked import Command
from photographs_folder import write_photographs
from recorded import comparable
from waiting import wait_for

from concord.environments import Environments
from concord.record import read_events
from concord.studies.trial import share_data, without
from concord.training import Job, ProcessContext, load_job, train
from concord.training.context import Silent
from concord.training.worker_data import prepare

FILE = Path(__file__).parents[1] / "jobs" / "photographs.py"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_photographs(tmp_path / "images")


@pytest.fixture
def job() -> Job[Any]:
    return load_job(str(FILE)).job


def test_metrics_are_equal_with_any_number_of_readers(job: Job[Any], images: Path) -> None:
    found = []
    for readers in (0, 1, 4):
        config = job.config.with_options(images=images, readers=readers).resolve()
        outcome = train(job, config, ProcessContext(), Silent())
        found.append([each.metrics | {"steps_per_second": 0.0} for each in outcome.history])
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_after_kill_9_a_run_sees_what_it_would_have_seen(
    job: Job[Any], concord_: Concord, output: Path, images: Path, tmp_path: Path
) -> None:
    words = ["train", FILE, "--images", images, "--output", output, "--name", "read", "--epochs", "8"]
    events = output / "runs" / "read" / "events.jsonl"
    with Command(*words, "--readers", "2", folder=tmp_path) as process:
        deadline = time.monotonic() + 120
        while not events.exists() or not any(each.name == "checkpoint" for each in read_events(events)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert not any(each.name == "ended" for each in read_events(events))
    resumed = concord_("train", FILE, "--output", output, "--name", "read", "--resume", "--readers", "1", "--json")
    assert resumed.status == 0, resumed.err
    config = job.config.with_options(images=images, epochs=8).resolve()
    expected = comparable(train(job, config, ProcessContext(), Silent()).metrics)
    assert comparable(resumed.json["metrics"]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_run_and_its_readers_ends_with_one_line(
    output: Path, images: Path, tmp_path: Path, number: signal.Signals
) -> None:
    words = ["train", FILE, "--images", images, "--output", output, "--name", "read", "--epochs", "10000"]
    checkpoints = output / "runs" / "read" / "checkpoints"
    with Command(*words, "--readers", "2", "--checkpoints", "10000", folder=tmp_path) as process:
        wait_for(lambda: process.poll() is not None or any(checkpoints.glob("checkpoint_*[0-9]")))
        os.killpg(process.pid, number)
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "concord: stopped; continue with --name read --resume"


def test_the_model_of_read_images_is_registered(concord_: Concord, output: Path, images: Path) -> None:
    said = concord_("train", FILE, "--images", images, "--output", output, "--epochs", "1", "--json")
    assert said.status == 0, said.err
    assert said.json["model"] == "models:/photographs/1"


def test_trials_share_the_sources_of_what_is_read(job: Job[Any], ray_cluster: None, images: Path) -> None:
    config = job.config.with_options(images=images).resolve()
    alone = prepare(job, config, ProcessContext())
    shared = share_data(job, config, ["lr", "readers"])
    assert shared is not None
    assert shared.fits(config.with_options(lr=0.5, readers=1))
    looked = (images / "looked through").read_text()
    found = shared.prepared()
    assert (images / "looked through").read_text() == looked

    def first(data: Any) -> torch.Tensor:
        inputs: torch.Tensor = data.source.take(torch.tensor([[2, 0]]), torch.tensor([[7, 8]]))[0]
        return inputs

    for ours, theirs in zip(found.training, alone.training, strict=True):
        assert torch.equal(first(ours.training), first(theirs.training))
        assert torch.equal(ours.held_out.targets, theirs.held_out.targets)  # type: ignore[union-attr]
    fold = without(found, ["day"])
    assert [name for name, _ in fold.eval_only] == ["day", "night"]
    assert sorted(fold.eval_only[0][1].targets.tolist()) == [0] * 12 + [1] * 12


def test_data_that_cannot_be_sent_are_loaded_by_each_trial(job: Job[Any], ray_cluster: None, images: Path) -> None:
    def environments(config: Any) -> Environments:
        source, lock = job.environments(config)["day"].source, threading.Lock()
        locked = dataclasses.replace(source, transform=lambda row: (lock, row)[1])
        return Environments(lambda _: locked, ["a", "b"])

    other = dataclasses.replace(job, environments=environments)
    assert share_data(other, job.config.with_options(images=images, held_out=0.0).resolve(), ["lr"]) is None
