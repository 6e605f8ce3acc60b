"""The weights of a run that are kept: an average in place of the last ones, and the best evaluation's."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from concord.errors import InputError
from concord.gradients.risk import Batch, Risk
from concord.training.evaluation import Mode
from concord.training.job import Job


class WeightAverage:
    """An average of a model's weights: exponential over steps, or the mean over late epochs.

    The exponential average has the model's buffers averaged in the same way. For the mean over epochs (Izmailov et al.,
    Averaging Weights Leads to Wider Optima and Better Generalization, 2018) batch norm's statistics are computed anew,
    from an epoch of training batches. ``kind`` and ``value`` are ``ema`` and the decay, or ``swa`` and the fraction of
    the run at which the mean begins.
    """

    def __init__(self, model: nn.Module, kind: str, value: float, epochs: int) -> None:
        self._by_steps, self._begin = kind == "ema", value * epochs
        average = get_ema_multi_avg_fn(value) if self._by_steps else None
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
        if not self._by_steps and self.count > 0:
            update_bn(([batch] for batch in batches), _Forward(self.averaged.module, risk))


class _Forward(nn.Module):
    """Calls the model as the risk does."""

    def __init__(self, model: nn.Module, risk: Risk) -> None:
        super().__init__()
        self.model, self.risk = model, risk

    def forward(self, batch: Batch) -> None:
        """The risk of a batch, which is not used."""
        self.risk(self.model, batch, 0)


def best_by(job: Job[Any], reported: Mapping[str, Mode | None], own: Iterable[str]) -> tuple[str, Mode]:
    """The metric of ``--keep best``, never of the test, and its mode (InputError if there is none)."""
    metric, mode = job.compared_by(reported, own)
    if metric.removeprefix("worst_").startswith(("validation_", "held_out_")):
        return metric, mode
    what = "there are neither validation environments nor held-out examples; give --held-out above 0"
    if job.criterion is not None:
        what = f"the job's criterion {job.criterion} is not of validation environments or held-out examples; give last"
    raise InputError(f"--keep best: {what}")
