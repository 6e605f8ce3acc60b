"""The result of a training run."""

from dataclasses import dataclass
from typing import NamedTuple


class Evaluation(NamedTuple):
    """All metrics at one moment of a run.

    Attributes:
        epoch: epochs done.
        step: steps done.
        metrics: by name, as tracked.
    """

    epoch: int
    step: int
    metrics: dict[str, float]

    @property
    def ended_early(self) -> bool:
        """Whether the run ends here, before its last epoch, since the environments are equally hard."""
        return bool(self.metrics.get("spread_reached", 0.0))


@dataclass(frozen=True)
class Outcome:
    """The result of the training loop.

    Attributes:
        history: the evaluations; the last one is the end of the run.
    """

    history: tuple[Evaluation, ...]

    @property
    def steps(self) -> int:
        """Steps done."""
        return self.history[-1].step

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics at the end."""
        return self.history[-1].metrics
