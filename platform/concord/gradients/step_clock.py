"""Measures the time of the parts of training steps; every moment belongs to one part, so the parts add up."""

from time import perf_counter
from typing import Literal

Part = Literal["gradients", "exchange", "optimizer"]
"""What a step does.

* ``gradients``: its batch, forward and backward passes, and what the rule makes of each environment's gradient.
* ``exchange``: sending to the other processes and waiting for them; nothing where there are none. What travels
  beside a backward pass costs no time here, and a process that waits for a slower one spends that time here.
* ``optimizer``: the rule's update from the sums (of this process's slice of them, where processes share that work),
  and what the optimizer makes of it.
"""

PARTS: tuple[Part, ...] = ("gradients", "exchange", "optimizer")


class StepClock:
    """The seconds of this process in each part of its steps.

    It reads the host's clock and does not synchronize devices. On a GPU a part that only launches work has the time of
    the launches. A part at whose end the host needs a result (whether gradients are finite, here or in other processes)
    has the time of the device's remaining work. The sum is right. With one environment a process ``exchange`` includes
    the end of the backward pass.

    Attributes:
        seconds: seconds by part since the clock was made; none between ``switch(None)`` and the next :meth:`switch`.
    """

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._part: Part | None = None
        self._since = 0.0

    def switch(self, part: Part | None) -> Part | None:
        """Count time for ``part`` from now on (None: for none); return the previous part."""
        now, before = perf_counter(), self._part
        if before is not None:
            self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before
