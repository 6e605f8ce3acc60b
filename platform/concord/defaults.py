"""Defaults of the command line, without slow imports."""

import os
from pathlib import Path

from concord.submitted import is_submitted


def _output() -> Path:
    if os.environ.get("CONCORD_OUTPUT"):
        return Path(os.environ["CONCORD_OUTPUT"])
    # Ray Jobs deletes the working directory of a job afterwards.
    if is_submitted() or os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return Path.home() / "concord-runs"
    return Path("concord-runs")


DEFAULT_OUTPUT = _output()
