"""The Game of Life three steps ahead; a teacher has to find out which frame is which layer's (thesis, 4.4.2).

x is a random board, the label whether its middle cell lives after three steps, and x* the boards after each step, in a
wrong order that is the same for all examples. The student has three convolutions for each step. The teacher's targets
for some of them are mixtures of frames; with ``--teacher oracle`` the right frame for every third convolution, with
``fixed`` random mixtures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from concord.distillation import Distillation, TeacherOptions, Teaching, with_privileged
from concord.objectives import Objective
from concord.options import group
from concord.space import Entry, Integers, LogUniform, Space, Uniform
from concord.training import Job, Measure, Run, Study, TrainConfig
from concord_jobs.distill_life.frame_attention import FrameAttention
from concord_jobs.distill_life.life import boards_figure, random_trajectories
from concord_jobs.distillation.taught import student_environments, training_parts
from concord_jobs.distillation.two_classes import binary_accuracy, binary_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE, STEPS, LAYERS, ORDER = 17, 3, 9, (2, 0, 1)  # frame i of x* is the board after ORDER[i] + 1 steps


@dataclass(frozen=True, kw_only=True)
class LifeTeacher(TeacherOptions):
    """The layers that a teacher teaches, and how it learns to choose their frames."""

    of_any = TeacherOptions.of_any | {"taught_every"}
    of_meta = TeacherOptions.of_meta | {"meta_momentum"}

    # fmt: off
    taught_every: int = 3
    """Teach every n-th layer: 1, 3 or 9; 1 teaches all nine."""
    meta_momentum: float = 0.9
    """Momentum of the teacher's SGD."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
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
    """Number of training examples; with --teacher meta some of them judge the teacher."""
    filters: int = 12
    """Number of feature maps of each layer."""
    teaching: LifeTeacher = group(LifeTeacher)
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "examples", "filters")
        objective(self)
        if self.teaching.fixed_split:
            training_parts(self, examples)


def examples(config: LifeConfig, purpose: str) -> tuple[Tensor, Tensor]:
    """Boards ``(examples, 1, 17, 17)``, and targets with x*; outside training x* is unknown, and 0."""
    count = config.examples if purpose == "train" else {"validation": 2000, "test": 5000}[purpose]
    seed = 3 * config.run.seed + ("train", "validation", "test").index(purpose)
    states = torch.from_numpy(random_trajectories(count, seed, SIZE, STEPS)).float()
    shown = states[:, [1 + step for step in ORDER]] * (purpose == "train")
    return states[:, :1], with_privileged(states[:, STEPS, SIZE // 2, SIZE // 2], shown)


class LifeStudent(nn.Module):
    """Nine 3 × 3 convolutions with ReLUs, as large as the board; the output reads the last layer's middle cell."""

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


def objective(config: LifeConfig) -> Objective:
    """The labels alone, or a teacher beside them."""
    options = config.teaching
    if options.teacher == "none":
        return options.alone(
            binary_loss, lambda: nn.Conv2d(config.filters, STEPS, 1), f"layers.{2 * LAYERS - 1}", boards_of
        )
    sgd = partial(torch.optim.SGD, momentum=options.meta_momentum)
    learning = options.learning(lambda: training_parts(config, examples).outer, sgd)
    taught = range(options.taught_every - 1, LAYERS, options.taught_every)
    teaching = Teaching(options.teaching_weight, layers=tuple(f"layers.{2 * layer}" for layer in taught))
    made = partial(FrameAttention, STEPS, len(taught), config.filters)
    if options.teacher == "oracle":
        made = partial(FrameAttention.pointing, [ORDER.index(step) for step in range(STEPS)], STEPS, config.filters)
    return Distillation(binary_loss, made, teaching, learning, boards_of)


def figures(job: Job[LifeConfig], config: LifeConfig, outcome: Run, trained: nn.Module) -> "Mapping[str, Figure]":
    """Two of the training examples, with the boards after each step."""
    return {"boards": boards_figure(random_trajectories(2, 3 * config.run.seed, SIZE, STEPS))}


# In appendix C.3 the largest batch, number of maps and n are legible, and that most ranges are logarithmic; the other
# bounds are ours. The thesis chose by the test, as --selection oracle does.
SEARCHED: dict[str, Entry] = {"lr": LogUniform(1e-4, 1e-2), "batch_size": Integers(16, 128), "filters": Integers(4, 32)}
TAUGHT: dict[str, Entry] = {"teaching_weight": LogUniform(1.0, 1e3)}
LEARNED: dict[str, Entry] = {
    "unrolled_steps": Integers(1, 32),
    "meta_lr": LogUniform(1.0, 1e3),
    "meta_momentum": Uniform(0.0, 0.99),
    "validation_fraction": LogUniform(0.02, 0.5),
}
STUDIES = {
    "ldt": Study(Space({"teacher": "meta", **SEARCHED, **TAUGHT, **LEARNED})),
    "none": Study(Space({"teacher": "none", **SEARCHED})),
    "fixed": Study(Space({"teacher": "fixed", **SEARCHED, **TAUGHT})),
    "oracle-teacher": Study(Space({"teacher": "oracle", **SEARCHED, **TAUGHT})),
}
teacher_defaults = {"validation_fraction": 0.1, "teaching_weight": 30.0, "unrolled_steps": 16, "meta_lr": 500.0}
run_defaults = {"batch_size": 32, "held_out": 0.0, "lr": 3e-3, "epochs": 30, "evaluations": 10, "milestones": ()}
job = Job(
    environments=partial(student_environments, examples=examples),
    model=lambda config: LifeStudent(config.filters),
    loss=binary_loss,
    objective=objective,
    measures={"accuracy": Measure(binary_accuracy, "max")},
    config=LifeConfig().with_options(aggregator="mean", **teacher_defaults, **run_defaults),
    criterion="validation_accuracy",
    figures=figures,
    reproduces="Learning to distill trajectories, the Game of Life: Fig. 4.5, 4.6",
    studies=STUDIES,
    comparisons="tables.py",
)
