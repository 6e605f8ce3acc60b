"""``concord data distill-mujoco``: generating (in Ray tasks) and reading returns of open-loop actions in MuJoCo."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from concord.environments.sharded import RowGroupData, ShardedData, data_folder
from concord.errors import ArgumentError
from concord.execution.sharded_data import Info, MakingOptions, SplitPart, make_sharded, split_parts
from concord.extras import require_extra
from concord.storage import display_path
from concord_jobs.distill_mujoco.simulator import MujocoTrajectories, Simulator, Split, simulate

_DATA = "distill-mujoco"
_SHARD = 1000  # examples in a file


@dataclass(frozen=True, kw_only=True)
class ReturnOptions(MakingOptions):
    """Returns of 16 random actions in a MuJoCo environment, with the states in between."""

    # fmt: off
    simulator: Simulator = "Hopper"
    """One of Gymnasium's environments, in version 4."""
    examples: int = 4000
    """Number of training examples."""
    test_examples: int = 10000
    """Number of test examples."""
    validation_examples: int = 2000
    """Number of validation examples, which select models."""
    seed: int = 0
    """Seed of initial states and actions."""
    # fmt: on

    @property
    def counts(self) -> dict[Split, int]:
        """The number of examples of each split."""
        return {"train": self.examples, "test": self.test_examples, "validation": self.validation_examples}

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "examples", "test_examples", "validation_examples")
        self.require_at_least(0, "seed")


def make_returns(options: ReturnOptions, info: Info) -> dict[str, Any]:
    """Make the missing files of the data, in parallel Ray tasks."""
    options.check()
    require_extra("mujoco", f"making the data of {_DATA}")
    _, made = make_sharded(
        _folder(options.data, options.output, options.simulator),
        {"data": _DATA, "options": options.deciding},
        split_parts(options.counts, _SHARD),
        partial(_simulated, simulator=options.simulator, seed=options.seed),
        options,
        info,
    )
    counts = {f"{split}_examples": count for split, count in options.counts.items()}
    return made | {"simulator": options.simulator} | counts


def _simulated(shard: SplitPart, simulator: Simulator, seed: int) -> Sequence[RowGroupData]:
    return [RowGroupData(vars(simulate(simulator, shard.split, seed, shard.first, shard.count)))]


def _folder(folder: Path | None, output: Path, simulator: str) -> Path:
    return data_folder(folder, output, f"{simulator}-returns")


def returns_of(folder: Path | None, output: Path, simulator: str) -> ShardedData:
    """The data of a simulator."""
    data = ShardedData(_folder(folder, output, simulator), _DATA)
    if (found := data.options.get("simulator")) != simulator:
        raise ArgumentError("simulator", simulator, f"the data in {display_path(data.folder)} are of {found}")
    return data


def examples_of(data: ShardedData, split: Split) -> MujocoTrajectories:
    """The examples of a split, in their order."""
    return MujocoTrajectories(**data.read_all(data.groups(split)))
