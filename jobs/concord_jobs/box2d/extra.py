"""Box2D is an extra, ``concord[box2d]``: it makes the trajectories; training does not need it."""

from importlib.util import find_spec

from concord.errors import InputError


def require_box2d(what: str) -> None:
    """Refuse ``what`` if Box2D is not installed."""
    try:
        found = find_spec("Box2D") is not None
    except ValueError:  # blocked in sys.modules
        found = False
    if not found:
        raise InputError(f"{what} needs Box2D: pip install 'concord[box2d]'")
