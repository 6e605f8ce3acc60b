"""Combines the meta-gradients of several students by any aggregator, in one process or several."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from concord.aggregation import Aggregator, check_statistics
from concord.aggregation.rule import add_statistics, new_statistics
from concord.distillation.meta_gradient import MetaGradient, bounded
from concord.gradients.finish import finish_whole
from concord.gradients.layout import Layout, trainable
from concord.gradients.nonfinite import NonFiniteGradientError


class MetaSums:
    """The aggregator's statistics of students' meta-gradients, added.

    The aggregator compares students here, each unrolled on its own data. Processes exchange only the sums, once, so the
    result does not depend on the placement of the students.

    Args:
        rule: the aggregator.
        teacher: the module whose gradient is computed.
        rescale: whether each parameter's update is divided by the fraction of it that the rule kept.

    Raises:
        InputError: the rule's statistics lack a property that they claim.
    """

    def __init__(self, rule: Aggregator, teacher: nn.Module, *, rescale: bool = False) -> None:
        check_statistics(rule)
        self._rule, self._rescale, self._parameters = rule, rescale, list(trainable(teacher).values())
        self._layout = Layout.of(trainable(teacher))
        device = self._parameters[0].device
        self._sums = new_statistics(rule, (self._layout.components,), self._layout.dtype, device)
        # The meta-losses added, how many, and how many that are not finite.
        self._counts = torch.zeros(3, dtype=self._layout.dtype, device=device)

    def add(self, found: MetaGradient) -> None:
        """Add the meta-gradient of a student."""
        flat = torch.cat([bounded(each).flatten().to(self._layout.dtype) for each in found.gradients])
        right = torch.isfinite(flat).all() & torch.isfinite(found.loss)
        add_statistics([(each, self._sums[each.name]) for each in self._rule.statistics], flat.unsqueeze(0))
        self._counts += torch.stack([each.to(self._counts) for each in (found.loss, torch.ones_like(right), ~right)])

    def combined(self, total: Callable[[Tensor], Tensor], step: int) -> tuple[list[Tensor], float]:
        """The update of the teacher's parameters, and the mean meta-loss.

        Args:
            total: gives the sum of a tensor over all processes; called once.
            step: the step's number, for rules that draw at random and for errors.

        Raises:
            NonFiniteGradientError: a student's meta-loss or its gradient is not finite, in any process.
        """
        names = list(self._sums)
        dtype = self._layout.dtype
        for each in self._sums.values():
            dtype = torch.promote_types(dtype, each.dtype)
        flat = total(torch.cat([each.to(dtype) for each in (*self._sums.values(), self._counts)]))
        loss, students, wrong = flat[-3:].tolist()
        if wrong:
            raise NonFiniteGradientError(["(outer examples)"], step)
        parts = flat[:-3].split(self._layout.components)
        sums = {name: part.to(self._sums[name].dtype) for name, part in zip(names, parts, strict=True)}
        update = torch.empty(self._layout.components, dtype=self._layout.dtype, device=flat.device)
        finish_whole(self._rule, sums, update, self._layout.layers, round(students), step, rescale=self._rescale)
        pieces = [self._layout.part(update, index) for index in range(len(self._parameters))]
        return [piece.to(each.dtype) for piece, each in zip(pieces, self._parameters, strict=True)], loss / students
