"""Train a model on what its environments agree on."""

from pathlib import Path
from typing import Any

# Written when the package is sent to a cluster, which may have another version or none.
_SENT = Path(__file__).parent / "VERSION"


def __getattr__(name: str) -> Any:
    """The version, computed on demand: it takes longer than the rest of ``concord --help``."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return _SENT.read_text(encoding="utf-8") if _SENT.exists() else version("concord")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
