"""One step of an unrolled student, forwards and backwards, against a plain step; and several seeds at once."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from concord.benchmark import Row, interleaved
from concord.distillation import (
    Adam,
    Stacked,
    StackedStudent,
    Student,
    Teaching,
    divergence,
    meta_gradient,
    of_labels,
    side_by_side,
)
from concord.gradients.risk import as_risk
from concord.training.process import tune_process

INPUTS, CLASSES, PRIVILEGED, UNROLLED, SEEDS = 128, 4, 32, 64, 5
RISK = as_risk(of_labels(lambda outputs, labels: cross_entropy(outputs, labels.long())))
TEACHING = Teaching(10.0, divergence)


def network(inputs: int, width: int = 256) -> nn.Sequential:
    """The network of task B's student and teacher."""
    hidden = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def batch(examples: int) -> tuple[Tensor, Tensor]:
    """Inputs, and targets: labels with x*."""
    labels = torch.randint(0, CLASSES, (examples, 1)).float()
    return torch.randn(examples, INPUTS), torch.cat([labels, torch.randn(examples, PRIVILEGED)], 1)


def privileged_of(given: tuple[Tensor, Tensor]) -> Tensor:
    """x* of one seed or of several."""
    return given[1][..., 1:]


def rows() -> Iterator[Row]:
    """A step of task B's student by batch size, and five seeds at once."""
    tune_process()
    torch.manual_seed(0)
    yield from (_inner_step(examples) for examples in (32, 512))
    yield _seeds()


def _inner_step(examples: int) -> Row:
    """Unrolled steps with one outer batch and a linear teacher, so that the student's steps dominate."""
    model, teacher = network(INPUTS), nn.Linear(PRIVILEGED, CLASSES)
    student, optimizer = Student(model, RISK, TEACHING), torch.optim.Adam(model.parameters(), 1e-3)
    batches = [batch(examples) for _ in range(UNROLLED)]
    with torch.no_grad():
        targets = [teacher(privileged_of(each)) for each in batches]

    def unrolled() -> object:
        return meta_gradient(student, teacher, batches, batches[0], Adam(1e-3), privileged=privileged_of)

    def plain() -> None:
        for each, told in zip(batches, targets, strict=True):
            optimizer.zero_grad()
            student.loss(each, told)[0].backward()
            optimizer.step()

    seconds, reference, ratio = interleaved(unrolled, plain, repeats=6, warmup=1)
    name = f"unrolled step of a student (Adam, n = {UNROLLED}), {examples} examples, MLP of 2 × 256"
    return Row(name, seconds / UNROLLED, "plain step", reference / UNROLLED, ratio, "≤ 4.5")


def _seeds() -> Row:
    """Meta-gradients of task A's small students and teachers."""

    def network_of_a() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def teacher() -> nn.Module:
        return nn.Sequential(nn.Linear(PRIVILEGED, 256), nn.ReLU(), nn.Linear(256, 32))

    teaching, rule = Teaching(1e3, layers=("0",)), Adam(1e-3)
    pairs = [(network_of_a(), teacher()) for _ in range(SEEDS)]
    batches, outer = [[batch(16) for _ in range(UNROLLED)] for _ in pairs], [batch(256) for _ in pairs]
    students, teachers = (Stacked([pair[at] for pair in pairs]) for at in (0, 1))
    joined, judges = [side_by_side(each) for each in zip(*batches, strict=True)], side_by_side(outer)

    def together() -> object:
        student = StackedStudent(students, RISK, teaching)
        return meta_gradient(student, teachers, joined, judges, rule, privileged=privileged_of)

    def one_by_one() -> None:
        for (model, taught_by), own, judge in zip(pairs, batches, outer, strict=True):
            student = Student(model, RISK, teaching)
            meta_gradient(student, taught_by, own, judge, rule, privileged=privileged_of)

    seconds, reference, ratio = interleaved(together, one_by_one, repeats=4, warmup=1)
    return Row(f"meta-gradient of task A's size, {SEEDS} seeds at once", seconds, "one by one", reference, ratio, "< 1")
