"""Where the time of training steps goes: every moment belongs to one part, so the parts add up to the whole."""

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
    """Seconds that this process has spent in the parts of its steps.

    It reads the host's clock and makes no device wait. On a GPU, work that is only launched takes the launch's time,
    and the part at whose end the host needs a result (whether gradients are finite, which environments of other
    processes were) takes what the device still had to do: the sum is right, while with one environment a process, where
    that happens once a step, waiting for ``exchange`` includes the end of the backward pass.

    Attributes:
        seconds: by part, since the clock was made; between ``switch(None)`` and the next :meth:`switch` nothing is
            added.
    """

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._part: Part | None = None
        self._since = 0.0

    def switch(self, part: Part | None) -> Part | None:
        """From now on time belongs to ``part`` (None: to none); gives the part that it belonged to."""
        now, before = perf_counter(), self._part
        if before is not None:
            self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before
