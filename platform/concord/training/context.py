"""The surroundings of a training loop: its process, the recorder of its run, and readers of its progress."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from concord.gradients import EnvironmentStep, StepClock

Item = TypeVar("Item")


@dataclass(frozen=True)
class ProcessContext:
    """This process's rank, the number of processes, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place; called in every process."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

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


@dataclass
class StepsSoFar:
    """The progress of a training loop, for readers in other threads.

    Attributes:
        steps: done by this process.
        environments: on which this process trains.
        epoch: epochs done, with the fraction of the current one.
        sizes: ``(parameters,)`` float32, the components of each.
        losses: of the latest evaluation, by split.
        checkpointed: the time of the latest checkpoint, before the first of the beginning; of the monotonic clock.
        restarts: how many groups of workers began before this one.
    """

    clock: StepClock = field(default_factory=StepClock)
    steps: int = 0
    environments: tuple[str, ...] = ()
    epoch: float = 0.0
    epochs: int = 0
    latest: EnvironmentStep | None = None
    sizes: torch.Tensor | None = None
    losses: dict[str, float] = field(default_factory=dict)
    checkpointed: float = field(default_factory=time.monotonic)
    restarts: int = 0

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Take the losses of the splits from an evaluation's metrics."""
        ends = "_loss"
        self.losses = {
            name.removesuffix(ends): value
            for name, value in metrics.items()
            if name.endswith(ends) and "/" not in name and not name.startswith(("worst_", "step"))
        }
