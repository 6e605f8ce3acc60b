"""Who works in a folder, as its lock or its lease tells the others: a user, a machine, and since when."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from concord.errors import InputError
from concord.submitted import SUBMISSION


@dataclass(frozen=True)
class Holder:
    """A process that works in a folder: its user and submission, if known, its machine, its beginning (Unix time)."""

    user: str | None = None
    host: str = ""
    since: float = 0.0
    submission: str | None = None

    @staticmethod
    def here(user: str | None) -> "Holder":
        """This process."""
        return Holder(user, socket.gethostname(), time.time(), os.environ.get(SUBMISSION))

    @staticmethod
    def read(text: str | bytes) -> "Holder":
        """The holder of a text; of one that cannot be read nothing is known."""
        try:
            told = json.loads(text)
            return Holder(told["user"], str(told["host"]), float(told["since"]), told["submission"])
        except (ValueError, KeyError, TypeError):
            return Holder()

    def write(self) -> bytes:
        """Its text."""
        return json.dumps(asdict(self)).encode()

    @property
    def same_submission(self) -> bool:
        """Whether it is an earlier process of this process's own submission."""
        return self.submission is not None and self.submission == os.environ.get(SUBMISSION)

    def __str__(self) -> str:
        if not self.host:
            return "somebody"
        return f"{self.user or 'somebody'} on {self.host} since {datetime.fromtimestamp(self.since, UTC):%F %T} UTC"


class HeldError(InputError):
    """Another process works in the folder.

    Attributes:
        line: what is refused, without what to do.
        holder: who works there.
    """

    def __init__(self, name: str, what: str, holder: Holder, more: str = "") -> None:
        self.line, self.holder = f"--name {name}: another process is using this {what}: {holder}{more}", holder
        super().__init__(f"{self.line}; wait for its end, or give another --name or --output")
