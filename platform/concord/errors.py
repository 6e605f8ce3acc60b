"""The ways a command can end badly, so that the command line knows which exit status to use."""

from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
    """What the user gave cannot be used. One line: the option, the value, and what would be right (exit status 2)."""


class ArgumentError(InputError):
    """An argument's value cannot be used: ``threshold=2: must lie in [0, 1]``; a command says ``--threshold 2: …``."""

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(argument, value, expected)  # what the error is made of again in another process
        self.argument, self.value, self.expected = argument, value, expected

    def __str__(self) -> str:
        return f"{self.argument}={self.value}: {self.expected}"

    def format_for_cli(self) -> str:
        """The same of an option of the command line."""
        values = self.value if isinstance(self.value, (tuple, list)) else (self.value,)
        given = "".join(f" {value}" for value in values if value is not None)
        return f"--{self.argument.replace('_', '-')}{given}: {self.expected}"

    def described(self) -> "ArgumentError":
        """The same error about the value's description, which other processes can read whatever the value is."""
        value = self.value
        if isinstance(value, (tuple, list)):
            value = tuple(map(str, value))
        elif value is not None:
            value = str(value)
        return ArgumentError(self.argument, value, self.expected)


class CheckpointError(InputError):
    """A file of a checkpoint is missing, damaged, or not one of Concord's; an earlier checkpoint may be whole."""


def picklable(error: InputError) -> InputError:
    """The same error in a form that other processes can read."""
    if isinstance(error, ArgumentError):
        return error.described()
    return CheckpointError(str(error)) if isinstance(error, CheckpointError) else InputError(str(error))


def format_for_cli(error: Exception) -> str:
    """What an error says, on the command line: there arguments are options."""
    return error.format_for_cli() if isinstance(error, ArgumentError) else str(error)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__


class RunFailedError(RuntimeError):
    """Work that was rightly asked for did not succeed (exit status 1)."""


class TrainingFailedError(RunFailedError):
    """A training did not reach its end: the reason in one line; of the job's own code also the traceback."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)  # what the error is made of again in another process
        self.reason, self.traceback = reason, traceback

    def __str__(self) -> str:
        return f"training failed: {self.reason}"


class StoppedError(RunFailedError):
    """The user stopped the work (Ctrl-C); what was finished is kept."""


class UnfinishedError(RunFailedError):
    """A part of the work failed or was stopped; ``result`` is what there is, as a whole one would be reported."""

    def __init__(self, problem: str, result: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.result = result
