"""The exact derivative of the student's loss after its steps with respect to the teacher's parameters.

The derivative is computed in two parts, before and after the targets. The teacher computes all targets h* in one
forward pass for the examples of all n steps. A backward sweep through the steps gives the derivative with respect to
h*. One product with the teacher's Jacobian gives the derivative with respect to the teacher's parameters φ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from concord.distillation.student import Student
from concord.distillation.unrolled import OptimizerState, Rule
from concord.gradients.layout import trainable
from concord.gradients.risk import Batch

LARGEST = 1e8
"""What components of a meta-gradient are cut to, as in the thesis."""


@dataclass(frozen=True)
class MetaGradient:
    """The derivative of the meta-loss with respect to the teacher's trainable parameters.

    Attributes:
        gradients: one for each parameter, in their order.
        loss: the meta-loss, the label loss of the unrolled student on the outer batch; one
            for each seed of a :class:`~concord.distillation.StackedStudent`.
    """

    gradients: tuple[Tensor, ...]
    loss: Tensor


def meta_gradient(
    student: Student,
    teacher: nn.Module,
    batches: Sequence[Batch],
    outer: Batch,
    rule: Rule,
    state: OptimizerState | None = None,
    *,
    privileged: Callable[[Batch], Any],
    step: int = 0,
) -> MetaGradient:
    """The derivative by the teacher of the label loss of the student's copy after a step on each batch.

    dL_outer/dφ = ∂L_outer/∂θ_n · dθ_n/dφ by reverse mode through all steps; θ_0 and the optimizer's first state are
    constants. Neither the model nor its buffers change. Time and memory grow with the number of steps.

    Args:
        student: its weights are θ_0.
        teacher: maps x* to the targets of the layers that are taught.
        batches: one a step, trees of tensors ``(examples, ...)``, all of one size.
        outer: the examples that judge the student after its steps, by their labels alone.
        rule: the student's optimizer.
        state: the optimizer's state; None starts a new one.
        privileged: takes x* out of a batch.
        step: the step's number, for the risk.
    """
    targets = _targets(teacher, [privileged(batch) for batch in batches])
    graph = [pytree.tree_flatten(each) for each in targets]
    cut = [[leaf.detach().requires_grad_() for leaf in leaves] for leaves, _ in graph]
    targets = [pytree.tree_unflatten(leaves, form) for leaves, (_, form) in zip(cut, graph, strict=True)]
    loss = _unrolled_loss(student, batches, targets, outer, rule, state, step)
    by_targets = torch.autograd.grad(loss.sum(), [leaf for leaves in cut for leaf in leaves], materialize_grads=True)
    gradients = torch.autograd.grad(
        [leaf for leaves, _ in graph for leaf in leaves],
        list(trainable(teacher).values()),
        grad_outputs=by_targets,
        materialize_grads=True,
    )
    return MetaGradient(gradients, loss.detach())


def bounded(gradient: Tensor) -> Tensor:
    """The gradient with components cut to ±1e8; NaN becomes 0 unless all components are NaN."""
    missing = gradient.isnan()
    return torch.where(missing & ~missing.all(), 0.0, gradient).clamp(-LARGEST, LARGEST)


def _targets(teacher: nn.Module, privileged: Sequence[Any]) -> list[Any]:
    """The teacher's targets of each batch, by one forward pass for all.

    A teacher that normalizes over the batch normalizes each batch separately, as in the student's own steps. If it also
    keeps running statistics, the batches pass one after another.
    """
    sizes = [len(pytree.tree_leaves(each)[0]) for each in privileged]
    normalizing = [each for each in teacher.modules() if isinstance(each, _BatchNorm) and each.training]
    if normalizing:
        if len(set(sizes)) > 1 or any(each.track_running_stats for each in normalizing):
            return [teacher(each) for each in privileged]
        stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *privileged)
        leaves, form = pytree.tree_flatten(vmap(teacher, randomness="different")(stacked))
        return [pytree.tree_unflatten(parts, form) for parts in zip(*leaves, strict=True)]
    targets = teacher(pytree.tree_map(lambda *leaves: torch.cat(leaves), *privileged))
    leaves, form = pytree.tree_flatten(targets)
    return [pytree.tree_unflatten(parts, form) for parts in zip(*(leaf.split(sizes) for leaf in leaves), strict=True)]


def _unrolled_loss(
    student: Student,
    batches: Sequence[Batch],
    targets: Sequence[Any],
    outer: Batch,
    rule: Rule,
    state: OptimizerState | None,
    step: int,
) -> Tensor:
    """The label loss of the outer batch after the steps, with the graph of all of them."""
    names = list(trainable(student.model))
    weights = [each.detach().requires_grad_() for each in trainable(student.model).values()]
    buffers = {name: buffer.detach().clone() for name, buffer in student.model.named_buffers()}
    state = rule.start([weight.detach() for weight in weights]) if state is None else state
    for index, (batch, target) in enumerate(zip(batches, targets, strict=True)):
        named = dict(zip(names, weights, strict=True)) | buffers
        loss, _ = student.loss(batch, target, step + index, named)
        gradients = torch.autograd.grad(loss.sum(), weights, create_graph=True, materialize_grads=True)
        weights, state = rule.step(weights, gradients, state)
    return student.label_loss(outer, step, dict(zip(names, weights, strict=True)) | buffers)
