"""Several students: their meta-gradients are combined by any aggregator, and several seeds are computed at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from forked import run_group
from small_students import BY_LABEL, CONFIG, INPUTS, PRIVILEGED, UNITS, metrics_of, small_student, small_teacher
from torch import Tensor, nn
from torch.testing import assert_close

from concord.aggregation import GRADIENT, Aggregator, AndMask, Mean, Statistic, Statistics, Update, aggregate
from concord.distillation import (
    SGD,
    Adam,
    Distillation,
    MetaGradient,
    MetaLearning,
    MetaSums,
    Stacked,
    StackedStudent,
    Student,
    Teaching,
    as_rule,
    meta_gradient,
    privileged_of,
    side_by_side,
    with_privileged,
)
from concord.environments import BatchStream, Environments
from concord.errors import InputError
from concord.gradients import NonFiniteGradientError
from concord.training import Job, ProcessContext, TrainConfig

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


TEACHING = Teaching(1.0, layers=("0",))
META_ADAM = partial(torch.optim.Adam, lr=0.1)


def job(rule: Aggregator | None, rescale: bool = False) -> Job[Any]:
    learning = MetaLearning(lambda: examples("outer"), 3, 2, META_ADAM, aggregator=rule, rescale=rescale)
    return Job(
        lambda _: Environments(examples, train=list(NAMES), test=["test"]),
        small_student,
        BY_LABEL,
        objective=lambda _: Distillation(BY_LABEL, small_teacher, TEACHING, learning),
        criterion="ood_loss",
        mode="min",
    )


# --- the meta-gradients are combined by an aggregator


def found(seed: int, network: nn.Module) -> MetaGradient:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(each.shape, generator=generator) for each in network.parameters()]
    return MetaGradient(tuple(gradients), torch.tensor(float(seed)))


@pytest.mark.parametrize("rule", [Mean(), AndMask(0.9), Loudest()], ids=["mean", "and-mask", "own"])
def test_meta_gradients_are_aggregated_as_stacked_gradients_are(rule: Aggregator) -> None:
    network = small_teacher()
    sums, students = MetaSums(rule, network), [found(seed, network) for seed in range(4)]
    for each in students:
        sums.add(each)
    updates, loss = sums.combined(lambda own: own, 0)
    assert loss == 1.5
    for index, update in enumerate(updates):
        stacked = torch.stack([each.gradients[index] for each in students])
        assert_close(update, aggregate(rule, stacked).value)


def test_what_is_masked_may_be_rescaled_by_parameter() -> None:
    network, students = small_teacher(), [found(seed, small_teacher()) for seed in range(3)]
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
    student_model, taught_by = given.model(CONFIG), small_teacher()
    adam = torch.optim.Adam(student_model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [5, 8])
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
        schedule.step()
    inputs, targets = examples("test")
    return BY_LABEL(student_model(inputs), targets).item(), sum(losses[3:]) / 2


def of_risk() -> Any:
    return Distillation(BY_LABEL, small_teacher, TEACHING).risk


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
        return Distillation(BY_LABEL, small_teacher, TEACHING, learning)

    given = replace(job(None), objective=objective)
    chosen = CONFIG.with_options(aggregator="and-mask", threshold=1.0)
    assert metrics_of(given, chosen)["ood_loss"] == metrics_of(job(AndMask(1.0)))["ood_loss"]
    with pytest.raises(InputError, match="--aggregator and-mask: the job's objective couples the environments"):
        metrics_of(job(None), chosen)


def test_one_student_that_is_not_finite_ends_the_run_in_all_processes() -> None:
    network = small_teacher()
    sums, wrong = MetaSums(AndMask(0.5), network), found(1, network)
    sums.add(found(0, network))
    sums.add(MetaGradient(wrong.gradients, torch.tensor(float("nan"))))
    with pytest.raises(NonFiniteGradientError):
        sums.combined(lambda own: own, 3)


# --- several seeds at once


SEEDS = 3
RULES = {"sgd": SGD(0.1, 0.5), "adam": Adam(0.05, 0.5)}


def of_seed(seed: int, normalized: bool = False) -> tuple[nn.Module, nn.Module]:
    """A student and a teacher, in float64."""
    torch.manual_seed(seed)
    hidden = [nn.BatchNorm1d(8)] if normalized else []
    taught_by = nn.Sequential(nn.Linear(PRIVILEGED, 8), *hidden, nn.Tanh(), nn.Linear(8, UNITS))
    return small_student().double(), taught_by.double()


def batch_of(seed: int, place: int, count: int = 6) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(count, 8, generator=torch.Generator().manual_seed(100 * seed + place)).double()
    return drawn[:, :4], drawn[:, 4:]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "batch norm"])
def test_meta_gradients_of_several_seeds_at_once_are_those_of_each(rule: str, normalized: bool) -> None:
    pairs = [of_seed(seed, normalized) for seed in range(SEEDS)]
    together = meta_gradient(
        StackedStudent(Stacked([pair[0] for pair in pairs]), of_risk(), TEACHING),
        Stacked([pair[1] for pair in pairs]),
        [side_by_side([batch_of(seed, place) for seed in range(SEEDS)]) for place in range(4)],
        side_by_side([batch_of(seed, 99, 20) for seed in range(SEEDS)]),
        RULES[rule],
        privileged=lambda batch: batch[1][..., 1:],
    )
    assert together.loss.shape == (SEEDS,)
    for seed, (network, taught_by) in enumerate(pairs):
        batches = [batch_of(seed, place) for place in range(4)]
        alone = meta_gradient(
            Student(network, of_risk(), TEACHING), taught_by, batches, batch_of(seed, 99, 20), RULES[rule],
            privileged=privileged_of,
        )  # fmt: skip
        assert_close(together.loss[seed], alone.loss, rtol=1e-12, atol=0)
        for one, other in zip(together.gradients, alone.gradients, strict=True):
            assert_close(one[seed], other, rtol=1e-8, atol=1e-13)


def learned(student: Student, taught_by: nn.Module, batch_at: Any, outer: Any, privileged: Any) -> Tensor:
    """The meta-losses of three steps of the teacher, with two steps of the student after each."""
    adam = torch.optim.Adam(student.model.parameters(), 1e-2)
    meta, losses = torch.optim.Adam(taught_by.parameters(), 1e-2), []
    for step in range(6):
        if step % 2 == 0:
            rule, state = as_rule(adam, list(student.model.parameters()))
            coming = [batch_at(step + ahead) for ahead in range(3)]
            found = meta_gradient(student, taught_by, coming, outer, rule, state, privileged=privileged)
            losses.append(found.loss)
            for parameter, gradient in zip(taught_by.parameters(), found.gradients, strict=True):
                parameter.grad = gradient
            meta.step()
        adam.zero_grad()
        student.loss(batch_at(step), taught_by(privileged(batch_at(step))).detach())[0].sum().backward()
        adam.step()
    return torch.stack(losses)


def test_seeds_that_learn_together_learn_as_each_alone() -> None:
    pairs = [of_seed(seed) for seed in range(SEEDS)]
    students, teachers = (Stacked([pair[at] for pair in pairs]) for at in (0, 1))
    together = learned(
        StackedStudent(students, of_risk(), TEACHING),
        teachers,
        lambda step: side_by_side([batch_of(seed, step) for seed in range(SEEDS)]),
        side_by_side([batch_of(seed, 99) for seed in range(SEEDS)]),
        lambda batch: batch[1][..., 1:],
    )
    for seed, (network, taught_by) in enumerate(pairs):
        alone = learned(
            Student(network, of_risk(), TEACHING), taught_by, partial(batch_of, seed), batch_of(seed, 99), privileged_of
        )
        assert_close(together[:, seed], alone, rtol=1e-9, atol=0)
        for one, other in zip(students.network(seed).parameters(), network.parameters(), strict=True):
            assert_close(one, other, rtol=1e-8, atol=1e-12)


def test_stacked_networks_are_each_its_own() -> None:
    networks = [
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)).double() for _ in range(SEEDS)
    ]
    stacked, inputs = Stacked(networks), torch.randn(7, SEEDS, 4).double()
    for training in (True, False):
        outputs = stacked.train(training)(inputs)
        for seed, network in enumerate(networks):
            assert_close(outputs[:, seed], network.train(training)(inputs[:, seed]))
    for seed, network in enumerate(networks):
        for name, value in stacked.network(seed).state_dict().items():
            assert_close(value, network.state_dict()[name])
    assert len(list(stacked.parameters())) == len(list(networks[0].parameters()))


def test_what_cannot_be_stacked_is_refused_in_a_line() -> None:
    for call, said in [
        (lambda: Stacked([]), "networks: none; expected at least one, alike but in their numbers"),
        (lambda: Stacked([nn.Linear(2, 2), nn.Linear(2, 3)]), "networks: some with other parameters than the first"),
        (lambda: side_by_side([torch.ones(2), torch.ones(3)]), "batches: expected at least one, all of one form"),
        (
            lambda: StackedStudent(Stacked([small_student()]), of_risk(), Teaching(1.0, layers=("9",))),
            "layers=9: the model has no such layer; there are 0, 1, 2",
        ),
    ]:
        with pytest.raises(InputError, match=said):
            call()
