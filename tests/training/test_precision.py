"""A run in float16: the loss is scaled, rules see unscaled gradients, and what overflows is found and told."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_group
from recorded import Kept, without_time
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.environments import Environments
from concord.errors import InputError
from concord.gradients import NonFiniteGradientError
from concord.objectives import Objective
from concord.training import Job, ProcessContext, TrainConfig, build_model, train
from concord.training.checkpoint import MODEL

TRAIN = ["a", "b", "c", "d"]
# Of float16's smallest number, 6e-8, most gradients are a fraction.
SMALL = 1e-6
CONFIG = TrainConfig().with_options(
    epochs=2, batch_size=16, held_out=0.0, aggregator="mean", optimizer="sgd", lr=0.1 / SMALL, checkpoints=2
)


def blobs(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(ord(name))
    targets = torch.randint(0, 3, (48,), generator=generator)
    inputs = torch.randn(48, 5, generator=generator)
    inputs[:, 0] += 2.0 * targets
    return inputs, targets


def small_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return SMALL * cross_entropy(outputs, targets)


JOB: Job[TrainConfig] = Job(
    environments=lambda _: Environments(blobs, train=TRAIN),
    model=lambda _: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)),
    loss=small_loss,
    name="blobs",
)


def learned(folder: Path) -> Tensor:
    """The change of all weights."""
    first = build_model(JOB, CONFIG).state_dict()
    return torch.cat([(value - first[name]).flatten() for name, value in load_file(folder / MODEL).items()])


def in_group(rank: int, world_size: int, folder: Path, config: TrainConfig) -> None:
    train(JOB, config, ProcessContext(rank, world_size), Kept(folder / f"of-{world_size}-{rank}"))


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (1, {}),
        (1, {"vectorize": "vmap"}),
        (1, {"vectorize": "pooled"}),
        (1, {"vectorize": "one-by-one"}),
        (1, {"per_example": True}),
        (1, {"objective": "vrex", "penalty_weight": 1.0}),
        (1, {"clip": 1e-7, "l1": 1e-10, "regularization": "coupled"}),
        (2, {}),
        (4, {}),  # the hook of DDP
    ],
    ids=str,
)
def test_small_gradients_survive_in_float16_wherever_they_come_from(
    tmp_path: Path, processes: int, changes: dict[str, Any]
) -> None:
    config = CONFIG.with_options(**changes)
    whole = Kept(tmp_path / "float32")
    train(JOB, config, ProcessContext(), whole)
    run_group(in_group, processes, tmp_path, tmp_path, config.with_options(precision="float16"))
    expected, found = learned(whole.checkpoints[-1]), learned(tmp_path / f"of-{processes}-0" / "checkpoint-1")
    assert float((found - expected).norm()) < 0.01 * float(expected.norm())


def scaled(factor: float) -> Job[TrainConfig]:
    return dataclasses.replace(JOB, loss=lambda outputs, targets: factor * cross_entropy(outputs, targets))


ORDINARY = CONFIG.with_options(precision="float16", lr=0.1, milestones=(0.5,), schedule="milestones", l2=0.1)


def test_a_step_that_overflows_changes_the_scale_alone(tmp_path: Path) -> None:
    """The first scale, 65536, is too large for this loss; the rate falls after half of the 24 steps that count."""
    kept = Kept(tmp_path)
    metrics = train(scaled(1e3), ORDINARY.with_options(lr=1e-4, epochs=8), ProcessContext(), kept).metrics
    skipped = round(math.log2(65536 / metrics["loss_scale"]))
    assert 0 < skipped < 12
    steps = [each for _, each in kept.logged if "step/lr" in each]
    assert [each["step/lr"] == 1e-4 for each in steps] == [True] * (12 + skipped) + [False] * (12 - skipped)
    assert all(math.isfinite(each["step/loss"]) for each in steps)


def test_a_resumed_run_goes_on_with_the_scale(tmp_path: Path) -> None:
    job = scaled(1e3)
    whole, resumed = Kept(tmp_path / "whole"), Kept(tmp_path / "resumed")
    expected = train(job, ORDINARY, ProcessContext(), whole).metrics
    found = train(job, ORDINARY, ProcessContext(), resumed, resume_from=whole.checkpoints[0]).metrics
    assert without_time(found) == without_time(expected)
    assert torch.equal(learned(resumed.checkpoints[-1]), learned(whole.checkpoints[-1]))


def broken(name: str) -> tuple[Tensor, Tensor]:
    inputs, targets = blobs(name)
    return (inputs * 1e30 if name == "b" else inputs), targets  # infinite in float16


def train_broken(rank: int, world_size: int, folder: Path, config: TrainConfig) -> None:
    job = dataclasses.replace(JOB, environments=lambda _: Environments(broken, train=TRAIN))
    try:
        metrics: Any = train(job, config, ProcessContext(rank, world_size), Kept()).metrics
    except NonFiniteGradientError as error:
        metrics = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(metrics))


@pytest.mark.parametrize("processes", [1, 4])
def test_what_is_not_finite_at_any_scale_ends_the_run_or_is_left_out(tmp_path: Path, processes: int) -> None:
    """17 steps lower the scale from 65536 below 1."""
    config = CONFIG.with_options(precision="float16", epochs=8)
    run_group(train_broken, processes, tmp_path, tmp_path, config)
    for rank in range(processes):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.startswith("the gradient of environment b is not finite at step 16")
    run_group(train_broken, processes, tmp_path, tmp_path, config.with_options(nonfinite="skip"))
    metrics = json.loads((tmp_path / "0.json").read_text())
    assert metrics["skipped_environments"] == 24 - 16
    assert math.isfinite(metrics["loss/train/a"])
    assert metrics["loss_scale"] == 1


class Alternating(Objective):
    alternates = True
    coupled = True


def test_what_does_not_scale_is_refused() -> None:
    job = dataclasses.replace(JOB, objective=lambda _: Alternating(cross_entropy))
    config = CONFIG.with_options(precision="float16")
    with pytest.raises(InputError, match="precision float16: the objective trains its module itself"):
        train(job, config, ProcessContext(), Kept())
