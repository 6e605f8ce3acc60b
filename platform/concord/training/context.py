"""Where a loop runs, and what it tells of itself: the interface between a loop and whoever records its run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True)
class ProcessContext:
    """Where this process stands among those of the run."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class RunContext(Protocol):
    """What a loop is given: where to begin, and where its metrics, checkpoints and files go."""

    @property
    def process(self) -> ProcessContext:
        """Which of the run's processes this is."""

    @property
    def start(self) -> Path | None:
        """The folder of the checkpoint to go on from; None begins from nothing."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record metrics beside those of evaluations; called in the first process only."""

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        """Keep a checkpoint; called in every process. ``write`` fills an empty folder, in the first process."""

    def keep(self, path: str, write: Callable[[Path], None]) -> None:
        """Keep a file with the run, by its path in the run's folder; ``write`` makes it, in the first process."""


class Silent:
    """A context that keeps nothing: for runs of which the evaluations are all that is wanted.

    Args:
        process: which of the run's processes this is.
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
