"""The Game of Life three steps ahead; a teacher has to find out which frame is which layer's (thesis, 4.4.2).

x is a random board, the label whether its middle cell lives after three steps, and x* the boards after each of them in
an order that is the same for all examples, and wrong. The student has three convolutions for each step. A teacher says
mixtures of frames to some of them; ``--teacher oracle`` the right frame to every third, ``fixed`` random mixtures.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from concord.distillation import Distillation, Parts, TeacherOptions, Teaching, inner_outer, of_labels, with_privileged
from concord.distillation.frame_attention import FrameAttention
from concord.environments import Environments
from concord.environments.life import random_trajectories
from concord.objectives import Objective
from concord.runs.teacher_studies import LIFE
from concord.training import Job, Measure, TrainConfig

SIZE, STEPS, LAYERS, ORDER = 17, 3, 9, (2, 0, 1)  # frame i of x* is the board after ORDER[i] + 1 steps


@dataclass(frozen=True, kw_only=True)
class LifeTeacher(TeacherOptions):
    """Which layers a teacher shows frames to, and how it learns which."""

    of_any = TeacherOptions.of_any | {"taught_every"}
    of_meta = TeacherOptions.of_meta | {"meta_momentum"}

    # fmt: off
    taught_every: int = 3
    """Every how manieth layer is taught: 1, 3 or 9; 1 teaches all nine."""
    meta_momentum: float = 0.9
    """Momentum of the teacher's SGD."""
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        self.require("taught_every", self.taught_every in (1, 3, 9), "must be 1, 3 or 9")
        right = self.teacher != "oracle" or self.taught_every == 3
        self.require("taught_every", right, "the oracle teaches every third layer")
        self.require("meta_momentum", 0 <= self.meta_momentum < 1, "must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class LifeConfig(TrainConfig):
    """The middle cell of a board of Life, three steps ahead."""

    # fmt: off
    examples: int = 5000
    """Training examples; with --teacher meta some of them judge the teacher."""
    filters: int = 12
    """Feature maps of each layer."""
    teaching: LifeTeacher = field(default_factory=LifeTeacher)
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        for option in ("examples", "filters"):
            self.require(option, getattr(self, option) >= 1, "must be at least 1")
        objective(self)
        if self.teaching.fixed_split:
            training_parts(self)


def examples(config: LifeConfig, purpose: str) -> tuple[Tensor, Tensor]:
    """Boards ``(examples, 1, 17, 17)``, and targets with x*; where nothing is trained x* is not known, and 0."""
    count = config.examples if purpose == "train" else {"validation": 2000, "test": 5000}[purpose]
    seed = 3 * config.run.seed + ("train", "validation", "test").index(purpose)
    states = torch.from_numpy(random_trajectories(count, seed, SIZE, STEPS)).float()
    shown = states[:, [1 + step for step in ORDER]] * (purpose == "train")
    return states[:, :1], with_privileged(states[:, STEPS, SIZE // 2, SIZE // 2], shown)


def training_parts(config: LifeConfig) -> Parts:
    """What trains the student, and what judges the teacher, where that is always the same."""
    fraction = config.teaching.validation_fraction
    return inner_outer(examples(config, "train"), fraction, config.run.seed, config.data.batch_size)


def environments(config: LifeConfig) -> Environments:
    """One environment; only with a fixed split some of its examples are not the student's."""

    def load(name: str) -> Any:
        split = config.teaching.fixed_split and name == "train"
        return training_parts(config).inner if split else examples(config, name)

    return Environments(load, train=["train"], validation=["validation"], test=["test"])


class Student(nn.Module):
    """Nine convolutions 3 × 3 with ReLUs, as large as the board; the last layer's middle cell is read out."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for layer in range(LAYERS):
            self.layers.extend([nn.Conv2d(filters if layer else 1, filters, 3, padding=1), nn.ReLU()])
            nn.init.kaiming_normal_(self.layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
        self.readout = nn.Linear(filters, 1)

    def forward(self, boards: Tensor) -> Tensor:
        """Logits ``(examples, 1)``."""
        logits: Tensor = self.readout(self.layers(boards)[..., SIZE // 2, SIZE // 2])
        return logits


def boards_of(batch: tuple[Tensor, Tensor]) -> Tensor:
    """The frames of x*, ``(examples, 3, 17, 17)``."""
    return batch[1][:, 1:].reshape(-1, STEPS, SIZE, SIZE)


loss = of_labels(lambda outputs, labels: nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), labels))
accuracy = of_labels(lambda outputs, labels: ((outputs.squeeze(1) > 0) == labels.bool()).float())


def objective(config: LifeConfig) -> Objective:
    """The labels alone, or a teacher beside them."""
    options = config.teaching
    if options.teacher == "none":
        return options.alone(loss, lambda: nn.Conv2d(config.filters, STEPS, 1), f"layers.{2 * LAYERS - 1}", boards_of)
    sgd = partial(torch.optim.SGD, momentum=options.meta_momentum)
    learning = options.learning(lambda: training_parts(config).outer, sgd)
    taught = range(options.taught_every - 1, LAYERS, options.taught_every)
    teaching = Teaching(options.teaching_weight, layers=tuple(f"layers.{2 * layer}" for layer in taught))
    made = partial(FrameAttention, STEPS, len(taught), config.filters)
    if options.teacher == "oracle":
        made = partial(FrameAttention.pointing, [ORDER.index(step) for step in range(STEPS)], STEPS, config.filters)
    return Distillation(loss, made, teaching, learning, boards_of)


teacher_defaults = {"validation_fraction": 0.1, "teaching_weight": 30.0, "unrolled_steps": 16, "meta_lr": 500.0}
run_defaults = {"batch_size": 32, "held_out": 0.0, "lr": 3e-3, "epochs": 30, "evaluations": 10, "milestones": ()}
job = Job(
    environments=environments,
    model=lambda config: Student(config.filters),
    loss=loss,
    objective=objective,
    measures={"accuracy": Measure(accuracy, "max")},
    config=LifeConfig().with_options(aggregator="mean", **teacher_defaults, **run_defaults),
    criterion="validation_accuracy",
    reproduces="Learning to distill trajectories: the Game of Life (Fig. 4.6), one training size",
    studies=LIFE,
    comparisons="tables/distill_life.py",
)
