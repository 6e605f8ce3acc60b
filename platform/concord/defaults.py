"""What the command line has to know before it imports anything that takes seconds."""

from pathlib import Path

DEFAULT_OUTPUT = Path("concord-runs")
