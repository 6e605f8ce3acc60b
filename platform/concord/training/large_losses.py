"""A warning about first losses that are finite but too large to train on."""

from collections.abc import Sequence

from concord.record import Evaluation

# From here on neighbouring float32 numbers are 1024 apart, so that steps of an optimizer are rounded away.
LARGE = 1e10


def large_losses(history: Sequence[Evaluation]) -> str | None:
    """A line that names the largest loss of the first evaluation, if it is above :data:`LARGE`; None otherwise."""
    losses = {name: value for name, value in history[0].metrics.items() if name.startswith("loss/")} if history else {}
    name = max(losses, key=lambda each: losses[each], default=None)
    if name is None or not losses[name] > LARGE:
        return None
    return (
        f"warning: {name} was {losses[name]:.3g} at the first evaluation; losses above {LARGE:.0e} exceed what float32 "
        "can tell apart: look for fill values in the data, and scale inputs and targets"
    )
