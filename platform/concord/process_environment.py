"""Sets environment variables for a while: some libraries read their settings only there."""

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set these variables while the body runs, or remove those that are None, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
