"""The best weights of a run by a metric, and early stopping when all environments are equally hard."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from concord.training.checkpoint import verify_checkpoint
from concord.training.evaluation import Mode

BEST, SEEN = "best.safetensors", "stopping.json"


class BestWeights:
    """Keeps the weights where a metric was best, and ends a run when it is below a threshold.

    ``--stop-spread`` is the criterion of the meta-IRM paper (section 3.3): the run ends when the environments' held-out
    losses are alike. A low loss alone does not say that a predictor is invariant, since shortcuts lower it as well (Bae
    et al., Meta-Learned Invariant Risk Minimization, 2021). Evaluations before ``first_epoch`` are ignored: the losses
    of an untrained model are nearly equal.

    Attributes:
        best: the best value yet, negative if large values are good; None before the first.
    """

    def __init__(self, metric: str, mode: Mode, threshold: float = -math.inf, first_epoch: int = 0) -> None:
        self.metric, self._sign = metric, 1.0 if mode == "min" else -1.0
        self.threshold = threshold
        self.first_epoch = first_epoch
        self.best: float | None = None
        self.epoch = 0
        self._weights: dict[str, Tensor] = {}

    def see(self, metrics: Mapping[str, float], epoch: int, model: nn.Module, *, last: bool) -> bool:
        """Take an evaluation; return whether the run must end. The last one counts even before ``first_epoch``."""
        if epoch < self.first_epoch and not last:
            return False
        value = self._sign * metrics[self.metric]
        if self.best is None or value < self.best or math.isnan(self.best):
            self.best, self.epoch = value, epoch
            self._weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return value < self.threshold

    def restore(self, model: nn.Module) -> None:
        """Restore the best weights."""
        model.load_state_dict(self._weights)

    def write(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint, before its checksums."""
        if self.best is not None:
            save_file({name: value.cpu().contiguous() for name, value in self._weights.items()}, folder / BEST)
            (folder / SEEN).write_text(json.dumps({"best": self.best, "epoch": self.epoch}))

    def read(self, folder: Path) -> None:
        """Read the state from the folder of a checkpoint (CheckpointError if a file is damaged or missing)."""
        verify_checkpoint(folder)
        if (folder / SEEN).exists():
            seen = json.loads((folder / SEEN).read_text())
            self.best, self.epoch = seen["best"], seen["epoch"]
            self._weights = load_file(folder / BEST)
