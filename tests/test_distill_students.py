"""Several students: their meta-gradients are combined by any aggregator, and several seeds are computed at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from forked import run_group
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from concord.aggregation import GRADIENT, Aggregator, AndMask, Mean, Statistic, Statistics, Update, aggregate
from concord.distillation import (
    Distillation,
    MetaGradient,
    MetaLearning,
    MetaSums,
    Student,
    Teaching,
    as_rule,
    meta_gradient,
    of_labels,
    privileged_of,
    with_privileged,
)
from concord.environments import BatchStream, Environments
from concord.errors import InputError
from concord.gradients import NonFiniteGradientError
from concord.training import Job, ProcessContext, TrainConfig, train
from concord.training.loop import Silent

INPUTS, UNITS, PRIVILEGED = 4, 5, 3
BY_LABEL = of_labels(lambda outputs, labels: mse_loss(outputs.squeeze(1), labels))
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Loudest:
    """A rule that nobody else knows: the mean where the cubes of the students' gradients outweigh half their size."""

    share: float = 0.5
    statistics: ClassVar[tuple[Statistic, ...]] = (
        GRADIENT,
        Statistic("cube", lambda gradient: gradient**3),
        Statistic("size", lambda gradient: gradient.abs() ** 3, dtype=torch.float64),
    )

    def finish(self, sums: Statistics, environments: int) -> Update:
        kept = (sums["cube"].abs() >= self.share * sums["size"]).to(sums["gradient"].dtype)
        return Update(sums["gradient"] / environments * kept, kept)


def examples(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    inputs = torch.randn(40, INPUTS, generator=generator)
    noise = torch.randn(40, generator=generator)
    return inputs, with_privileged(inputs[:, 0] * inputs[:, 1], torch.stack([inputs[:, 0], inputs[:, 1], noise], 1))


def model(_: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))


def teacher() -> nn.Module:
    return nn.Sequential(nn.Linear(PRIVILEGED, 8), nn.Tanh(), nn.Linear(8, UNITS))


TEACHING = Teaching(1.0, layers=("0",))
META_ADAM = partial(torch.optim.Adam, lr=0.1)


def job(rule: Aggregator | None, rescale: bool = False) -> Job[Any]:
    learning = MetaLearning(lambda: examples("outer"), 3, 2, META_ADAM, aggregator=rule, rescale=rescale)
    return Job(
        lambda _: Environments(examples, train=list(NAMES), test=["test"]),
        model,
        BY_LABEL,
        objective=lambda _: Distillation(BY_LABEL, teacher, TEACHING, learning),
        criterion="ood_loss",
        mode="min",
    )


CONFIG = TrainConfig().with_options(
    epochs=2, batch_size=8, held_out=0.0, lr=1e-2, evaluations=2, aggregator="mean", milestones=()
)


def metrics_of(given: Job[Any], config: TrainConfig = CONFIG, place: ProcessContext | None = None) -> dict[str, float]:
    metrics = train(given, config, place or ProcessContext(), Silent()).metrics
    return {name: value for name, value in metrics.items() if name != "steps_per_second"}


# --- the meta-gradients are combined by an aggregator


def found(seed: int, network: nn.Module) -> MetaGradient:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(each.shape, generator=generator) for each in network.parameters()]
    return MetaGradient(tuple(gradients), torch.tensor(float(seed)))


@pytest.mark.parametrize("rule", [Mean(), AndMask(0.9), Loudest()], ids=["mean", "and-mask", "own"])
def test_meta_gradients_are_aggregated_as_stacked_gradients_are(rule: Aggregator) -> None:
    network = teacher()
    sums, students = MetaSums(rule, network), [found(seed, network) for seed in range(4)]
    for each in students:
        sums.add(each)
    updates, loss = sums.combined(lambda own: own, 0)
    assert loss == 1.5
    for index, update in enumerate(updates):
        stacked = torch.stack([each.gradients[index] for each in students])
        assert_close(update, aggregate(rule, stacked).value)


def test_what_is_masked_may_be_rescaled_by_parameter() -> None:
    network, students = teacher(), [found(seed, teacher()) for seed in range(3)]
    pair = MetaSums(AndMask(1.0), network), MetaSums(AndMask(1.0), network, rescale=True)
    for each in students:
        for sums in pair:
            sums.add(each)
    plain, rescaled = (sums.combined(lambda own: own, 0)[0] for sums in pair)
    for one, other in zip(plain, rescaled, strict=True):
        kept = (one != 0).float().mean()
        assert_close(other, one / kept if kept > 0 else one)


def by_hand(rule: Aggregator, steps: int = 10) -> tuple[float, float]:
    """The test's loss and the last epoch's meta-loss: three copies, their meta-gradients side by side, one student."""
    given = job(rule)
    torch.manual_seed(CONFIG.run.seed)
    student_model, taught_by = given.model(CONFIG), teacher()
    adam = torch.optim.Adam(student_model.parameters(), 1e-2)
    meta = META_ADAM(taught_by.parameters())
    stream = BatchStream([given.environments(CONFIG)[name] for name in NAMES], 8, CONFIG.run.seed)
    student = Student(student_model, of_risk(), TEACHING)
    losses = []
    for step in range(steps):
        if step % 2 == 0:
            unrolled, state = as_rule(adam, list(student_model.parameters()))
            each = [
                meta_gradient(
                    student, taught_by, [take(stream.batch(step + at), index) for at in range(3)], examples("outer"),
                    unrolled, state, privileged=privileged_of,
                )
                for index in range(len(NAMES))
            ]  # fmt: skip
            losses.append(torch.stack([one.loss for one in each]).mean().item())
            for index, parameter in enumerate(taught_by.parameters()):
                parameter.grad = aggregate(rule, torch.stack([one.gradients[index] for one in each])).value
            meta.step()
        adam.zero_grad()
        parts = [take(stream.batch(step), index) for index in range(len(NAMES))]
        torch.stack([student.loss(part, taught_by(part[1][:, 1:]).detach())[0] for part in parts]).mean().backward()
        adam.step()
    inputs, targets = examples("test")
    return BY_LABEL(student_model(inputs), targets).item(), sum(losses[3:]) / 2


def of_risk() -> Any:
    return Distillation(BY_LABEL, teacher, TEACHING).risk


def take(batch: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
    return tuple(leaf[index] for leaf in batch)


@pytest.mark.parametrize("rule", [AndMask(1.0), Loudest()], ids=["and-mask", "own"])
def test_the_teacher_follows_what_the_aggregator_makes_of_the_copies(rule: Aggregator) -> None:
    metrics = metrics_of(job(rule))
    loss, meta_loss = by_hand(rule)
    assert metrics["ood_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["ood_loss"] != pytest.approx(metrics_of(job(None))["ood_loss"], rel=1e-6)
    # Of the second epoch's five steps two begin with a step of the teacher: 6 and 8.
    assert metrics["objective/meta_loss"] == pytest.approx(meta_loss, rel=1e-4)


def test_the_mean_is_what_no_aggregator_is() -> None:
    assert metrics_of(job(Mean())) == metrics_of(job(None))


def _on_two(rank: int, world_size: int, folder: Path) -> None:
    for given in (job(Loudest()), job(AndMask(1.0), rescale=True)):
        alone, together = metrics_of(given), metrics_of(given, CONFIG, ProcessContext(rank, world_size))
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            assert together[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_placement_over_two_workers_changes_nothing(tmp_path: Path) -> None:
    run_group(_on_two, 2, tmp_path, tmp_path)


def test_the_runs_aggregator_may_be_the_teachers() -> None:
    def objective(config: TrainConfig) -> Distillation:
        learning = MetaLearning(lambda: examples("outer"), 3, 2, META_ADAM, aggregator=config.rule(len(NAMES)))
        return Distillation(BY_LABEL, teacher, TEACHING, learning)

    given = replace(job(None), objective=objective)
    chosen = CONFIG.with_options(aggregator="and-mask", threshold=1.0)
    assert metrics_of(given, chosen)["ood_loss"] == metrics_of(job(AndMask(1.0)))["ood_loss"]
    with pytest.raises(InputError, match="--aggregator and-mask: the job's objective couples the environments"):
        metrics_of(job(None), chosen)


def test_one_student_that_is_not_finite_ends_the_run_in_all_processes() -> None:
    network = teacher()
    sums, wrong = MetaSums(AndMask(0.5), network), found(1, network)
    sums.add(found(0, network))
    sums.add(MetaGradient(wrong.gradients, torch.tensor(float("nan"))))
    with pytest.raises(NonFiniteGradientError):
        sums.combined(lambda own: own, 3)
