"""What to do about an environment whose gradient is not finite."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from concord.errors import ArgumentError

NonFinite = Literal["raise", "skip", "propagate"]
"""``raise``: end with :class:`NonFiniteGradientError`. ``skip``: leave the environment out of the step; count it.
``propagate``: leave it in, so that the update is not finite either and a ``GradScaler`` lowers its scale."""


class NonFiniteGradientError(FloatingPointError):
    """An environment's gradient has an infinite or undefined component.

    Attributes:
        environments: the names of those environments.
        step: the step at which it happened, counted from 0.
    """

    def __init__(self, environments: Sequence[str], step: int) -> None:
        self.environments = tuple(environments)
        self.step = step
        super().__init__(
            f"the gradient of environment {', '.join(self.environments)} is not finite at step {step}; "
            "lower the learning rate, clip, or leave such environments out of the step with nonfinite=skip"
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # The default would call the class with the message alone when the error crosses a process boundary.
        return NonFiniteGradientError, (self.environments, self.step)


def check_nonfinite(nonfinite: Any) -> None:
    """Refuse what is no :data:`NonFinite`, nor None (ArgumentError)."""
    if nonfinite is not None and nonfinite not in get_args(NonFinite):
        raise ArgumentError("nonfinite", nonfinite, f"must be one of {', '.join(get_args(NonFinite))}")


def presence(gradient: Tensor) -> Tensor:
    """1 where all components of a flat gradient are finite, -1 where they are not: ``(1,)``, float32."""
    # Extremes, since a sum of finite numbers may overflow; as fast as a sum, and twenty times as isfinite().all().
    lowest, highest = gradient.aminmax()
    return torch.where(torch.isfinite(lowest) & torch.isfinite(highest), 1.0, -1.0)[None]
