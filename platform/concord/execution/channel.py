"""An actor that passes events from the first worker on Ray Train to the process of the run, in order.

The events name the run's valid checkpoints, so replacement workers ask the channel where to begin, and whether to begin
at all. This module has no slow imports, since the actor is a process of its own.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple


class Message(NamedTuple):
    """An event, or how the work ended: see :class:`concord.record.Event` for its name and fields."""

    name: str
    fields: dict[str, Any]


SIGN_SECONDS = 5.0
"""Between two signs of a worker."""
FAILED = "failed"  # the name of a message about a failure that new workers would repeat
LOST = "lost"  # of one about workers that died, and are replaced


class Beginning(NamedTuple):
    """The point at which workers begin.

    Attributes:
        checkpoint: the name of the run's last checkpoint; None starts a new run.
        over: the run was stopped, or has failed.
        restarts: how many groups of workers began before this one.
    """

    checkpoint: str | None
    over: bool
    restarts: int


class Sign(NamedTuple):
    """What a worker says of itself every few seconds, from a thread beside its training.

    Attributes:
        node: the name of its machine.
        steps: that it has done.
        environments: on which it trains.
    """

    rank: int
    node: str
    steps: int
    environments: tuple[str, ...]


class Waiting(NamedTuple):
    """A worker that the others wait for.

    Attributes:
        silent: seconds since its last sign.
        still: seconds since its last step.
    """

    sign: Sign
    silent: float
    still: float


class Channel:
    """The actor; ``checkpoint`` names the run's last one."""

    def __init__(self, checkpoint: str | None) -> None:
        self._waiting: list[Message] = []
        self._news = asyncio.Event()
        self._checkpoint = checkpoint
        self._over = False
        self._begun = 0
        self._at_work = False
        self._controller: Any = None
        self._signs: dict[int, tuple[Sign, float, float]] = {}  # with the times of the sign and of the last step

    async def attend(self, controller: Any) -> None:
        """Note the actor that controls the workers."""
        self._controller = controller

    async def hear(self, sign: Sign) -> None:
        """Take a worker's sign."""
        now = time.monotonic()
        before, _, stepped = self._signs.get(sign.rank, (sign, now, now))
        self._signs[sign.rank] = (sign, now, stepped if before.steps == sign.steps else now)

    async def waiting(self) -> list[Waiting]:
        """The workers, those with the oldest sign, and then with the fewest steps, first."""
        now = time.monotonic()
        found = [Waiting(sign, now - heard, now - stepped) for sign, heard, stepped in self._signs.values()]
        return sorted(found, key=lambda each: (-each.silent // SIGN_SECONDS, each.sign.steps, each.sign.rank))

    async def lose(self) -> None:
        """Note that workers who had begun died: all are replaced, and nobody waits for those that were."""
        self._signs.clear()
        if self._at_work and not self._over:
            self._at_work = False
            await self.send([Message(LOST, {})])

    async def begin(self) -> Beginning:
        """The point at which workers begin; what workers said before is forgotten."""
        self._signs.clear()
        self._begun += 1
        self._at_work = True
        return Beginning(self._checkpoint, self._over, self._begun - 1)

    async def send(self, messages: Sequence[Message]) -> bool:
        """Take messages of the first worker; return whether it should end."""
        if not self._over:
            for message in messages:
                if message.name == "checkpoint":
                    self._checkpoint = message.fields["name"]
                self._over = self._over or message.name == FAILED
            self._waiting += messages
            self._news.set()
        return self._over

    async def take(self, seconds: float) -> list[Message]:
        """The messages since the last call; waits up to this number of seconds."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return []
        taken, self._waiting = self._waiting, []
        self._news.clear()
        return taken

    async def stop(self) -> Any:
        """End the workers at their next message; return the actor that controls them, None before it has begun."""
        self._over = True
        return self._controller
