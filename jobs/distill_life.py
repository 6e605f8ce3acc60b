"""The Game of Life three steps ahead: does a teacher find out which frame belongs to which layer (thesis, 4.4.2)?

x is a random board, the label whether its middle cell lives after three steps, and x* the boards after each of them in
an order that is the same for all examples, and wrong. The student has three convolutions for each step. A teacher says
mixtures of frames to some of them; ``--teacher oracle`` the right frame to every third, ``fixed`` random mixtures.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from concord.distillation import Distillation, MetaLearning, Parts, Teaching, inner_outer, of_labels, with_privileged
from concord.distillation.frame_attention import FrameAttention
from concord.environments import Environments
from concord.environments.life import random_trajectories
from concord.objectives import ERM, Objective
from concord.training import Job, Measure, TrainConfig

SIZE, STEPS, LAYERS = 17, 3, 9
ORDER = (2, 0, 1)  # frame i of x* is the board after ORDER[i] + 1 steps
OF_META = {"validation_fraction", "unrolled_steps", "student_steps", "meta_lr", "meta_momentum"}


@dataclass(frozen=True, kw_only=True)
class LifeConfig(TrainConfig):
    """The middle cell of a board of Life, three steps ahead."""

    # fmt: off
    teacher: Literal["meta", "none", "fixed", "oracle"] = "meta"
    """One that learns which frames to show, none, a random one that stays, or one that shows the right ones."""
    examples: int = 5000
    """Training examples; with --teacher meta some of them judge the teacher."""
    filters: int = 12
    """Feature maps of each layer."""
    taught_every: int = 3
    """Every how manieth layer is taught: 1, 3 or 9; 1 teaches all nine."""
    validation_fraction: float = 0.1
    """Fraction of the examples that judges the teacher."""
    teaching_weight: float = 30.0
    """α, the weight of what is taught beside the labels."""
    unrolled_steps: int = 16
    """n, the steps of the student's copy through which the teacher's gradient goes."""
    student_steps: int = 16
    """N, the steps of the student between two steps of the teacher."""
    meta_lr: float = 500.0
    """Learning rate of the teacher's SGD."""
    meta_momentum: float = 0.9
    """Momentum of the teacher's SGD."""
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        for option in ("examples", "filters", "unrolled_steps"):
            self.require(option, getattr(self, option) >= 1, "must be at least 1")
        self.require("taught_every", self.taught_every in (1, 3, 9), "must be 1, 3 or 9")
        right = self.teacher != "oracle" or self.taught_every == 3
        self.require("taught_every", right, "the oracle teaches every third layer")
        self.require("meta_lr", 0 < self.meta_lr < float("inf"), "must be a finite number above 0")
        self.require("meta_momentum", 0 <= self.meta_momentum < 1, "must lie in [0, 1)")
        objective(self)
        if self.teacher == "meta":
            training_parts(self)

    def unused(self) -> frozenset[str]:
        """Also what only a teacher needs, or one that learns."""
        of_teacher = {"teaching_weight", "taught_every"} if self.teacher == "none" else set()
        return super().unused() | of_teacher | (OF_META if self.teacher != "meta" else set())


def examples(config: LifeConfig, purpose: str) -> tuple[Tensor, Tensor]:
    """Boards ``(examples, 1, 17, 17)``, and targets with x*; where nothing is trained x* is not known, and 0."""
    count = config.examples if purpose == "train" else {"validation": 2000, "test": 5000}[purpose]
    seed = 3 * config.run.seed + ("train", "validation", "test").index(purpose)
    states = torch.from_numpy(random_trajectories(count, seed, SIZE, STEPS)).float()
    shown = states[:, [1 + step for step in ORDER]] * (purpose == "train")
    return states[:, :1], with_privileged(states[:, STEPS, SIZE // 2, SIZE // 2], shown)


def training_parts(config: LifeConfig) -> Parts:
    """What trains the student, and what judges the teacher, where that is always the same."""
    return inner_outer(examples(config, "train"), config.validation_fraction, config.run.seed, config.data.batch_size)


def environments(config: LifeConfig) -> Environments:
    """One environment; with a teacher that learns, some of its examples are not the student's."""

    def load(name: str) -> Any:
        parts = name == "train" and config.teacher == "meta"
        return training_parts(config).inner if parts else examples(config, name)

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
    if config.teacher == "none":
        return ERM(loss)
    sgd = partial(torch.optim.SGD, lr=config.meta_lr, momentum=config.meta_momentum)
    learning = MetaLearning(lambda: training_parts(config).outer, config.unrolled_steps, config.student_steps, sgd)
    taught = range(config.taught_every - 1, LAYERS, config.taught_every)
    teaching = Teaching(config.teaching_weight, layers=tuple(f"layers.{2 * layer}" for layer in taught))
    made = partial(FrameAttention, STEPS, len(taught), config.filters)
    if config.teacher == "oracle":
        made = partial(FrameAttention.pointing, [ORDER.index(step) for step in range(STEPS)], STEPS, config.filters)
    return Distillation(loss, made, teaching, learning if config.teacher == "meta" else None, boards_of)


job = Job(
    environments=environments,
    model=lambda config: Student(config.filters),
    loss=loss,
    objective=objective,
    measures={"accuracy": Measure(accuracy, "max")},
    config=LifeConfig().with_options(
        aggregator="mean", batch_size=32, held_out=0.0, lr=3e-3, epochs=15, evaluations=15, milestones=()
    ),
    criterion="validation_accuracy",
    reproduces="Learning to distill trajectories: the Game of Life (Fig. 4.6)",
    comparisons="tables/distill_life.py",
)
