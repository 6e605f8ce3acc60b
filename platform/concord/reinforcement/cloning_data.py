"""Generating and reading the data of behavioural cloning: states of an expert, with its actions.

A file has the states of a training level. It depends only on the seed, its levels and the expert.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from concord.environments.sharded import SPLITS, RowGroup, RowGroupData, ShardedData, Split, data_folder
from concord.execution.sharded_data import Info, MakingOptions, SplitPart, make_sharded, split_parts
from concord.extras import require_extra
from concord.reinforcement.actor_critic import Policy
from concord.reinforcement.episodes import Step, steps
from concord.reinforcement.expert import Expert, load_expert, shipped_expert
from concord.reinforcement.games import (
    FIRST_UNSEEN_LEVEL,
    LARGEST_LEVEL,
    Difficulty,
    check_game,
)

_DATA = "coinrun-clone"
_TOGETHER = 16  # environments of a level, stepped together
_SHARD = 125  # levels in a file of validation or test, one state each
_ROOM = 1_000_000  # size of the range from which such a file draws its levels
_FIRST_EPISODES = 32


@dataclass(frozen=True, kw_only=True)
class CloningOptions(MakingOptions):
    """Data for behavioural cloning: states of an expert's own episodes, with its distribution over actions."""

    # fmt: off
    game: str = "coinrun"
    """One of Procgen's 16 games."""
    difficulty: Difficulty = "easy"
    """Distribution of levels: easy or hard."""
    expert: Path | None = None
    """Safetensors file of an expert from coinrun-expert; by default the included expert."""
    levels: int = 64
    """Number of training levels."""
    states: int = 1000
    """Number of states of each training level."""
    first_level: int = 0
    """Seed of the first training level."""
    test_states: int = 2000
    """Number of test states, each from a level of its own outside of the training levels."""
    validation_states: int = 1000
    """Number of validation states, each from a further level; they select models."""
    first_test_level: int = FIRST_UNSEEN_LEVEL
    """First level of validation and test; no expert trains on levels from the default on."""
    seed: int = 0
    """Seed of the episodes and of the draw of their states."""
    # fmt: on

    @property
    def unseen_levels(self) -> int:
        """The number of levels, from the first test level on, for test and validation."""
        return _ROOM * (-(-self.test_states // _SHARD) + -(-self.validation_states // _SHARD))

    def check(self) -> None:
        """Validate options."""
        super().check()
        check_game(self.game, self.difficulty)
        self.require_at_least(1, "levels", "states", "test_states")
        self.require_at_least(0, "validation_states", "first_level", "first_test_level", "seed")
        last = self.first_level + self.levels - 1
        self.require("first_level", last <= LARGEST_LEVEL, f"levels end at {LARGEST_LEVEL}")
        unseen = self.first_test_level + self.unseen_levels
        self.require("first_test_level", unseen <= LARGEST_LEVEL, f"too few levels from there to {LARGEST_LEVEL}")
        apart = self.first_test_level > last or unseen <= self.first_level
        among = f"the training levels {self.first_level} to {last} would be among the test levels"
        self.require("first_test_level", apart, among)


def cloning_folder(folder: Path | None, output: Path, game: str, difficulty: str) -> Path:
    """The default folder of a game's data."""
    return data_folder(folder, output, f"{game}-{difficulty}")


@dataclass(frozen=True)
class _Shard(SplitPart):
    """The content of one file: ``states`` states of one level, or one state from each of ``states`` levels.

    ``first`` and ``count`` are the range of levels to play, or to draw from.
    """

    states: int


def _shards(options: CloningOptions) -> list[_Shard]:
    levels = range(options.first_level, options.first_level + options.levels)
    shards = [_Shard(f"train/level-{level:010d}.parquet", "train", level, 1, options.states) for level in levels]
    unseen = split_parts({"test": options.test_states, "validation": options.validation_states}, _SHARD)
    rooms = range(options.first_test_level, LARGEST_LEVEL, _ROOM)
    return shards + [
        _Shard(part.file, part.split, room, _ROOM, part.count) for room, part in zip(rooms, unseen, strict=False)
    ]


def make_cloning_data(options: CloningOptions, info: Info) -> dict[str, Any]:
    """Make the missing files of the data, in parallel Ray tasks."""
    options.check()
    path = options.expert or shipped_expert(options.game, options.difficulty)
    expert = load_expert(path, options.game, options.difficulty)
    require_extra("coinrun", "making cloning data")
    unseen = [options.first_test_level, options.unseen_levels]
    data, made = make_sharded(
        cloning_folder(options.data, options.output, options.game, options.difficulty),
        {
            "data": _DATA,
            "options": options.deciding | {"expert": expert.version},
            "expert": expert.provenance,
            "unseen_levels": unseen,
        },
        _shards(options),
        partial(_played, expert=expert, game=options.game, difficulty=options.difficulty, seed=options.seed),
        options,
        info,
    )
    counts = {f"{split}_states": sum(group.rows for group in data.groups(split)) for split in SPLITS}
    return {
        **made,
        "expert": expert.version,
        "expert_return": expert.provenance.get("unseen_return"),
        "training_levels": options.levels,
        **counts,
    }


@dataclass(frozen=True)
class States:
    """States, and the expert's distribution over actions in them.

    Attributes:
        frame: ``(states, 64, 64, 3)`` uint8.
        policy: ``(states, actions)`` float32; each row sums to 1.
        level: ``(states,)`` int64, the level's seed.
        episode, step: ``(states,)`` int64, the number of the file's episode, and of the episode's step.
    """

    frame: npt.NDArray[np.uint8]
    policy: npt.NDArray[np.float32]
    level: npt.NDArray[np.int64]
    episode: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]


def _played(shard: _Shard, expert: Expert, game: str, difficulty: Difficulty, seed: int) -> Sequence[RowGroupData]:
    """The states of one file, from an expert's own episodes.

    For training: states of one level, drawn without replacement from all states of at least 32 episodes; more episodes
    are played if their states are too few. For validation and test: one state from one episode of each of as many
    levels, drawn from the file's range of levels. The seed draws episodes and states.
    """
    from concord.reinforcement.procgen_environment import ProcgenVectorEnv

    training, states = shard.split == "train", shard.states
    key = np.random.SeedSequence([seed, shard.first, shard.count])
    drawn = np.random.default_rng(key)
    episodes = _FIRST_EPISODES if training else states + 8  # some levels may come twice
    while True:
        environment = ProcgenVectorEnv(
            min(_TOGETHER if training else 64, episodes),
            game,
            levels=shard.count,
            first_level=shard.first,
            difficulty=difficulty,
            seed=int(key.generate_state(1)[0]) % LARGEST_LEVEL,
            threads=0,
        )
        try:
            generator = torch.Generator().manual_seed(int(key.generate_state(2)[1]))
            played = steps(Policy(expert.network), environment, episodes, generator)
            found = _some_of_all(played, states, drawn) if training else one_a_level(played, states, drawn)
        finally:
            environment.close()
        if found is not None:
            return [RowGroupData(vars(found), {"levels": sorted(set(found.level.tolist()))})]
        episodes *= 2


def _some_of_all(played: Iterable[Step], states: int, drawn: np.random.Generator) -> States | None:
    """Draw this number of states without replacement; None if there are fewer."""
    seen = list(played)
    number = np.concatenate([step.episodes for step in seen])
    if len(number) < states:
        return None
    rows = np.sort(drawn.choice(len(number), states, replace=False))
    at = np.concatenate([np.full(len(step.episodes), index) for index, step in enumerate(seen)])
    began = np.full(number.max() + 1, at.max())
    np.minimum.at(began, number, at)
    return States(
        frame=np.concatenate([step.frames for step in seen])[rows],
        policy=_distribution(np.concatenate([step.logits for step in seen])[rows]),
        level=np.concatenate([step.levels for step in seen])[rows].astype(np.int64),
        episode=number[rows],
        step=(at - began[number])[rows],
    )


def one_a_level(played: Iterable[Step], states: int, drawn: np.random.Generator) -> States | None:
    """One state of the first episode of each of the first levels; None if there are fewer levels.

    A state replaces its episode's kept state with probability 1 / (states of the episode so far). So all states are
    equally likely, and only one state of each episode is in memory.
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
    """Softmax in double precision, so that rows sum to 1 up to the rounding of single precision."""
    policy: npt.NDArray[np.float32] = torch.from_numpy(logits).double().softmax(1).float().numpy()
    return policy


class CloningData(ShardedData):
    """Data for behavioural cloning in a folder, and their training levels."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _DATA)
        self.levels = tuple(group.facts["levels"][0] for group in self.groups("train"))

    def level(self, level: int) -> tuple[Tensor, Tensor]:
        """Frames ``(states, 64, 64, 3)`` uint8 and distributions ``(states, 15)`` of one training level."""
        return self._tensors([group for group in self.groups("train") if group.facts["levels"] == [level]])

    def split(self, split: Split) -> tuple[Tensor, Tensor]:
        """Frames and distributions of all states of a split."""
        return self._tensors(self.groups(split))

    def _tensors(self, groups: Sequence[RowGroup]) -> tuple[Tensor, Tensor]:
        arrays = self.read_all(groups)
        return torch.from_numpy(arrays["frame"]), torch.from_numpy(arrays["policy"])
