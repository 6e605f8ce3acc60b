"""What the jobs on trajectories of a simulator share: options, data, evaluation, and the spaces that are searched."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.analysis.skip_figures import aligned_sequences, timelines
from concord.analysis.trajectory_figures import as_bytes
from concord.dynamics import SkipConfig, SkipOptions, rollout, skip_objective, staircase, unroll
from concord.dynamics.evaluation import task_measures
from concord.environments import Environment, Environments
from concord.environments.funnel_board import FunnelBoard
from concord.environments.room_runner import RoomRunner
from concord.environments.trajectories import TrajectoryTask
from concord.models.dynamics_network import DynamicsNetworkOptions
from concord.objectives import Objective
from concord.runs.trajectory_choice import TrajectoryChoice
from concord.space import Choice, Entry, Space, Value
from concord.training import EnvironmentEvaluation, Job, Outcome, Study, TrainConfig
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
_DRAWN = 12


class SeenTask(TrajectoryTask, Protocol):
    """A task of which one can tell whether what moves is seen."""

    def sees_object(self, frames: Tensor) -> Tensor:
        """Whether it is, in each frame."""
        ...


class WithSkips(Protocol):
    """The options of a job on sequences."""

    @property
    def skips(self) -> SkipOptions:
        """How far predictions reach."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(TrainConfig):
    """A model of dynamics, trained on trajectories that ``concord data`` has made."""

    chosen: TrajectoryChoice = field(default_factory=lambda: TrajectoryChoice(trajectories=500))
    skips: SkipOptions = field(default_factory=SkipOptions)
    network: DynamicsNetworkOptions = field(default_factory=DynamicsNetworkOptions)
    # fmt: off
    lr_decay_steps: int = 15_000
    """Steps after which the learning rate is multiplied by --decay, again and again; 0: at --milestones."""
    # fmt: on

    def resolve(self, num_environments: int | None = None) -> Self:
        """With the milestones that --lr-decay-steps means."""
        found = super().resolve(num_environments)
        if self.lr_decay_steps <= 0 or self.chosen.trajectories <= 0:  # check says what is wrong
            return found
        batches = math.ceil(self.chosen.trajectories / self.data.batch_size)
        steps = self.schedule.epochs * math.ceil(batches / max(1, self.aggregation.steps_per_update))
        return found.with_options(milestones=staircase(self.lr_decay_steps, steps))

    def unused(self) -> frozenset[str]:
        """Also the milestones where the rate falls by steps."""
        return super().unused() | ({"milestones"} if self.lr_decay_steps else set())

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        self.require("lr_decay_steps", self.lr_decay_steps >= 0, "must not be negative")
        known = self.chosen.trajectories > 0 or self.lr_decay_steps == 0
        self.require("lr_decay_steps", known, "needs to know the steps of a run; give --trajectories, too")
        whole = self.data.environments_per_step == 0 or self.lr_decay_steps == 0
        self.require("environments_per_step", whole, "--lr-decay-steps counts steps of all environments; give 0")
        switch, epochs = self.chosen.switch_epoch, self.schedule.epochs
        self.require("switch_epoch", switch < max(epochs, 1), f"must come before the last of the {epochs} epochs")
        self.require("held_out", self.data.held_out == 0, "there are trajectories for validation; give 0")


def environments(config: TrajectoryConfig, task: RoomRunner | FunnelBoard) -> Environments:
    """The standard physics, and the other if it is wanted.

    Raises:
        InputError: the data are missing, of another task, or too few.
    """
    output = config.run.output
    data = config.chosen.read(task, config.data.data_dir, output)
    return config.chosen.environments(data, config.chosen.read_perturbed(replace(task, perturbed=True), output))


def objective(config: TrajectoryConfig) -> Objective:
    """The mean over all predictions, or the environments' means for an aggregator."""
    return skip_objective(config.skips.risk(config.run.seed), config.aggregation.aggregator)


def evaluation(config: TrajectoryConfig, task: SeenTask) -> EnvironmentEvaluation:
    """Labels read from rollouts."""
    return EnvironmentEvaluation(partial(_measured, config.skips.skips, task), MODES)


def _measured(skips: SkipConfig, task: SeenTask, model: nn.Module, environment: Environment) -> Mapping[str, float]:
    device = next(model.parameters()).device

    def batches() -> Iterator[Mapping[str, Tensor]]:
        for start in range(0, len(environment), _EVALUATED):
            part = environment.take(slice(start, start + _EVALUATED))
            yield pytree.tree_map(lambda leaf: leaf.to(device), part)

    return task_measures(model, batches, skips, task.read_label, task.sees_object)


def figures(
    job: Job[Any],
    config: WithSkips,
    outcome: Outcome,  # noqa: ARG001
    model: nn.Module,
) -> Mapping[str, Figure | Tensor]:
    """What the model makes of some sequences that did not train it: which frames its predictions were matched with
    (Fig. 2.7 and 2.8 of the thesis), and a rollout beside the true frames of the same moments. For any job on
    :func:`~concord.dynamics.sequences` whose configuration has ``skips``."""
    environments = job.environments(config)
    name = (*environments.validation, *environments.test, *environments.train)[0]
    device = next(model.parameters()).device
    batch = pytree.tree_map(lambda leaf: leaf.to(device), environments[name].take(slice(0, _DRAWN)))
    with torch.no_grad():
        times = unroll(model, batch["frames"], batch["length"], config.skips.skips).times
    matched = times[0, 1:][times[0, 1:] >= 0]
    predicted = rollout(model, batch["frames"][:1, 0], len(matched))[0].cpu()
    frames = batch["frames"][0, : batch["length"][0]].cpu()
    return {
        "sequence": aligned_sequences(frames, predicted, matched.tolist()),
        "skips": timelines(times, batch["length"].cpu()),
        "rollout": torch.stack([frames[matched], as_bytes(predicted)]),
    }


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
_COMMON: dict[str, Value] = {"lr": 5e-4, "lr_decay_steps": 15_000, "kernels": 48, "architecture": "plain"}
TABLE_A1: Mapping[str, dict[str, Value]] = {
    "asi": {**_COMMON, "horizon": 21, "exploration_steps": 7500, "architecture": "strided"},
    "asi-no-exploration": {**_COMMON, "horizon": 18},
    **{f"fixed-{stride}": _COMMON for stride in (1, 2, 3)},
}
"""What the thesis' search found for room runner, by the study; there was none for a stride of 3."""
_NARROW: dict[str, Value] = {**_COMMON, "lr": 7.5e-4, "kernels": 32, "architecture": "strided"}
TABLE_A2: Mapping[str, dict[str, Value]] = {
    "asi": {**_COMMON, "horizon": 21, "exploration_steps": 15_000, "architecture": "dilated"},
    "asi-no-exploration": {**_NARROW, "horizon": 18, "lr_decay_steps": 10_000},
    "fixed-1": {**_NARROW, "architecture": "dilated"},
    **{f"fixed-{stride}": _NARROW for stride in (2, 3)},
}
"""The same for funnel board."""


def studies(found: Mapping[str, Mapping[str, Value]]) -> Mapping[str, Study]:
    """The spaces of the thesis (appendix A.0.3); what its search found is tried first."""
    return {
        name: Study(
            Space(_SEARCHED | method), suggestions=(found[name],), selection="validation", metric="soft_accuracy"
        )
        for name, method in _METHODS.items()
    }


def methods_of(found: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Any]]:
    """What a table compares: the settings of each study, with what makes it the method."""
    names = {"asi": "ASI", "asi-no-exploration": "ASI, no exploration"}
    fixed = {
        name: {option: entry for option, entry in method.items() if not isinstance(entry, Choice)}
        for name, method in _METHODS.items()
    }
    return {
        names.get(name, name.replace("fixed-", "Δt = ")): {"exploration_steps": 0, **fixed[name], **found[name]}
        for name in _METHODS
    }
