"""Options of a student's teacher or auxiliary prediction, for jobs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from concord.distillation.auxiliary import AuxiliaryPrediction
from concord.distillation.distillation import MetaLearning
from concord.distillation.privileged import privileged_of
from concord.distillation.unrolled import Rule
from concord.gradients.risk import Batch, Loss, Risk
from concord.objectives.erm import ERM
from concord.objectives.objective import Objective
from concord.options import OptionGroup


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(OptionGroup):
    """The teacher or auxiliary prediction of a student.

    A job with further options derives its own group, and adds the options that only a teacher needs to ``of_any``,
    those that only a learning teacher needs to ``of_meta``.
    """

    of_any: ClassVar[frozenset[str]] = frozenset({"teaching_weight"})
    of_meta: ClassVar[frozenset[str]] = frozenset(
        {"resample_split", "validation_fraction", "unrolled_steps", "student_steps", "meta_lr"}
    )

    # fmt: off
    teacher: Literal["meta", "none", "fixed", "oracle"] = "meta"
    """Teacher that learns its targets (meta), none, a fixed random one (fixed), or an optimal one,
    made by hand (oracle)."""
    teaching_weight: float = 1000.0
    """α, the weight of the teacher's targets beside the labels."""
    auxiliary_weight: float = 0.0
    """With --teacher none, the weight of predicting x* from the student's last hidden layer, beside the labels."""
    resample_split: bool = False
    """Draw new judging examples for each step of the teacher, outside of the student's next batches."""
    validation_fraction: float = 0.5
    """Fraction of the examples that judge the teacher."""
    unrolled_steps: int = 64
    """n: number of steps of the student's copy, through which the teacher's gradient passes."""
    student_steps: int = 16
    """N: number of the student's steps between two steps of the teacher."""
    meta_lr: float = 1e-3
    """Learning rate of the teacher's optimizer."""
    # fmt: on

    @property
    def fixed_split(self) -> bool:
        """Whether a fixed part of the examples judges the teacher and never trains the student."""
        return self.teacher == "meta" and not self.resample_split

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(1, "unrolled_steps", "student_steps")
        self.require("validation_fraction", 0 < self.validation_fraction < 1, "must lie between 0 and 1")
        self.require("meta_lr", 0 < self.meta_lr < float("inf"), "must be a finite number above 0")
        right = 0 <= self.auxiliary_weight < float("inf")
        self.require("auxiliary_weight", right, "must be a finite number, not below 0")
        alone = self.teacher == "none" or self.auxiliary_weight == 0
        self.require("auxiliary_weight", alone, f"--teacher {self.teacher} has x* already; give --teacher none")

    def unused(self) -> frozenset[str]:
        """The options of a teacher if there is none, or if it does not learn; and an auxiliary weight of 0."""
        left_out = self.of_any if self.teacher == "none" else frozenset[str]()
        if self.auxiliary_weight == 0:
            left_out |= {"auxiliary_weight"}
        return left_out if self.teacher == "meta" else left_out | self.of_meta

    def learning(
        self,
        outer: Callable[[], Batch],
        optimizer: Callable[..., torch.optim.Optimizer],
        rule: Rule | None = None,
    ) -> MetaLearning | None:
        """The settings of the teacher's learning; None if it does not learn.

        Args:
            outer: returns the examples that judge the teacher, with a fixed split.
            optimizer: makes the teacher's optimizer from its parameters and ``lr``.
            rule: the copy's optimizer; None takes the run's.
        """
        if self.teacher != "meta":
            return None
        return MetaLearning(
            None if self.resample_split else outer,
            self.unrolled_steps,
            self.student_steps,
            partial(optimizer, lr=self.meta_lr),
            rule,
            validation_fraction=self.validation_fraction,
        )

    def alone(
        self,
        loss: Loss | Risk,
        head: Callable[[], nn.Module],
        layer: str,
        privileged: Callable[[Batch], Any] = privileged_of,
    ) -> Objective:
        """The objective of a student without a teacher: the label loss, or :class:`AuxiliaryPrediction`."""
        if self.auxiliary_weight == 0:
            return ERM(loss)
        return AuxiliaryPrediction(loss, head, self.auxiliary_weight, layer, privileged)
