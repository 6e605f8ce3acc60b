"""The 16 games of Procgen as one native vector environment of gymnasium: no loop over environments in Python."""

import contextlib
import io
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from concord.errors import InputError
from concord.extras import require_extra
from concord.reinforcement.games import (
    ACTIONS,
    FRAME,
    FRAMES_PER_SECOND,
    Difficulty,
    check_game,
    check_levels,
    check_seed,
)

_RESTART = -1  # an action that ends the episode


class ProcgenVectorEnv(VectorEnv[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[Any]]):
    """Many copies of one game, stepped together by Procgen's own threads.

    Episodes restart within the step that ends them (gymnasium's ``AutoresetMode.SAME_STEP``): the frame of that step
    is the first of the next episode. ``info`` then holds, with gymnasium's masks (``_final_obs`` and so on):

    - ``final_obs``: the last drawn frame of the episode, from which its last action was chosen. Procgen draws no frame
      between the last action and the next episode.
    - ``final_info``: ``level_seed`` and ``level_complete`` of the episode that ended.
    - ``episode``: ``r`` (sum of rewards), ``l`` (steps) and ``t`` (seconds), as gymnasium's RecordEpisodeStatistics.

    At every step ``info`` has ``level_seed``, the level of each environment. Procgen does not report why an episode
    ended, so a timeout counts as ``terminated``, as in the published results; ``truncated`` is always false.

    Args:
        num_envs: number of copies.
        game: one of :data:`~concord.reinforcement.games.GAMES`.
        levels: number of levels to draw from; 0 stands for all.
        first_level: the seed of the first of these levels.
        difficulty: the distribution of levels.
        seed: decides the order of levels and the random events of a game.
        threads: number of Procgen's threads; 0 steps in the calling thread.
        options: further options of Procgen, such as ``use_backgrounds``.
        render_mode: with ``rgb_array`` :meth:`render` returns frames of 512 × 512 pixels; it is slow.

    Observations are ``(num_envs, 64, 64, 3)`` uint8 and belong to the caller; actions ``(num_envs,)`` integers below
    15; rewards ``(num_envs,)`` float32.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012, gymnasium's own declaration
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": FRAMES_PER_SECOND,
    }

    def __init__(
        self,
        num_envs: int,
        game: str = "coinrun",
        *,
        levels: int = 0,
        first_level: int = 0,
        difficulty: Difficulty = "easy",
        seed: int = 0,
        threads: int = 2,
        options: Mapping[str, Any] | None = None,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        self._games: Any = None  # gymnasium also closes an environment without games
        if num_envs < 1:
            raise InputError(f"environments {num_envs}: must be at least 1")
        check_game(game, difficulty)
        check_levels(levels, first_level)
        check_seed(seed)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space = spaces.Box(0, 255, FRAME, np.uint8)
        self.single_action_space = spaces.Discrete(ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._made_from = {
            "env_name": game,
            "num_levels": levels,
            "start_level": first_level,
            "distribution_mode": difficulty,
            "num_threads": threads,
            "render_mode": render_mode,
            **(options or {}),
        }
        self._games = self._make(seed)
        self._stepped = False
        self._frames: npt.NDArray[np.uint8] = self._games.observe()[1]["rgb"]
        self._begin()

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        """Begin new episodes; with a seed, the same ones as an environment made with that seed."""
        if isinstance(seed, list):
            raise InputError("seed: a list; Procgen takes one seed for all its environments")
        if seed is not None:
            check_seed(seed)
            self._games.close()
            self._games = self._make(seed)
        elif self._stepped:
            self._games.act(np.full(self.num_envs, _RESTART, np.int32))
        _, observed, _ = self._games.observe()
        self._begin()
        self._frames = observed["rgb"]
        return self._frames, {"level_seed": self._levels.copy()}

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[
        npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
    ]:
        """One action each; see the class for what ``info`` holds."""
        self._games.act(np.asarray(actions, np.int32))
        rewards, observed, ended = self._games.observe()
        before, self._frames = self._frames, observed["rgb"]
        self._stepped = True
        self._returns += rewards
        self._lengths += 1
        seen = self._seen()
        info: dict[str, Any] = {"level_seed": self._levels.copy()}
        if ended.any():
            now = time.perf_counter()
            final = np.empty(self.num_envs, object)
            which = np.flatnonzero(ended)
            final[which] = list(before[which])
            info |= {
                "final_obs": final,
                "_final_obs": ended.copy(),
                "final_info": {
                    "level_seed": seen["prev_level_seed"].copy(),
                    "_level_seed": ended.copy(),
                    "level_complete": seen["prev_level_complete"].astype(bool),
                    "_level_complete": ended.copy(),
                },
                "_final_info": ended.copy(),
                "episode": {
                    "r": np.where(ended, self._returns, 0).astype(np.float32),
                    "l": np.where(ended, self._lengths, 0),
                    "t": np.where(ended, now - self._began, 0.0),
                },
                "_episode": ended.copy(),
            }
            self._returns[ended] = 0
            self._lengths[ended] = 0
            self._began[ended] = now
        return self._frames, rewards, ended, np.zeros(self.num_envs, bool), info

    def render(self) -> Any:
        """The frames in high resolution, ``(512, 512, 3)`` each; None without a ``render_mode``."""
        if self.render_mode is None:
            return None
        self._games.observe()
        return tuple(self._seen()["rgb"].copy())

    def close_extras(self, **_: Any) -> None:
        """Free the games."""
        if self._games is not None:
            self._games.close()

    @property
    def _levels(self) -> npt.NDArray[np.int32]:
        levels: npt.NDArray[np.int32] = self._seen()["level_seed"]
        return levels

    def _seen(self) -> dict[str, npt.NDArray[Any]]:
        # The content of get_info() as arrays; get_info() makes a dictionary for each environment, in a loop.
        seen: dict[str, npt.NDArray[Any]] = self._games._info
        return seen

    def _make(self, seed: int) -> Any:
        return _procgen()(num=self.num_envs, rand_seed=seed, **self._made_from)

    def _begin(self) -> None:
        self._returns = np.zeros(self.num_envs, np.float32)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._began = np.full(self.num_envs, time.perf_counter())


def _procgen() -> Any:
    """Procgen's class, without the notice that its old dependency gym prints at its first import."""
    require_extra("coinrun", "an environment of Procgen")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from procgen import ProcgenGym3Env
    return ProcgenGym3Env
