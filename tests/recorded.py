"""What a training loop tells its recorder, what a run reports, and metrics without the speed of the machine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from concord.record import Run
from concord.training.context import Silent


class Kept(Silent):
    """Keeps the metrics of steps, and in a folder every checkpoint."""

    def __init__(self, folder: Path | None = None) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.folder = folder
        self.checkpoints: list[Path] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        if self.folder is not None:
            self.checkpoints.append(self.folder / f"checkpoint-{len(self.checkpoints)}")
            self.checkpoints[-1].mkdir(parents=True)
            write(self.checkpoints[-1])


def report_of(run: Run) -> Mapping[str, Any]:
    """The result of a finished run, as ``concord train --json`` has it."""
    assert run.report is not None
    return run.report


def without_time(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "steps_per_second"}


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a trial reports and that do not depend on the machine's speed."""
    return {name: value for name, value in without_time(metrics).items() if "/" not in name}
