"""Box2D is an extra, ``concord[box2d]``: it makes the trajectories; training on them does without."""

from importlib.util import find_spec

from concord.errors import InputError


def require_box2d(what: str) -> None:
    """Refuse ``what`` where Box2D is not installed.

    Raises:
        InputError: it says how to install it.
    """
    try:
        found = find_spec("Box2D") is not None
    except ValueError:  # named, but not there
        found = False
    if not found:
        raise InputError(f"{what} needs Box2D: pip install 'concord[box2d]'")
