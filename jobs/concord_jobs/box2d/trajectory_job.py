"""The common part of the jobs on simulated trajectories: options, data, evaluation, search spaces, tables."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.dynamics import SkipConfig, SkipOptions, skip_objective, staircase
from concord.dynamics.measures import task_measures
from concord.dynamics.skip_figures import skip_figures
from concord.environments import Environment, Environments
from concord.models.dynamics_network import DynamicsNetworkOptions
from concord.objectives import Objective
from concord.options import group
from concord.space import Choice, Entry, Space, Value
from concord.training import Comparison, Data, EnvironmentEvaluation, Job, Study, TrainConfig
from concord.training.declared_measures import Mode
from concord_jobs.box2d.figures import accuracy_figure
from concord_jobs.box2d.trajectories import TrajectoryTask
from concord_jobs.box2d.trajectory_choice import TrajectoryChoice

MODES: Mapping[str, Mode | None] = {
    "soft_accuracy": "max",
    "hard_accuracy": "max",
    "mean_skip": None,
    "predictions": None,
    "depth": None,
    "frames_seen": None,
}
COLUMNS = {
    "soft accuracy": "ood_soft_accuracy",
    "hard accuracy": "ood_hard_accuracy",
    "mean skip": "ood_mean_skip",
    "model evaluations": "model_evaluations",
}
_EVALUATED = 8  # number of trajectories evaluated at a time


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(TrainConfig):
    """A model of dynamics, trained on trajectories that ``concord data`` has made."""

    data_selection: TrajectoryChoice = group(TrajectoryChoice, trajectories=500)
    skips: SkipOptions = group(SkipOptions)
    network: DynamicsNetworkOptions = group(DynamicsNetworkOptions)
    # fmt: off
    lr_decay_steps: int = 15_000
    """Interval in steps after which the learning rate is multiplied by --decay; 0 uses --milestones."""
    # fmt: on

    @abstractmethod
    def task(self, perturbed: bool) -> TrajectoryTask:
        """The simulated task, with the standard or the perturbed physics."""

    def derived_options(self) -> dict[str, Any]:
        """Also the milestones from --lr-decay-steps."""
        found = super().derived_options()
        if min(self.lr_decay_steps, self.data_selection.trajectories, self.data.batch_size) <= 0:
            return found  # check reports the error
        batches = math.ceil(self.data_selection.trajectories / self.data.batch_size)
        steps = self.schedule.epochs * math.ceil(batches / max(1, self.aggregation.steps_per_update))
        return found | {"milestones": staircase(self.lr_decay_steps, steps)}

    def unused(self) -> frozenset[str]:
        """Also the milestones, if the rate falls by steps."""
        return super().unused() | ({"milestones"} if self.lr_decay_steps else set())

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(0, "lr_decay_steps")
        known = self.data_selection.trajectories > 0 or self.lr_decay_steps == 0
        self.require("lr_decay_steps", known, "needs the number of a run's steps; give also --trajectories")
        whole = self.data.environments_per_step == 0 or self.lr_decay_steps == 0
        self.require("environments_per_step", whole, "--lr-decay-steps counts steps of all environments; give 0")
        switch, epochs = self.data_selection.switch_epoch, self.schedule.epochs
        self.require("switch_epoch", switch < max(epochs, 1), f"must come before the last of the {epochs} epochs")
        self.require("held_out", self.data.held_out == 0, "there are trajectories for validation; give 0")


def environments(config: TrajectoryConfig) -> Environments:
    """The standard physics, and the perturbed one if an option asks for it."""
    selection, output = config.data_selection, config.run.output
    data = selection.read(config.task(selection.perturbed), config.data.data, output)
    return selection.environments(data, selection.read_perturbed(config.task(perturbed=True), output))


def network(config: TrajectoryConfig) -> nn.Module:
    """The network of the appendix."""
    return config.network.network(channels=3)


def objective(config: TrajectoryConfig) -> Objective:
    """The mean over all predictions, or the environments' means for an aggregator."""
    return skip_objective(config.skips.risk(config.run.seed), config.aggregation.aggregator)


def evaluation(config: TrajectoryConfig) -> EnvironmentEvaluation:
    """Labels read from rollouts."""
    return EnvironmentEvaluation(
        partial(_measured, config.skips.skips, config.task(config.data_selection.perturbed)), MODES
    )


def _measured(
    skips: SkipConfig, task: TrajectoryTask, model: nn.Module, environment: Environment
) -> Mapping[str, float]:
    device = next(model.parameters()).device

    def batches() -> Iterator[Mapping[str, Tensor]]:
        for start in range(0, len(environment), _EVALUATED):
            part = environment.take(slice(start, start + _EVALUATED))
            yield pytree.tree_map(lambda leaf: leaf.to(device), part)

    return task_measures(model, batches, skips, task.read_label, task.sees_object)


# The options of all runs of the thesis; it has no number of epochs, and 150 is from the authors' command for one task.
SETTINGS: dict[str, Any] = {
    "batch_size": 2, "held_out": 0.0, "decay": 0.2, "epochs": 150, "evaluations": 30, "vectorize": "one-by-one",
}  # fmt: skip


SEARCHED: dict[str, Entry] = {
    "lr": Choice(1e-3, 7.5e-4, 5e-4),
    "lr_decay_steps": Choice(7500, 10_000, 15_000),
    "kernels": Choice(32, 48),
    "architecture": Choice("plain", "dilated", "strided"),
}
HORIZONS: dict[str, Entry] = {"skip": "adaptive", "horizon": Choice(15, 18, 21, 25)}
METHODS: dict[str, dict[str, Entry]] = {
    "asi": {**HORIZONS, "exploration_steps": Choice(7500, 10_000, 15_000)},
    "asi-no-exploration": {**HORIZONS, "exploration_steps": 0},
    **{f"fixed-{stride}": {"skip": "fixed", "stride": stride} for stride in (1, 2, 3)},
}
COMMON: dict[str, Value] = {"lr": 5e-4, "lr_decay_steps": 15_000, "kernels": 48, "architecture": "plain"}


def studies(found: Mapping[str, Mapping[str, Value]]) -> Mapping[str, Study]:
    """The spaces of the thesis (appendix A.0.3); the results of its search are tried first."""
    return {name: Study(Space(SEARCHED | method), suggestions=(found[name],)) for name, method in METHODS.items()}


def methods_of(found: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Any]]:
    """The rows of a table: each study's method and settings."""
    names = {"asi": "ASI", "asi-no-exploration": "ASI, no exploration"}
    fixed = {
        name: {option: entry for option, entry in method.items() if not isinstance(entry, Choice)}
        for name, method in METHODS.items()
    }
    return {
        names.get(name, name.replace("fixed-", "Δt = ")): {"exploration_steps": 0, **fixed[name], **found[name]}
        for name in METHODS
    }


def trajectory_job(
    config: TrajectoryConfig, found: Mapping[str, Mapping[str, Value]], data: Data, reproduces: str
) -> Job[Any]:
    """The job of a task, with the settings that the thesis' search found for each study.

    Pass ``data`` and ``reproduces`` by keyword: commands read them from a job's source text.
    """
    return Job(
        environments=environments,
        model=network,
        objective=objective,
        evaluation=evaluation,
        config=config.with_options(**SETTINGS, **found["asi"]),
        criterion="validation_soft_accuracy",
        reproduces=reproduces,
        figures=skip_figures,
        data=data,
        studies=studies(found),
        comparisons="tables.py",
    )


def table(rows: Mapping[str, Mapping[str, Any]], title: str, *, seeds: int = 8, **options: Any) -> Comparison:
    """A comparison of methods by their accuracies; seed 0 chose the settings."""
    shown: dict[str, Any] = {"columns": COLUMNS, "figures": {"accuracy": accuracy_figure}} | options
    return Comparison(rows, seeds=seeds, first_seed=1, title=title, **shown)
