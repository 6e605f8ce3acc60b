"""How OpenMP's threads wait for each other, and how many the user allows, so that processes share a machine's cores.

By default a waiting thread uses its core for milliseconds before it sleeps, which another process then lacks. OpenMP
reads these variables when PyTorch is imported, so a process inherits them or sets them first. They change no result.
"""

import json
import os
from collections.abc import Mapping

_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Enough for the next operation of a step: one process alone is no slower, and two at once take half the time.
_SHARED = {"GOMP_SPINCOUNT": "2000"}


def wait_variables() -> dict[str, str]:
    """The variables for processes that Concord starts: the user's own if one is set, otherwise a short wait."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ} or dict(_SHARED)


def threads_of_user() -> int | None:
    """The ``OMP_NUM_THREADS`` of who started this command; None without one. A job of Ray has Ray's own, which is 1."""
    variables: Mapping[str, str] = os.environ
    if job := variables.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):  # in it is what the submission set
        variables = (json.loads(job).get("runtime_env") or {}).get("env_vars") or {}
    threads = variables.get("OMP_NUM_THREADS", "").partition(",")[0]  # the rest is for nested regions
    return int(threads) if threads.isdecimal() and int(threads) > 0 else None
