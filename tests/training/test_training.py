"""The training loop in this process: exact on resume, clear errors, the same in every placement."""

import dataclasses
import gc
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_group, run_program
from recorded import Kept, without_time
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from concord.aggregation import MGDA
from concord.environments import BatchStream, Environment, Environments
from concord.errors import CheckpointError, InputError, format_for_cli
from concord.gradients import (
    HookedGradients,
    NonFiniteGradientError,
    PerExampleGradients,
    StackedGradients,
    StepClock,
)
from concord.objectives import ObjectiveGradients
from concord.training import Job, ProcessContext, TrainConfig, build_model, share, train
from concord.training.checkpoint import (
    CHECKSUMS,
    MODEL,
    MOMENTUM,
    OPTIMIZER,
    PROGRESS,
    read_checkpoint,
    read_weights,
    verify_checkpoint,
    write_checksums,
)
from concord.training.context import Silent
from concord.training.declared_measures import Measure
from concord.training.evaluation import EvaluatedPart, correct, evaluate
from concord.training.gradient_source import gradient_source
from concord.training.kept_weights import BEST, SEEN
from concord.training.loop import training
from concord.training.optimization import Optimization


def blobs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    targets = torch.randint(0, 3, (60,), generator=generator)
    inputs = torch.randn(60, 5, generator=generator)
    inputs[:, 0] += 2.0 * targets
    inputs[:, 4] += targets * torch.randn((), generator=generator)
    return inputs, targets


def network(_: TrainConfig) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def plain_network(_: TrainConfig) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))


def environments(_: TrainConfig) -> Environments:
    return Environments(blobs, train=["a", "b", "c", "d"], validation=["v"], test=["t"])


JOB: Job[TrainConfig] = Job(environments=environments, model=network, loss=cross_entropy, name="blobs")
CONFIG = TrainConfig().with_options(
    epochs=6, batch_size=16, lr=1e-2, threshold=0.5, checkpoints=3, evaluations=3, l1=1e-4
)


def grouped(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Biases and norms first, more slowly and without decay."""
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [
        {"params": plain, "lr": 0.1 * config.optimizer.lr, "weight_decay": 0.0},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim >= 2]},
    ]


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"optimizer": "sgd"}, {"environment_momentum": 0.9}, {"steps_per_update": 3}),
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
    ids=str,
)
def test_a_resumed_run_ends_exactly_as_an_undisturbed_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = CONFIG.with_options(**changes)
    job = dataclasses.replace(JOB, parameter_groups=grouped) if "weight_decay" in changes else JOB
    whole = Kept(tmp_path / "whole")
    outcome = train(job, config, ProcessContext(), whole)
    assert len(whole.checkpoints) == 3
    resumed = Kept(tmp_path / "resumed")
    again = train(job, config, ProcessContext(), resumed, resume_from=whole.checkpoints[0])
    assert without_time(again.metrics) == without_time(outcome.metrics)
    assert [at.epoch for at in outcome.history] == [2, 4, 6]
    assert [at.epoch for at in again.history] == [4, 6]
    first, second = (torch.load(k.checkpoints[-1] / OPTIMIZER, weights_only=True) for k in (whole, resumed))
    for one, other in zip(first["optimizer"]["state"].values(), second["optimizer"]["state"].values(), strict=True):
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[name])


def test_every_trained_parameter_is_in_one_group() -> None:
    def groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
        return [{"params": parameters} for parameters in made(list(model.parameters()))]

    job = dataclasses.replace(JOB, parameter_groups=groups)
    made: Callable[[list[nn.Parameter]], list[list[nn.Parameter]]] = lambda each: [each[:2], each[2:]]  # noqa: E731
    model = build_model(job, CONFIG)
    next(model.parameters()).requires_grad_(False)
    assert [len(group["params"]) for group in job.parameters_of(model, CONFIG)] == [1, 3]  # the frozen one is left out
    made = lambda each: [each[1:], each[3:]]  # noqa: E731
    with pytest.raises(InputError, match=r"parameter_groups: 4.weight is in 2 of them; expected in one"):
        job.parameters_of(model, CONFIG)
    made = lambda each: [each[2:]]  # noqa: E731
    with pytest.raises(InputError, match=r"parameter_groups: 1.weight is in none of them; expected in one"):
        job.parameters_of(model, CONFIG)


def test_every_step_and_epoch_is_logged_once_with_its_metrics() -> None:
    kept = Kept()
    outcome = train(JOB, CONFIG, ProcessContext(), kept)
    steps = [step for step, metrics in kept.logged if "step/loss" in metrics]
    assert steps == list(range(1, outcome.steps + 1))
    evaluated = [(each.step, each.epoch) for each in outcome.history]
    others = [(step, metrics["epoch"]) for step, metrics in kept.logged if "epoch" in metrics]
    assert sorted(evaluated + others) == [(epoch * outcome.steps // 6, epoch) for epoch in range(1, 7)]
    last = outcome.metrics
    for name in ("train_accuracy", "held_out_accuracy", "validation_accuracy", "ood_accuracy", "kept_fraction"):
        assert 0 <= last[name] <= 1
    for split, names in {"train": "abcd", "held_out": "abcd", "validation": "v", "ood": "t"}.items():
        by_name = [last[f"accuracy/{split}/{name}"] for name in names]
        assert last[f"worst_{split}_accuracy"] == min(by_name)
        assert last[f"{split}_accuracy"] == pytest.approx(sum(by_name) / len(by_name))
    layers = [name for name, _ in network(CONFIG).named_parameters()]
    assert {f"kept_fraction/{name}" for name in layers} <= set(last)


@pytest.mark.parametrize("changes", [{}, {"steps_per_update": 2}], ids=str)
def test_what_a_weighting_gives_each_environment_is_a_metric(changes: dict[str, Any]) -> None:
    kept = Kept()
    metrics = train(JOB, CONFIG.with_options(aggregator="mgda", epochs=3, **changes), ProcessContext(), kept).metrics
    weights = [metrics[f"weight/{name}"] for name in "abcd"]
    assert sum(weights) == pytest.approx(1)
    assert min(weights) >= 0
    assert not any("kept_fraction" in name for _, logged in kept.logged for name in logged)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_weight_is_reported_by_the_name_of_its_environment(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    shares = torch.arange(1, 5).repeat_interleave(batches).double() / (10 * batches)
    monkeypatch.setattr(MGDA, "weights", lambda *_: shares)
    config = CONFIG.with_options(aggregator="mgda", epochs=1, steps_per_update=batches)
    metrics = train(JOB, config, ProcessContext(), Kept()).metrics
    assert [metrics[f"weight/{name}"] for name in "abcd"] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_step_of_changing_environments_has_no_weights_by_name() -> None:
    config = CONFIG.with_options(aggregator="mgda", epochs=3, environments_per_step=2)
    metrics = train(JOB, config, ProcessContext(), Kept()).metrics
    assert not any(name.startswith("weight/") for name in metrics)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"environments_per_step": 1}, "--aggregator mgda: compares environments, and a step has only one"),
        ({"per_example": True}, "--aggregator mgda: compares whole gradients, which --per-example does not form"),
        ({"aggregator": "clip", "clip_norm": 0.0}, "--clip-norm 0.0: must be above 0"),
        ({"aggregator": "trimmed-mean", "trimmed_fraction": 0.5}, "--trimmed-fraction 0.5: must be at least 0, and"),
        ({"aggregator": "krum", "byzantine": -1}, "--byzantine -1: must be at least 0"),
        ({"aggregator": "krum", "selected": 0}, "--selected 0: must be at least 1"),
        (
            {"aggregator": "krum", "environments_per_step": 2},
            "--byzantine 1: needs 4 environments at each step, and there",
        ),
        ({"aggregator": "krum", "selected": 50}, "--selected 50: there are"),
        ({"aggregator": "cagrad", "conflict_radius": -1.0}, "--conflict-radius -1.0: must be at least 0"),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else "",
)
def test_a_rule_that_cannot_compare_is_refused_before_it_trains(changes: dict[str, Any], problem: str) -> None:
    config = CONFIG.with_options(**{"aggregator": "mgda"} | changes)
    with pytest.raises(InputError) as caught:
        config.check() or train(JOB, config, ProcessContext(), Kept())  # type: ignore[func-returns-value]
    assert format_for_cli(caught.value).startswith(problem)


def test_where_no_environment_is_for_validation_the_held_out_parts_are() -> None:
    job = dataclasses.replace(JOB, environments=lambda _: Environments(blobs, train=["a", "b"]))
    metrics = train(job, CONFIG, ProcessContext(), Kept()).metrics
    assert metrics["validation_accuracy"] == metrics["held_out_accuracy"]
    assert metrics["worst_validation_loss"] == metrics["worst_held_out_loss"]
    assert "ood_accuracy" not in metrics


def test_a_regression_reports_losses_and_the_measures_of_the_job() -> None:
    def line(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = blobs(name)
        return inputs, inputs[:, :1] * 2 + 0.1 * targets[:, None]

    def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).abs()[:, 0]

    job: Job[TrainConfig] = Job(
        environments=lambda _: Environments(line, train=["a", "b"], test=["t"]),
        model=lambda _: nn.Linear(5, 1),
        loss=mse_loss,
        measures={"absolute_error": absolute},
        name="line",
    )
    config = CONFIG.with_options(epochs=60, lr=5e-2, aggregator="mean")
    metrics = train(job, config, ProcessContext(), Kept()).metrics
    assert "train_accuracy" not in metrics
    assert metrics["ood_loss"] < 0.1
    assert metrics["ood_absolute_error"] < 0.3


def test_evaluation_is_the_mean_over_examples_of_all_environments() -> None:
    model = nn.Linear(5, 3)
    loaded = Environments(blobs, train=["a", "b"]).load(["a", "b"])
    small = Environment("b", loaded[1].take(slice(7)))
    parts = [EvaluatedPart("train", "a", loaded[0]), EvaluatedPart("train", "b", small)]
    metrics = evaluate(model, cross_entropy, {}, parts, ProcessContext())
    inputs, targets = torch.cat([loaded[0].inputs, small.inputs]), torch.cat([loaded[0].targets, small.targets])
    assert metrics["train_loss"] == pytest.approx(cross_entropy(model(inputs), targets).item(), rel=1e-6)
    assert metrics["worst_train_loss"] == max(metrics["loss/train/a"], metrics["loss/train/b"])


def test_shares_cover_all_environments_and_differ_by_one_at_most() -> None:
    names = [str(index) for index in range(32)]
    for world_size in (1, 3, 5, 8, 32):
        shares = [share(names, ProcessContext(rank, world_size)) for rank in range(world_size)]
        assert [name for own in shares for name in own] == names
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _train_in_group(rank: int, world_size: int, folder: Path, config: TrainConfig) -> None:
    job = dataclasses.replace(JOB, model=plain_network)
    kept = Kept(folder / f"rank-{rank}")
    outcome = train(job, config, ProcessContext(rank, world_size), kept)
    if rank == 0:
        (folder / "metrics.json").write_text(json.dumps(outcome.metrics))


MOMENTUM_CONFIG, VOTES_CONFIG = CONFIG.with_options(environment_momentum=0.9), CONFIG.with_options(steps_per_update=3)
EXAMPLES_CONFIG = CONFIG.with_options(per_example=True, threshold=0.2)
PCGRAD_CONFIG = CONFIG.with_options(aggregator="pcgrad")


@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (2, CONFIG),
        (2, CONFIG.with_options(average="ema:0.9", schedule="cosine", warmup=0.2)),
        (3, CONFIG.with_options(average="swa:0.5", keep="best")),
        pytest.param(4, CONFIG, marks=pytest.mark.slow),
        (3, EXAMPLES_CONFIG),
        pytest.param(3, MOMENTUM_CONFIG, marks=pytest.mark.slow),
        pytest.param(4, MOMENTUM_CONFIG, marks=pytest.mark.slow),
        (4, VOTES_CONFIG),
        pytest.param(2, PCGRAD_CONFIG, marks=pytest.mark.slow),
        (4, PCGRAD_CONFIG.with_options(steps_per_update=2)),
        (4, CONFIG.with_options(accumulate=3)),
    ],
)
def test_processes_that_share_the_work_train_what_one_process_trains(
    tmp_path: Path, world_size: int, config: TrainConfig
) -> None:
    """2 processes with 2 environments each (two-level), 4 with one each (the DDP hook), and 3 that share the examples
    of each batch of 4 × 16, against one with all; 3 and 4 with averages, 4 with 3 batches of one environment; PCGrad.
    """
    alone = Kept(tmp_path / "alone")
    metrics = train(dataclasses.replace(JOB, model=plain_network), config, ProcessContext(), alone).metrics
    run_group(_train_in_group, world_size, tmp_path, tmp_path, config)
    shared = json.loads((tmp_path / "metrics.json").read_text())
    assert set(shared) == set(metrics)
    for name, value in without_time(metrics).items():
        assert shared[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    one, other = plain_network(CONFIG), plain_network(CONFIG)
    read_weights(alone.checkpoints[-1], one)
    read_weights(tmp_path / "rank-0" / "checkpoint-2", other)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _resume_in_group(rank: int, world_size: int, folder: Path, job: Job[TrainConfig], checkpoint: Path) -> None:
    resumed = Kept(folder / f"rank-{rank}")
    train(job, MOMENTUM_CONFIG, ProcessContext(rank, world_size), resumed, checkpoint)


def _two_environments(_: TrainConfig) -> Environments:
    return Environments(blobs, train=["a", "b"])


@pytest.mark.parametrize(("of", "world_size"), [(environments, 3), (_two_environments, 2)])
def test_averages_of_environments_go_on_in_other_processes(tmp_path: Path, of: Any, world_size: int) -> None:
    """From one process to 3 with 2, 1 and 1 environments, or to 2 with one each (the hook), and back to one."""
    job = dataclasses.replace(JOB, model=plain_network, environments=of)
    whole, last = Kept(tmp_path / "whole"), Kept(tmp_path / "last")
    train(job, MOMENTUM_CONFIG, ProcessContext(), whole)
    run_group(_resume_in_group, world_size, tmp_path, tmp_path, job, whole.checkpoints[0])
    train(job, MOMENTUM_CONFIG, ProcessContext(), last, tmp_path / "rank-0" / "checkpoint-0")
    for folder in (tmp_path / "rank-0" / "checkpoint-1", last.checkpoints[-1]):
        for file in (MODEL, MOMENTUM):
            expected, found = load_file(whole.checkpoints[-1] / file), load_file(folder / file)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_without_these_environments_averages_is_refused(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "without")
    train(JOB, CONFIG.with_options(epochs=1), ProcessContext(), kept)
    with pytest.raises(InputError, match=r"of a run without --environment-momentum; it has no environment_momentum\."):
        train(JOB, MOMENTUM_CONFIG, ProcessContext(), Kept(), resume_from=kept.checkpoints[0])
    kept = Kept(tmp_path / "with")
    train(JOB, MOMENTUM_CONFIG.with_options(epochs=1), ProcessContext(), kept)
    others = dataclasses.replace(JOB, environments=lambda _: Environments(blobs, train=["a", "x"]))
    with pytest.raises(InputError, match=r"momentum\.safetensors has no environment x"):
        train(others, MOMENTUM_CONFIG, ProcessContext(), Kept(), resume_from=kept.checkpoints[0])
    (kept.checkpoints[0] / MOMENTUM).write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match=r"momentum\.safetensors is damaged"):
        train(JOB, MOMENTUM_CONFIG, ProcessContext(), Kept(), resume_from=kept.checkpoints[0])


def test_an_epoch_with_several_batches_an_update_has_fewer_updates() -> None:
    """54 training examples of each environment are 4 batches of 16: with 3 an update 2 updates, the rest of the second
    from the next pass; every environment's loss is the mean of its batches'."""
    kept = Kept()
    outcome = train(dataclasses.replace(JOB, model=plain_network), VOTES_CONFIG, ProcessContext(), kept)
    assert outcome.steps == 2 * CONFIG.schedule.epochs
    steps = [metrics for _, metrics in kept.logged if "step/loss" in metrics]
    rates = [metrics["step/lr"] for metrics in steps]
    assert rates == pytest.approx([1e-2] * 6 + [1e-3] * 3 + [1e-4] * 3)
    config = VOTES_CONFIG.with_options(held_out=0.0, lr=1e-30, epochs=1)
    train(dataclasses.replace(JOB, model=plain_network), config, ProcessContext(), kept := Kept())
    loaded = Environments(blobs, train=["a", "b", "c", "d"]).load(["a", "b", "c", "d"])
    model, stream = build_model(dataclasses.replace(JOB, model=plain_network), config), BatchStream(loaded, 16, seed=0)
    inputs, targets = (torch.cat([stream.batch(k)[at] for k in range(3)], 1) for at in (0, 1))
    losses = [float(cross_entropy(model(x), y).detach()) for x, y in zip(inputs, targets, strict=True)]
    assert kept.logged[0][1]["step/loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert kept.logged[0][1]["step/worst_loss"] == pytest.approx(max(losses), rel=1e-5)


def test_a_non_finite_gradient_ends_the_run_or_is_left_out_and_counted() -> None:
    def exploding(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = blobs(name)
        return (inputs * 1e30 if name == "b" else inputs), targets

    def cubed(_: TrainConfig) -> nn.Module:
        class Cube(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(5, 3)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return self.linear(inputs) ** 3

        return Cube()

    job = dataclasses.replace(JOB, environments=lambda _: Environments(exploding, train=["a", "b"]), model=cubed)
    config = CONFIG.with_options(held_out=0.0, lr=1e-4)
    with pytest.raises(NonFiniteGradientError, match=r"environment b .* step 0"):
        train(job, config, ProcessContext(), Kept())
    outcome = train(job, config.with_options(nonfinite="skip"), ProcessContext(), Kept())
    assert outcome.metrics["skipped_environments"] == outcome.steps
    assert math.isfinite(outcome.metrics["loss/train/a"])


def test_propagate_lets_the_update_be_what_the_gradients_are() -> None:
    job = dataclasses.replace(JOB, model=lambda _: nn.Linear(5, 3), loss=lambda outputs, _: (outputs * math.inf).sum())
    config = CONFIG.with_options(epochs=1, nonfinite="propagate", aggregator="mean")
    config.check()
    outcome = train(job, config, ProcessContext(), Kept())
    assert outcome.metrics["skipped_environments"] == 0
    assert not math.isfinite(outcome.metrics["train_loss"])


# --- a risk in place of a loss


def blob_tree(name: str) -> dict[str, Tensor]:
    inputs, targets = blobs(name)
    return {"inputs": inputs, "label": targets}


def blob_risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
    return cross_entropy(model(batch["inputs"]), batch["label"])


def blob_accuracy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return correct(outputs, batch["label"])


RISK_JOB: Job[TrainConfig] = Job(
    environments=lambda _: Environments(blob_tree, train=["a", "b", "c", "d"], validation=["v"], test=["t"]),
    model=network,
    risk=blob_risk,
    measures={"accuracy": blob_accuracy},
    name="blobs",
)


@pytest.mark.parametrize("changes", [{}, {"environments_per_step": 2}, {"per_example": True, "threshold": 0.2}])
def test_a_risk_that_is_the_mean_loss_trains_what_the_loss_trains(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = CONFIG.with_options(**changes)
    by_loss, by_risk = (train(job, config, ProcessContext(), Kept()).metrics for job in (JOB, RISK_JOB))
    assert without_time(by_risk) == pytest.approx(without_time(by_loss), rel=1e-6)


def weighted_risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
    """Examples of class 0 weigh nothing."""
    losses = cross_entropy(model(batch["inputs"]), batch["label"], reduction="none")
    weights = batch["label"].float() + 1e-3
    return (losses * weights).sum(), weights.sum()


def test_a_weighted_risk_is_evaluated_by_its_weight_in_any_chunks() -> None:
    model = nn.Linear(5, 3)
    loaded = Environments(blob_tree, train=["a", "b"]).load(["a", "b"])
    parts = [
        EvaluatedPart("train", "a", loaded[0]),
        EvaluatedPart("train", "b", Environment("b", loaded[1].take(slice(7)))),
    ]

    def found(examples_at_once: int) -> dict[str, float]:
        measures = {"accuracy": blob_accuracy}
        at = {"examples_at_once": examples_at_once}
        return evaluate(model, weighted_risk, measures, parts, ProcessContext(), **at)

    whole = {name: torch.cat([part.data.data[name] for part in parts if part.data]) for name in ("inputs", "label")}
    total, weight = weighted_risk(model, whole, 0)
    for examples_at_once in (4096, 8, 3):
        metrics = found(examples_at_once)
        assert metrics["train_loss"] == pytest.approx((total / weight).item(), rel=1e-5)
        assert metrics["train_accuracy"] == pytest.approx(float(blob_accuracy(model(whole["inputs"]), whole).mean()))


def test_a_batch_of_which_the_risk_takes_nothing_counts_for_nothing() -> None:
    def of_class_two(model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        taken = (batch["label"] == 2).float()
        return (cross_entropy(model(batch["inputs"]), batch["label"], reduction="none") * taken).sum(), taken.sum()

    model, part = nn.Linear(5, 3), EvaluatedPart("train", "a", Environments(blob_tree, train=["a"])["a"])
    whole, single = (
        evaluate(model, of_class_two, {}, [part], ProcessContext(), examples_at_once=count) for count in (60, 1)
    )
    assert single == pytest.approx(whole, rel=1e-5)


def test_a_measure_of_a_risk_that_never_calls_the_model_is_refused() -> None:
    part = EvaluatedPart("train", "a", Environments(blob_tree, train=["a"])["a"])

    def risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
        return model.weight.square().sum()  # type: ignore[operator, union-attr]

    assert evaluate(nn.Linear(5, 3), risk, {}, [part], ProcessContext())["train_loss"] > 0
    with pytest.raises(InputError, match="measure accuracy: the risk does not call the model"):
        evaluate(nn.Linear(5, 3), risk, {"accuracy": blob_accuracy}, [part], ProcessContext())


def test_a_risk_is_told_the_step_in_training_and_in_evaluation() -> None:
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    def risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
        seen[model.training].add(step)
        return blob_risk(model, batch, step)

    outcome = train(dataclasses.replace(RISK_JOB, risk=risk), CONFIG, ProcessContext(), Kept())
    assert seen[True] == set(range(outcome.steps))
    assert seen[False] == {evaluation.step for evaluation in outcome.history}


def test_the_warm_up_of_a_penalty_takes_its_steps_from_the_run() -> None:
    config = CONFIG.with_options(objective="irm", penalty_weight=100.0, aggregator="mean", l1=0.0)

    def losses(**options: float) -> list[float]:
        train(JOB, config.with_options(**options), ProcessContext(), kept := Kept())
        return [metrics["step/loss"] for _, metrics in kept.logged if "step/loss" in metrics]

    small = losses(penalty_weight=1.0)  # the weight during the warm-up
    for warmup in (0.0, 0.5, 0.75):
        differs = [one != other for one, other in zip(losses(penalty_warmup=warmup), small, strict=True)]
        assert differs.index(True) == warmup * len(small)
    weight = config.with_options(penalty_warmup=0.5).objective.build(cross_entropy, len(small)).weight
    assert (weight.at(len(small) // 2 - 1), weight.at(len(small) // 2)) == (1.0, 100.0)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"loss": None}, "give a loss.* or a risk"),
        ({"risk": blob_risk}, "give a loss.* or a risk"),
        (
            {"loss": None, "risk": cross_entropy},
            r"risk: takes other arguments; expected a function of \(model, batch, step",
        ),
        ({"loss": None, "risk": lambda model, batch: model(*batch)}, "risk: takes other arguments"),
    ],
)
def test_a_job_has_a_loss_or_a_risk(parts: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        dataclasses.replace(JOB, **parts)


@pytest.mark.parametrize("objective", ["irm", "vrex", "mm-rex", "meta-irm"])
def test_an_objective_of_a_risk_that_is_the_mean_loss_is_that_of_the_loss(objective: Any) -> None:
    changes: dict[str, Any] = {"objective": objective, "aggregator": "mean", "penalty_weight": 0.5, "epochs": 2}
    config = CONFIG.with_options(penalty_warmup=0.5, **changes)
    # Without dropout, which a loss draws for all environments at once.
    jobs = [dataclasses.replace(job, model=plain_network) for job in (JOB, RISK_JOB)]
    by_loss, by_risk = (train(job, config, ProcessContext(), Kept()).metrics for job in jobs)
    assert without_time(by_risk) == pytest.approx(without_time(by_loss), rel=1e-4)


def _weighted_examples(rank: int, world_size: int, folder: Path) -> None:
    kept = Kept()
    train(WEIGHTED_JOB, EXAMPLES_CONFIG, ProcessContext(rank, world_size), kept)
    if rank == 0:
        (folder / "steps.json").write_text(json.dumps(_step_metrics(kept)))


def _step_metrics(kept: Kept) -> list[list[float]]:
    steps = [metrics for _, metrics in kept.logged if "step/loss" in metrics]
    return [[metrics["step/loss"], metrics["step/worst_loss"]] for metrics in steps]


WEIGHTED_JOB = dataclasses.replace(RISK_JOB, model=plain_network, risk=weighted_risk)


def test_processes_that_share_a_batch_report_its_weighted_loss(tmp_path: Path) -> None:
    """3 processes have 5 or 6 of the 16 examples each, of unlike weights."""
    alone = Kept()
    train(WEIGHTED_JOB, EXAMPLES_CONFIG, ProcessContext(), alone)
    run_group(_weighted_examples, 3, tmp_path, tmp_path)
    shared = json.loads((tmp_path / "steps.json").read_text())
    torch.testing.assert_close(torch.tensor(shared), torch.tensor(_step_metrics(alone)), rtol=1e-4, atol=1e-5)


# --- memory


@pytest.mark.parametrize("held_out", [0.0, 0.25])
def test_a_process_holds_its_data_once(held_out: float) -> None:
    def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4000, 64), float(ord(name))), torch.zeros(4000, dtype=torch.long)

    job = Job(lambda _: Environments(load, ["a", "b", "c"]), lambda _: nn.Linear(64, 3), cross_entropy)
    gc.freeze()  # ignore existing objects
    run = training(
        job,
        CONFIG.with_options(epochs=2, evaluations=2, batch_size=100, held_out=held_out).resolve(),
        ProcessContext(),
        Silent(),
    )
    next(run)  # in the middle of it
    data = 3 * 4000 * (64 * 4 + 8)
    assert data <= bytes_of_new_tensors() < 1.1 * data


STEPS_IN_A_TUNED_PROCESS = """
import psutil, torch
from concord.environments import Environments
from concord.training import Job, ProcessContext, TrainConfig
from concord.training.loop import _Run, StepsSoFar
from concord.training.process import tune_process
from concord.training.worker_data import prepare
from torch import nn

tune_process(1)

def convolution(of, to, stride=1):
    return nn.Sequential(nn.Conv2d(of, to, 3, stride, 1), nn.ReLU(), nn.GroupNorm(8, to))

def model(_):
    layers = convolution(1, 64), convolution(64, 32, 2), convolution(32, 32)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))

def load(name):
    return torch.randn(1920, 1, 20, 20), torch.arange(1920) % 2

job = Job(lambda _: Environments(load, ["a", "b", "c"]), model, nn.functional.cross_entropy)
config = TrainConfig().with_options(batch_size=32, held_out=0.0, aggregator="mean", precision="bfloat16").resolve()
run = _Run(job, config, ProcessContext(), prepare(job, config, ProcessContext()), StepsSoFar())
step, process, sizes = run.optimization.step, psutil.Process(), []

def stepped(number):
    sizes.append(process.memory_info().rss)
    step(number)

run.optimization.step = stepped
run.epoch(0)
print((max(sizes) - sizes[10]) / 2**20)
"""


@pytest.mark.slow
def test_a_process_does_not_grow_with_the_steps_of_an_epoch(tmp_path: Path) -> None:
    """It grew while the numbers of each step were tensors of their own."""
    assert float(run_program(STEPS_IN_A_TUNED_PROCESS, tmp_path)) < 20


def bytes_of_new_tensors() -> int:
    """Memory of all tensors since ``gc.freeze()``, each part of it counted once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects of other libraries warn when inspected
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


# --- where gradients come from


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """This process alone as a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "environments", "grouped", "expected"),
    [
        ({}, 1, False, StackedGradients),
        ({}, 2, False, StackedGradients),
        ({}, 2, True, StackedGradients),
        ({}, 1, True, HookedGradients),
        ({"objective": "irm"}, 1, True, HookedGradients),
        ({"per_example": True}, 1, True, PerExampleGradients),
        ({"objective": "vrex"}, 2, False, ObjectiveGradients),
        ({"objective": "vrex"}, 1, True, ObjectiveGradients),
    ],
)
def test_the_source_of_gradients_is_what_the_table_says(
    group: dist.ProcessGroup, changes: dict[str, Any], environments: int, grouped: bool, expected: type
) -> None:
    config = CONFIG.with_options(**changes).resolve()
    batch = torch.randn(environments, 8, 5), torch.randint(0, 3, (environments, 8))
    source = gradient_source(
        nn.Linear(5, 3),
        config.objective.build(JOB.risk_of(config), 10),
        config.rule(),
        list("ab"[:environments]),
        group if grouped else None,
        first_batch=lambda: batch,
        example_gradient=config.aggregation.example_gradient if config.aggregation.per_example else None,
        clock=StepClock(),
    )
    assert type(source) is expected
    if expected is not ObjectiveGradients or environments > 1:  # which compares several
        assert source(batch, 0).environments in (environments, 8)


# --- checkpoints


class Lengthening(nn.Module):
    """Goes through a layer twice, which cannot be pooled, as soon as its bias has grown by training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
        nn.init.zeros_(self.last.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).relu()
        long = bool(self.last.bias.detach().abs().sum() > 0.1)
        outputs: Tensor = self.last(hidden) + self.last(hidden.tanh()) if long else self.last(hidden)
        return outputs


@pytest.mark.parametrize("model", [plain_network, network, lambda _: Lengthening()], ids=["pooled", "vmap", "both"])
def test_a_run_resumed_anywhere_computes_gradients_in_the_same_way(
    tmp_path: Path, model: Callable[[TrainConfig], nn.Module]
) -> None:
    job, config = dataclasses.replace(JOB, model=model), CONFIG.with_options(checkpoints=6)
    kept = Kept(tmp_path / "whole")
    end = train(job, config, ProcessContext(), kept).metrics
    weights = load_file(kept.checkpoints[-1] / MODEL)
    for folder in kept.checkpoints[:-1]:
        again = Kept(tmp_path / f"after-{folder.name}")
        resumed = train(job, config, ProcessContext(), again, resume_from=folder).metrics
        assert without_time(resumed) == without_time(end)
        found = load_file(again.checkpoints[-1] / MODEL)
        assert all(torch.equal(value, found[name]) for name, value in weights.items())


_FRESH = """
import test_training
from concord.training import ProcessContext, train
for model in ("plain_network", "network"):
    job = test_training.dataclasses.replace(test_training.JOB, model=getattr(test_training, model))
    kept = test_training.Kept(test_training.Path(model))
    metrics = train(job, test_training.CONFIG, ProcessContext(), kept).metrics
    print(test_training.json.dumps(test_training.without_time(metrics)))
"""


def test_two_fresh_runs_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    """One in an interpreter of its own and one that is forked: strings have other hashes there."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    own = subprocess.check_output([sys.executable, "-c", _FRESH], cwd=tmp_path / "one", env=environment, text=True)
    assert run_program(_FRESH, tmp_path / "other") == own
    for model, checkpoint in itertools.product(("plain_network", "network"), range(3)):
        one, other = (
            load_file(tmp_path / each / model / f"checkpoint-{checkpoint}" / MODEL) for each in ("one", "other")
        )
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = Kept(tmp_path_factory.mktemp("checkpoint"))
    train(JOB, CONFIG.with_options(epochs=1), ProcessContext(), kept)
    return kept.checkpoints[-1]


def _read(folder: Path, model: nn.Module) -> None:
    read_checkpoint(folder, model, Optimization(list(model.parameters()), CONFIG.resolve(), 10))


def test_a_checkpoint_of_another_model_is_refused_by_the_parameter(checkpoint: Path) -> None:
    wider = nn.Sequential(nn.Linear(5, 17, bias=False), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(), nn.Linear(17, 3))
    with pytest.raises(InputError, match=r"of another model; 0\.weight is \(16, 5\) in it and \(17, 5\) in this model"):
        _read(checkpoint, wider)
    with pytest.raises(InputError, match="of another model"):
        _read(checkpoint, nn.Linear(5, 3))


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9 if file.suffix == ".safetensors" else len(content) // 2] ^= 1
    file.write_bytes(content)


_WITH_CHECKSUM = (MODEL, OPTIMIZER, MOMENTUM, PROGRESS, BEST, SEEN)


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        *((file, damage, "is damaged") for file in _WITH_CHECKSUM for damage in (_cut_short, _flip_a_bit)),
        *((file, Path.unlink, "cannot be read (No such file") for file in _WITH_CHECKSUM),
        *((CHECKSUMS, damage, "cannot be read (") for damage in (_cut_short, Path.unlink)),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(
    tmp_path: Path, file: str, damage: Callable[[Path], object], problem: str
) -> None:
    kept, config = Kept(tmp_path), MOMENTUM_CONFIG.with_options(keep="best")
    train(JOB, config.with_options(epochs=1), ProcessContext(), kept)
    folder = kept.checkpoints[0]
    verify_checkpoint(folder)
    damage(folder / file)
    for read in (verify_checkpoint, lambda at: train(JOB, config, ProcessContext(), Kept(), resume_from=at)):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        assert str(caught.value).startswith(f"checkpoint {folder}: {file} {problem}")
        assert "\n" not in str(caught.value)


def test_an_optimizer_that_would_run_code_is_refused_in_a_plain_line(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    torch.save({"state": Path("/")}, folder / OPTIMIZER)
    write_checksums(folder)
    with pytest.raises(CheckpointError) as caught:
        _read(folder, network(CONFIG))
    assert (
        str(caught.value) == f"checkpoint {folder}: {OPTIMIZER} holds objects that are not an optimizer's state; "
        "it was not read"
    )


class Tied(nn.Module):
    """Two layers that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.inner.weight
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.inner(inputs).relu()))


def test_tied_weights_go_through_a_checkpoint(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, model=lambda _: Tied())
    kept = Kept(tmp_path)
    outcome = train(job, CONFIG, ProcessContext(), kept)
    again = train(job, CONFIG, ProcessContext(), Kept(), resume_from=kept.checkpoints[0])
    assert without_time(again.metrics) == without_time(outcome.metrics)


def test_one_logit_for_two_classes_trains_with_a_measure_of_the_jobs_own() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], (targets > 1).float())

    def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs[:, 0] > 0) == (targets > 1)).float()

    job = dataclasses.replace(JOB, model=lambda _: nn.Linear(5, 1), loss=loss, measures={"accuracy": right})
    config = CONFIG.with_options(aggregator="mean", epochs=40, lr=5e-2)
    assert train(job, config, ProcessContext(), Kept()).metrics["train_accuracy"] > 0.75


def test_the_worst_environment_follows_from_the_measure_not_its_name() -> None:
    loaded = Environments(blobs, train=["a", "b"]).load(["a", "b"])
    parts = [EvaluatedPart("train", environment.name, environment) for environment in loaded]

    def first(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0].abs()

    measures = {"rmse": Measure(first, "min"), "terror": Measure(first, "max"), "first_error": first, "right": correct}
    metrics = evaluate(nn.Linear(5, 3), cross_entropy, measures, parts, ProcessContext())
    assert metrics["worst_train_rmse"] == max(metrics[f"rmse/train/{name}"] for name in "ab")
    assert metrics["worst_train_terror"] == min(metrics[f"terror/train/{name}"] for name in "ab")
    assert metrics["worst_train_right"] == min(metrics[f"right/train/{name}"] for name in "ab")
    assert metrics["train_first_error"] == metrics["train_rmse"]
    assert "worst_train_first_error" not in metrics  # it does not say, and nobody guesses
    with pytest.raises(InputError, match="mode='down': give max or min"):
        Measure(first, "down")  # type: ignore[arg-type]


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    torch.randn(10)
    one, other = build_model(JOB, CONFIG), build_model(JOB, CONFIG)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(next(build_model(JOB, CONFIG.with_options(seed=1)).parameters()), next(one.parameters()))


# --- wrong input

POSITIVE = ("batch_size", "epochs", "evaluations", "checkpoints", "workers", "steps_per_update", "accumulate")


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        *(("threshold", value, f"--threshold {value}: the agreement") for value in (1.5, -0.1, float("nan"))),
        ("held_out", 1.0, "--held-out 1.0: the held-out fraction must lie in [0, 1)"),
        *((name, 0, f"--{name.replace('_', '-')} 0: must be at least 1") for name in POSITIVE),
        ("batch_size", -1, "--batch-size -1: must be at least 1"),
        *(("lr", rate, f"--lr {rate}: must be a finite number above 0") for rate in (0.0, float("nan"), math.inf)),
        *((name, -1.0, f"--{name} -1.0: must not be negative") for name in ("l1", "l2", "clip")),
        *((name, float("nan"), f"--{name} nan: must not be negative") for name in ("l2", "clip")),
        *(("beta1", beta, f"--beta1 {beta}: must lie in [0, 1)") for beta in (-0.1, 1.0)),
        *(("decay", factor, f"--decay {factor}: must lie in (0, 1]") for factor in (0.0, 1.5)),
        ("decay_per_step", 1.5, "--decay-per-step 1.5: must lie in (0, 1]"),
        *(
            (name, -1, f"--{name.replace('_', '-')} -1: must not be neg")
            for name in ("seed", "readers", "max_failures")
        ),
        ("seed", 2**63, f"--seed {2**63}: must not be above {2**63 - 1}"),
        *(("min_workers", least, f"--min-workers {least}: must lie in [1, 1], up to --workers") for least in (0, 2)),
        *(("milestones", at, f"--milestones {' '.join(map(str, at))}: must be fr") for at in ((0.5, 1.0), (0.0,))),
        ("aggregator", "mode", "--aggregator mode: must be one of mean"),
        ("environment_momentum", 1.0, "--environment-momentum 1.0: must lie in [0, 1)"),
        ("name", "../elsewhere", "--name ../elsewhere: must have letters, digits"),
        ("name", "a" * 201, f"--name {'a' * 201}: must not be longer than 200 letters"),
        ("resume", True, "--resume"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(option: str, value: Any, named: str) -> None:
    with pytest.raises(InputError) as caught:
        CONFIG.with_options(**{option: value}).check()
    assert str(caught.value).startswith(named)


@pytest.mark.parametrize(
    ("option", "beside", "said"),
    [
        ("environment_momentum", {"per_example": True}, "--environment-momentum 0.5: with --per-example"),
        ("environment_momentum", {"environments_per_step": 2}, "--environment-momentum 0.5: with --environments-per"),
        ("environment_momentum", {"vectorize": "pooled"}, "--vectorize pooled: with --environment-momentum"),
        ("environment_momentum", {"steps_per_update": 2}, "--steps-per-update 2: with --environment-momentum"),
        ("steps_per_update", {"per_example": True}, "--steps-per-update 4: with --per-example each example votes"),
        ("steps_per_update", {"objective": "vrex"}, "--steps-per-update 4: --objective vrex couples the environments"),
        *(
            ("accumulate", {"objective": name}, f"--accumulate 4: --objective {name} is no mean over the examples")
            for name in ("vrex", "irm")
        ),
        ("accumulate", {"batch_size": 3}, "--accumulate 4: a batch has 3 examples"),
        ("accumulate", {"vectorize": "pooled"}, "--vectorize pooled: with --accumulate"),
        ("compile", {"objective": "vrex"}, "--compile True: --objective vrex couples the environments"),
    ],
)
def test_ways_to_more_votes_that_make_no_sense_are_refused(option: str, beside: dict[str, Any], said: str) -> None:
    value = {"environment_momentum": 0.5, "compile": True}.get(option, 4)
    with pytest.raises(InputError) as caught:
        CONFIG.with_options(**{option: value}, **beside).resolve().check()
    assert str(caught.value).startswith(said)
    coupled = CONFIG.with_options(objective="vrex", environment_momentum=0.5)
    coupled.check()
    assert "environment_momentum" in coupled.resolve().unused()


def test_more_workers_than_environments_are_refused() -> None:
    with pytest.raises(InputError, match="--workers 5: more than the 4 training environments"):
        train(JOB, CONFIG.with_options(workers=5), ProcessContext(), Kept())


def test_a_target_that_the_model_has_no_output_for_is_refused() -> None:
    job = dataclasses.replace(JOB, model=lambda _: nn.Linear(5, 2))
    with pytest.raises(InputError, match="target 2 is out of range; the model has 2 outputs"):
        train(job, CONFIG, ProcessContext(), Kept())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores")
def test_a_process_has_no_more_threads_than_cores_of_its_own() -> None:
    asked = (
        "import os, torch; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from concord.training.process import tune_process; tune_process(threads=8); print(torch.get_num_threads())"
    )
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["1"]
