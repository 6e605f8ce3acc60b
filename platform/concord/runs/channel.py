"""How the first worker on Ray Train tells the process of its run what happens: an actor passes events on, in order.

The checkpoints of a run are those that its events name. So workers that take the place of others ask the channel where
to begin, and whether they need to begin at all. This module imports nothing heavy: the actor has a process of its own.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple


class Message(NamedTuple):
    """An event, or how the work ended: see :class:`concord.record.Event` for its name and fields."""

    name: str
    fields: dict[str, Any]


FAILED = "failed"  # the name of a message about a failure that new workers would only repeat


class Beginning(NamedTuple):
    """Where workers begin.

    Attributes:
        checkpoint: the name of the run's last checkpoint; None begins from nothing.
        over: nothing is left to do: the run was stopped, or has failed.
    """

    checkpoint: str | None
    over: bool


class Channel:
    """The actor.

    Args:
        checkpoint: the name of the run's last checkpoint.
    """

    def __init__(self, checkpoint: str | None) -> None:
        self._waiting: list[Message] = []
        self._news = asyncio.Event()
        self._checkpoint = checkpoint
        self._over = False

    async def begin(self) -> Beginning:
        """Where workers begin."""
        return Beginning(self._checkpoint, self._over)

    async def tell(self, messages: Sequence[Message]) -> bool:
        """Take messages of the first worker; gives whether it should end."""
        if not self._over:
            for message in messages:
                if message.name == "checkpoint":
                    self._checkpoint = message.fields["name"]
                self._over = self._over or message.name == FAILED
            self._waiting += messages
            self._news.set()
        return self._over

    async def take(self, seconds: float) -> list[Message]:
        """What was told and not taken yet; waits for it for so many seconds."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return []
        taken, self._waiting = self._waiting, []
        self._news.clear()
        return taken

    async def stop(self) -> None:
        """Have the workers end at what they tell next."""
        self._over = True
