"""What to do about an environment whose gradient is not finite."""

from collections.abc import Sequence
from typing import Literal

NonFinite = Literal["raise", "skip"]
"""``raise``: end with :class:`NonFiniteGradientError`. ``skip``: leave the environment out of the step; count it."""


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
