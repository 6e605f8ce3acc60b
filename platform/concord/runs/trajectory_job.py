"""What the jobs on trajectories of a simulator share: options, data, evaluation, and the spaces that are searched."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.dynamics import SkipOptions, Skips, skip_objective, staircase
from concord.dynamics.evaluation import task_measures
from concord.environments import Environment, Environments
from concord.environments.trajectories import TrajectoryFolder, TrajectoryTask
from concord.environments.trajectory_examples import TrajectoryExamples
from concord.models.dynamics_network import DynamicsNetworkOptions
from concord.objectives import Objective
from concord.runs.made_trajectories import trajectory_folder
from concord.space import Choice, Entry, Space
from concord.training import EnvironmentEvaluation, Study, TrainConfig
from concord.training.evaluation import Mode

MODES: Mapping[str, Mode | None] = {
    "soft_accuracy": "max",
    "hard_accuracy": "max",
    "mean_skip": None,
    "predictions": None,
    "depth": None,
    "frames_seen": None,
}
_EVALUATED = 8  # trajectories at a time


class SeenTask(TrajectoryTask, Protocol):
    """A task of which one can tell whether what moves is seen."""

    def sees_object(self, frames: Tensor) -> Tensor:
        """Whether it is, in each frame."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(TrainConfig):
    """A model of dynamics, trained on trajectories that ``concord data`` has made."""

    skips: SkipOptions = field(default_factory=SkipOptions)
    network: DynamicsNetworkOptions = field(default_factory=DynamicsNetworkOptions)
    # fmt: off
    examples: int = 500
    """Trajectories of a training environment, the first of those that were made."""
    lr_decay_steps: int = 15_000
    """Steps after which the learning rate is multiplied by --decay, again and again; 0: at --milestones."""
    perturbed_dir: Path | None = None
    """Folder of trajectories with other physics (concord data JOB --perturbed), which are a second training
    environment then."""
    # fmt: on

    def resolved(self) -> Self:
        """With the milestones that --lr-decay-steps means."""
        found = super().resolved()
        if not self.lr_decay_steps:
            return found
        steps = self.schedule.epochs * math.ceil(self.examples / self.data.batch_size)
        return found.with_options(milestones=staircase(self.lr_decay_steps, steps))

    def unused(self) -> frozenset[str]:
        """Also the milestones where the rate falls by steps."""
        return super().unused() | ({"milestones"} if self.lr_decay_steps else set())

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        self.require("examples", self.examples >= 1, "must be at least 1")
        self.require("lr_decay_steps", self.lr_decay_steps >= 0, "must not be negative")
        self.require("held_out", self.data.held_out == 0, "there are trajectories for validation; give 0")


def environments(config: TrajectoryConfig, task: TrajectoryTask) -> Environments:
    """The standard physics, and the other if it is given; what trains is in memory, all else is read as it is needed.

    Raises:
        InputError: the data are missing, of another task, or too few.
    """
    folders = {
        "standard": TrajectoryFolder(trajectory_folder(config.data.data_dir, config.run.output, task), task.name)
    }
    if config.perturbed_dir is not None:
        folders["perturbed"] = TrajectoryFolder(config.perturbed_dir, task.name)
    for each in folders.values():
        said = f"frames {each.frame} in {each.folder}, expected {task.frame}"
        config.require("data_dir", each.frame == tuple(task.frame), said)
    training = {
        name: TrajectoryExamples(name, folder.split("train"), config.examples) for name, folder in folders.items()
    }
    longest = max(each.longest for each in training.values())
    others = [split for split in ("validation", "test") if folders["standard"].has(split)]

    def load(name: str) -> Any:
        if name in training:
            return training[name].in_memory(longest)
        return TrajectoryExamples(name, folders["standard"].split(name))  # type: ignore[arg-type]

    version = "-".join(folder.version for folder in folders.values())
    validation, test = (["validation"] if "validation" in others else []), (["test"] if "test" in others else [])
    return Environments(load, training, validation, test, version=version)


def objective(config: TrajectoryConfig) -> Objective:
    """The mean over all predictions, or the environments' means for an aggregator."""
    return skip_objective(config.skips.risk(config.run.seed), config.aggregation.aggregator)


def evaluation(config: TrajectoryConfig, task: SeenTask) -> EnvironmentEvaluation:
    """Labels read from rollouts."""
    return EnvironmentEvaluation(partial(_measured, config.skips.skips, task), MODES)


def _measured(skips: Skips, task: SeenTask, model: nn.Module, environment: Environment) -> Mapping[str, float]:
    device = next(model.parameters()).device

    def batches() -> Iterator[Mapping[str, Tensor]]:
        for start in range(0, len(environment), _EVALUATED):
            part = environment.take(slice(start, start + _EVALUATED))
            yield pytree.tree_map(lambda leaf: leaf.to(device), part)

    return task_measures(model, batches, skips, task.read_label, task.sees_object)


def settings(**found: Any) -> dict[str, Any]:
    """The options of all runs of the thesis, and those that a search found."""
    common: dict[str, Any] = {
        "batch_size": 2, "held_out": 0.0, "decay": 0.2, "epochs": 150, "evaluations": 30, "vectorize": "one-by-one",
    }  # fmt: skip
    return common | found


_SEARCHED: dict[str, Entry] = {
    "lr": Choice(1e-3, 7.5e-4, 5e-4),
    "lr_decay_steps": Choice(7500, 10_000, 15_000),
    "kernels": Choice(32, 48),
    "architecture": Choice("plain", "dilated", "strided"),
}
_HORIZONS: dict[str, Entry] = {"skip": "adaptive", "horizon": Choice(15, 18, 21, 25)}
_METHODS: dict[str, dict[str, Entry]] = {
    "asi": {**_HORIZONS, "exploration_steps": Choice(7500, 10_000, 15_000)},
    "asi-no-exploration": {**_HORIZONS, "exploration_steps": 0},
    **{f"fixed-{stride}": {"skip": "fixed", "stride": stride} for stride in (1, 2, 3)},
}
STUDIES: Mapping[str, Study] = {
    name: Study(Space(_SEARCHED | method), selection="validation") for name, method in _METHODS.items()
}
"""The spaces of the thesis (appendix A.0.3)."""
