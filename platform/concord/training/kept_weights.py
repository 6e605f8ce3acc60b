"""The weights of a run that are kept: an average in place of the last ones, or the best evaluation's."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from concord.errors import InputError
from concord.gradients.risk import Batch, Risk
from concord.training.checkpoint import verify_checkpoint
from concord.training.declared_measures import Mode
from concord.training.job import Job
from concord.training.options import TrainConfig

BEST, SEEN = "best.safetensors", "stopping.json"
_Tensors = tuple[Tensor, ...] | list[Tensor]
_Average = Callable[[_Tensors, _Tensors, Tensor | int], None]


class WeightAverage:
    """An average of a model's weights: exponential over steps, or the mean over late epochs.

    The exponential average has the model's floating-point buffers averaged in the same way. For the mean over epochs
    (Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018) batch norm's statistics
    are computed anew, from an epoch of training batches; layers that the model keeps in evaluation keep theirs.
    ``kind`` and ``value`` are ``ema`` and the decay, or ``swa`` and the fraction of the run at which the mean begins.
    """

    def __init__(self, model: nn.Module, kind: str, value: float, epochs: int) -> None:
        self._by_steps, self._begin = kind == "ema", value * epochs
        average = _of_numbers(get_ema_multi_avg_fn(value)) if self._by_steps else None
        self.averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=self._by_steps)

    @property
    def count(self) -> int:
        """The number of weights in the average."""
        return int(self.averaged.n_averaged)

    def after_step(self, model: nn.Module) -> None:
        """Take the weights after a step."""
        if self._by_steps:
            self.averaged.update_parameters(model)

    def after_epoch(self, model: nn.Module, epoch: int) -> None:
        """Take the weights after this many epochs."""
        if not self._by_steps and epoch > self._begin:
            self.averaged.update_parameters(model)

    def renew_batch_norm(self, batches: Iterable[Batch], risk: Risk) -> None:
        """Compute batch norm's statistics of a mean over epochs from the batches of environments."""
        if self._by_steps or self.count == 0:
            return
        # Unlike torch.optim.swa_utils.update_bn, which also resets layers in evaluation.
        model = self.averaged.module
        training = model.training
        model.train()
        layers = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.training]
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
        with torch.no_grad():
            for batch in batches if layers else ():
                risk(model, batch, 0)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        model.train(training)


def _of_numbers(average: _Average) -> _Average:
    """The same average; whole numbers, such as indices in a buffer, are copied."""

    def update(averaged: _Tensors, latest: _Tensors, count: Tensor | int) -> None:
        if averaged[0].is_floating_point():  # all have one dtype
            average(averaged, latest, count)
            return
        for mean, value in zip(averaged, latest, strict=True):
            mean.copy_(value)

    return update


class BestWeights:
    """Keeps the weights where a metric was best, and ends a run when it is below a threshold, or no longer improves.

    ``--stop-spread`` is the criterion of the meta-IRM paper (section 3.3): the run ends when the environments' held-out
    losses are alike. A low loss alone does not say that a predictor is invariant, since shortcuts lower it as well (Bae
    et al., Meta-Learned Invariant Risk Minimization, 2021). Evaluations before ``first_epoch`` are ignored: the losses
    of an untrained model are nearly equal.

    Attributes:
        best: the best value yet, negative if large values are good; None before the first.
    """

    def __init__(
        self, metric: str, mode: Mode, threshold: float = -math.inf, first_epoch: int = 0, patience: int = 0
    ) -> None:
        self.metric, self._sign = metric, 1.0 if mode == "min" else -1.0
        self.threshold, self._patience, self._since = threshold, patience, 0
        self.first_epoch = first_epoch
        self.best: float | None = None
        self.epoch = 0
        self._weights: dict[str, Tensor] = {}

    def see(self, metrics: Mapping[str, float], epoch: int, model: nn.Module, *, last: bool) -> bool:
        """Take an evaluation; return whether it is below the threshold. The last one counts even before
        ``first_epoch``."""
        self._since += 1
        if epoch < self.first_epoch and not last:
            return False
        value = self._sign * metrics[self.metric]
        if self.best is None or value < self.best or math.isnan(self.best):
            self.best, self.epoch = value, epoch
            self._since = self._since if math.isnan(value) else 0  # NaN is no better than NaN
            self._weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return value < self.threshold

    @property
    def out_of_patience(self) -> bool:
        """Whether too many evaluations have brought no better value."""
        return 0 < self._patience <= self._since

    def restore(self, model: nn.Module) -> None:
        """Restore the best weights."""
        model.load_state_dict(self._weights)

    def write(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint, before its checksums."""
        if self.best is not None:
            save_file({name: value.cpu().contiguous() for name, value in self._weights.items()}, folder / BEST)
            (folder / SEEN).write_text(json.dumps({"best": self.best, "epoch": self.epoch, "since": self._since}))

    def read(self, folder: Path) -> None:
        """Read the state from the folder of a checkpoint (CheckpointError if a file is damaged or missing)."""
        verify_checkpoint(folder)
        if (folder / SEEN).exists():
            seen = json.loads((folder / SEEN).read_text())
            self.best, self.epoch, self._since = seen["best"], seen["epoch"], seen.get("since", 0)
            self._weights = load_file(folder / BEST)


def best_by(
    job: Job[Any], config: TrainConfig, reported: Mapping[str, Mode | None], own: Iterable[str]
) -> tuple[str, Mode]:
    """The metric of ``--keep``, never of the test or of an environment left out, and its mode (InputError)."""
    keep, metric = config.schedule.keep, "validation_loss"
    mode: Mode = "min"
    if keep == "best":
        metric, mode = job.compared_by(reported, own)
    if config.data.left_out:  # the only validation environments
        metric = metric.replace("validation_", "held_out_", 1)
        chosen = f"{metric} chooses, not the environment left out"
        config.require("leave_out", metric in reported, f"with --keep {keep} {chosen}, and no run reports it")
    if metric in reported and metric.removeprefix("worst_").startswith(("validation_", "held_out_")):
        return metric, mode
    what = "there are neither validation environments nor held-out examples; give --held-out above 0"
    if job.criterion is not None and keep == "best":
        what = f"the job's criterion {job.criterion} is not of validation environments or held-out examples; give last"
    raise InputError(f"--keep {keep}: {what}")
