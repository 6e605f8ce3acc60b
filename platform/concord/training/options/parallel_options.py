"""Options of the worker processes."""

from dataclasses import dataclass

from concord.options import OptionGroup, Place


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(OptionGroup):
    """The worker processes."""

    # fmt: off
    workers: Place[int] = 1
    """Number of worker processes, which divide the environments; several workers run on Ray Train."""
    min_workers: Place[int | None] = None
    """Least number of workers after a loss of nodes; the run divides the environments anew, and grows when nodes
    return. By default the run waits until all --workers fit."""
    use_gpu: Place[bool] = False
    """Give each worker a GPU."""
    max_failures: Place[int] = 3
    """Number of times that dead workers are replaced; the run continues from its last checkpoint."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(1, "workers")
        self.require_at_least(0, "max_failures")
        if self.min_workers is not None:
            right = 1 <= self.min_workers <= self.workers
            self.require("min_workers", right, f"must lie in [1, {self.workers}], up to --workers")
