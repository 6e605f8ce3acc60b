"""Task A of learning to distill trajectories: the exclusive or of two hidden signs; x* shows them behind random signs.

x* = (s, s ⊙ h) determines the label, but x does not predict x*: the mean of x* is 0 for every x. A teacher can learn to
undo s and to return h. ``concord train distill-xor`` trains a student with such a teacher, ``--teacher none`` a student
without. The teachers of ``fixed`` and ``oracle`` do not learn: one is random, the other returns h.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from concord.distillation import Distillation, TeacherOptions, Teaching, with_privileged
from concord.environments.collection import generator_for
from concord.objectives import Objective
from concord.options import group
from concord.training import Job, Measure, TrainConfig
from concord_jobs.distillation.taught import student_environments, training_parts
from concord_jobs.distillation.two_classes import binary_accuracy, binary_loss


@dataclass(frozen=True, kw_only=True)
class XorConfig(TrainConfig):
    """The exclusive or of two signs, hidden in many dimensions."""

    # fmt: off
    dimensions: int = 256
    """Number of dimensions of x."""
    examples: int = 512
    """Number of training examples; with --teacher meta some of them judge the teacher."""
    taught_units: int = 32
    """Units of the student's first layer, which the teacher teaches; 128 in the authors' code."""
    teacher_units: int = 256
    """Units of each of the teacher's two hidden layers; 512 in the authors' code."""
    teaching: TeacherOptions = group(TeacherOptions)
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "dimensions", "examples", "taught_units", "teacher_units")
        objective(self)
        if self.teaching.fixed_split:
            training_parts(self, examples)


def examples(config: XorConfig, purpose: str) -> tuple[Tensor, Tensor]:
    """Inputs, and targets with x*; outside training x* is unknown, and 0."""
    # Named, since with the seed itself a generator would draw the numbers of the student's first weights.
    mixing = 2 * torch.rand(2, config.dimensions, generator=generator_for(config.run.seed, "mixing")) - 1
    generator = generator_for(config.run.seed, purpose)
    count = config.examples if purpose == "train" else 1000
    inputs = torch.randn(count, config.dimensions, generator=generator)
    signs = 2.0 * torch.randint(0, 2, (count, 2), generator=generator) - 1
    hidden = inputs @ mixing.T / config.dimensions**0.5
    privileged = torch.cat([signs, signs * hidden], 1) * (purpose == "train")
    return inputs, with_privileged((hidden > 0).sum(1) % 2, privileged)


def student(config: XorConfig) -> nn.Module:
    """A taught bottleneck without an activation, and a hidden layer."""
    units = config.taught_units
    return nn.Sequential(nn.Linear(config.dimensions, units), nn.Linear(units, 128), nn.ReLU(), nn.Linear(128, 1))


def teacher(config: XorConfig) -> nn.Module:
    """A network from x* to targets for the student's first layer."""
    units, taught = config.teacher_units, config.taught_units
    return nn.Sequential(nn.Linear(4, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, taught))


class SignOracle(nn.Module):
    """A teacher that undoes the signs of x* and returns h: each number to one half of the units."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.halves: Tensor
        self.register_buffer("halves", torch.arange(units) * 2 // units, persistent=False)

    def forward(self, privileged: Tensor) -> Tensor:
        """Targets ``(examples, units)``."""
        return (privileged[:, :2] * privileged[:, 2:])[:, self.halves]


def objective(config: XorConfig) -> Objective:
    """The labels alone, or a teacher beside them."""
    options = config.teaching
    if options.teacher == "none":
        return options.alone(binary_loss, lambda: nn.Linear(128, 4), "2")
    adam = partial(torch.optim.Adam, betas=(config.optimizer.betas[0], 0.999))
    learning = options.learning(lambda: training_parts(config, examples).outer, adam)
    made = partial(SignOracle, config.taught_units) if options.teacher == "oracle" else partial(teacher, config)
    return Distillation(binary_loss, made, Teaching(options.teaching_weight, layers=("0",)), learning)


settings = {
    "resample_split": True,
    "student_steps": 8,  # of 8 and 16, with the teacher's rate, by validation: `choice`
    "meta_lr": 3e-4,
    "batch_size": 16,
    "held_out": 0.0,
    "epochs": 100,
    "evaluations": 100,
    "beta1": 0.5,
    "milestones": (),
}
job = Job(
    # In version 1 the matrix was among the student's first weights.
    environments=partial(student_environments, examples=examples, version="2"),
    model=student,
    loss=binary_loss,
    objective=objective,
    measures={"accuracy": Measure(binary_accuracy, "max")},
    config=XorConfig().with_options(aggregator="mean", **settings),
    criterion="validation_accuracy",
    reproduces="Learning to distill trajectories, toy task A: Fig. 4.3",
    comparisons="tables.py",
)
