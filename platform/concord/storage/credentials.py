"""Credentials: found in the environment, and passed on to processes that Ray started before, or elsewhere."""

import os
from collections.abc import Mapping

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_PLACE = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "STORAGE_EMULATOR_HOST")


def storage_credentials() -> dict[str, str]:
    """The environment variables by which this process reaches storages: keys, endpoint, region.

    What is in files, or what a machine's role gives, stays there: every node finds its own.
    """
    return {name: os.environ[name] for name in (*_KEYS, *_PLACE) if os.environ.get(name)}


def apply_credentials(given: Mapping[str, str]) -> None:
    """Use another process's credentials in this one; they replace this process's as a whole."""
    if any(name in given for name in _KEYS):
        for name in _KEYS:
            os.environ.pop(name, None)
    os.environ.update(given)


def endpoint() -> str | None:
    """The S3 server's address; None for Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
