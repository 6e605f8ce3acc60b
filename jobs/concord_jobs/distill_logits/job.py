"""Task B of learning to distill trajectories: noisy labels, drawn from logits that x* shows in 32 mixed numbers.

A student that fits the labels becomes confident and wrong. x* = B h determines the logits h from which the label was
drawn, but a teacher must learn this. ``concord train distill-logits`` trains a student with such a teacher,
``--teacher none`` one without; ``fixed`` is a random teacher, ``oracle`` a teacher that returns h.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from concord.distillation import Distillation, TeacherOptions, Teaching, divergence, with_privileged
from concord.environments.collection import generator_for
from concord.objectives import Objective
from concord.options import group
from concord.training import Job, Measure, TrainConfig
from concord_jobs.distillation.taught import student_environments, training_parts

DIMENSIONS, CLASSES, PRIVILEGED = 128, 4, 32


@dataclass(frozen=True, kw_only=True)
class LogitsConfig(TrainConfig):
    """Labels drawn from the softmax of four hidden numbers."""

    # fmt: off
    examples: int = 1000
    """Number of training examples; with --teacher meta some of them judge the teacher."""
    logit_scale: float = 3.0
    """Factor of the hidden numbers A x: 1 in the thesis, 3 in its authors' code and figure."""
    entropy_weight: float = 0.0
    """β: the label loss is the cross-entropy less β times the entropy of the student's prediction."""
    teaching: TeacherOptions = group(TeacherOptions)
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "examples")
        self.require("logit_scale", 0 < self.logit_scale < math.inf, "must be a finite number above 0")
        self.require("entropy_weight", 0 <= self.entropy_weight < math.inf, "must be a finite number, not below 0")
        objective(self)
        if self.teaching.fixed_split:
            training_parts(self, examples)


def mixings(config: LogitsConfig) -> tuple[Tensor, Tensor]:
    """A ``(classes, dimensions)``, times --logit-scale, and B ``(privileged, classes)``, drawn by the seed."""
    # Named, since with the seed itself a generator would draw the numbers of the student's first weights.
    generator = generator_for(config.run.seed, "mixing")
    hidden = 2 * torch.rand(CLASSES, DIMENSIONS, generator=generator) - 1
    shown = 2 * torch.rand(PRIVILEGED, CLASSES, generator=generator) - 1
    return config.logit_scale * hidden / DIMENSIONS**0.5, shown / CLASSES**0.5


def examples(config: LogitsConfig, purpose: str) -> tuple[Tensor, Tensor]:
    """Inputs, and targets ``(examples, 1 + classes + privileged)``: a label, the logits, x*.

    The logits are only for measuring. Outside training x* is unknown, and 0.
    """
    hidden, shown = mixings(config)
    generator = generator_for(config.run.seed, purpose)
    count = config.examples if purpose == "train" else 1000
    inputs = torch.randn(count, DIMENSIONS, generator=generator)
    logits = inputs @ hidden.T
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    privileged = logits @ shown.T * (purpose == "train")
    return inputs, with_privileged(labels, torch.cat([logits, privileged], 1))


def privileged_of(batch: Any) -> Tensor:
    """x* of a batch."""
    privileged: Tensor = batch[1][:, 1 + CLASSES :]
    return privileged


def perceptron(inputs: int) -> nn.Sequential:
    """Two hidden layers of 256, and logits: the architecture of student and teacher."""
    hidden = nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(256, CLASSES))


class LogitOracle(nn.Module):
    """A teacher that knows B, and returns h = B⁺ x*."""

    def __init__(self, shown: Tensor) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.linalg.pinv(shown))

    def forward(self, privileged: Tensor) -> Tensor:
        """Logits ``(examples, classes)``."""
        return privileged @ self.get_buffer("inverse").T


def loss(outputs: Tensor, targets: Tensor, entropy_weight: float = 0.0) -> Tensor:
    """Cross-entropy of logits, minus β times the mean entropy of the prediction."""
    label_loss = nn.functional.cross_entropy(outputs, targets[:, 0].long())
    predicted = outputs.log_softmax(1)
    return label_loss + entropy_weight * (predicted.exp() * predicted).sum(1).mean() if entropy_weight else label_loss


def kl(outputs: Tensor, targets: Tensor) -> Tensor:
    """KL(p_y ‖ ŷ) of each example: the student's error against the distribution of the label."""
    true, predicted = targets[:, 1 : 1 + CLASSES].log_softmax(1), outputs.log_softmax(1)
    return (true.exp() * (true - predicted)).sum(1)


def objective(config: LogitsConfig) -> Objective:
    """The labels alone, or a teacher beside them."""
    options, by_label = config.teaching, partial(loss, entropy_weight=config.entropy_weight)
    if options.teacher == "none":
        return options.alone(by_label, lambda: nn.Linear(256, PRIVILEGED), "3", privileged_of)
    adam = partial(torch.optim.Adam, betas=(config.optimizer.betas[0], 0.999))
    learning = options.learning(lambda: training_parts(config, examples).outer, adam)
    made = partial(LogitOracle, mixings(config)[1]) if options.teacher == "oracle" else partial(perceptron, PRIVILEGED)
    return Distillation(by_label, made, Teaching(options.teaching_weight, divergence), learning, privileged_of)


published = {"teaching_weight": 1e4, "student_steps": 8, "batch_size": 32, "epochs": 16}
job = Job(
    # In version 1 the matrix was among the student's first weights.
    environments=partial(student_environments, examples=examples, version="2"),
    model=lambda _: perceptron(DIMENSIONS),
    loss=loss,
    objective=objective,
    measures={"kl": Measure(kl, "min")},
    config=LogitsConfig().with_options(aggregator="mean", held_out=0.0, evaluations=16, milestones=(), **published),
    criterion="validation_kl",
    reproduces="Learning to distill trajectories, toy task B: Fig. 4.4; Table C.1",
    comparisons="tables.py",
)
