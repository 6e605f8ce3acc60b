"""Train a model on what its environments agree on."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Written where the package is sent to a cluster, on which another version may be installed, or none.
_SENT = Path(__file__).parent / "VERSION"

try:
    __version__ = _SENT.read_text(encoding="utf-8") if _SENT.exists() else version("concord")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
