"""What the command line has to know before it imports anything that takes seconds."""

import os
from pathlib import Path


def _output() -> Path:
    if os.environ.get("CONCORD_OUTPUT"):
        return Path(os.environ["CONCORD_OUTPUT"])
    if os.environ.get("CONCORD_SUBMISSION"):  # its working directory goes with it
        return Path.home() / "concord-runs"
    return Path("concord-runs")


DEFAULT_OUTPUT = _output()
