"""``concord data room-runner`` and ``concord data funnel-board``: trajectories of a task, made in Ray tasks."""

import json
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.environments.box2d_extra import require_box2d
from concord.environments.trajectories import (
    FORMAT,
    SPLITS,
    Split,
    TrajectoryTask,
    changes,
    check_distinct,
    described_shard,
    shard_of,
)
from concord.runs.sharded_data import Info, MakingOptions, SplitPart, begin, make_missing, split_parts
from concord.storage.data_folder import MANIFEST, PLAN, read_json, unfit, write_whole
from concord.training.process import tune_process

_LARGEST_SEED = 2**32 - 1  # of which NumPy makes one word, so that no two keys are the same


@dataclass(frozen=True, kw_only=True)
class TrajectoryOptions(MakingOptions):
    """Trajectories of a task: each from a seed of its own, so that the splits have none in common."""

    # fmt: off
    trajectories: int = 500
    """Trajectories to train on."""
    validation_trajectories: int = 500
    """Trajectories to choose by."""
    test_trajectories: int = 500
    """Trajectories that nothing is chosen by; the thesis has none."""
    perturbed: bool = False
    """Other physics on the same courses: nothing bounces in funnels, or the agent never walks slowly."""
    seed: int = 0
    """Seed of all trajectories."""
    shard_size: int = 25
    """Trajectories a file."""
    # fmt: on

    @property
    @abstractmethod
    def task(self) -> TrajectoryTask:
        """Where the trajectories come from."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides a trajectory beside its number and split."""
        return {"perturbed": self.perturbed, "seed": self.seed}

    @property
    def counts(self) -> dict[Split, int]:
        """Trajectories of each split."""
        return {
            "train": self.trajectories, "validation": self.validation_trajectories, "test": self.test_trajectories,
        }  # fmt: skip

    def check(self) -> None:
        """Validate options."""
        super().check()
        for option, least in (
            ("trajectories", 1), ("validation_trajectories", 0), ("test_trajectories", 0), ("shard_size", 1),
        ):  # fmt: skip
            said = f"must be at least {least}" if least else "must not be negative"
            self.require(option, getattr(self, option) >= least, said)
        self.require("seed", 0 <= self.seed <= _LARGEST_SEED, f"must be from 0 to {_LARGEST_SEED}")


def trajectory_folder(data_dir: Path | None, output: Path, task: TrajectoryTask) -> Path:
    """Where the trajectories of a task are, unless another folder is given."""
    return data_dir if data_dir is not None else output / "data" / task.folder


def make_trajectories(options: TrajectoryOptions, info: Info) -> dict[str, Any]:
    """Make what is missing of the data, in parallel Ray tasks; says in the end what there is.

    Raises:
        InputError: the options cannot be used, Box2D is missing, or the folder holds other data.
    """
    started = time.perf_counter()
    options.check()
    task = options.task
    require_box2d(f"making the data of {task.name}")
    folder = trajectory_folder(options.data_dir, options.output, task).absolute()
    plan = {"format": FORMAT, "data": task.name, **_deciding(options)}
    if (folder / PLAN).exists() and (there := read_json(folder / PLAN).get("data")) != task.name:
        raise unfit(folder, f"holds data of {there or 'another job'}, not of {task.name}; give another folder")
    begin(folder, plan, f"data of {task.name}")
    shards = split_parts(options.counts, options.shard_size)
    made = make_missing(
        folder, shards, _make_shard, lambda _: (task, options.seed), options.tasks, options.address, info
    )
    described = [{"file": each.file, "split": each.split, **_described(folder, each)} for each in shards]
    check_distinct(described, folder)
    manifest = {
        "format": FORMAT,
        "data": task.name,
        "settings": options.settings,
        "classes": task.classes,
        "frame": task.frame,
        "shards": described,
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    lengths = [length for shard in described for length in shard["lengths"]]
    rejected = sum(count for shard in described for count in shard["rejected"])
    labels = [label for shard in described for label in shard["labels"]]
    return {
        "folder": str(folder),
        **{f"{split}_trajectories": count for split, count in options.counts.items()},
        "mean_frames": round(sum(lengths) / len(lengths), 1),
        "longest_frames": max(lengths),
        "rejected": round(rejected / (rejected + len(lengths)), 3),
        "labels": {name: labels.count(label) for label, name in enumerate(task.classes)},
        "megabytes": round(sum((folder / each.file).stat().st_size for each in shards) / 1e6, 1),
        "files_made": made,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _deciding(options: TrajectoryOptions) -> dict[str, Any]:
    counts = {"trajectories": options.trajectories, "validation_trajectories": options.validation_trajectories}
    sizes = {"test_trajectories": options.test_trajectories, "shard_size": options.shard_size}
    return {**options.settings, **counts, **sizes}


def _make_shard(shard: SplitPart, task: TrajectoryTask, seed: int) -> bytes:
    """One file's content; to be called where Box2D is."""
    tune_process(threads=1)
    numbers = range(shard.first, shard.first + shard.count)
    return shard_of([changes(task.trajectory((seed, SPLITS.index(shard.split), number))) for number in numbers])


def _described(folder: Path, shard: SplitPart) -> dict[str, Any]:
    found = described_shard(folder / shard.file)
    if len(found["lengths"]) != shard.count:
        held = f"{shard.file} holds {len(found['lengths'])} trajectories, not {shard.count}"
        raise unfit(folder, f"{held}; remove it, and concord data makes it")
    return found
