"""Returns in MuJoCo from a state and 16 actions, with a teacher that sees the states in between (thesis, 4.4.3).

x is a state and the actions that follow, the label in which of 32 bins their sum of rewards lies, and x* the 16 states
and rewards. ``concord data distill-mujoco --simulator Hopper`` makes the data, ``concord train distill-mujoco`` trains
a student with a teacher that learns what to say of its pre-activations, and which of them; ``--teacher none`` one
without. Ablations of Fig. 4.9: ``--teacher fixed``, ``--permute-time``, ``--noise-frames 16``, ``--resample-split``.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import concord.environments.reward_trajectories as trajectories
from concord import distillation
from concord.distillation import Distillation, GatedError, MetaLearning, Teaching, inner_outer, of_labels
from concord.distillation.trajectory_teacher import TrajectoryTeacher
from concord.environments import Environments
from concord.objectives import ERM, Objective
from concord.reinforcement import trajectory_data
from concord.training import Data, Job, Measure, TrainConfig

LAYERS, UNITS, BINS = 5, 128, 32
TAUGHT = tuple(f"{2 * layer}" for layer in range(LAYERS))  # the linear layers: their outputs are pre-activations
OF_ANY = {"teaching_weight", "permute_time", "noise_frames"}
OF_META = {"resample_split", "validation_fraction", "unrolled_steps", "unrolled_lr", "student_steps"}
OF_META |= {"meta_lr", "meta_beta1"}


@dataclass(frozen=True, kw_only=True)
class ReturnConfig(TrainConfig):
    """Returns of open-loop actions, with the settings for Hopper of Tables C.5 and C.6."""

    # fmt: off
    simulator: trajectories.Simulator = "Hopper"
    """Which of Gymnasium's environments the data are of."""
    teacher: Literal["meta", "none", "fixed"] = "meta"
    """One that learns what to say, none, or a random one that stays as it is."""
    permute_time: bool = False
    """Shuffle the states that the teacher sees, each example's in an order of its own."""
    noise_frames: int = 0
    """Replace so many of the last states that the teacher sees by noise."""
    resample_split: bool = False
    """Draw anew, for each step of the teacher, which examples judge it; --batch-size divides the examples then."""
    validation_fraction: float = 0.3
    """Fraction of the examples that judges the teacher, where it is always the same."""
    teaching_weight: float = 10**2.5
    """α, the weight of what is taught beside the labels."""
    unrolled_steps: int = 96
    """n, the steps of the student's copy through which the teacher's gradient goes."""
    unrolled_lr: float = 1e-2
    """Learning rate of the copy, SGD with momentum 0.75."""
    student_steps: int = 24
    """N, the steps of the student between two steps of the teacher."""
    meta_lr: float = 5e-4
    """Learning rate of the teacher's Adam."""
    meta_beta1: float = 0.0
    """β₁ of the teacher's Adam."""
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        self.require("noise_frames", 0 <= self.noise_frames <= trajectories.HORIZON, "must lie in 0 … 16")
        for option in ("meta_lr", "unrolled_lr"):
            self.require(option, 0 < getattr(self, option) < float("inf"), "must be a finite number above 0")
        self.require("meta_beta1", 0 <= self.meta_beta1 < 1, "must lie in [0, 1)")
        self.require("unrolled_steps", self.unrolled_steps >= 1, "must be at least 1")
        self.require("validation_fraction", 0 < self.validation_fraction < 1, "must lie between 0 and 1")
        objective(self)

    def unused(self) -> frozenset[str]:
        """Also what only a teacher needs, or one that learns."""
        left_out = OF_META if self.teacher != "meta" else {"validation_fraction"} if self.resample_split else set()
        return super().unused() | left_out | (OF_ANY if self.teacher == "none" else set())


def examples(config: ReturnConfig, purpose: Any) -> tuple[Tensor, Tensor]:
    """Inputs, and targets with x*; where nothing is trained x* is not known, and 0."""
    data = trajectory_data.data_of(config.data.data_dir, config.run.output, config.simulator)
    made = trajectories.standardized(data.split("train"), data.split(purpose), BINS)
    seen = trajectories.disturbed(made.frames, config.run.seed, config.permute_time, config.noise_frames)
    privileged = torch.from_numpy(seen * (purpose == "train"))
    return torch.from_numpy(made.inputs), distillation.with_privileged(torch.from_numpy(made.labels), privileged)


def training_parts(config: ReturnConfig) -> distillation.Parts:
    """What trains the student, and what judges the teacher, where that is always the same."""
    return inner_outer(examples(config, "train"), config.validation_fraction, config.run.seed, config.data.batch_size)


def environments(config: ReturnConfig) -> Environments:
    """One environment; with a fixed split some of its examples are not the student's."""
    split = config.teacher == "meta" and not config.resample_split
    version = trajectory_data.data_of(config.data.data_dir, config.run.output, config.simulator).version

    def load(name: str) -> Any:
        return training_parts(config).inner if split and name == "train" else examples(config, name)

    return Environments(load, ["train"], ["validation"], ["test"], version=version)


def student(config: ReturnConfig) -> nn.Module:
    """Five layers of 128 and one for the bins, with weight normalization."""
    observations, actions = trajectories.SIZES[config.simulator]
    widths = [observations + trajectories.HORIZON * actions, *[UNITS] * LAYERS, BINS]
    layers = [part for each in pairwise(widths) for part in (weight_norm(nn.Linear(*each)), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# Of logits (examples, bins), and what the table reports: always saying the same gives .083.
loss = of_labels(lambda outputs, labels: nn.functional.cross_entropy(outputs, labels.long()))
squared_error = of_labels(trajectories.squared_error_of_bins)


def objective(config: ReturnConfig) -> Objective:
    """The labels alone, or a teacher beside them."""
    if config.teacher == "none":
        return ERM(loss)
    adam = partial(torch.optim.Adam, lr=config.meta_lr, betas=(config.meta_beta1, 0.999))
    outer = None if config.resample_split else lambda: training_parts(config).outer
    rule = distillation.SGD(config.unrolled_lr, momentum=0.75, weight_decay=1e-8)
    learning = MetaLearning(outer, config.unrolled_steps, config.student_steps, adam, rule)
    shape = trajectories.HORIZON, trajectories.SIZES[config.simulator][0] + 1, [UNITS] * LAYERS
    made = partial(TrajectoryTeacher, *shape, autocast=torch.bfloat16)  # it is most of the work, and costs half so
    gated = GatedError(scale=10.0, offset=2.0)  # the mean over all units, since the weight is divided
    teaching = Teaching(config.teaching_weight / LAYERS, gated, TAUGHT)
    return Distillation(loss, made, teaching, learning if config.teacher == "meta" else None)


job = Job(
    environments=environments,
    model=student,
    loss=loss,
    objective=objective,
    measures={"squared_error": Measure(squared_error, "min")},
    config=ReturnConfig().with_options(
        aggregator="mean", data_dir=None, batch_size=24, held_out=0.0, epochs=40, evaluations=40, milestones=()
    ),
    criterion="validation_squared_error",
    reproduces="Learning to distill trajectories: returns in MuJoCo (Table C.7)",
    comparisons="tables/distill_mujoco.py",
    data=Data(trajectory_data.TrajectoryOptions, trajectory_data.make_trajectory_data),
)
