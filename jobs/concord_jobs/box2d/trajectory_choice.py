"""Options that choose a task's trajectories for training, and their environments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.environments import Environments, Switching
from concord.environments.sharded import ShardedData, Split, data_folder
from concord.options import OptionGroup
from concord_jobs.box2d.trajectories import Trajectories, TrajectoryExamples, TrajectoryTask


@dataclass(frozen=True, kw_only=True)
class TrajectoryChoice(OptionGroup):
    """The training trajectories."""

    # fmt: off
    trajectories: int = 0
    """Number of training trajectories, from the first; 0 takes all."""
    perturbed: bool = False
    """Train on trajectories of the perturbed physics."""
    perturbed_dir: Path | None = None
    """Folder of trajectories of the perturbed physics, a second training environment beside the standard physics."""
    switch_epoch: int = 0
    """Number of epochs on the perturbed physics, before the standard physics takes its place; 0 never switches. Without
    --perturbed-dir the perturbed trajectories are those of concord data."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(0, "trajectories", "switch_epoch")
        for option, given in (("perturbed_dir", self.perturbed_dir is not None), ("switch_epoch", self.switch_epoch)):
            alone = not (self.perturbed and given)
            self.require(option, alone, "with --perturbed there is no other physics; leave one of them out")

    def read(self, task: TrajectoryTask, folder: Path | None, output: Path) -> ShardedData:
        """The data of a task."""
        data = self._checked(data_folder(folder, output, task.folder), task)
        perturbed = bool(data.options.get("perturbed"))
        physics = "perturbed" if perturbed else "the standard"
        self.require("perturbed", perturbed == self.perturbed, f"the data in {data.folder} are of {physics} physics")
        return data

    def read_perturbed(self, task: TrajectoryTask, output: Path) -> ShardedData | None:
        """The data of the perturbed physics; None if no option asks for them."""
        if self.perturbed_dir is None and self.switch_epoch == 0:
            return None
        data = self._checked(data_folder(self.perturbed_dir, output, task.folder), task)
        self.require("perturbed_dir", bool(data.options.get("perturbed")), "its data are of the standard physics")
        return data

    def environments(self, data: ShardedData, perturbed: ShardedData | None = None) -> Environments:
        """A training environment for each physics, one for validation and one for the test: sequences with labels.

        Trajectories are read when they are needed. Training trajectories are padded to the longest of them. With a
        ``switch_epoch`` there is one training environment, first with the perturbed physics, then with the standard.
        """
        folders = {"perturbed" if self.perturbed else "standard": data}
        if perturbed is not None:
            folders["perturbed"] = perturbed
        training = {
            name: TrajectoryExamples(name, Trajectories(folder, "train"), self.trajectories or None)
            for name, folder in folders.items()
        }
        longest = max(each.longest for each in training.values())
        alike = len({len(each) for each in training.values()}) == 1
        self.require("switch_epoch", self.switch_epoch == 0 or alike, "the data differ in number; give --trajectories")
        others: dict[str, Split] = {"validation": "validation", "test": "test"}
        others = {name: split for name, split in others.items() if data.groups(split)}

        def load(name: str) -> Any:
            if name == "standard" and self.switch_epoch:
                before, after = (training[each].padded(longest) for each in ("perturbed", "standard"))
                return Switching(before, after, self.switch_epoch)
            if name in training:
                return training[name].padded(longest)
            return TrajectoryExamples(name, Trajectories(data, others[name]))

        validation, test = ([name] if name in others else [] for name in ("validation", "test"))
        version = "-".join(folder.version for folder in folders.values())
        names = ["standard"] if self.switch_epoch else list(training)
        return Environments(load, names, validation, test, version=version)

    def _checked(self, folder: Path, task: TrajectoryTask) -> ShardedData:
        data = ShardedData(folder, task.name, task.command)
        if (found := tuple(data.manifest["frame"])) != task.frame:
            raise data.error(f"frames of {found[1]} × {found[2]} pixels, not {task.frame[1]} × {task.frame[2]}")
        there = len(data.groups("train"))
        self.require("trajectories", self.trajectories <= there, f"{data.folder} has {there} for training")
        return data
