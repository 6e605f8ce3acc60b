"""Averaged and best weights: the evaluated weights are kept, and a resumed run equals an undisturbed one."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from forked import run_group
from recorded import Kept, without_time
from safetensors.torch import load_file
from test_training import CONFIG, JOB
from torch import Tensor, nn

from concord.environments import BatchStream, Environments
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.execution.run import run
from concord.execution.trained_model import model_of_version
from concord.tracking import Store
from concord.training import Job, JobFile, ProcessContext, TrainConfig, load_job, loop, train
from concord.training.checkpoint import MODEL, TRAINED, read_weights
from concord.training.context import Silent
from concord.training.kept_weights import BestWeights
from concord.training.worker_data import prepare

SENSORS = Path(__file__).parents[1] / "jobs" / "sensors.py"
HABITS: dict[str, dict[str, Any]] = {
    "ema": {"average": "ema:0.9"},
    "swa": {"average": "swa:0.4"},
    "swa from the start": {"average": "swa:0"},
    "best": {"keep": "best"},
    "all": {"average": "swa:0.5", "keep": "best", "schedule": "cosine", "warmup": 0.3, "clip": 0.1},
}
SOURCES: dict[str, dict[str, Any]] = {
    "stacked": {},
    "of the objective": {"objective": "vrex", "aggregator": "mean"},
    "of an objective with a state": {"objective": "group-dro", "aggregator": "mean"},
    "by example": {"per_example": True, "threshold": 0.2},
    "temporal": {"optimizer": "temporal-and-mask", "aggregator": "mean"},
}


def resumed_equals_whole(config: TrainConfig, process: ProcessContext, folder: Path) -> None:
    whole, rest = Kept(folder / "whole"), Kept(folder / "rest")
    outcome = train(JOB, config, process, whole)
    for start in (0, 1):
        rest.checkpoints.clear()
        rest.folder = folder / f"from {start}"
        again = train(JOB, config, process, rest, resume_from=whole.checkpoints[start])
        assert without_time(again.metrics) == without_time(outcome.metrics)
        for name in (MODEL, TRAINED):
            one, other = whole.checkpoints[-1] / name, rest.checkpoints[-1] / name
            assert one.exists() == other.exists() == (name == MODEL or config.schedule.average is not None)
            if one.exists():
                assert one.read_bytes() == other.read_bytes()


def each_once(first: Collection[str], second: Collection[str]) -> list[Any]:
    """Each of both in one case at least; the other pairs are for ``make test-slow``."""
    pairs = list(itertools.product(first, second))
    quick = {(one, next(iter(second))) for one in first} | {(next(iter(first)), other) for other in second}
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(("habit", "source"), each_once(HABITS, SOURCES))
def test_a_resumed_run_is_equal_bit_by_bit(tmp_path: Path, habit: str, source: str) -> None:
    config = CONFIG.with_options(**HABITS[habit], **SOURCES[source])
    resumed_equals_whole(config, ProcessContext(), tmp_path)


def _resumed_in_group(rank: int, world_size: int, folder: Path, config: TrainConfig) -> None:
    resumed_equals_whole(config, ProcessContext(rank, world_size), folder / str(rank))


@pytest.mark.parametrize("habit", ["ema", "all"])
def test_so_is_a_run_of_two_processes(tmp_path: Path, habit: str) -> None:
    config = CONFIG.with_options(**HABITS[habit])
    run_group(_resumed_in_group, 2, tmp_path, tmp_path, config)
    ranks = [tmp_path / rank / "whole" / "checkpoint-2" / MODEL for rank in "01"]
    assert ranks[0].read_bytes() == ranks[1].read_bytes()


@pytest.mark.parametrize("habit", HABITS)
def test_the_checkpoints_model_predicts_what_was_evaluated(tmp_path: Path, habit: str) -> None:
    kept = Kept(tmp_path)
    metrics = train(JOB, CONFIG.with_options(**HABITS[habit]), ProcessContext(), kept).metrics
    model = JOB.model(CONFIG)
    read_weights(kept.checkpoints[-1], model)
    inputs, targets = JOB.environments(CONFIG)["t"].data
    accuracy = (model.eval()(inputs).argmax(1) == targets).float().mean()
    assert metrics["ood_accuracy"] == pytest.approx(float(accuracy))


def test_the_registered_version_predicts_what_was_evaluated(tmp_path: Path) -> None:
    job = load_job(str(SENSORS))
    config = job.job.config.with_options(average="ema:0.8", keep="best", output=tmp_path, name="averaged")
    lines: list[str] = []
    done = run(job, config, lines.append)
    version = model_of_version(job, Store.open(tmp_path, None), "sensors/1").model
    inputs, targets = job.job.environments(config)["t"].data
    accuracy = (version(inputs).argmax(1) == targets).float().mean()
    assert done.metrics["ood_accuracy"] == pytest.approx(float(accuracy))
    assert f"--keep best: the model of epoch {done.metrics['kept_epoch']:.0f} is kept" in lines


def weights_of_epochs(folder: Path, **options: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The trained weights after every epoch, and the averaged ones at the end."""
    kept = Kept(folder)
    train(JOB, CONFIG.with_options(checkpoints=6, **options), ProcessContext(), kept)
    files = [each / TRAINED if (each / TRAINED).exists() else each / MODEL for each in kept.checkpoints]
    return [load_file(each) for each in files], load_file(kept.checkpoints[-1] / MODEL)


def test_swa_is_the_mean_of_late_epochs_with_batch_norm_computed_anew(tmp_path: Path) -> None:
    each, averaged = weights_of_epochs(tmp_path, average="swa:0.5")
    for name in ("0.weight", "1.weight", "4.bias"):
        mean = torch.stack([weights[name] for weights in each[3:]]).mean(0)
        torch.testing.assert_close(averaged[name], mean, rtol=1e-5, atol=1e-7)
    config = CONFIG.resolve()
    training = [pair.training for pair in prepare(JOB, config, ProcessContext()).training]
    batches = BatchStream(training, config.data.batch_size, config.run.seed)
    last = range(5 * batches.steps_per_epoch, 6 * batches.steps_per_epoch)
    hidden = [one @ averaged["0.weight"].T for step in last for one in batches.batch(step)[0]]
    for name, of in (("1.running_mean", torch.mean), ("1.running_var", torch.var)):
        expected = torch.stack([of(one, dim=0) for one in hidden]).mean(0)
        torch.testing.assert_close(averaged[name], expected, rtol=1e-4, atol=1e-6)


def test_ema_averages_the_weights_and_the_buffers_of_every_step(tmp_path: Path) -> None:
    each, averaged = weights_of_epochs(tmp_path, average="ema:0.75", batch_size=54)  # an epoch is one step
    for name in ("0.weight", "4.bias", "1.running_mean", "1.running_var"):
        expected = each[0][name]
        for weights in each[1:]:
            expected = 0.75 * expected + 0.25 * weights[name]
        torch.testing.assert_close(averaged[name], expected, rtol=1e-5, atol=1e-6)


class Frozen(nn.Module):
    """Batch norm that stays in evaluation, as a network keeps a source model's, and an index of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(512, affine=False), nn.Linear(512, 2)
        self.norm.running_mean, self.norm.running_var = torch.full((512,), 5.0), torch.full((512,), 9.0)
        self.register_buffer("index", torch.arange(512))

    def train(self, mode: bool = True) -> "Frozen":
        """Only the rest is trained."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the inputs in the order of the index."""
        return cast(Tensor, self.last(self.norm(inputs[:, self.index])))


@pytest.mark.parametrize("average", ["swa:0.5", "ema:0.9999"])
def test_an_average_leaves_frozen_batch_norm_and_whole_numbers_as_they_are(tmp_path: Path, average: str) -> None:
    data = {name: (torch.randn(20, 512), torch.arange(20) % 2) for name in "abt"}
    job = dataclasses.replace(
        JOB, environments=lambda _: Environments.from_arrays(data, test=["t"]), model=lambda _: Frozen()
    )
    kept = Kept(tmp_path)
    train(job, CONFIG.with_options(average=average), ProcessContext(), kept)
    averaged, first = load_file(kept.checkpoints[-1] / MODEL), Frozen().state_dict()
    for name in ("norm.running_mean", "norm.running_var", "index"):
        torch.testing.assert_close(averaged[name], first[name])
    assert not torch.equal(averaged["last.weight"], load_file(kept.checkpoints[-1] / TRAINED)["last.weight"])


def test_checkpoints_by_time_leave_the_result_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, ends, counts = CONFIG.with_options(checkpoints=1, average="swa:0.5"), [], []
    for seconds in (math.inf, 0.0):
        monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", seconds)
        kept = Kept(tmp_path / str(seconds))
        ends.append({**train(JOB, config, ProcessContext(), kept).metrics, "steps_per_second": 0.0})
        counts.append(len(kept.checkpoints))
    assert counts == [1, config.schedule.epochs]
    assert ends[0] == ends[1]


def test_the_best_evaluation_by_validation_is_kept_and_not_the_tests() -> None:
    config = CONFIG.with_options(keep="best", epochs=12, evaluations=12, consistency=12, lr=1.0, optimizer="sgd")
    *history, end = train(JOB, config, ProcessContext(), Silent()).history
    best = max(each.metrics["validation_accuracy"] for each in history)
    assert end.metrics["validation_accuracy"] >= best
    kept = int(end.metrics["kept_epoch"])
    assert kept < 12
    first = next(each for each in history if each.metrics["validation_accuracy"] == best)
    assert kept == first.epoch
    for name in ("validation_loss", "ood_accuracy", "train_loss", "consistency/log_ratio"):
        assert end.metrics[name] == pytest.approx(first.metrics[name])


def test_an_environment_left_out_does_not_choose_the_weights_that_are_kept() -> None:
    config = CONFIG.with_options(keep="best", leave_out="a", held_out=0.3, epochs=12, evaluations=12, lr=1.0)
    *history, end = train(JOB, config.with_options(optimizer="sgd"), ProcessContext(), Silent()).history
    by_held_out, by_left_out = (
        max(history, key=lambda each: each.metrics[name]) for name in ("held_out_accuracy", "validation_accuracy")
    )
    assert end.metrics["kept_epoch"] == by_held_out.epoch != by_left_out.epoch
    with pytest.raises(InputError, match="--leave-out a: with --keep best held_out_accuracy chooses, not the environ"):
        preflight(JobFile(JOB, "", ""), config.with_options(held_out=0.0))


def held_out_only(_: TrainConfig) -> Environments:
    there = JOB.environments(CONFIG)
    return Environments(lambda name: there[name].data, train=["a", "b"], test=["t"])


def test_patience_ends_a_run_whose_evaluations_are_all_nan() -> None:
    kept, ends = BestWeights("validation_loss", "min", patience=2), []
    for epoch in (1, 2, 3):
        kept.see({"validation_loss": math.nan}, epoch, nn.Linear(1, 1), last=False)
        ends.append((kept.epoch, kept.out_of_patience))
    assert ends == [(1, False), (2, True), (3, True)]


@pytest.mark.parametrize(
    ("changes", "options", "line"),
    [
        (
            {"environments": held_out_only},
            {"held_out": 0.0},
            "there are neither validation environments nor held-out exam",
        ),
        (
            {"criterion": "ood_accuracy"},
            {},
            "the job's criterion ood_accuracy is not of validation environments or held-",
        ),
        (
            {"criterion": "train_loss"},
            {},
            "the job's criterion train_loss is not of validation environments or held-out",
        ),
    ],
)
def test_without_a_criterion_no_weights_are_best(changes: dict[str, Any], options: dict[str, Any], line: str) -> None:
    job: Job[TrainConfig] = dataclasses.replace(JOB, **changes)
    config = CONFIG.with_options(keep="best", **options)
    for refuse in (
        lambda: preflight(JobFile(job, "", ""), config),
        lambda: train(job, config, ProcessContext(), Silent()),
    ):
        with pytest.raises(InputError, match=f"^--keep best: {line}"):
            refuse()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--average swa:1", "--average swa:1: begins after the end; give a fraction of the run in [0, 1)"),
        ("--average swa:1.5", "--average swa:1.5: begins after the end; give a fraction of the run in [0, 1)"),
        ("--average ema:1", "--average ema:1: the decay must lie in (0, 1)"),
        ("--average ema", "--average ema: give ema:DECAY, such as ema:0.999, or swa:FRACTION, such as swa:0.75"),
        ("--average mean:2", "--average mean:2: give ema:DECAY, such as ema:0.999, or swa:FRACTION, such as swa:0.75"),
        ("--warmup 1", "--warmup 1.0: must be a fraction of the run, in [0, 1)"),
        ("--keep best --stop-spread 0.1", "--keep best: --stop-spread decides which weights are kept; give last"),
    ],
)
def test_wrong_habits_are_refused_in_one_line(refused: Callable[..., str], words: str, line: str) -> None:
    assert refused("train", SENSORS, *words.split()) == line
