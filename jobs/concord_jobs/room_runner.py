"""Room runner (adaptive skip intervals, §2.3 of the thesis): whether an agent ends up in the red room or in the blue.

From the first frame alone a model predicts what comes; the answer is read from the frames that it predicts. How long
the agent takes through a room is up to chance, so what predicts every frame has to be vague. ``concord data
room-runner`` makes the trajectories (``--size 32`` smaller ones, ``--perturbed`` others), ``concord train room-runner``
trains with adaptive skips, ``--skip fixed --stride 1`` without. Defaults are those of table A.1.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from concord.environments import Environments
from concord.environments.room_runner import RoomRunner
from concord.runs import trajectory_job
from concord.runs.made_trajectories import RoomRunnerOptions, make_trajectories
from concord.runs.trajectory_job import TABLE_A1, TrajectoryConfig, settings, studies
from concord.training import Data, EnvironmentEvaluation, Job


@dataclass(frozen=True, kw_only=True)
class RoomRunnerConfig(TrajectoryConfig):
    """A model of room runner."""

    # fmt: off
    size: Literal[64, 32] = 64
    """Pixels of a frame's height and width, as they were made."""
    # fmt: on

    @property
    def task(self) -> RoomRunner:
        """Room runner in that size."""
        return RoomRunner(size=self.size, perturbed=self.chosen.perturbed)


def environments(config: RoomRunnerConfig) -> Environments:
    """The standard physics, and the other if it is wanted."""
    return trajectory_job.environments(config, config.task)


def model(config: RoomRunnerConfig) -> nn.Module:
    """The network of the appendix."""
    return config.network.network(channels=3)


def evaluation(config: RoomRunnerConfig) -> EnvironmentEvaluation:
    """Labels read from rollouts."""
    return trajectory_job.evaluation(config, config.task)


job = Job(
    environments=environments,
    model=model,
    objective=trajectory_job.objective,
    evaluation=evaluation,
    config=RoomRunnerConfig().with_options(**settings(**TABLE_A1["asi"])),
    criterion="validation_soft_accuracy",
    reproduces="Adaptive skip intervals (chapter 2 of the thesis): room runner (Fig. 2.9); no run of full length",
    figures=trajectory_job.figures,
    data=Data(RoomRunnerOptions, make_trajectories),
    studies=studies(TABLE_A1),
    comparisons="tables/room_runner.py",
)
