"""A run whose steps are one graph each ends with what it ends with otherwise; the steps are recorded on a CPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Kept
from recorder import Recorder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.aggregation.asynchronous import as_asynchronous
from concord.environments import Environments
from concord.gradients import NonFiniteGradientError, step_graph
from concord.record import Run
from concord.training import Job, ProcessContext, TrainConfig, train
from concord.training.checkpoint import read_weights

TRAIN = ["a", "b", "c", "d"]
STEPS = 12  # three in each of four epochs
REPLAYS = STEPS - 4  # an optimizer has no state before its first step
CONFIG = TrainConfig().with_options(
    epochs=4,
    batch_size=16,
    held_out=0.0,
    aggregator="and-mask",
    threshold=0.5,
    lr=0.05,
    evaluations=2,
    checkpoints=2,
    graph=True,
)


def blobs(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(ord(name))
    targets = torch.randint(0, 3, (48,), generator=generator)
    inputs = torch.randn(48, 5, generator=generator)
    inputs[:, 0] += 2.0 * targets
    return inputs, targets


def network(config: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


JOB: Job[TrainConfig] = Job(
    environments=lambda _: Environments(blobs, train=TRAIN), model=network, loss=cross_entropy, name="blobs"
)


@pytest.fixture(autouse=True)
def _optimizers_capture_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's Adam refuses ``capturable`` on a CPU, where it would have no use."""
    module = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda supports_xla=True: ["cpu"])


def weights(kept: Kept) -> Tensor:
    model = network()
    read_weights(kept.checkpoints[-1], model)
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def trained(folder: Path, **changes: Any) -> tuple[Run, Tensor]:
    kept = Kept(folder)
    return train(JOB, CONFIG.with_options(**changes), ProcessContext(), kept), weights(kept)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"schedule": "cosine", "warmup": 0.2},
    "adamw": {"optimizer": "adamw", "clip": 0.5},
    "temporal": {"optimizer": "temporal-and-mask"},
    "sgd": {"optimizer": "sgd", "schedule": "constant", "momentum": 0.9},
    "penalties": {"l2": 0.1, "l1": 0.01, "regularization": "coupled", "schedule": "constant", "optimizer": "sgd"},
    "decoupled": {"l2": 0.1},
    "examples": {"per_example": True},
    "average of weights": {"average": "ema:0.9"},
}


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_a_run_by_a_graph_ends_as_one_without(
    options: str, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = OPTIMIZERS[options]
    run, found = trained(tmp_path / "graph", **changes)
    assert recorder.replays == REPLAYS
    without, other = trained(tmp_path / "without", graph=False, **changes)
    assert recorder.replays == REPLAYS
    # Adam forms its correction in float32 where a graph can hold it.
    torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)
    assert run.metrics["train_accuracy"] == without.metrics["train_accuracy"]
    assert run.metrics["kept_fraction"] == pytest.approx(without.metrics["kept_fraction"], abs=0.01)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("not here")

    monkeypatch.setattr(step_graph, "capture", refuse)
    assert torch.equal(trained(tmp_path / "ordinary", **changes)[1], found)


def test_a_rate_that_sgd_gets_later_is_recorded_anew(tmp_path: Path, recorder: Recorder) -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "milestones": (0.5,), "schedule": "milestones", "epochs": 6}
    found = trained(tmp_path / "graph", **changes)[1]
    assert len(recorder.graphs) == 2
    other = trained(tmp_path / "without", graph=False, **changes)[1]
    torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_ends_as_an_undisturbed_one(tmp_path: Path, recorder: Recorder) -> None:
    whole, resumed = Kept(tmp_path / "whole"), Kept(tmp_path / "resumed")
    train(JOB, CONFIG, ProcessContext(), whole)
    train(JOB, CONFIG, ProcessContext(), resumed, resume_from=whole.checkpoints[0])
    assert torch.equal(weights(resumed), weights(whole))


def test_a_checkpoint_of_a_run_without_graphs_goes_on_with_one(tmp_path: Path, recorder: Recorder) -> None:
    whole, resumed = Kept(tmp_path / "whole"), Kept(tmp_path / "resumed")
    train(JOB, CONFIG.with_options(graph=False), ProcessContext(), whole)
    train(JOB, CONFIG, ProcessContext(), resumed, resume_from=whole.checkpoints[0])
    assert recorder.replays > 0
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-4, atol=1e-5)


def test_gradients_that_are_not_finite_end_the_run_with_their_step(tmp_path: Path, recorder: Recorder) -> None:
    def late(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) / (outputs.detach().abs().amax() < 60)

    job: Job[TrainConfig] = Job(
        environments=lambda _: Environments(blobs, train=TRAIN), model=network, loss=late, name="late"
    )
    said = []
    for graph in (True, False):
        kept = Kept(tmp_path / str(graph))
        config = CONFIG.with_options(lr=1.0, optimizer="sgd", schedule="constant", momentum=0.95, graph=graph)
        with pytest.raises(NonFiniteGradientError) as error:
            train(job, config.with_options(epochs=20, checkpoints=20, aggregator="mean"), ProcessContext(), kept)
        said.append((str(error.value), error.value.step))
        for folder in kept.checkpoints:
            model = network()
            read_weights(folder, model)
            assert all(bool(each.isfinite().all()) for each in model.parameters())
    assert recorder.replays > 1
    assert said[0] == said[1]


ORDINARY: dict[str, tuple[dict[str, Any], str]] = {
    "skip": ({"nonfinite": "skip"}, "--nonfinite skip decides on the host which environments are in a step"),
    "coupled": ({"aggregator": "mean", "objective": "vrex", "penalty_weight": 1.0}, "the objective couples"),
    "float16": ({"precision": "float16"}, "the host reads the scale of the loss"),
    "weighting": ({"aggregator": "upgrad"}, "UPGrad reads the gradients' inner products"),
    "decoupled l1": ({"l1": 0.1}, "--l1 is an update of its own"),
}


@pytest.mark.parametrize("what", ORDINARY)
def test_a_run_that_cannot_be_a_graph_says_why_once(
    what: str, tmp_path: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, reason = ORDINARY[what]
    if "aggregator" in changes:
        changes = changes | {"threshold": None}
    trained(tmp_path, **changes)
    lines = [line for line in capsys.readouterr().err.splitlines() if "without a CUDA graph" in line]
    assert len(lines) == 1
    assert reason in lines[0]
    assert recorder.replays == 0


@pytest.mark.parametrize("asked", [True, False])
def test_only_who_asks_for_a_graph_is_told_that_there_is_none(
    asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with as_asynchronous():
        trained(tmp_path, graph=asked)
    line = "a step is computed without a CUDA graph: the run is not on a GPU"
    assert (line in capsys.readouterr().err) is asked
