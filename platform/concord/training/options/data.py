"""Options of what a run sees of its data."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from concord.options import OptionGroup
from concord.storage import check_address


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """What a run sees of its data."""

    # fmt: off
    batch_size: int = 128
    """Examples of each environment at each step."""
    held_out: float = 0.1
    """Fraction of every training environment that training never sees; [0, 1)."""
    environments_per_step: int = 0
    """Environments of a step, in a new random order through all of them each time; 0 takes all at every step. Each
    worker takes its part from its own environments, so which of them meet depends on --workers."""
    data_dir: Path | None = field(default_factory=lambda: _path_from_environment("CONCORD_DATA"))
    """Folder with the job's data, if it reads any, or s3://BUCKET/FOLDER, gs://… (or CONCORD_DATA)."""
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        if self.data_dir is not None:
            check_address("data-dir", self.data_dir)
        self.require("batch_size", self.batch_size >= 1, "must be at least 1")
        self.require("environments_per_step", self.environments_per_step >= 0, "must not be negative")
        self.require("held_out", 0 <= self.held_out < 1, "the held-out fraction must lie in [0, 1)")


def _path_from_environment(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None
