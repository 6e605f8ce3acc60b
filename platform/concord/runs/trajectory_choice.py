"""Options of which trajectories of a task are learned from, and the environments that they are."""

from dataclasses import dataclass
from pathlib import Path

from concord.dynamics import sequences
from concord.environments import Environments
from concord.environments.trajectories import Split, TrajectoryFolder, TrajectoryTask
from concord.options import OptionGroup
from concord.runs.made_trajectories import trajectory_folder


@dataclass(frozen=True, kw_only=True)
class TrajectoryChoice(OptionGroup):
    """The trajectories that are learned from."""

    # fmt: off
    trajectories: int = 0
    """Train on the first so many; 0 takes all there are."""
    perturbed: bool = False
    """Those of the perturbed physics."""
    # fmt: on

    def check(self) -> None:
        """Refuse what makes no data."""
        self.require("trajectories", self.trajectories >= 0, "must not be negative")

    def read(self, task: TrajectoryTask, data_dir: Path | None, output: Path) -> TrajectoryFolder:
        """The data of a task.

        Raises:
            InputError: there are none, or too few, or they are of something else.
        """
        data = TrajectoryFolder(trajectory_folder(data_dir, output, task), task.name)
        perturbed = bool(data.settings.get("perturbed"))
        physics = "perturbed" if perturbed else "the standard"
        self.require("perturbed", perturbed == self.perturbed, f"the data in {data.folder} are of {physics} physics")
        if data.frame != task.frame:
            raise data.unfit(
                f"frames of {data.frame[1]} × {data.frame[2]} pixels, not {task.frame[1]} × {task.frame[2]}"
            )
        there = len(data.split("train"))
        self.require("trajectories", self.trajectories <= there, f"the data have {there} to train on")
        return data

    def environments(self, data: TrajectoryFolder) -> Environments:
        """An environment to train on, one to choose by and one for the test, as sequences of one length with labels."""
        there: dict[str, Split] = {"train": "train", "validation": "validation", "test": "test"}
        splits = {name: data.split(split) for name, split in there.items() if data.has(split)}
        longest = max(int(split.lengths.max()) for split in splits.values())

        def load(name: str) -> object:
            split = splits[name]
            count = self.trajectories or len(split) if name == "train" else len(split)
            frames = [split[number][0] for number in range(count)]
            return sequences(name, frames, longest=longest, label=split.labels[:count].numpy())

        validation, test = ([name] if name in splits else [] for name in ("validation", "test"))
        return Environments(load, ["train"], validation, test, version=data.version)
