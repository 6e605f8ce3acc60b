"""Room runner (adaptive skip intervals, §2.3 of the thesis): whether an agent ends up in the red room or in the blue.

A model predicts the following frames from the first frame alone; the answer is read from the predicted frames. The
agent's time in a room is random, so a model that predicts every frame must be vague. ``concord data room-runner`` makes
the trajectories (``--size 32``: smaller frames, ``--perturbed``: other physics). ``concord train room-runner`` trains
with adaptive skips, ``--skip fixed --stride 1`` without. Defaults are those of table A.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from concord.space import Value
from concord.training import Data
from concord_jobs.box2d.data import TrajectoryOptions, make_trajectories
from concord_jobs.box2d.trajectory_job import COMMON, TrajectoryConfig, trajectory_job
from concord_jobs.room_runner.simulator import RoomRunner


@dataclass(frozen=True, kw_only=True)
class RoomRunnerConfig(TrajectoryConfig):
    """A model of room runner."""

    # fmt: off
    size: Literal[64, 32] = 64
    """Height and width of the data's frames, in pixels."""
    # fmt: on

    def task(self, perturbed: bool) -> RoomRunner:
        """Room runner in that size."""
        return RoomRunner(size=self.size, perturbed=perturbed)


@dataclass(frozen=True, kw_only=True)
class RoomRunnerOptions(TrajectoryOptions):
    """Trajectories of room runner: an agent walks through rooms to the red or the blue one."""

    size: int = 64
    """Height and width of a frame in pixels: 64, or 32 for 2 × 2 means."""

    @property
    def task(self) -> RoomRunner:
        """Room runner in that size."""
        return RoomRunner(size=self.size, perturbed=self.perturbed)


# The results of the thesis' search, by study; it had no study with a stride of 3.
TABLE_A1: Mapping[str, dict[str, Value]] = {
    "asi": {**COMMON, "horizon": 21, "exploration_steps": 7500, "architecture": "strided"},
    "asi-no-exploration": {**COMMON, "horizon": 18},
    **{f"fixed-{stride}": COMMON for stride in (1, 2, 3)},
}

job = trajectory_job(
    RoomRunnerConfig(),
    TABLE_A1,
    data=Data(RoomRunnerOptions, make_trajectories),
    reproduces="Adaptive skip intervals (thesis, chapter 2), room runner: Fig. 2.5, 2.7, 2.9, 2.10; Table A.1",
)
