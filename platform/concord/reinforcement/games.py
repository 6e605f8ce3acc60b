"""Procgen's games, levels and actions: what jobs declare, without the extra that plays them."""

from typing import Literal

from concord.errors import InputError

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper",
    "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
ACTIONS = 15
FRAME = (64, 64, 3)
FRAMES_PER_SECOND = 15
LARGEST_LEVEL = 2**31 - 1
"""Level seeds are 32-bit integers, not negative."""
FIRST_UNSEEN_LEVEL = 2_000_000_000
"""Agents train on levels below, and are evaluated on this one and those above."""
Difficulty = Literal["easy", "hard"]


def check_game(game: str, difficulty: str) -> None:
    """Refuse a game or difficulty that Procgen does not have (InputError)."""
    if game not in GAMES:
        raise InputError(f"--game {game}: must be one of {', '.join(GAMES)}")
    if difficulty not in ("easy", "hard"):
        raise InputError(f"--difficulty {difficulty}: must be easy or hard")


def check_levels(levels: int, first_level: int) -> None:
    """Refuse a range of levels that Procgen does not have (InputError); 0 levels stand for all."""
    if levels < 0 or first_level < 0 or first_level + levels - 1 > LARGEST_LEVEL:
        raise InputError(f"levels {first_level} to {first_level + levels - 1}: must lie in [0, {LARGEST_LEVEL}]")
    if levels == 0 and first_level > 0:
        raise InputError(f"first level {first_level}: needs a number of levels; 0 levels stand for all there are")


def check_seed(seed: int) -> None:
    """Refuse a seed that Procgen does not take (InputError)."""
    if not 0 <= seed <= LARGEST_LEVEL:
        raise InputError(f"seed {seed}: must lie in [0, {LARGEST_LEVEL}]")
