"""Returns in MuJoCo; a teacher sees the states in between (thesis, 4.4.3).

x is a state and the actions that follow, the label the bin, of 32, of the sum of rewards, and x* the 16 states and
rewards. ``concord data distill-mujoco --simulator Hopper`` makes the data. ``concord train distill-mujoco`` trains a
student with a teacher that learns targets for the student's pre-activations, and a gate for each of them. ``--teacher
none`` trains one without; with ``--auxiliary-weight 4`` this student also predicts x*, and with ``--dynamics
transition`` it predicts one state after another, and the label from their rewards. ``concord compare distill-mujoco
fig-4.9`` has the ablations: a random teacher, states in another order, noise, a split drawn anew.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import concord_jobs.distill_mujoco.simulator as trajectories
from concord import distillation
from concord.distillation import Distillation, GatedError, TeacherOptions, Teaching, of_labels
from concord.environments import Environments
from concord.objectives import ERM, Objective
from concord.options import Detail, group
from concord.space import Choice, Entry, Space
from concord.training import Data, Job, Measure, Study, TrainConfig
from concord_jobs.distill_mujoco import data as made_returns
from concord_jobs.distill_mujoco.dynamics import DynamicsModel, trajectory_error, transition_error
from concord_jobs.distill_mujoco.teacher import TrajectoryTeacher
from concord_jobs.distillation.taught import student_environments, training_parts

LAYERS, UNITS, BINS = 5, 128, 32
TAUGHT = tuple(f"{2 * layer}" for layer in range(LAYERS))  # the linear layers: their outputs are pre-activations


@dataclass(frozen=True, kw_only=True)
class ReturnTeacher(TeacherOptions):
    """What a teacher sees of trajectories, and how it learns."""

    of_any = TeacherOptions.of_any | {"gate_offset"}
    of_meta = TeacherOptions.of_meta | {"unrolled_lr", "meta_beta1"}

    # fmt: off
    teacher: Literal["meta", "none", "fixed"] = "meta"
    """Teacher that learns its targets (meta), none, or a fixed random one (fixed)."""
    permute_time: bool = False
    """Shuffle the states of x* in another order for each example."""
    noise_frames: int = 0
    """Number of last states of x* to replace by noise."""
    gate_offset: float = 2.0
    """c of the gates σ(m / 10 - c) of the teacher's targets; 1 in the thesis, where m's divisor is not legible."""
    unrolled_lr: float = 1e-2
    """Learning rate of the copy, SGD with momentum 0.75."""
    meta_beta1: Detail[float] = 0.0
    """β₁ of the teacher's Adam."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require("noise_frames", 0 <= self.noise_frames <= trajectories.HORIZON, "must lie in [0, 16]")
        self.require("gate_offset", abs(self.gate_offset) < float("inf"), "must be a finite number")
        self.require("unrolled_lr", 0 < self.unrolled_lr < float("inf"), "must be a finite number above 0")
        self.require("meta_beta1", 0 <= self.meta_beta1 < 1, "must lie in [0, 1)")

    def unused(self) -> frozenset[str]:
        """Also the disturbance of x*, if nothing uses x*."""
        blind = self.teacher == "none" and self.auxiliary_weight == 0
        return super().unused() | ({"permute_time", "noise_frames"} if blind else set())


@dataclass(frozen=True, kw_only=True)
class ReturnConfig(TrainConfig):
    """Returns of open-loop actions, with the settings for Hopper of Tables C.5 and C.6."""

    # fmt: off
    simulator: trajectories.Simulator = "Hopper"
    """Gymnasium's environment of the data."""
    teaching: ReturnTeacher = group(ReturnTeacher)
    dynamics: Literal["none", "trajectory", "transition"] = "none"
    """With --teacher none, predict one state and reward after another, and the label from the rewards. Learn from whole
    trajectories, each predicted from its first state (trajectory), or from single steps (transition)."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        alone = self.dynamics == "none" or (self.teaching.teacher == "none" and self.teaching.auxiliary_weight == 0)
        self.require("dynamics", alone, "predicts x* itself; give --teacher none, without --auxiliary-weight")
        objective(self)

    def unused(self) -> frozenset[str]:
        """Also the dynamics, if there are none; they use x*, which may be disturbed."""
        if self.dynamics == "none":
            return super().unused() | {"dynamics"}
        return super().unused() - {"permute_time", "noise_frames"}


def examples(config: ReturnConfig, purpose: Any) -> tuple[Tensor, Tensor]:
    """Inputs, and targets with x*; outside training x* is unknown, and 0."""
    data = made_returns.returns_of(config.data.data, config.run.output, config.simulator)
    train, wanted = (made_returns.examples_of(data, split) for split in ("train", purpose))
    made = trajectories.standardized(train, wanted, BINS)
    options = config.teaching
    seen = trajectories.disturbed(made.frames, config.run.seed, options.permute_time, options.noise_frames)
    privileged = torch.from_numpy(seen * (purpose == "train"))
    return torch.from_numpy(made.inputs), distillation.with_privileged(torch.from_numpy(made.labels), privileged)


def environments(config: ReturnConfig) -> Environments:
    """One environment, with the version of the returns' data."""
    version = made_returns.returns_of(config.data.data, config.run.output, config.simulator).version
    return student_environments(config, examples, version)


def student(config: ReturnConfig) -> nn.Module:
    """Five layers of 128 and one for the bins, or for the next state and the reward, with weight normalization."""
    observations, actions = trajectories.SIZES[config.simulator]
    if config.dynamics == "none":
        return _network(observations + trajectories.HORIZON * actions, BINS)
    data = made_returns.returns_of(config.data.data, config.run.output, config.simulator)
    network = _network(observations + actions, observations + 1)
    return DynamicsModel.of(network, made_returns.examples_of(data, "train"), BINS)


def _network(inputs: int, outputs: int) -> nn.Sequential:
    widths = [inputs, *[UNITS] * LAYERS, outputs]
    layers = [part for each in pairwise(widths) for part in (weight_norm(nn.Linear(*each)), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# A measure of logits (examples, bins), reported by the tables: a constant prediction has .083.
loss = of_labels(lambda outputs, labels: nn.functional.cross_entropy(outputs, labels.long()))
squared_error = of_labels(trajectories.squared_error_of_bins)


def objective(config: ReturnConfig) -> Objective:
    """The labels alone, or a teacher beside them, or x* in place of the labels."""
    options, frame = config.teaching, trajectories.SIZES[config.simulator][0] + 1
    if config.dynamics != "none":
        return ERM({"trajectory": trajectory_error, "transition": transition_error}[config.dynamics])
    if options.teacher == "none":
        return options.alone(loss, lambda: nn.Linear(UNITS, trajectories.HORIZON * frame), f"{2 * LAYERS - 1}")
    adam = partial(torch.optim.Adam, betas=(options.meta_beta1, 0.999))
    rule = distillation.SGD(options.unrolled_lr, momentum=0.75, weight_decay=1e-8)
    learning = options.learning(lambda: training_parts(config, examples).outer, adam, rule)
    shape = trajectories.HORIZON, frame, [UNITS] * LAYERS
    made = partial(TrajectoryTeacher, *shape, autocast=torch.bfloat16)  # bfloat16 halves the teacher's large cost
    gated = GatedError(scale=10.0, offset=options.gate_offset)  # the mean over all units, since the weight is divided
    return Distillation(loss, made, Teaching(options.teaching_weight / LAYERS, gated, TAUGHT), learning)


# Tables C.2 to C.4: grids, from which TPE draws; the base of the teaching weight's logarithm is taken to be 10.
# The thesis chose by the test, as --selection oracle does.
ALONE: dict[str, Entry] = {"lr": Choice(1e-3, 1e-2), "l2": Choice(0.0, 1e-5, 1e-4), "regularization": "coupled"}
LEARNED: dict[str, Entry] = {
    "meta_beta1": Choice(0.0, 0.9),
    "unrolled_lr": Choice(1e-3, 5e-3, 1e-2),
    "teaching_weight": Choice(10**2.0, 10**2.5, 10**3.0),
    "validation_fraction": Choice(0.3, 0.5, 0.7),
}
PREDICTED: dict[str, Entry] = {"auxiliary_weight": Choice(1.0, 2.0, 4.0)}
STUDIES = {
    "ldt": Study(Space({"teacher": "meta", **LEARNED})),
    "none": Study(Space({"teacher": "none", **ALONE, "batch_size": Choice(8, 16, 32)})),
    "predicting": Study(Space({"teacher": "none", **ALONE, **PREDICTED})),
}
teacher_defaults = {"teaching_weight": 10**2.5, "unrolled_steps": 96, "student_steps": 24, "meta_lr": 5e-4}
run_defaults = {"batch_size": 24, "held_out": 0.0, "epochs": 40, "evaluations": 40, "milestones": (), "data": None}
job = Job(
    environments=environments,
    model=student,
    loss=loss,
    objective=objective,
    measures={"squared_error": Measure(squared_error, "min")},
    config=ReturnConfig().with_options(aggregator="mean", validation_fraction=0.3, **teacher_defaults, **run_defaults),
    criterion="validation_squared_error",
    reproduces="Learning to distill trajectories: Fig. 4.7, 4.8, 4.9; C.2.2.3; Tables C.2, C.3, C.4, C.5, C.6, C.7",
    studies=STUDIES,
    comparisons="tables.py",
    data=Data(made_returns.ReturnOptions, made_returns.make_returns),
)
