"""Returns of open-loop actions in MuJoCo as data: made in Ray tasks, kept as safetensors files, and read."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from concord.environments.reward_trajectories import (
    HORIZON,
    Simulator,
    Split,
    Trajectories,
    check_simulator,
    require_mujoco,
    simulate,
)
from concord.errors import ArgumentError, InputError, first_line
from concord.runs.sharded_data import Info, MakingOptions, SplitPart, begin, make_missing, split_parts
from concord.storage import display_path, local
from concord.storage.data_folder import MANIFEST, checksum, manifest_of, unfit, write_whole
from concord.training.process import tune_process

_FORMAT = 1
_SHARD = 500  # examples in a file


@dataclass(frozen=True, kw_only=True)
class ReturnOptions(MakingOptions):
    """Returns of 16 random actions in a MuJoCo environment, with the states in between."""

    # fmt: off
    simulator: Simulator = "Hopper"
    """Which of Gymnasium's environments, in version 4."""
    examples: int = 4000
    """Training examples."""
    test_examples: int = 10000
    """Test examples."""
    validation_examples: int = 2000
    """Validation examples; to choose by."""
    seed: int = 0
    """Seed of initial states and actions."""
    # fmt: on

    @property
    def counts(self) -> dict[Split, int]:
        """Examples of each split."""
        return {"train": self.examples, "test": self.test_examples, "validation": self.validation_examples}

    def check(self) -> None:
        """Validate options."""
        super().check()
        check_simulator(self.simulator)
        for option in ("examples", "test_examples", "validation_examples"):
            self.require(option, getattr(self, option) >= 1, "must be at least 1")
        self.require("seed", self.seed >= 0, "must not be negative")


def returns_folder(data_dir: Path | None, output: Path, simulator: str) -> Path:
    """Where the data of a simulator are, unless another folder is given."""
    return data_dir if data_dir is not None else output / "data" / f"{simulator}-returns"


_DECIDING = ("simulator", "examples", "test_examples", "validation_examples", "seed")


def make_returns(options: ReturnOptions, info: Info) -> dict[str, Any]:
    """Make what is missing of the data, in parallel Ray tasks; says in the end what there is.

    Raises:
        InputError: the options cannot be used, MuJoCo is missing, or the folder holds other data.
    """
    started = time.perf_counter()
    options.check()
    require_mujoco("making the data of distill-mujoco")
    folder = returns_folder(options.data_dir, options.output, options.simulator).absolute()
    plan = {"format": _FORMAT, **{option: getattr(options, option) for option in _DECIDING}}
    begin(folder, plan, "returns of a simulator")
    shards = split_parts(options.counts, _SHARD)
    simulated = (options.simulator, options.seed)
    made = make_missing(folder, shards, _make_shard, lambda _: simulated, options.tasks, options.address, info)
    described = [
        {"file": each.file, "split": each.split, "examples": each.count, "sha256": _checked(folder, each)}
        for each in shards
    ]
    write_whole(folder / MANIFEST, json.dumps(plan | {"shards": described}, indent=1).encode())
    return {
        "folder": str(folder),
        "simulator": options.simulator,
        **{f"{split}_examples": count for split, count in options.counts.items()},
        "files_made": made,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _make_shard(shard: SplitPart, simulator: Simulator, seed: int) -> bytes:
    """One file's content; to be called where the simulator can run."""
    tune_process(threads=1)
    made = simulate(simulator, shard.split, seed, shard.first, shard.count)
    content: bytes = save({name: np.ascontiguousarray(array) for name, array in vars(made).items()})
    return content


def _checked(folder: Path, shard: SplitPart) -> str:
    """The checksum of a file that holds what it should."""
    found = len(_read(folder / shard.file).rewards)
    if found != shard.count:
        raise unfit(folder, f"{shard.file} holds {found} examples, not {shard.count}; remove it, and concord data "
                    "makes it")  # fmt: skip
    return checksum((folder / shard.file).read_bytes())


def _read(path: Path) -> Trajectories:
    try:
        arrays = load(path.read_bytes())
        made = Trajectories(**arrays)
        examples, steps = made.rewards.shape
        width = made.state.shape[1]
        shapes = made.state.shape, made.actions.shape[:2], made.states.shape
        if shapes != ((examples, width), (examples, steps), (examples, steps, width)) or steps != HORIZON:
            raise ValueError(f"shapes that do not fit: {', '.join(map(str, shapes))}")
    except (OSError, SafetensorError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"--data-dir: {path} cannot be read ({first_line(error)}); remove it, and concord data makes it"
        ) from error
    return made


class ReturnData:
    """Data of a simulator as they lie in a folder; files are read, and checked, when they are asked for.

    Args:
        folder: where they are, or their address.

    Attributes:
        manifest: what is written of them.
        version: of the data: another when any of them is.

    Raises:
        InputError: there are none, or the manifest is not one of this format, or a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest, names = manifest_of(folder, "returns of a simulator", "concord data distill-mujoco")
        if self.manifest.get("format") != _FORMAT or not _complete(self.manifest):
            raise unfit(folder, f"its {MANIFEST} is not one of format {_FORMAT}, or not complete")
        for shard in self.manifest["shards"]:
            if shard["file"] not in names:
                raise unfit(folder, f"{shard['file']} is missing; concord data distill-mujoco makes it")
        self.version = checksum(json.dumps(self.manifest, sort_keys=True).encode())[:12]

    def split(self, split: Split) -> Trajectories:
        """The examples of a split, in their order."""
        return Trajectories.joined([self._part(each) for each in self.manifest["shards"] if each["split"] == split])

    def _part(self, shard: dict[str, Any]) -> Trajectories:
        path = local(self.folder / shard["file"])
        if checksum(path.read_bytes()) != shard["sha256"]:
            raise unfit(self.folder, f"{shard['file']} is corrupt; remove it, and concord data makes it anew")
        return _read(path)


def returns_of(data_dir: Path | None, output: Path, simulator: str) -> ReturnData:
    """The data of a simulator, see :func:`returns_folder`.

    Raises:
        InputError: there are none, or they are of another simulator.
    """
    data = ReturnData(returns_folder(data_dir, output, simulator))
    found = data.manifest["simulator"]
    if found != simulator:
        raise ArgumentError("simulator", simulator, f"the data in {display_path(data.folder)} are of {found}")
    return data


def _complete(manifest: dict[str, Any]) -> bool:
    """Whether a manifest names a simulator, and a file for each split."""
    shards = manifest.get("shards")
    if not isinstance(manifest.get("simulator"), str) or not isinstance(shards, list):
        return False
    keys = ("file", "split", "sha256")
    if not all(isinstance(each, dict) and all(isinstance(each.get(key), str) for key in keys) for each in shards):
        return False
    return {each["split"] for each in shards} == set(get_args(Split))
