"""How OpenMP's threads wait for each other, so that several processes share a machine's cores.

By default a waiting thread uses its core for milliseconds before it sleeps, which another process then lacks. OpenMP
reads these variables when PyTorch is imported, so a process inherits them or sets them first. They change no result.
"""

import os

_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Enough for the next operation of a step: one process alone is no slower, and two at once take half the time.
_SHARED = {"GOMP_SPINCOUNT": "2000"}


def wait_variables() -> dict[str, str]:
    """The variables for processes that Concord starts: the user's own if one is set, otherwise a short wait."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ} or dict(_SHARED)
