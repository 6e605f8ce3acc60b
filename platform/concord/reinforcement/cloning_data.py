"""What an expert does in which state: the data that behavioural cloning learns from, made, kept and read.

A folder of parquet files, one a training level, and a manifest that names expert, seed, levels and checksums. Each
file depends on the seed, its levels and the expert alone, so an interrupted generation goes on where it stopped, and
the same command makes the same data again.
"""

import io
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from concord.environments.parquet import read_table
from concord.errors import InputError, first_line
from concord.reinforcement.actor_critic import Policy
from concord.reinforcement.episodes import Step, steps
from concord.reinforcement.expert import Expert, load_expert, shipped_expert
from concord.reinforcement.extra import require_coinrun
from concord.reinforcement.procgen_environment import (
    ACTIONS,
    FIRST_UNSEEN_LEVEL,
    FRAME,
    LARGEST_LEVEL,
    Difficulty,
    ProcgenVectorEnv,
    check_game,
)
from concord.runs.sharded_data import Info, MakingOptions, begin, make_missing
from concord.storage import local
from concord.storage.data_folder import MANIFEST, PLAN, checksum, manifest_of, unfit, write_whole
from concord.training.process import tune_process

_FORMAT = 1
_TOGETHER = 16  # environments of a level that are stepped together
_SHARD = 125  # levels of one state each in a file
_ROOM = 1_000_000  # levels to draw those of such a file from
_FIRST_EPISODES = 32

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True)
class CloningOptions(MakingOptions):
    """Data for behavioural cloning: states of an expert's own episodes, with its distribution over actions."""

    # fmt: off
    game: str = "coinrun"
    """Which of Procgen's 16 games."""
    difficulty: Difficulty = "easy"
    """Distribution of levels: easy or hard."""
    expert: Path | None = None
    """The expert, a safetensors file of coinrun-expert; the one that comes with Concord if not given."""
    levels: int = 64
    """Training levels."""
    states: int = 1000
    """States of each training level."""
    first_level: int = 0
    """Seed of the first training level."""
    test_states: int = 2000
    """Test states, each of another level that is no training level."""
    validation_states: int = 1000
    """Validation states, each of another level that is neither; to choose by."""
    first_test_level: int = FIRST_UNSEEN_LEVEL
    """From this level on are those of validation and test; from the default on, no expert trained on them."""
    seed: int = 0
    """Seed of the episodes, and of which of their states are taken."""
    # fmt: on

    @property
    def folder(self) -> Path:
        """Where the data are."""
        return cloning_folder(self.data_dir, self.output, self.game, self.difficulty)

    @property
    def unseen_levels(self) -> int:
        """How many levels, from the first test level on, are for test and validation."""
        return _ROOM * (-(-self.test_states // _SHARD) + -(-self.validation_states // _SHARD))

    def check(self) -> None:
        """Validate options."""
        super().check()
        check_game(self.game, self.difficulty)
        for option in ("levels", "states", "test_states"):
            self.require(option, getattr(self, option) >= 1, "must be at least 1")
        for option in ("validation_states", "first_level", "first_test_level", "seed"):
            self.require(option, getattr(self, option) >= 0, "must not be negative")
        last = self.first_level + self.levels - 1
        self.require("first_level", last <= LARGEST_LEVEL, f"levels end at {LARGEST_LEVEL}")
        unseen = self.first_test_level + self.unseen_levels
        self.require("first_test_level", unseen <= LARGEST_LEVEL, f"too few levels from there to {LARGEST_LEVEL}")
        apart = self.first_test_level > last or unseen <= self.first_level
        among = f"the training levels {self.first_level} to {last} would be among the test levels"
        self.require("first_test_level", apart, among)


def cloning_folder(data_dir: Path | None, output: Path, game: str, difficulty: str) -> Path:
    """Where the data of a game are, unless another folder is given."""
    return data_dir if data_dir is not None else output / "data" / f"{game}-{difficulty}"


# What decides the data; where and with how many tasks they are made does not.
_DECIDING = (
    "game", "difficulty", "levels", "states", "first_level", "test_states", "validation_states", "first_test_level",
    "seed",
)  # fmt: skip


@dataclass(frozen=True)
class _Shard:
    """What one file holds: ``states`` of one level, or one state of each of that many levels.

    Attributes:
        file: its name in the folder.
        split: what it is for.
        first, count: the levels to play, or to draw from.
        states: how many.
    """

    file: str
    split: Split
    first: int
    count: int
    states: int


def _shards(options: CloningOptions) -> list[_Shard]:
    levels = range(options.first_level, options.first_level + options.levels)
    shards = [_Shard(f"train/level-{level:010d}.parquet", "train", level, 1, options.states) for level in levels]
    room = options.first_test_level
    unseen: tuple[tuple[Split, int], ...] = (("test", options.test_states), ("validation", options.validation_states))
    for split, states in unseen:
        for number, start in enumerate(range(0, states, _SHARD)):
            some = min(_SHARD, states - start)
            shards.append(_Shard(f"{split}/part-{number:04d}.parquet", split, room, _ROOM, some))
            room += _ROOM
    return shards


def make_cloning_data(options: CloningOptions, info: Info) -> dict[str, Any]:
    """Make what is missing of the data, in parallel Ray tasks; says in the end what there is.

    Raises:
        InputError: the options or the expert cannot be used, or the folder holds other data.
    """
    started = time.perf_counter()
    options.check()
    path = options.expert or shipped_expert(options.game, options.difficulty)
    expert = load_expert(path, options.game, options.difficulty)
    require_coinrun("making cloning data")
    folder = options.folder.absolute()
    plan = {
        "format": _FORMAT,
        "expert": {"version": expert.version, **expert.provenance},
        **{option: getattr(options, option) for option in _DECIDING},
    }
    there = begin(folder, plan, "cloning data", special={"expert"})
    _check_expert(there, expert, folder)
    shards = _shards(options)
    made = make_missing(
        folder,
        shards,
        _make_shard,
        lambda ray: (ray.put(path.read_bytes()), options.game, options.difficulty, options.seed),
        options.tasks,
        options.address,
        info,
    )
    described = [_described(folder, shard) for shard in shards]
    unseen = [options.first_test_level, options.unseen_levels]
    manifest = plan | {"unseen_levels": unseen, "shards": described}
    _check_disjoint(manifest["shards"], folder)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    counts = {split: sum(s["states"] for s in manifest["shards"] if s["split"] == split) for split in get_args(Split)}
    return {
        "folder": str(folder),
        "expert": expert.version,
        "expert_return": expert.provenance.get("unseen_return"),
        "training_levels": options.levels,
        **{f"{split}_states": count for split, count in counts.items()},
        "files_made": made,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _check_expert(plan: dict[str, Any] | None, expert: Expert, folder: Path) -> None:
    """Refuse to add to data of another expert."""
    if plan is None:
        return
    if not isinstance(plan["expert"], dict):
        raise unfit(folder, f"{PLAN} is of another version of Concord; give another folder")
    if plan["expert"].get("version") != expert.version:
        raise InputError(
            f"--expert: version {expert.version}; the data in {folder} are of version "
            f"{plan['expert'].get('version')}; give another --data-dir"
        )


def _make_shard(shard: _Shard, weights: bytes, game: str, difficulty: Difficulty, seed: int) -> bytes:
    """One file's content; to be called where the games can run."""
    import tempfile

    tune_process(threads=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expert.safetensors"
        path.write_bytes(weights)
        expert = load_expert(path)
    return _parquet(states_of(expert, shard.split, shard.first, shard.count, shard.states, game, difficulty, seed))


@dataclass(frozen=True)
class States:
    """States and what the expert would do in them.

    Attributes:
        frames: ``(states, 64, 64, 3)`` uint8.
        policy: ``(states, actions)`` float32; each row sums to 1.
        levels: ``(states,)`` int64, the level's seed.
        episodes, steps: ``(states,)`` int64, which episode of the file, and which step of it.
    """

    frames: npt.NDArray[np.uint8]
    policy: npt.NDArray[np.float32]
    levels: npt.NDArray[np.int64]
    episodes: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]


def states_of(
    expert: Expert,
    split: Split,
    first: int,
    count: int,
    states: int,
    game: str = "coinrun",
    difficulty: Difficulty = "easy",
    seed: int = 0,
) -> States:
    """States from an expert's own episodes.

    For training: ``states`` of one level, drawn without replacement from all states of at least 32 episodes; as
    many more are played as are needed. For validation and test: one state drawn from one episode of each of ``states``
    levels, which are drawn from the range.

    Args:
        expert: who plays.
        split: what the states are for.
        first, count: the levels.
        states: how many.
        game, difficulty: what is played.
        seed: of episodes and draws.
    """
    key = np.random.SeedSequence([seed, first, count])
    drawn = np.random.default_rng(key)
    episodes = _FIRST_EPISODES if split == "train" else states + 8  # some levels may come twice
    while True:
        environment = ProcgenVectorEnv(
            min(_TOGETHER if split == "train" else 64, episodes),
            game,
            levels=count,
            first_level=first,
            difficulty=difficulty,
            seed=int(key.generate_state(1)[0]) % LARGEST_LEVEL,
            threads=0,
        )
        try:
            generator = torch.Generator().manual_seed(int(key.generate_state(2)[1]))
            played = steps(Policy(expert.network), environment, episodes, generator)
            found = _some_of_all(played, states, drawn) if split == "train" else _one_a_level(played, states, drawn)
        finally:
            environment.close()
        if found is not None:
            return found
        episodes *= 2


def _some_of_all(played: Iterable[Step], states: int, drawn: np.random.Generator) -> States | None:
    """So many of all states, without replacement; None if there are fewer."""
    seen = list(played)
    number = np.concatenate([step.episodes for step in seen])
    if len(number) < states:
        return None
    rows = np.sort(drawn.choice(len(number), states, replace=False))
    at = np.concatenate([np.full(len(step.episodes), index) for index, step in enumerate(seen)])
    began = np.full(number.max() + 1, at.max())
    np.minimum.at(began, number, at)
    return States(
        frames=np.concatenate([step.frames for step in seen])[rows],
        policy=_distribution(np.concatenate([step.logits for step in seen])[rows]),
        levels=np.concatenate([step.levels for step in seen])[rows].astype(np.int64),
        episodes=number[rows],
        steps=(at - began[number])[rows],
    )


def _one_a_level(played: Iterable[Step], states: int, drawn: np.random.Generator) -> States | None:
    """One state of the first episode of each of the first so many levels; None if there are fewer.

    A state takes the place of the one kept of its episode with probability 1 / (states of the episode so far): then
    each is as likely in the end, and one an episode is all that is held.
    """
    kept: dict[int, tuple[Any, ...]] = {}
    lengths: dict[int, int] = {}
    for step in played:
        chances = drawn.random(len(step.episodes))
        for row, episode in enumerate(step.episodes.tolist()):
            at = lengths.get(episode, 0)
            lengths[episode] = at + 1
            if chances[row] * (at + 1) < 1:
                kept[episode] = (step.frames[row].copy(), step.logits[row], int(step.levels[row]), episode, at)
    first_of_level: dict[int, int] = {}
    for episode in sorted(kept):
        first_of_level.setdefault(kept[episode][2], episode)
    wanted = sorted(first_of_level.values())[:states]
    if len(wanted) < states:
        return None
    frames, logits, levels, episodes, at_steps = zip(*(kept[episode] for episode in wanted), strict=True)
    numbers = (np.array(each, np.int64) for each in (levels, episodes, at_steps))
    return States(np.stack(frames), _distribution(np.stack(logits)), *numbers)


def _distribution(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """In double precision, so that rows sum to 1 as nearly as single precision can say."""
    policy: npt.NDArray[np.float32] = torch.from_numpy(logits).double().softmax(1).float().numpy()
    return policy


def _parquet(states: States) -> bytes:
    size = int(np.prod(FRAME))
    table = pa.table(
        {
            "frame": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(size), len(states.levels), [None, pa.py_buffer(np.ascontiguousarray(states.frames))]
            ),
            "policy": pa.FixedSizeListArray.from_arrays(pa.array(states.policy.ravel()), ACTIONS),
            "level": pa.array(states.levels),
            "episode": pa.array(states.episodes),
            "step": pa.array(states.steps),
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False)
    return buffer.getvalue()


def _read(path: Path) -> States:
    """One file.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        table = read_table(path).combine_chunks()
        frames = table["frame"].chunk(0)
        pixels = np.frombuffer(frames.buffers()[1], np.uint8).reshape(len(frames), *FRAME)
        policy = table["policy"].chunk(0).flatten().to_numpy().reshape(-1, ACTIONS)
        return States(pixels, policy, *(table[name].to_numpy() for name in ("level", "episode", "step")))
    except InputError as error:
        raise InputError(f"--data-dir: {error}") from None
    except (OSError, pa.ArrowException, KeyError, ValueError, IndexError) as error:
        said = f"--data-dir: {path} cannot be read ({first_line(error)}); remove it, and concord data makes it"
        raise InputError(said) from error


def _described(folder: Path, shard: _Shard) -> dict[str, Any]:
    states = _read(folder / shard.file)
    right = (
        len(states.levels) == shard.states
        and ((states.levels >= shard.first) & (states.levels < shard.first + shard.count)).all()
        and np.allclose(states.policy.sum(1), 1, rtol=0, atol=1e-5)
    )
    if not right:
        raise unfit(folder, f"{shard.file} holds other states; remove it, and concord data makes it")
    return {
        "file": shard.file,
        "split": shard.split,
        "states": len(states.levels),
        "levels": sorted(set(states.levels.tolist())),
        "sha256": checksum((folder / shard.file).read_bytes()),
    }


def _check_disjoint(shards: Sequence[dict[str, Any]], folder: Path) -> None:
    """See that no level is in two files: then none is in two splits."""
    seen: dict[int, str] = {}
    for shard in shards:
        for level in shard["levels"]:
            if level in seen:
                raise unfit(folder, f"level {level} is in {seen[level]} and in {shard['file']}")
            seen[level] = shard["file"]


def _missing(manifest: dict[str, Any]) -> str | None:
    """What a manifest lacks."""
    for key, kind in (("game", str), ("difficulty", str), ("states", int), ("unseen_levels", list), ("shards", list)):
        if not isinstance(manifest.get(key), kind):
            return key
    keys = (("file", str), ("split", str), ("levels", list), ("states", int), ("sha256", str))
    for shard in manifest["shards"]:
        for key, kind in keys:
            if not (isinstance(shard, dict) and isinstance(shard.get(key), kind) and shard[key] != []):
                return f"{key} of a file"
    there = {shard["split"] for shard in manifest["shards"]}
    return next((f"a file for {split}" for split in ("train", "test") if split not in there), None)


class CloningData:
    """Data for behavioural cloning as they lie in a folder; files are read, and checked, when they are asked for.

    Args:
        folder: where they are, or their address.

    Attributes:
        manifest: what is written of them.
        levels: the training levels.
        version: of the data: another when any of them is.

    Raises:
        InputError: there are none, or the manifest is not one of this format, or a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest, names = manifest_of(folder, "cloning data", "concord data coinrun-clone")
        if self.manifest.get("format") != _FORMAT or not isinstance(self.manifest.get("shards"), list):
            found = self.manifest.get("format")
            raise unfit(folder, f"its {MANIFEST} has format {found}; this Concord reads {_FORMAT}")
        if missing := _missing(self.manifest):
            raise unfit(folder, f"its {MANIFEST} is not complete ({missing} is missing)")
        self._shards = {shard["file"]: dict(shard) for shard in self.manifest["shards"]}
        _check_disjoint(self.manifest["shards"], folder)
        for file in self._shards:
            if file not in names:
                raise unfit(folder, f"{file} is missing; concord data coinrun-clone makes it")
        self.version = checksum(json.dumps(self.manifest, sort_keys=True).encode())[:12]
        self.levels = tuple(shard["levels"][0] for shard in self._shards.values() if shard["split"] == "train")

    def level(self, level: int) -> tuple[Tensor, Tensor]:
        """Frames ``(states, 64, 64, 3)`` uint8 and distributions ``(states, 15)`` of one training level."""
        files = [f for f, shard in self._shards.items() if shard["split"] == "train" and shard["levels"][0] == level]
        return self._tensors(files)

    def split(self, split: Split) -> tuple[Tensor, Tensor]:
        """Frames and distributions of all states of a split."""
        return self._tensors([file for file, shard in self._shards.items() if shard["split"] == split])

    def has(self, split: Split) -> bool:
        """Whether there are states for that."""
        return any(shard["split"] == split for shard in self._shards.values())

    def _tensors(self, files: Sequence[str]) -> tuple[Tensor, Tensor]:
        parts = [self._checked(file) for file in files]
        frames = np.concatenate([part.frames for part in parts])
        return torch.from_numpy(frames), torch.from_numpy(np.concatenate([part.policy for part in parts]))

    def _checked(self, file: str) -> States:
        path = local(self.folder / file)
        if checksum(path.read_bytes()) != self._shards[file]["sha256"]:
            raise unfit(self.folder, f"{file} is corrupt; remove it, and concord data makes it anew")
        return _read(path)
