"""Who works here: the owner of what is submitted, trained and registered."""

import contextlib
import getpass
import os

from concord.errors import InputError

USER = "CONCORD_USER"
"""The environment variable that names the user; a submitted job has its submitter's."""


def user_name() -> str | None:
    """The user: of a submitted job the one who submitted it; None if the system does not know."""
    with contextlib.suppress(OSError, KeyError):  # a container without a user
        return os.environ.get(USER) or getpass.getuser()
    return None


def require_user(option: str) -> str:
    """The user, for an option that needs one (InputError if the system does not know)."""
    if (user := user_name()) is None:
        raise InputError(f"{option}: the system does not know who you are; name yourself by {USER}")
    return user
