"""What an expert does in which state: the data that behavioural cloning learns from, made, kept and read.

A folder of parquet files, one a training level, and a manifest that names expert, seed, levels and checksums. Each
file depends on the seed, its levels and the expert alone, so an interrupted generation goes on where it stopped, and
the same command makes the same data again.
"""

import dataclasses
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.reinforcement.agent_training import FIRST_UNSEEN_LEVEL, policy_of
from concord.reinforcement.episodes import steps
from concord.reinforcement.expert import Expert, load_expert, shipped_expert
from concord.reinforcement.procgen_environment import (
    ACTIONS,
    FRAME,
    LARGEST_LEVEL,
    Difficulty,
    ProcgenVectorEnv,
    check_game,
)
from concord.training.config import RunConfig
from concord.training.distributed import ray_session
from concord.training.process import tune_process

MANIFEST = "manifest.json"
_PLAN = "plan.json"
_FORMAT = 1
_TOGETHER = 16  # environments of a level that are stepped together
_SHARD = 125  # levels of one state each in a file
_ROOM = 1_000_000  # levels to draw those of such a file from
_FIRST_EPISODES = 32

Split = Literal["train", "validation", "test"]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CloningOptions:
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
    tasks: int | None = None
    """Ray tasks at a time; one for each CPU if not given."""
    address: str | None = None
    """Ray cluster to run on; without it (or RAY_ADDRESS) Ray starts on this machine."""
    data_dir: Path | None = None
    """Folder for the data; data/GAME-DIFFICULTY under --output if not given."""
    output: Path = DEFAULT_OUTPUT
    """Folder of runs and data."""
    # fmt: on

    @property
    def folder(self) -> Path:
        """Where the data are."""
        return cloning_folder(self.data_dir, self.output, self.game, self.difficulty)

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        check_game(self.game, self.difficulty)
        for option in ("levels", "states", "test_states"):
            self._require(option, getattr(self, option) >= 1, "must be at least 1")
        for option in ("validation_states", "first_level", "first_test_level", "seed"):
            self._require(option, getattr(self, option) >= 0, "must not be negative")
        self._require("tasks", self.tasks is None or self.tasks >= 1, "must be at least 1")
        last = self.first_level + self.levels - 1
        self._require("first_level", last <= LARGEST_LEVEL, f"levels end at {LARGEST_LEVEL}")
        files = -(-self.test_states // _SHARD) + -(-self.validation_states // _SHARD)
        unseen = self.first_test_level + _ROOM * files
        self._require("first_test_level", unseen <= LARGEST_LEVEL, f"too few levels from there to {LARGEST_LEVEL}")
        apart = self.first_test_level > last or unseen <= self.first_level
        self._require(
            "first_test_level",
            apart,
            f"the training levels {self.first_level} to {last} would be among the test levels",
        )

    def _require(self, option: str, right: bool, expected: str) -> None:
        if not right:
            raise InputError(f"--{option.replace('_', '-')} {getattr(self, option)}: {expected}")


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
        for number, begin in enumerate(range(0, states, _SHARD)):
            some = min(_SHARD, states - begin)
            shards.append(_Shard(f"{split}/part-{number:04d}.parquet", split, room, _ROOM, some))
            room += _ROOM
    return shards


def make_cloning_data(options: CloningOptions, say: Say) -> dict[str, Any]:
    """Make what is missing of the data, in parallel Ray tasks; says in the end what there is.

    Raises:
        InputError: the options or the expert cannot be used, or the folder holds other data.
    """
    started = time.perf_counter()
    options.check()
    path = options.expert or shipped_expert(options.game, options.difficulty)
    expert = load_expert(path, options.game, options.difficulty)
    folder = options.folder.absolute()
    plan = {
        "format": _FORMAT,
        "expert": {"version": expert.version, **expert.provenance},
        **{option: getattr(options, option) for option in _DECIDING},
    }
    _begin(folder, plan)
    shards = _shards(options)
    made = {shard.file: shard for shard in shards}
    missing = [shard for shard in shards if not _whole(folder / shard.file, shard)]
    if missing:
        say(f"{len(missing)} of {len(shards)} files to make in {folder}")
        with ray_session(RunConfig(address=options.address)):
            for done, (shard, content) in enumerate(_made(path, missing, options), 1):
                _write(folder / shard.file, content)
                if done % 8 == 0 or done == len(missing):
                    say(f"{done}/{len(missing)} files")
    manifest = plan | {"shards": [_described(folder, made[shard.file]) for shard in shards]}
    _check_disjoint(manifest["shards"], folder)
    _write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    counts = {split: sum(s["states"] for s in manifest["shards"] if s["split"] == split) for split in get_args(Split)}
    return {
        "folder": str(folder),
        "expert": expert.version,
        "expert_return": expert.provenance.get("unseen_return"),
        "training_levels": options.levels,
        **{f"{split}_states": count for split, count in counts.items()},
        "files_made": len(missing),
        "seconds": round(time.perf_counter() - started, 1),
    }


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    """Write down what the folder is for, or see that it is for the same."""
    if (folder / _PLAN).exists():
        there = _read_json(folder / _PLAN)
        for key in plan:
            if key != "expert" and there.get(key) != plan[key]:
                raise InputError(
                    f"--{key.replace('_', '-')} {plan[key]}: the data in {folder} are made with {there.get(key)}; "
                    "give another --data-dir"
                )
        if there["expert"]["version"] != plan["expert"]["version"]:
            raise InputError(
                f"--expert: version {plan['expert']['version']}; the data in {folder} are of version "
                f"{there['expert']['version']}; give another --data-dir"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--data-dir {folder}: not empty, and not made for cloning data; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _PLAN, json.dumps(plan, indent=1).encode())
    except OSError as error:
        raise InputError(f"--data-dir {folder}: not a folder to write to ({error.strerror})") from error


def _made(expert: Path, shards: Sequence[_Shard], options: CloningOptions) -> Iterable[tuple[_Shard, bytes]]:
    """The contents of the files as they come, in any order."""
    import ray

    make: Any = ray.remote(num_cpus=1, max_retries=3)(_make_shard)
    weights = ray.put(expert.read_bytes())
    limit = options.tasks or int(ray.cluster_resources().get("CPU", 1))
    waiting = list(shards)
    running: dict[Any, _Shard] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                shard = waiting.pop(0)
                task = make.remote(weights, shard, options.game, options.difficulty, options.seed)
                running[task] = shard
            (ready,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(ready), ray.get(ready)
    finally:
        for task in running:
            ray.cancel(task, force=True)


def _make_shard(weights: bytes, shard: _Shard, game: str, difficulty: Difficulty, seed: int) -> bytes:
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
            pool = _Pool.of(expert, environment, episodes, int(key.generate_state(2)[1]))
        finally:
            environment.close()
        chosen = pool.draw(states, drawn) if split == "train" else pool.one_a_level(states, drawn)
        if chosen is not None:
            return pool.at(chosen)
        episodes *= 2


@dataclass(frozen=True)
class _Pool:
    """All states of some episodes."""

    states: States

    @staticmethod
    def of(expert: Expert, environment: ProcgenVectorEnv, episodes: int, seed: int) -> "_Pool":
        generator = torch.Generator().manual_seed(seed)
        played = list(steps(policy_of(expert.network), environment, episodes, generator))
        number = np.concatenate([step.episodes for step in played])
        at = np.concatenate([np.full(len(step.episodes), index) for index, step in enumerate(played)])
        began = np.full(number.max() + 1, at.max())
        np.minimum.at(began, number, at)
        logits = torch.from_numpy(np.concatenate([step.logits for step in played]))
        return _Pool(
            States(
                frames=np.concatenate([step.frames for step in played]),
                # In double precision, so that rows sum to 1 as nearly as single precision can say.
                policy=logits.double().softmax(1).float().numpy(),
                levels=np.concatenate([step.levels for step in played]).astype(np.int64),
                episodes=number,
                steps=at - began[number],
            )
        )

    def draw(self, states: int, drawn: np.random.Generator) -> npt.NDArray[np.int64] | None:
        """So many of all; None if there are fewer."""
        there = len(self.states.levels)
        return np.sort(drawn.choice(there, states, replace=False)) if there >= states else None

    def one_a_level(self, states: int, drawn: np.random.Generator) -> npt.NDArray[np.int64] | None:
        """One of the first episode of each of the first so many levels; None if there are fewer."""
        numbers = self.states.episodes
        first_rows = np.unique(numbers, return_index=True)[1]
        _, firsts = np.unique(self.states.levels[first_rows], return_index=True)
        wanted = np.sort(firsts)[:states]
        if len(wanted) < states:
            return None
        return np.array([drawn.choice(np.flatnonzero(numbers == number)) for number in wanted])

    def at(self, rows: npt.NDArray[np.int64]) -> States:
        values = {field.name: getattr(self.states, field.name)[rows] for field in dataclasses.fields(States)}
        return States(**values)


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
        table = pq.read_table(path).combine_chunks()
        frames = table["frame"].chunk(0)
        pixels = np.frombuffer(frames.buffers()[1], np.uint8).reshape(len(frames), *FRAME)
        policy = table["policy"].chunk(0).flatten().to_numpy().reshape(-1, ACTIONS)
        return States(pixels, policy, *(table[name].to_numpy() for name in ("level", "episode", "step")))
    except (OSError, pa.ArrowException, KeyError, ValueError, IndexError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"--data-dir: {path} cannot be read ({reason}); remove it, and concord data makes it"
        ) from error


def _whole(path: Path, shard: _Shard) -> bool:
    """Whether the file is there and complete."""
    try:
        return pq.read_metadata(path).num_rows == shard.states and len(_read(path).levels) == shard.states
    except (OSError, pa.ArrowException, InputError):
        return False


def _described(folder: Path, shard: _Shard) -> dict[str, Any]:
    states = _read(folder / shard.file)
    return {
        "file": shard.file,
        "split": shard.split,
        "states": len(states.levels),
        "levels": sorted(set(states.levels.tolist())),
        "sha256": hashlib.sha256((folder / shard.file).read_bytes()).hexdigest(),
    }


def _check_disjoint(shards: Sequence[dict[str, Any]], folder: Path) -> None:
    """See that no level is in two files: then none is in two splits."""
    seen: dict[int, str] = {}
    for shard in shards:
        for level in shard["levels"]:
            if level in seen:
                raise InputError(f"--data-dir {folder}: level {level} is in {seen[level]} and in {shard['file']}")
            seen[level] = shard["file"]


def _write(path: Path, content: bytes) -> None:
    """At once and as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
    except (OSError, ValueError) as error:
        raise InputError(f"--data-dir {path.parent}: {path.name} cannot be read ({error})") from error
    return content


class CloningData:
    """Data for behavioural cloning as they lie in a folder; files are read, and checked, when they are asked for.

    Args:
        folder: where they are.

    Raises:
        InputError: there are none, or the manifest is not one of this format, or a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / MANIFEST).is_file():
            unfinished = ", only the beginning of some" if (folder / _PLAN).exists() else ""
            raise InputError(f"--data-dir {folder}: no cloning data{unfinished}; concord data coinrun-clone makes them")
        self.manifest = _read_json(folder / MANIFEST)
        if self.manifest.get("format") != _FORMAT or not isinstance(self.manifest.get("shards"), list):
            found = self.manifest.get("format")
            raise InputError(f"--data-dir {folder}: its {MANIFEST} has format {found}; this Concord reads {_FORMAT}")
        try:
            self._shards = {shard["file"]: dict(shard) for shard in self.manifest["shards"]}
            _check_disjoint(self.manifest["shards"], folder)
        except (KeyError, TypeError) as error:
            raise InputError(f"--data-dir {folder}: its {MANIFEST} is not complete ({error} is missing)") from error
        for file in self._shards:
            if not (folder / file).is_file():
                raise InputError(f"--data-dir {folder}: {file} is missing; concord data coinrun-clone makes it")
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
        path = self.folder / file
        if hashlib.sha256(path.read_bytes()).hexdigest() != self._shards[file]["sha256"]:
            raise InputError(f"--data-dir {self.folder}: {file} is corrupt; remove it, and concord data makes it anew")
        return _read(path)
