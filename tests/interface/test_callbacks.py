"""Callbacks of a run, and its early end for lack of patience."""

import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from made_job import CONFIG, made_job
from recorded import Kept, without_time
from torch import nn

import concord
from concord.gradients import EnvironmentStep
from concord.record import Evaluation
from concord.training.callback import TrainingRun
from concord.training.context import ProcessContext
from concord.training.loop import train

pytestmark = pytest.mark.usefixtures("without_figures")
# No step changes anything, so the first evaluation stays the best.
STILL = {"lr": 1e-12, "epochs": 9, "evaluations": 9}


class Counting(concord.Callback):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.runs: list[TrainingRun] = []
        self.losses: list[float] = []

    def on_train_begin(self, run: TrainingRun) -> None:
        self.calls["begin"] += 1
        self.runs.append(run)

    def on_step(self, step: int, model: nn.Module, result: EnvironmentStep) -> None:
        self.calls["step"] += 1
        assert step == self.calls["step"]
        assert result.losses.ndim == 1  # of the environments of this process
        assert model.training

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls["metrics"] += 1
        self.losses.append(metrics["step/loss"])

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.calls["evaluation"] += 1

    def on_checkpoint(self, folder: Path, step: int) -> None:
        self.calls["checkpoint"] += 1
        assert (folder / "model.safetensors").exists()

    def on_train_end(self, run: TrainingRun) -> None:
        self.calls["end"] += 1


def test_a_run_calls_its_callbacks_and_the_job_s(output: Path) -> None:
    own, given = Counting(), Counting()
    run = concord.train(made_job(callbacks=[own]), callbacks=[given], output=output, name="a", register=False)
    steps = int(run.history["step"].iloc[-1])
    assert own.calls == given.calls
    assert own.calls == {"begin": 1, "step": steps, "metrics": steps, "evaluation": 2, "checkpoint": 2, "end": 1}
    assert (own.runs[0].name, own.runs[0].resumed, own.runs[0].options["lr"]) == ("a", False, 0.1)
    with_none = concord.train(made_job(), output=output, name="b", register=False)
    assert with_none.metrics == {**run.metrics, "steps_per_second": with_none.metrics["steps_per_second"]}


def test_on_ray_train_the_driver_s_callback_hears_of_all_but_steps(ray_cluster: None, output: Path) -> None:
    given = Counting()
    concord.train(made_job(), callbacks=[given], output=output, workers=2, register=False)
    assert given.calls["step"] == 0
    assert (given.calls["begin"], given.calls["evaluation"], given.calls["end"]) == (1, 2, 1)

    class Wrong(concord.Callback):
        def on_evaluation(self, evaluation: Evaluation) -> None:
            raise KeyError("mine")

    with pytest.raises(concord.RunFailedError, match="training failed: KeyError: 'mine'"):
        concord.train(made_job(), callbacks=[Wrong()], output=output, workers=2, register=False)


@pytest.mark.parametrize(
    "method",
    [
        "on_train_begin",
        "on_step",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("on_metrics", "on_evaluation", "on_checkpoint")),
    ],
)
def test_an_exception_of_a_callback_ends_the_run_with_its_line(output: Path, method: str) -> None:
    def wrong(*_: Any) -> None:
        raise KeyError("mine")

    Wrong = type("Wrong", (concord.Callback,), {method: wrong})  # noqa: N806
    with pytest.raises(concord.RunFailedError, match="training failed: KeyError: 'mine'"):
        concord.train(made_job(), callbacks=[Wrong()], output=output, name="a")
    assert concord.load("a", made_job(), output=output).status == "FAILED"  # type: ignore[union-attr]
    finished = concord.train(made_job(), output=output, name="a", resume=True, register=False)
    assert finished.history.index.tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [[3], [Counting]])
def test_what_is_no_callback_is_refused(output: Path, wrong: list[Any]) -> None:
    with pytest.raises(concord.InputError, match="is no Callback"):
        concord.train(made_job(), callbacks=wrong, output=output)
    with pytest.raises(concord.InputError, match="expected a list of Callback objects"):
        concord.train(made_job(callbacks=wrong), output=output)


def test_tensorboard_has_the_metrics_of_steps_and_evaluations(output: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    run = concord.train(made_job(), callbacks=[concord.TensorBoard()], output=output, name="a", register=False)
    (file,) = (output / "tensorboard" / "a").glob("events*")
    content, found = file.read_bytes(), {}
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        content = content[16 + length :]
    last = int(run.history["step"].iloc[-1])
    assert found["ood_accuracy", last] == pytest.approx(run.metrics["ood_accuracy"])
    assert {step for name, step in found if name == "step/loss"} == {*range(1, last + 1)}


@pytest.mark.slow
def test_weights_and_biases_takes_a_run_offline(output: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = concord.WeightsAndBiases("tests", mode="offline")
    run = concord.train(made_job(), callbacks=[writer], output=output, name="a", register=False)
    assert run.status == "FINISHED"
    (kept,) = (output / "runs" / "a" / "wandb").glob("offline-run-*")
    assert next(iter(kept.glob("*.wandb"))).stat().st_size > 1000


# --- patience


def test_a_run_out_of_patience_ends_with_the_best_weights(output: Path) -> None:
    run = concord.train(made_job(), patience=3, output=output, register=False, **STILL)
    assert run.options["keep"] == "best"
    assert run.history.index.tolist() == [1, 2, 3, 4]
    assert (run.metrics["kept_epoch"], run.metrics["out_of_patience"]) == (1, 1)
    whole = concord.train(made_job(), keep="best", output=output, register=False, **STILL)
    assert whole.history.index.tolist() == [*range(1, 10)]
    assert run.metrics["validation_loss"] == pytest.approx(whole.metrics["validation_loss"])


@pytest.mark.parametrize("place", range(1, 4))
def test_a_resumed_run_has_the_patience_that_was_left(tmp_path: Path, place: int) -> None:
    job = made_job()
    config = CONFIG.with_options(patience=3, checkpoints=9, **STILL)
    whole = Kept(tmp_path / "whole")
    undisturbed = train(job, config, ProcessContext(), whole)
    again = train(job, config, ProcessContext(), Kept(tmp_path / "again"), whole.checkpoints[place - 1])
    assert [each.epoch for each in again.history] == list(range(place + 1, 5))
    assert without_time(again.history[-1].metrics) == without_time(undisturbed.history[-1].metrics)


def test_patience_needs_the_best_weights() -> None:
    with pytest.raises(concord.InputError, match="--patience 2: ends with the best evaluation's weights"):
        made_job().config.with_options(patience=2, keep="last").check()
    with pytest.raises(concord.InputError, match="--patience -1: must not be negative"):
        made_job().config.with_options(patience=-1).check()
