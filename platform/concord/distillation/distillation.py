"""Distillation as an objective: the platform's loop trains the student, and a teacher learns between its steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.aggregation import Aggregator, Mean
from concord.distillation.combination import MetaSums
from concord.distillation.meta_gradient import meta_gradient
from concord.distillation.privileged import privileged_of
from concord.distillation.student import Student
from concord.distillation.teaching import Teaching
from concord.distillation.unrolled import Rule, as_rule
from concord.errors import ArgumentError, InputError
from concord.gradients.layout import trainable
from concord.gradients.risk import Batch, Loss, Risk, take
from concord.objectives.objective import Objective

MetaOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_ADAM: MetaOptimizer = partial(torch.optim.Adam, lr=1e-3)


@dataclass(frozen=True)
class MetaLearning:
    """The settings of a teacher's learning.

    Args:
        outer: returns the examples that judge the teacher, a tree of tensors ``(examples, ...)``; called once in every
            process. None draws a new split for every step of the teacher: of a pass through the data,
            ``validation_fraction`` of the batches judge, which never are the student's next N, and the others train
            the copy, those N first, in cycles. If the next N reach into the next pass, batches are made of the
            examples of this pass that are not among them.
        inner_steps: n, the number of steps of the student's copy.
        student_steps: N, the number of the student's steps between two steps of the teacher.
        optimizer: makes the teacher's optimizer from its parameters.
        rule: the copy's optimizer. None takes the run's optimizer with its present state, without clipping and
            without the penalties --l1 and --l2.
        aggregator: the rule that combines the meta-gradients of the environments' copies, such as ``AndMask(0.8)``, or
            the one of ``--aggregator``, ``config.rule(environments)``. None takes their mean.
        rescale: divide each of the teacher's parameters' update by the fraction of it that the aggregator kept.
        validation_fraction: with ``outer=None`` the fraction of a pass's batches that judge, in (0, 1).

    Raises:
        InputError: a number of steps is below 1, or the fraction is not between 0 and 1.
    """

    outer: Callable[[], Batch] | None
    inner_steps: int = 32
    student_steps: int = 16
    optimizer: MetaOptimizer = _ADAM
    rule: Rule | None = None
    aggregator: Aggregator | None = None
    rescale: bool = False
    validation_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name in ("inner_steps", "student_steps"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "must be at least 1")
        if not 0 < self.validation_fraction < 1:
            raise ArgumentError("validation_fraction", self.validation_fraction, "must lie between 0 and 1")


class Distillation(Objective):
    """The mean over environments of label loss + α Σ_k L_t(h_k, h*_k), with the teacher's targets h* = T(x*).

    At steps 0, N, 2N, … the teacher takes a step first. For each environment a copy of the student takes n steps on the
    environment's next batches. The teacher follows the mean of the copies' meta-gradients, or another aggregator's
    combination. So the result does not depend on the placement of the environments. See :mod:`concord.distillation`.

    Args:
        loss: the loss or the risk by labels.
        teacher: makes T; called in :meth:`begin`.
        teaching: the taught layers and the teaching loss.
        meta: the settings of the teacher's learning; None keeps the teacher fixed.
        privileged: takes x* out of a batch ``(examples, ...)``.
        autocast: the dtype in which layers compute.

    Attributes:
        module: the teacher; no part of the registered model.
        meta_loss: the latest meta-loss, the mean over environments; None before the first.
    """

    alternates: ClassVar[bool] = True

    def __init__(
        self,
        loss: Loss | Risk,
        teacher: Callable[[], nn.Module],
        teaching: Teaching,
        meta: MetaLearning | None = None,
        privileged: Callable[[Batch], Any] = privileged_of,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(loss, autocast)
        self.teaching, self.meta, self.privileged = teaching, meta, privileged
        self.meta_loss: float | None = None
        self._teacher = teacher
        self._batch_at: Callable[[int], Batch] | None = None
        self._students: torch.optim.Optimizer | None = None
        self._steps_per_pass: int | None = None
        self._outer: Batch | None = None
        self._meta_losses: list[float] = []
        self.takes_aggregator = meta is not None and meta.aggregator is not None

    def metrics(self) -> dict[str, float]:
        """``meta_loss``: the mean since the last call, if there was a meta-loss."""
        losses, self._meta_losses = self._meta_losses, []
        return {"meta_loss": sum(losses) / len(losses)} if losses else {}

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Make the teacher and its optimizer.

        Raises:
            InputError: the model has no taught layer, or a teacher that learns has no parameters.
        """
        Student(model, self.risk, self.teaching)
        self.module = self._teacher()
        if self.meta is not None:
            if not trainable(self.module):
                raise InputError("teacher: none of its parameters requires a gradient, so it cannot learn")
            self.optimizer = self.meta.optimizer(trainable(self.module).values())

    def attach(
        self, batch_at: Callable[[int], Batch], optimizer: torch.optim.Optimizer, steps_per_pass: int | None = None
    ) -> None:
        """Keep the run's batches and optimizer for the copies.

        Raises:
            InputError: the copies take the run's optimizer, and it cannot be unrolled; or ``outer`` is None, and N is
                more than the batches of a pass through the data that do not judge.
        """
        if self.meta is not None and self.meta.outer is None:
            if steps_per_pass is None:
                raise InputError("batch_size: with a split drawn anew it has to divide every environment's examples")
            real, most = self.meta.student_steps, steps_per_pass - self._judging(steps_per_pass)
            if real > most:
                expected = f"at most the {most} of a pass's {steps_per_pass} steps that do not judge"
                raise ArgumentError("student_steps", real, f"with a split drawn anew: {expected}")
            self._steps_per_pass = steps_per_pass
        if self.meta is not None and self.meta.rule is None:
            as_rule(optimizer, optimizer.param_groups[0]["params"])
        self._batch_at, self._students = batch_at, optimizer

    def prepare(self, model: nn.Module, step: int, own: Sequence[int], total: Callable[[Tensor], Tensor]) -> None:
        """The teacher's step, every N steps.

        Raises:
            NonFiniteGradientError: the meta-loss or its gradient is not finite.
        """
        if self.meta is None or step % self.meta.student_steps:
            return
        if self._batch_at is None or self._students is None or self.optimizer is None:
            raise ArgumentError("objective", "distillation", "call begin and attach before its first step")
        teacher, parameters = self._require_teacher(), list(trainable(model).values())
        rule, state = (self.meta.rule, None) if self.meta.rule else as_rule(self._students, parameters)
        coming, judges = self._parts(step, parameters[0].device)
        student = Student(model, self.risk, self.teaching, self.autocast)
        sums = MetaSums(self.meta.aggregator or Mean(), teacher, rescale=self.meta.rescale)
        devices = [parameters[0].device] if parameters[0].is_cuda else []
        with torch.random.fork_rng(devices):  # the student draws the same numbers as the copies
            for index in range(len(own)):
                found = meta_gradient(
                    student,
                    teacher,
                    [take(batch, index) for batch in coming],
                    judges(index),
                    rule,
                    state,
                    privileged=self.privileged,
                    step=step,
                )
                sums.add(found)
        updates, self.meta_loss = sums.combined(total, step)
        self._meta_losses.append(self.meta_loss)
        for parameter, update in zip(trainable(teacher).values(), updates, strict=True):
            parameter.grad = update
        self.optimizer.step()

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Label loss and teaching of each environment; the teacher is a constant here."""
        teacher, student = self._require_teacher(), Student(model, self.risk, self.teaching, self.autocast)
        losses, weights = [], []
        for index in range(len(pytree.tree_leaves(batch)[0])):
            part = take(batch, index)
            with torch.no_grad():
                targets = teacher(self.privileged(part))
            loss, weight = student.loss(part, targets, step)
            losses.append(loss)
            weights.append(weight)
        return torch.stack(losses), torch.stack(weights)

    def _parts(self, step: int, device: torch.device) -> tuple[list[Batch], Callable[[int], Batch]]:
        """The batches of the copies' steps, and a function that returns the judging examples of an environment."""
        assert self.meta is not None
        assert self._batch_at is not None
        steps, real = self.meta.inner_steps, self.meta.student_steps
        if self.meta.outer is not None:
            if self._outer is None:
                self._outer = pytree.tree_map(lambda leaf: leaf.to(device), self.meta.outer())
            return [self._batch_at(at) for at in range(step, step + steps)], lambda _: self._outer
        assert self._steps_per_pass is not None
        batches = [self._batch_at(at) for at in range(step, step + real)]
        first = step - step % self._steps_per_pass
        whole = [self._batch_at(at) for at in range(first, first + self._steps_per_pass)]
        judging = self._judging(len(whole))
        if step + real <= first + len(whole):
            others = whole[: step - first] + whole[step - first + real :]
            order = torch.randperm(len(others), generator=torch.Generator().manual_seed(step)).tolist()
            judges = [others[at] for at in sorted(order[:judging])]
            batches += [others[at] for at in sorted(order[judging:])]
        else:  # examples of the pass that begins among the student's steps may be those of this pass
            others = _outside(whole, batches, len(whole) - real, step)
            judges, batches = others[:judging], batches + others[judging:]
        joined = pytree.tree_map(lambda *leaves: torch.cat(leaves, 1), *judges)
        return [batches[at % len(batches)] for at in range(steps)], lambda index: take(joined, index)

    def _judging(self, steps_per_pass: int) -> int:
        """The number of a pass's batches that judge."""
        assert self.meta is not None
        return max(1, round(self.meta.validation_fraction * steps_per_pass))

    def _require_teacher(self) -> nn.Module:
        if self.module is None:
            raise ArgumentError("objective", "distillation", "it has no teacher yet; call begin with the model first")
        return self.module


def _outside(whole: Sequence[Batch], used: Sequence[Batch], count: int, seed: int) -> list[Batch]:
    """``count`` batches, in a random order, of the examples of ``whole`` that are not among those of ``used``.

    All batches are trees ``(environments, batch, ...)``. Of equal examples as many are left out as are used.
    """
    pool, taken = (pytree.tree_map(lambda *leaves: torch.cat(leaves, 1), *each) for each in (whole, used))
    leaves, others = pytree.tree_leaves(pool), pytree.tree_leaves(taken)
    size = len(pytree.tree_leaves(whole[0])[0][0])
    chosen = []
    for environment in range(len(leaves[0])):
        left = torch.ones(len(leaves[0][0]), dtype=torch.bool, device=leaves[0].device)
        for example in range(len(others[0][0])):
            same = left.clone()
            for leaf, other in zip(leaves, others, strict=True):
                same &= (leaf[environment] == other[environment, example]).reshape(len(same), -1).all(1)
            left[same.nonzero()[:1]] = False
        outside = left.nonzero().flatten().cpu()
        order = torch.randperm(len(outside), generator=torch.Generator().manual_seed(seed))  # wherever the others are
        chosen.append(outside[order[: count * size]])
    return [
        pytree.tree_map(
            lambda leaf, at=at: torch.stack([leaf[e, places[at : at + size]] for e, places in enumerate(chosen)]), pool
        )
        for at in range(0, count * size, size)
    ]
