"""Options that choose the levels and states to clone."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from concord.options import OptionGroup, option_values
from concord.reinforcement.cloning_data import CloningData, cloning_folder
from concord.reinforcement.episodes import Played, play
from concord.reinforcement.games import Difficulty


@dataclass(frozen=True, kw_only=True)
class ClonedLevels(OptionGroup):
    """The expert's states that train the clone."""

    # fmt: off
    game: str = "coinrun"
    """One of Procgen's 16 games."""
    difficulty: Difficulty = "easy"
    """Distribution of levels: easy or hard."""
    levels: int = 0
    """Number of training levels, from the first; 0 takes all."""
    states: int = 0
    """Number of training states of each level, drawn at random; 0 takes all."""
    play_episodes: int = 100
    """Number of episodes that the trained clone plays on unseen levels."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(0, "levels", "states", "play_episodes")

    def read(self, folder: Path | None, output: Path) -> CloningData:
        """The data of these options."""
        data = CloningData(cloning_folder(folder, output, self.game, self.difficulty))
        for option in ("game", "difficulty"):
            found = data.options.get(option)
            self.require(option, found == option_values(self)[option], f"the data in {data.folder} are of {found}")
        self.require("levels", self.levels <= len(data.levels), f"the data have {len(data.levels)} training levels")
        there = data.options["states"]
        self.require("states", self.states <= there, f"the data have {there} states of each level")
        return data

    def played(self, data: CloningData, clone: nn.Module) -> Played:
        """Returns of a clone on levels outside these data."""
        from concord.reinforcement.procgen_environment import ProcgenVectorEnv

        device = next(clone.parameters()).device
        first, levels = data.manifest["unseen_levels"]
        environment = ProcgenVectorEnv(
            min(self.play_episodes, 64), self.game,
            levels=levels, first_level=first, difficulty=self.difficulty, seed=1,
        )  # fmt: skip
        try:
            return play(lambda frames: clone(frames.to(device)), environment, self.play_episodes)
        finally:
            environment.close()
