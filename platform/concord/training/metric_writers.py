"""Callbacks that write a run's metrics as they come: for TensorBoard, and for Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.record import Evaluation
from concord.training.callback import Callback, TrainingRun


class TensorBoard(Callback):
    """Writes event files for TensorBoard: ``tensorboard --logdir FOLDER``.

    Args:
        folder: gets a folder for each run; by default ``tensorboard`` in the output folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._writer: Any = None

    def on_train_begin(self, run: TrainingRun) -> None:
        """Open the run's file."""
        from tensorboardX import SummaryWriter

        folder = Path(self._folder) if self._folder is not None else run.folder.parents[1] / "tensorboard"
        self._writer = SummaryWriter(str(folder / run.name))

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write the metrics of an evaluation, at its step."""
        self.on_metrics(evaluation.step, evaluation.metrics)

    def on_train_end(self, run: TrainingRun) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()


class WeightsAndBiases(Callback):
    """Writes a run's options and metrics to Weights & Biases; a resumed run goes on in the same one.

    Args:
        project: of the runs.
        settings: further arguments of ``wandb.init``, such as ``mode="offline"``.

    Raises:
        InputError: the package ``wandb`` is not installed.
    """

    def __init__(self, project: str = "concord", **settings: Any) -> None:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise InputError("WeightsAndBiases: the package wandb is not installed; pip install wandb") from error
        self._settings = {"project": project, **settings}
        self._run: Any = None

    def on_train_begin(self, run: TrainingRun) -> None:
        """Begin or resume the run of this name."""
        import wandb

        about = {"name": run.name, "id": run.name, "config": dict(run.options), "dir": str(run.folder)}
        self._run = wandb.init(**{**about, "resume": "allow", **self._settings})

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write the metrics of an evaluation, at its step."""
        self.on_metrics(evaluation.step, evaluation.metrics)

    def on_train_end(self, run: TrainingRun) -> None:  # noqa: ARG002
        """Finish the run."""
        self._run.finish()
