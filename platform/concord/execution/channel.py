"""An actor that passes events from the first worker on Ray Train to the process of the run, in order.

The events name the run's valid checkpoints, so replacement workers ask the channel where to begin, and whether to begin
at all. This module has no slow imports, since the actor is a process of its own.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple


class Message(NamedTuple):
    """An event, or how the work ended: see :class:`concord.record.Event` for its name and fields."""

    name: str
    fields: dict[str, Any]


FAILED = "failed"  # the name of a message about a failure that new workers would repeat


class Beginning(NamedTuple):
    """The point at which workers begin.

    Attributes:
        checkpoint: the name of the run's last checkpoint; None starts a new run.
        over: the run was stopped, or has failed.
    """

    checkpoint: str | None
    over: bool


class Channel:
    """The actor; ``checkpoint`` names the run's last one."""

    def __init__(self, checkpoint: str | None) -> None:
        self._waiting: list[Message] = []
        self._news = asyncio.Event()
        self._checkpoint = checkpoint
        self._over = False
        self._controller: Any = None

    async def attend(self, controller: Any) -> None:
        """Note the actor that controls the workers."""
        self._controller = controller

    async def begin(self) -> Beginning:
        """The point at which workers begin."""
        return Beginning(self._checkpoint, self._over)

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
