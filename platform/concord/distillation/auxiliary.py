"""Privileged information as a second target to predict: the baseline of a teacher."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

from concord.distillation.privileged import privileged_of
from concord.distillation.student import Student
from concord.distillation.teaching import Teaching
from concord.errors import ArgumentError, InputError
from concord.gradients.risk import Batch, Loss, Risk, take
from concord.objectives.objective import Objective


class AuxiliaryPrediction(Objective):
    """The mean over environments of label loss + w · mean (head(h) - x*)², with h the output of a layer.

    The head is trained with the model, by the run's optimizer, and is no part of the registered model.

    Args:
        loss: the loss or the risk by labels.
        head: makes the head, from h to x*; called in :meth:`begin`.
        weight: w.
        layer: the name (in ``model.named_modules()``) of the module whose output is h; the last hidden layer, say.
        privileged: takes x* out of a batch ``(examples, ...)``, a tensor of the shape that the head gives.
        autocast: the dtype in which layers compute.

    Raises:
        InputError: the weight is negative or not finite.
    """

    coupled: ClassVar[bool] = True  # the head is the objective's own

    def __init__(
        self,
        loss: Loss | Risk,
        head: Callable[[], nn.Module],
        weight: float,
        layer: str,
        privileged: Callable[[Batch], Any] = privileged_of,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(loss, autocast)
        if not 0 <= weight < math.inf:
            raise ArgumentError("auxiliary_weight", weight, "must be a finite number, not below 0")
        self._teaching = Teaching(weight, self._error, (layer,))
        self._head, self._privileged = head, privileged

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        """Make the head.

        Raises:
            InputError: the model has no layer of this name.
        """
        Student(model, self.risk, self._teaching)
        self.module = self._head()

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Label loss and prediction of each environment.

        Raises:
            InputError: the head gives another shape than x* has.
        """
        student = Student(model, self.risk, self._teaching, self.autocast)
        parts = [take(batch, index) for index in range(len(pytree.tree_leaves(batch)[0]))]
        losses, weights = zip(*(student.loss(part, self._privileged(part), step) for part in parts), strict=True)
        return torch.stack(losses), torch.stack(weights)

    def _error(self, activations: Tensor, privileged: Tensor) -> Tensor:
        if self.module is None:
            raise ArgumentError("objective", "auxiliary prediction", "it has no head yet; call begin first")
        found = self.module(activations)
        if found.shape != privileged.shape:
            raise InputError(f"head: gives {tuple(found.shape)}; x* has {tuple(privileged.shape)}")
        return mse_loss(found, privileged)
