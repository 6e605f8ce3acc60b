"""The interface between a training loop and the recorder of its run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True)
class ProcessContext:
    """This process's rank, the number of processes, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class RunContext(Protocol):
    """The context of a loop: where it begins, and where its metrics, checkpoints and files go."""

    @property
    def process(self) -> ProcessContext:
        """The run's process that this is."""

    @property
    def start(self) -> Path | None:
        """The folder of the checkpoint to resume from; None starts a new run."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record metrics beside those of evaluations; called in the first process only."""

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        """Keep a checkpoint; called in every process. ``write`` fills an empty folder, in the first process."""

    def keep(self, path: str, write: Callable[[Path], None]) -> None:
        """Keep a file with the run, by its path in the run's folder; ``write`` makes it, in the first process."""


class Silent:
    """A context that keeps nothing, for runs of which only the evaluations are used.

    Args:
        process: the rank and device; one process by default.
    """

    start: Path | None = None

    def __init__(self, process: ProcessContext | None = None) -> None:
        self.process = process or ProcessContext()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Nothing."""

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        """Nothing."""

    def keep(self, path: str, write: Callable[[Path], None]) -> None:
        """Nothing."""
