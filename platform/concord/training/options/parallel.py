"""Options of how many processes train."""

from dataclasses import dataclass

from concord.options import OptionGroup


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(OptionGroup):
    """How many processes train, and on what."""

    # fmt: off
    workers: int = 1
    """Worker processes, among which the environments are divided: of this machine, or Ray Train's on a cluster."""
    min_workers: int | None = None
    """Go on with as few workers as this when nodes leave, the environments divided anew, and with more when they come
    back; without it the run waits until there is room for all --workers."""
    use_gpu: bool = False
    """Give each worker a GPU."""
    max_failures: int = 3
    """How often workers that died are replaced, the run going on from the last checkpoint."""
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        self.require("workers", self.workers >= 1, "must be at least 1")
        self.require("max_failures", self.max_failures >= 0, "must not be negative")
        if self.min_workers is not None:
            right = 1 <= self.min_workers <= self.workers
            self.require("min_workers", right, f"between 1 and --workers {self.workers}")
