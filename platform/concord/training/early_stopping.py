"""Early stopping when all environments are equally hard, the criterion of the meta-IRM paper (section 3.3)."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BEST, SEEN = "best.safetensors", "stopping.json"


class SpreadStopping:
    """Ends a run when the environments' held-out losses are alike; keeps the weights where they were most alike.

    A low loss alone does not say that a predictor is invariant, since shortcuts lower it too (Bae et al.,
    Meta-Learned Invariant Risk Minimization, 2021).

    Args:
        threshold: the largest standard deviation of the environments' losses at which to stop.
        first_epoch: earlier evaluations are ignored: the losses of an untrained model are nearly equal.

    Attributes:
        spread: the least standard deviation yet; None before the first.
        epoch: its epoch.
    """

    def __init__(self, threshold: float, first_epoch: int) -> None:
        self.threshold = threshold
        self.first_epoch = first_epoch
        self.spread: float | None = None
        self.epoch = 0
        self._weights: dict[str, Tensor] = {}

    def see(self, spread: float, epoch: int, model: nn.Module, *, last: bool) -> bool:
        """Take an evaluation; return whether the run must end. The last evaluation always counts."""
        if epoch < self.first_epoch and not last:
            return False
        if self.spread is None or spread < self.spread:
            self.spread, self.epoch = spread, epoch
            self._weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return spread < self.threshold

    def restore(self, model: nn.Module) -> None:
        """Restore the weights of the least spread."""
        model.load_state_dict(self._weights)

    def write(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint."""
        if self.spread is not None:
            save_file({name: value.cpu().contiguous() for name, value in self._weights.items()}, folder / BEST)
            (folder / SEEN).write_text(json.dumps({"spread": self.spread, "epoch": self.epoch}))

    def read(self, folder: Path) -> None:
        """Read the state from the folder of a checkpoint."""
        if (folder / SEEN).exists():
            seen = json.loads((folder / SEEN).read_text())
            self.spread, self.epoch = seen["spread"], seen["epoch"]
            self._weights = load_file(folder / BEST)
