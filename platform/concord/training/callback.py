"""Callbacks of a run: functions of the user's that are called as it trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord.record import Evaluation

if TYPE_CHECKING:
    from torch import nn

    from concord.gradients import EnvironmentStep


@dataclass(frozen=True)
class TrainingRun:
    """The run that a callback is called for.

    Attributes:
        name: the run's.
        folder: its folder on this machine.
        options: resolved, by name.
        resumed: whether it continues from a checkpoint.
    """

    name: str
    folder: Path
    options: Mapping[str, Any]
    resumed: bool


class Callback:
    """Called as a run trains: ``train(job, callbacks=[…])``, or ``Job(callbacks=[…])`` for every run of a job.

    :meth:`on_step` is called in each process that trains, on Ray Train in each worker, which has a copy of the
    callback. All others are called in the process that records the run: the caller's, or of a trial the trial's. An
    exception ends the run as an exception in the job would.
    """

    def on_train_begin(self, run: TrainingRun) -> None:
        """Before the first step; of a resumed run before its first step after the checkpoint."""

    def on_step(self, step: int, model: "nn.Module", result: "EnvironmentStep") -> None:
        """After the optimizer's step, counted from 1. To read a tensor of ``result`` makes a GPU wait."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, as they are recorded, such as ``step/loss``."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """After an evaluation was recorded."""

    def on_checkpoint(self, folder: Path, step: int) -> None:
        """After a checkpoint was written into this folder, which later ones replace; copy what must stay."""

    def on_train_end(self, run: TrainingRun) -> None:
        """After the last evaluation and checkpoint, and after a failure or a stop."""
