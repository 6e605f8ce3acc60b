"""The vector environment: against Procgen's own stepping, hand-counted episodes, seeds and levels, misuse."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("gymnasium")

from gymnasium.vector import AutoresetMode

from concord.errors import InputError
from concord.reinforcement.games import ACTIONS, GAMES, LARGEST_LEVEL
from concord.reinforcement.procgen_environment import ProcgenVectorEnv

pytestmark = pytest.mark.usefixtures("coinrun")

Steps = list[tuple[npt.NDArray[Any], ...]]


def actions(steps: int, environments: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, ACTIONS, (steps, environments))


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_every_game_gives_exactly_what_procgen_gives(game: str, difficulty: Any) -> None:
    from procgen import ProcgenGym3Env

    theirs = ProcgenGym3Env(3, game, distribution_mode=difficulty, rand_seed=7, num_levels=20, start_level=5)
    ours = ProcgenVectorEnv(3, game, difficulty=difficulty, seed=7, levels=20, first_level=5)
    frames, info = ours.reset()
    for action in actions(60, 3):
        _, seen, _ = theirs.observe()
        np.testing.assert_array_equal(frames, seen["rgb"])
        assert [each["level_seed"] for each in theirs.get_info()] == info["level_seed"].tolist()
        theirs.act(action.astype(np.int32))
        frames, rewards, terminated, truncated, info = ours.step(action)
        reward, _, first = theirs.observe()
        np.testing.assert_array_equal(rewards, reward)
        np.testing.assert_array_equal(terminated, first)
        assert not truncated.any()
    ours.close()


def played(environment: ProcgenVectorEnv, steps: int) -> Steps:
    return [environment.step(action) for action in actions(steps, environment.num_envs)]


def test_episodes_are_counted_and_their_ends_described() -> None:
    environment = ProcgenVectorEnv(8, "bigfish", seed=1)
    frames, info = environment.reset()
    returns, lengths, levels, ends = np.zeros(8), np.zeros(8, int), info["level_seed"], 0
    for action in actions(400, 8):
        before = frames
        frames, rewards, terminated, _, info = environment.step(action)
        returns += rewards
        lengths += 1
        assert ("episode" in info) == terminated.any()
        for i in np.flatnonzero(terminated):
            ends += 1
            assert info["_episode"][i]
            assert info["episode"]["r"][i] == pytest.approx(returns[i])
            assert info["episode"]["l"][i] == lengths[i]
            assert info["episode"]["t"][i] > 0
            np.testing.assert_array_equal(info["final_obs"][i], before[i])
            assert info["final_info"]["level_seed"][i] == levels[i]
            returns[i], lengths[i] = 0, 0
        if terminated.any():
            np.testing.assert_array_equal(info["_final_obs"], terminated)
            assert all(info["final_obs"][i] is None for i in np.flatnonzero(~terminated))
        levels = info["level_seed"]
    assert ends > 10
    environment.close()


def test_frames_belong_to_the_caller() -> None:
    environment = ProcgenVectorEnv(2, seed=0)
    frames, _ = environment.reset()
    kept = frames.copy()
    later = played(environment, 3)
    np.testing.assert_array_equal(frames, kept)
    assert len({step[0].ctypes.data for step in later}) == 3


def test_a_seed_repeats_everything_and_another_does_not() -> None:
    def run(environment: ProcgenVectorEnv, seed: int | None) -> tuple[Any, Steps]:
        return environment.reset(seed=seed)[0], played(environment, 40)

    first, second, other = ProcgenVectorEnv(4, seed=3), ProcgenVectorEnv(4, seed=9), ProcgenVectorEnv(4, seed=4)
    began, steps = run(first, None)
    for environment, seed in ((first, 3), (second, 3)):
        again, same = run(environment, seed)
        np.testing.assert_array_equal(again, began)
        for ours, theirs in zip(same, steps, strict=True):
            np.testing.assert_array_equal(ours[0], theirs[0])
            np.testing.assert_array_equal(ours[1], theirs[1])
    assert not np.array_equal(run(other, None)[0], began)


def test_reset_without_a_seed_begins_new_episodes() -> None:
    environment = ProcgenVectorEnv(4, seed=0)
    _, info = environment.reset()
    played(environment, 5)
    _, after = environment.reset()
    assert not np.array_equal(info["level_seed"], after["level_seed"])
    _, _, terminated, _, step = environment.step(actions(1, 4)[0])
    assert not terminated.any()
    assert "episode" not in step


def test_threads_do_not_change_anything() -> None:
    alone, several = (ProcgenVectorEnv(5, seed=2, threads=threads) for threads in (0, 3))
    np.testing.assert_array_equal(alone.reset()[0], several.reset()[0])
    for ours, theirs in zip(played(alone, 30), played(several, 30), strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])


def test_levels_come_from_the_range() -> None:
    environment = ProcgenVectorEnv(16, "bigfish", levels=3, first_level=100, seed=0)
    seen = set(environment.reset()[1]["level_seed"].tolist())
    for step in played(environment, 100):
        seen |= set(step[4]["level_seed"].tolist())
    assert seen == {100, 101, 102}


def test_a_wrong_seed_leaves_the_environment_as_it_was() -> None:
    environment = ProcgenVectorEnv(2, seed=0)
    environment.step(actions(1, 2)[0])  # also without a reset
    with pytest.raises(InputError):
        environment.reset(seed=-1)
    assert environment.step(actions(1, 2)[0])[0].shape == (2, 64, 64, 3)


def test_it_is_a_gymnasium_vector_environment() -> None:
    environment = ProcgenVectorEnv(2, render_mode="rgb_array")
    frames, _ = environment.reset()
    assert environment.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert environment.observation_space.contains(frames)
    environment.action_space.seed(0)
    assert environment.action_space.contains(environment.action_space.sample())
    pictures = environment.render()
    assert [picture.shape for picture in pictures] == [(512, 512, 3)] * 2
    assert pictures[0].std() > 0
    assert ProcgenVectorEnv(2).render() is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"game": "pacman"}, "--game pacman: must be one of bigfish, bossfight"),
        ({"difficulty": "extreme"}, "--difficulty extreme: must be easy or hard"),
        ({"num_envs": 0}, "environments 0: must be at least 1"),
        ({"levels": -1}, "levels 0 to -2"),
        ({"first_level": -5, "levels": 2}, "levels -5 to -4"),
        ({"first_level": LARGEST_LEVEL, "levels": 2}, "must lie in"),
        ({"seed": -1}, "seed -1: must lie in"),
        ({"first_level": 5}, "first level 5: needs a number of levels; 0 levels stand for all there are"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said.replace("[", r"\[")):
        ProcgenVectorEnv(**{"num_envs": 1, **options})
