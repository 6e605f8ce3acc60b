"""Train a model on what its environments agree on."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("concord")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
