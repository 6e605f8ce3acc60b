"""``concord data room-runner`` and ``concord data funnel-board`` generate trajectories of a task in Ray tasks."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from concord.environments.sharded import SPLITS, RowGroupData, Split, data_folder
from concord.execution.sharded_data import Info, MakingOptions, SplitPart, make_sharded, split_parts
from concord.extras import require_extra
from concord_jobs.box2d.trajectories import TrajectoryTask

_LARGEST_SEED = 2**32 - 1  # NumPy makes one word of it, so that no two keys are equal


@dataclass(frozen=True, kw_only=True)
class TrajectoryOptions(MakingOptions):
    """Trajectories of a task: each from a seed of its own, so that the splits have none in common."""

    # fmt: off
    trajectories: int = 500
    """Number of training trajectories."""
    validation_trajectories: int = 500
    """Number of validation trajectories, which select models."""
    test_trajectories: int = 500
    """Number of test trajectories; the thesis has none."""
    perturbed: bool = False
    """Perturbed physics on the same courses: the ball hardly bounces, or the agent never walks slowly."""
    seed: int = 0
    """Seed of all trajectories."""
    shard_size: int = 25
    """Number of trajectories in a file."""
    # fmt: on

    @property
    @abstractmethod
    def task(self) -> TrajectoryTask:
        """The simulated task."""

    @property
    def counts(self) -> dict[Split, int]:
        """The number of trajectories of each split."""
        return {
            "train": self.trajectories, "validation": self.validation_trajectories, "test": self.test_trajectories,
        }  # fmt: skip

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "trajectories", "shard_size")
        self.require_at_least(0, "validation_trajectories", "test_trajectories")
        self.require("seed", 0 <= self.seed <= _LARGEST_SEED, f"must be from 0 to {_LARGEST_SEED}")


def make_trajectories(options: TrajectoryOptions, info: Info) -> dict[str, Any]:
    """Make the missing files of the data, in parallel Ray tasks."""
    options.check()
    task = options.task
    require_extra("box2d", f"making the data of {task.name}")
    data, made = make_sharded(
        data_folder(options.data, options.output, task.folder),
        {"data": task.name, "options": options.deciding, "classes": task.classes, "frame": task.frame},
        split_parts(options.counts, options.shard_size),
        partial(_simulated, task=task, seed=options.seed),
        options,
        info,
    )
    groups = [group for split in SPLITS for group in data.groups(split)]
    rejected = sum(group.facts["rejected"] for group in groups)
    labels = [group.facts["label"] for group in groups]
    return {
        **made,
        **{f"{split}_trajectories": count for split, count in options.counts.items()},
        "mean_frames": round(sum(group.rows for group in groups) / len(groups), 1),
        "longest_frames": max(group.rows for group in groups),
        "rejected": round(rejected / (rejected + len(groups)), 3),
        "labels": {name: labels.count(label) for label, name in enumerate(task.classes)},
        "megabytes": round(sum(path.stat().st_size for path in data.folder.rglob("*.parquet")) / 1e6, 1),
    }


def _simulated(shard: SplitPart, task: TrajectoryTask, seed: int) -> Sequence[RowGroupData]:
    numbers = range(shard.first, shard.first + shard.count)
    made = [task.trajectory((seed, SPLITS.index(shard.split), number)) for number in numbers]
    return [RowGroupData({"frames": each.frames}, {"label": each.label, "rejected": each.rejected}) for each in made]
