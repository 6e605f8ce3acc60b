"""Funnel board (adaptive skip intervals, §2.3 of the thesis): on which of five platforms a ball lands.

From the first frame alone a model predicts what comes; the answer is read from the frames that it predicts. In a
funnel the ball bounces as nobody can foresee, and leaves at one place. ``concord data funnel-board`` makes the
trajectories (``--perturbed`` others), ``concord train funnel-board`` trains with adaptive skips, and with ``--skip
fixed`` without. Defaults are those of table A.2. A run of full length needs a GPU.
"""

from torch import nn

from concord.environments import Environments
from concord.environments.funnel_board import FunnelBoard
from concord.runs import trajectory_job
from concord.runs.made_trajectories import FunnelBoardOptions, make_trajectories
from concord.runs.trajectory_job import TABLE_A2, TrajectoryConfig, settings, studies
from concord.training import Data, EnvironmentEvaluation, Job


def environments(config: TrajectoryConfig) -> Environments:
    """The standard physics, and the other if it is wanted."""
    return trajectory_job.environments(config, FunnelBoard(perturbed=config.chosen.perturbed))


def model(config: TrajectoryConfig) -> nn.Module:
    """The network of the appendix."""
    return config.network.network(channels=3)


def evaluation(config: TrajectoryConfig) -> EnvironmentEvaluation:
    """Labels read from rollouts."""
    return trajectory_job.evaluation(config, FunnelBoard(perturbed=config.chosen.perturbed))


job = Job(
    environments=environments,
    model=model,
    objective=trajectory_job.objective,
    evaluation=evaluation,
    config=TrajectoryConfig().with_options(**settings(**TABLE_A2["asi"])),
    criterion="validation_soft_accuracy",
    reproduces="Adaptive skip intervals (chapter 2 of the thesis): funnel board (Fig. 2.10); no run of full length",
    figures=trajectory_job.figures,
    data=Data(FunnelBoardOptions, make_trajectories),
    studies=studies(TABLE_A2),
    comparisons="tables/funnel_board.py",
)
