"""The ways a command can end badly, so that the command line knows which exit status to use."""

from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
    """What the user gave cannot be used. One line: the option, the value, and what would be right (exit status 2)."""


class RunFailedError(RuntimeError):
    """Work that was rightly asked for did not succeed (exit status 1)."""


class StoppedError(RunFailedError):
    """The user stopped the work (Ctrl-C); what was finished is kept."""


class UnfinishedError(RunFailedError):
    """A part of the work failed or was stopped; ``result`` is what there is, as a whole one would be reported."""

    def __init__(self, problem: str, result: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.result = result
