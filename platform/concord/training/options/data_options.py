"""Options of a run's data."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from concord.options import Learning, OptionGroup, Place, Scoring
from concord.storage import check_address


def _default_data_dir() -> Path | None:
    value = os.environ.get("CONCORD_DATA")
    return Path(value) if value else None


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """The data of a run."""

    # fmt: off
    batch_size: Learning[int] = 128
    """Examples of each environment at each step."""
    held_out: Scoring[float] = 0.1
    """Fraction of every training environment that is held out of training; [0, 1)."""
    environments_per_step: Learning[int] = 0
    """Number of environments of a step, in a new random order on each pass; 0 takes all at every step. A worker draws
    its share from its own environments, so the combinations depend on --workers."""
    leave_out: str | None = None
    """Training environment to leave out; it becomes the only validation environment."""
    data_dir: Place[Path | None] = field(default_factory=_default_data_dir)
    """Folder with the job's data, or with a folder of the dataset's name (mnist, heart-disease), or s3://BUCKET/FOLDER,
    gs://… (or CONCORD_DATA)."""
    readers: Place[int] = 0
    """Number of reader processes of each worker for data that are not in memory; 0 reads in the training process."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        if self.data_dir is not None:
            check_address("data-dir", self.data_dir)
        self.require_at_least(1, "batch_size")
        self.require_at_least(0, "environments_per_step", "readers")
        self.require("held_out", 0 <= self.held_out < 1, "the held-out fraction must lie in [0, 1)")
