"""The interface between a training loop and the recorder of its run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")


@dataclass(frozen=True)
class ProcessContext:
    """This process's rank, the number of processes, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def all_gather(self, value: Item) -> list[Item]:
        """The values of all processes, by rank; called in every process."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast_from_rank0(self, value: Any) -> Any:
        """The value of the first process; called in every process."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, 0)
        return values[0]


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
        """Keep a checkpoint; called in every process, after the evaluation of its step was yielded. ``write`` fills an
        empty folder, in the first process.
        """

    def keep(self, path: str, write: Callable[[Path], None]) -> None:
        """Keep a file with the run, by its path in the run's folder; ``write`` makes it, in the first process."""


class Silent:
    """A context that keeps nothing, for runs of which only the evaluations are used."""

    process = ProcessContext()
    start: Path | None = None

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Nothing."""

    def checkpoint(self, write: Callable[[Path], None], step: int) -> None:
        """Nothing."""

    def keep(self, path: str, write: Callable[[Path], None]) -> None:
        """Nothing."""
