"""Funnel board (adaptive skip intervals, §2.3 of the thesis): on which of five platforms a ball lands.

A model predicts the following frames from the first frame alone; the answer is read from the predicted frames. In a
funnel the ball bounces unpredictably, but it leaves at one place. ``concord data funnel-board`` makes the trajectories
(``--perturbed``: with other physics). ``concord train funnel-board`` trains with adaptive skips, with ``--skip fixed``
without. Defaults are those of table A.2. A run of full length needs a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from concord.space import Value
from concord.training import Data
from concord_jobs.box2d.data import TrajectoryOptions, make_trajectories
from concord_jobs.box2d.trajectory_job import COMMON, TrajectoryConfig, trajectory_job
from concord_jobs.funnel_board.simulator import FunnelBoard


@dataclass(frozen=True, kw_only=True)
class FunnelBoardConfig(TrajectoryConfig):
    """A model of funnel board."""

    def task(self, perturbed: bool) -> FunnelBoard:
        """Funnel board."""
        return FunnelBoard(perturbed=perturbed)


@dataclass(frozen=True, kw_only=True)
class FunnelBoardOptions(TrajectoryOptions):
    """Trajectories of funnel board: a ball falls through funnels onto one of five platforms."""

    @property
    def task(self) -> FunnelBoard:
        """Funnel board."""
        return FunnelBoard(perturbed=self.perturbed)


# The results of the thesis' search, by study.
NARROW: dict[str, Value] = {**COMMON, "lr": 7.5e-4, "kernels": 32, "architecture": "strided"}
TABLE_A2: Mapping[str, dict[str, Value]] = {
    "asi": {**COMMON, "horizon": 21, "exploration_steps": 15_000, "architecture": "dilated"},
    "asi-no-exploration": {**NARROW, "horizon": 18, "lr_decay_steps": 10_000},
    "fixed-1": {**NARROW, "architecture": "dilated"},
    **{f"fixed-{stride}": NARROW for stride in (2, 3)},
}

job = trajectory_job(
    FunnelBoardConfig(),
    TABLE_A2,
    data=Data(FunnelBoardOptions, make_trajectories),
    reproduces="Adaptive skip intervals (thesis, chapter 2), funnel board: Fig. 2.6, 2.8, 2.9, 2.10, 2.11; Table A.2",
)
