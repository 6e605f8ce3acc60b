"""Room runner (thesis, chapter 2): will the agent end in the red room or in the blue one, from the first frame?

``concord data room-runner`` makes the trajectories with Box2D (``pip install 'concord[box2d]'``). A network of
convolutions predicts a later frame, whichever of the next ones it comes nearest to: adaptive skip intervals.
"""

from dataclasses import dataclass, field

from torch import nn

from concord.dynamics import SkipOptions, skip_objective
from concord.environments import Environments
from concord.environments.room_runner import RoomRunner
from concord.models.dynamics_network import DynamicsNetworkOptions
from concord.objectives import Objective
from concord.runs.made_trajectories import RoomRunnerOptions, make_trajectories
from concord.runs.trajectory_choice import TrajectoryChoice
from concord.training import Data, Job, TrainConfig


@dataclass(frozen=True, kw_only=True)
class RoomRunnerConfig(TrainConfig):
    """Room runner."""

    # fmt: off
    chosen: TrajectoryChoice = field(default_factory=TrajectoryChoice)
    skips: SkipOptions = field(default_factory=SkipOptions)
    network: DynamicsNetworkOptions = field(default_factory=lambda: DynamicsNetworkOptions(architecture="strided"))
    size: int = 64
    """Pixels of a frame's height and width: 64 or 32."""
    # fmt: on

    @property
    def task(self) -> RoomRunner:
        """Room runner in that size."""
        return RoomRunner(size=self.size, perturbed=self.chosen.perturbed)


def environments(config: RoomRunnerConfig) -> Environments:
    """The trajectories to train on, to choose by and of the test."""
    data = config.chosen.read(config.task, config.data.data_dir, config.run.output)
    return config.chosen.environments(data)


def model(config: RoomRunnerConfig) -> nn.Module:
    """The network of the appendix; Table A.1 has the strided one for adaptive skip intervals."""
    return config.network.network(config.task.frame[0])


def objective(config: RoomRunnerConfig) -> Objective:
    """The mean over all predictions of a batch."""
    return skip_objective(config.skips.risk(config.run.seed), config.aggregation.aggregator)


job = Job(
    environments=environments,
    model=model,
    objective=objective,
    config=RoomRunnerConfig().with_options(
        exploration_steps=7500, batch_size=2, held_out=0.0, lr=5e-4, epochs=150, vectorize="one-by-one", data_dir=None
    ),
    reproduces="Adaptive skip intervals (chapter 2 of the thesis): room runner",
    data=Data(RoomRunnerOptions, make_trajectories),
)
