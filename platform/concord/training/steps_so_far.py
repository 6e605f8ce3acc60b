"""The progress of a training loop, for readers in other threads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from concord.gradients import EnvironmentStep, StepClock


@dataclass
class StepsSoFar:
    """The progress of a training loop, for readers in other threads.

    Attributes:
        steps: done by this process.
        epoch: epochs done, with the fraction of the current one.
        sizes: ``(parameters,)`` float32, the components of each.
        losses: of the latest evaluation, by split.
    """

    clock: StepClock = field(default_factory=StepClock)
    steps: int = 0
    epoch: float = 0.0
    epochs: int = 0
    latest: EnvironmentStep | None = None
    sizes: torch.Tensor | None = None
    losses: dict[str, float] = field(default_factory=dict)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Take the losses of the splits from an evaluation's metrics."""
        ends = "_loss"
        self.losses = {
            name.removesuffix(ends): value
            for name, value in metrics.items()
            if name.endswith(ends) and "/" not in name and not name.startswith(("worst_", "step"))
        }
