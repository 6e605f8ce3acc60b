"""The environment that a submission brings for the user's code: variables, packages, and Ray's runtime environment.

Everybody who may look at the cluster can read it, so a secret is refused.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.options import did_you_mean
from concord.redaction import is_secret, redact
from concord.submitted import FOLDER, OPTIONS, SUBMISSION

# Set by a submission itself, and what the user gives in their place.
_OWN_KEYS = {
    "working_dir": "give --working-dir",
    "excludes": "list what to leave out in .gitignore",
    "py_modules": "Concord sends itself by it; put modules into the folder that is sent",
}
OWN_VARIABLES = {
    "MLFLOW_TRACKING_URI": "give --tracking-uri",
    **dict.fromkeys(
        (
            *("CONCORD_CLIENT_PYTHON", "CONCORD_DASHBOARD", "CONCORD_USER", "RAY_JOB_STOP_WAIT_TIME_S"),
            *(FOLDER, OPTIONS, SUBMISSION),
        ),
        "concord submit sets it",
    ),
}
"""Variables that a submission sets itself, and what to do instead of giving them."""
_OF_PYTHON = ("pip", "uv", "conda", "py_executable", "image_uri", "container")
_NODES = "everybody who may look at the cluster could read it; set it in the environment of the cluster's nodes"


def variables_of(words: Sequence[str]) -> dict[str, str]:
    """The variables of ``--env NAME=VALUE …`` (InputError for another form)."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"--env {redact(word)}: must be NAME=VALUE; a command and its job stand before --env")
        found[name] = value
    return found


def runtime_environment(
    base: Mapping[str, Any], shown: str, variables: Mapping[str, str], packages: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Ray's runtime environment without its variables, and the variables.

    ``variables`` and ``packages`` (requirements of pip, or one file of them) go before those of ``base``, which errors
    name as ``shown``.

    Raises:
        InputError: something is set by the submission itself, holds a secret, or is refused by Ray.
    """
    found = dict(base)
    of_base = found.pop("env_vars", {})
    if not isinstance(of_base, dict) or not all(isinstance(each, str) for pair in of_base.items() for each in pair):
        raise InputError(f"{shown}: env_vars must have texts, as in NAME: 'value'")
    for where, given in ((f"{shown}: env_vars", of_base), ("--env", variables)):
        for name, value in given.items():
            _check_variable(f"{where} {name}", name, value)
    if packages:
        found["pip"] = _requirements(packages)
    if found:
        _check_keys("--pip" if found.keys() == {"pip"} and packages else shown, found)
    return found, {**of_base, **variables}


def brings_python(environment: Mapping[str, Any]) -> bool:
    """Whether Ray's runtime environment has a Python of its own, in place of the nodes'."""
    return any(key in environment for key in _OF_PYTHON)


def _requirements(packages: Sequence[str]) -> str | list[str]:
    for each in packages:
        if redact(each) != each:
            raise InputError(f"--pip {redact(each)}: holds a password; {_NODES}")
        if not each.endswith(".txt"):
            continue
        if len(packages) > 1:
            raise InputError(f"--pip {' '.join(packages)}: give packages, or one file of requirements")
        if not Path(each).expanduser().is_file():
            raise InputError(f"--pip {each}: there is no such file")
        return str(Path(each).expanduser())
    return list(packages)


def _check_variable(shown: str, name: str, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise InputError(f"{shown}: is no name of a variable, which has letters, digits and _")
    if name in OWN_VARIABLES:
        raise InputError(f"{shown}: cannot be given; {OWN_VARIABLES[name]}")
    if is_secret(name):
        raise InputError(f"{shown}: is named like a secret; {_NODES}")
    if redact(value) != value:
        raise InputError(f"{shown}: holds a password; {_NODES}")


def _check_keys(shown: str, environment: Mapping[str, Any]) -> None:
    from ray.runtime_env import RuntimeEnv  # takes a second

    for key in environment:
        if key in _OWN_KEYS:
            raise InputError(f"{shown}: {key} cannot be given; {_OWN_KEYS[key]}")
        if key not in RuntimeEnv.known_fields:
            raise InputError(f"{shown}: Ray has no {key}{did_you_mean(key, RuntimeEnv.known_fields)}")
    try:
        RuntimeEnv(**environment)
    except (TypeError, ValueError, OSError) as error:
        raise InputError(f"{shown}: Ray refuses it: {' '.join(redact(str(error)).split())}") from error
    if redact(str(environment)) != str(environment):
        raise InputError(f"{shown}: holds a password or a token; {_NODES}")
