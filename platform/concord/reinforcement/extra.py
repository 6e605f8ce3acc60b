"""Procgen and RLlib are an extra, ``concord[coinrun]``, since Procgen alone needs numpy below 2."""

import platform
from importlib.util import find_spec

from concord.errors import InputError

# Every Ray contains RLlib's modules; they import dm-tree, which only the extra installs.
_MODULES = ("procgen", "tree")


def require_coinrun(what: str) -> None:
    """Refuse ``what`` if Procgen or RLlib is not installed."""
    if all(find_spec(module) for module in _MODULES):
        return
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise InputError(f"{what} needs Procgen, which is published for Linux on x86-64 alone")
    raise InputError(f"{what} needs Procgen and RLlib: pip install 'concord[coinrun]'")
