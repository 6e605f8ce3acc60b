"""What the command line has to know before it imports anything that takes seconds."""

import os
from pathlib import Path


def _output() -> Path:
    if os.environ.get("CONCORD_OUTPUT"):
        return Path(os.environ["CONCORD_OUTPUT"])
    # The working directory of what Ray Jobs runs goes with it.
    if os.environ.get("CONCORD_SUBMISSION") or os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return Path.home() / "concord-runs"
    return Path("concord-runs")


DEFAULT_OUTPUT = _output()
